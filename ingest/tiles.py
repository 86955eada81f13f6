"""Which bytes of a sample make a part of it: a rank of a spatially parallel group reads only those.

An array in C order is a run of bytes; a rectangular part of it is as many runs as the axes before the last cut one
have places, each as long as the cut piece of that axis and all of the axes behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from exitwave.ingest.errors import UsageError

__all__ = ["Tile", "plan_tile"]


@dataclass(frozen=True, kw_only=True)
class Tile:
    """`shape` of the part, the `slices` with all ends named, and `pieces`: (offset, length) in bytes, in order."""

    shape: tuple[int, ...]
    slices: tuple[slice, ...]
    pieces: tuple[tuple[int, int], ...]


def plan_tile(shape: tuple[int, ...], itemsize: int, slices: Sequence[slice]) -> Tile:
    """The runs of bytes of `array[slices]` for an array of `shape`; UsageError for a step or too many slices."""
    if len(slices) > len(shape) or any(s.step not in (None, 1) for s in slices):
        raise UsageError(f"tile {list(slices)} of a field of shape {shape}: expected a slice of step 1 for each axis")
    bounds = [s.indices(size)[:2] for s, size in zip(slices, shape, strict=False)]
    bounds = [(low, max(low, high)) for low, high in bounds] + [(0, size) for size in shape[len(slices) :]]
    sizes = tuple(high - low for low, high in bounds)
    full = tuple(slice(low, high) for low, high in bounds)
    cut = max((axis for axis, size in enumerate(shape) if sizes[axis] != size), default=-1)
    if 0 in sizes:
        return Tile(shape=sizes, slices=full, pieces=())
    if cut < 0:
        return Tile(shape=sizes, slices=full, pieces=((0, prod(shape) * itemsize),))
    strides = [prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape))]
    starts: np.ndarray[Any, Any] = np.zeros((), np.int64)
    for axis in range(cut):
        starts = starts[..., None] + np.arange(*bounds[axis]) * strides[axis]
    starts = (starts + bounds[cut][0] * strides[cut]).reshape(-1)
    length = sizes[cut] * strides[cut]
    return Tile(shape=sizes, slices=full, pieces=tuple((start, length) for start in starts.tolist()))
