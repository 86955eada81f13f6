"""Resizing of tiles: interpolation and other linear maps along one dim, applied one dim after another.

Which inputs an output is made of is taken from torch itself, asked with the numbers 0, 1, …, N-1 in place of a signal:
linear interpolation of these gives each output's position among the inputs, nearest gives its index. Outputs [A, B)
then need the inputs from the lowest to the highest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from exitwave.train.spatial.convolution import checked_input, tuple_of
from exitwave.train.spatial.tile import Op, Split, Tile, fetched, handles
from exitwave.train.spatial.tiles import Bounds, Range, scaled_bounds

__all__ = ["mapped"]

_MODES = {"nearest": "nearest", "nearest-exact": "nearest-exact", "bilinear": "linear", "trilinear": "linear"}


@handles("interpolate", "upsample")
def _interpolate(
    op: Op,
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tile:
    if mode not in _MODES or antialias:
        raise op.refuse(f"mode={mode!r}, antialias={antialias}: expected one of {', '.join(_MODES)}, no antialias")
    if not isinstance(input, Tile):
        raise op.refuse("expected a split input")
    nd = input.ndim - 2
    x = checked_input(op, input, nd)
    if mode in ("bilinear", "trilinear") and nd != (2 if mode == "bilinear" else 3):
        raise op.refuse(f"mode={mode!r} of an input of {nd} dims of space")
    if (size is None) == (scale_factor is None):
        raise op.refuse("expected either size or scale_factor")
    factors: tuple[float | None, ...] = (None,) * nd
    if size is not None:
        sizes = tuple(int(n) for n in tuple_of(size, nd))
    else:
        given = (scale_factor,) * nd if isinstance(scale_factor, int | float) else tuple(scale_factor)
        sizes = tuple(int(n * float(f)) for n, f in zip(x.shape[2:], given, strict=True))
        if not recompute_scale_factor:
            factors = tuple(float(f) for f in given)
    if any(m < 1 for m in sizes):
        raise op.refuse(f"would leave sizes {sizes}")
    for i, (m, factor) in enumerate(zip(sizes, factors, strict=True)):
        n = x.shape[i + 2]
        if n != m or factor not in (None, 1.0):
            place = _places(n, m, _MODES[mode], align_corners, factor, x.dtype)
            x = _picked(x, i + 2, place, linear=_MODES[mode] == "linear")
    return x


@lru_cache(maxsize=256)
def _places(n: int, m: int, mode: str, align_corners: bool | None, factor: float | None, dtype: torch.dtype) -> Tensor:
    """(m,) float64: where each output lies among the inputs 0..n-1. Nearest: as torch rounds for this type."""
    single = mode != "linear" and dtype != torch.float64
    with torch.no_grad():
        line = torch.arange(n, dtype=torch.float32 if single else torch.float64).view(1, 1, n)
        options: dict[str, Any] = {"size": m} if factor is None else {"scale_factor": factor}
        found = F.interpolate(line, mode=mode, align_corners=align_corners, **options)
    assert found.shape[-1] == m, (n, m, factor)
    return found.view(m).double()


def _picked(x: Tile, dim: int, place: Tensor, *, linear: bool) -> Tile:
    """Outputs at `place` along `dim`: the nearest input, or the mean of both neighbours by distance."""
    low = place.floor().long().clamp_(0, x.shape[dim] - 1)
    high = (low + 1).clamp_(max=x.shape[dim] - 1) if linear else low
    local, new, (first, end), start = _ranged(x, dim, low.tolist(), high.tolist())
    before = local.index_select(dim, (low[first:end] - start).to(local.device))
    if linear:
        shape = [1] * local.ndim
        shape[dim] = end - first
        part = (place - low)[first:end].to(local.dtype).view(shape).to(local.device)
        behind = local.index_select(dim, (high[first:end] - start).to(local.device))
        before = before * (1 - part) + behind * part
    return _replaced(x, before, new)


def mapped(x: Tile, weights: Tensor, dim: int) -> Tile:
    """`weights` (outputs, inputs), the same on all ranks and without gradient, applied along `dim`."""
    columns = torch.arange(weights.shape[1])
    used = weights.detach() != 0
    low = torch.where(used, columns, weights.shape[1]).amin(1)
    high = torch.where(used, columns, -1).amax(1)
    low = torch.where(high < 0, 0, low)
    local, new, (first, end), start = _ranged(x, dim, low.tolist(), high.clamp(min=0).tolist())
    rows = weights[first:end, start : start + local.shape[dim]].to(local.dtype).to(local.device)
    # (…, n, …) -> (…, n) @ (n, m) -> (…, m) -> (…, m, …)
    return _replaced(x, (local.movedim(dim, -1) @ rows.T).movedim(-1, dim), new)


def _ranged(x: Tile, dim: int, low: list[int], high: list[int]) -> tuple[Tensor, Split | None, Range, int]:
    """For outputs that need inputs low[o]..high[o]: the local inputs, the new split, own outputs, first local input."""
    split = x.split_of(dim)
    if split is None:
        return x.local, None, (0, len(low)), 0
    bounds: Bounds = scaled_bounds(split.bounds, len(low))
    needs = [
        (min(low[first:end]), max(high[first:end]) + 1) if end > first else (0, 0) for first, end in pairwise(bounds)
    ]
    new = split.by(bounds)
    return fetched(x.local, split, needs), new, new.own, needs[split.axis.place][0]


def _replaced(x: Tile, local: Tensor, new: Split | None) -> Tile:
    splits: Sequence[Split] = [new if new is not None and s.dim == new.dim else s for s in x.splits]
    return Tile(local, splits, x.space)


@handles("matmul", "rmatmul")
def _matmul(op: Op, one: Any, other: Any) -> Tile:
    """A replicated matrix times tiles, from the left (along the last dim but one) or the right (along the last)."""
    if op.name == "rmatmul":
        one, other = other, one
    left = isinstance(other, Tile)
    x, matrix = (other, one) if left else (one, other)
    if isinstance(matrix, Tile) or matrix.ndim != 2 or x.ndim < 3:
        raise op.refuse("only the product of a replicated matrix and a split tensor of three or more dims")
    dim = x.ndim - 2 if left else x.ndim - 1
    if matrix.shape[1 if left else 0] != x.shape[dim]:
        raise op.refuse(f"shapes {tuple(one.shape)} and {tuple(other.shape)} do not fit")
    if x.split_of(dim) is None:
        matrix = x.space.shared(matrix)
        product: Tensor = torch.matmul(matrix, x.local) if left else torch.matmul(x.local, matrix)
        return x.like(product)
    if matrix.requires_grad:
        raise op.refuse("along a split dim the matrix must not require gradients")
    return mapped(x, matrix if left else matrix.T, dim)
