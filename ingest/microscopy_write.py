"""Calibrated images for the programs of the field: HyperSpy's format and EMD (NCEM's), written by RosettaSciIO."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.errors import UsageError

__all__ = ["FORMATS", "write_image"]

FORMATS = {".hspy": "rsciio.hspy", ".emd": "rsciio.emd"}


def write_image(
    path: Path, image: np.ndarray[Any, Any], *, sampling_A: float, title: str, quantity: str, facts: Mapping[str, Any]
) -> None:
    """Writes an image (H, W) with axes y and x in Å; the file appears whole or not at all.

    `quantity` says what the values are, with their unit; `facts` go to the original metadata.
    Raises UsageError for an extension other than .hspy and .emd.
    """
    plugin = FORMATS.get(path.suffix.lower())
    if plugin is None:
        raise UsageError(f"{path}: expected a name ending in {' or '.join(FORMATS)}")
    try:
        writer = importlib.import_module(plugin).file_writer
    except ImportError:
        raise UsageError("writing this needs RosettaSciIO: pip install 'exitwave[formats]'") from None
    axes = [
        {
            "_type": "UniformDataAxis",
            "name": name,
            "units": "Å",
            "scale": float(sampling_A),
            "offset": 0.0,
            "size": int(size),
            "navigate": False,
            "is_binned": False,
            "index_in_array": i,
        }
        for i, (name, size) in enumerate(zip("yx", image.shape, strict=True))
    ]
    signal = {
        "data": np.ascontiguousarray(image, dtype=np.float32),
        "axes": axes,
        "metadata": {
            "General": {"title": title},
            "Signal": {"signal_type": "", "quantity": quantity},
        },
        "original_metadata": {"exitwave": dict(facts)},
        "attributes": {"_lazy": False, "ragged": False},
        "package_info": {},
        "tmp_parameters": {},
        "learning_results": {},
        "models": {},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        writer(str(partial), signal)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
