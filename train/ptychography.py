"""Reconstructions that another program made of some samples, by ptychography, to be scored beside ours.

The file is a NumPy archive: `uid` (n,) uint64; `image_VA` (n, H, W) projected potential [V·Å] on the label's pixels
(phase over σ, any offset, no further scale is fitted to it); `library` and `how` say what made them.
benchmarks/peers/ptychography.py makes one by py4DSTEM; the output of any other program can be turned into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.errors import UsageError

__all__ = ["Reconstructions", "read_reconstructions"]


@dataclass(frozen=True, kw_only=True)
class Reconstructions:
    """Images [V·Å] by uid, the library's name and version, and its settings in words."""

    images_VA: Mapping[int, np.ndarray[Any, Any]]
    library: str
    how: str


def read_reconstructions(path: Path, shape: tuple[int, ...]) -> Reconstructions:
    """Raises UsageError for a file that is none, or whose images are not `shape`."""
    try:
        with np.load(path, allow_pickle=False) as file:
            uids, images = file["uid"], file["image_VA"]
            library, how = str(file["library"]), str(file["how"])
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{path}: expected reconstructions (uid, image_VA, library, how), got: {error}") from None
    if images.shape != (len(uids), *shape):
        raise UsageError(f"{path}: expected images (n, {shape[0]}, {shape[1]}), got {images.shape}")
    return Reconstructions(
        images_VA={int(u): i.astype(np.float64) for u, i in zip(uids, images, strict=True)}, library=library, how=how
    )
