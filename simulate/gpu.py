"""The seam to CuPy: a GPU for abTEM's own loop, where there is one. Nothing else of the package knows of it."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exitwave.ingest.errors import UsageError

__all__ = ["cupy_with_gpu", "on_host"]


def cupy_with_gpu() -> Any:
    """The module cupy, with a GPU to work on. UsageError saying what is missing."""
    try:
        cupy = importlib.import_module("cupy")
        if cupy.cuda.runtime.getDeviceCount() > 0:
            return cupy
        why = "CuPy sees none"
    except ImportError:
        why = "CuPy is not installed"
    except Exception as error:  # a driver that is missing or too old: CuPy's own error, whose class needs CuPy
        why = f"CuPy says {error}"
    raise UsageError(f"device gpu: a GPU and CuPy are needed, {why}; use device cpu, or install CuPy for your CUDA")


def on_host(array: Any) -> NDArray[Any]:
    """An array of NumPy's or CuPy's as one of NumPy's."""
    return np.asarray(array.get() if hasattr(array, "get") else array)
