"""From tiles to values that all ranks hold: sums, means and gathering; and back.

The gradient of a replicated value is the same on every rank (see `tile`), so backward needs no message here: each rank
takes its own part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from exitwave.train.spatial.halo import assemble, begin_fetch
from exitwave.train.spatial.tile import Op, Space, Split, Tile, handles, precise
from exitwave.train.spatial.tiles import moves

__all__ = ["Part", "Whole", "replicated_sum", "whole"]


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, space: Space) -> Tensor:
        ctx.factor = space.factor
        return space.sum(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient if ctx.factor == 1.0 else gradient * ctx.factor, None


def replicated_sum(x: Tensor, space: Space) -> Tensor:
    """The sum of `x` over all spatial ranks, on each of them."""
    total: Tensor = _Total.apply(x, space)
    return total


class Whole(torch.autograd.Function):
    """(tile, splits, factor) -> the whole on every rank. Backward: this rank's part of the gradient, times factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: Sequence[Split], factor: float) -> Tensor:
        ctx.how = (splits, factor)
        return gathered(x, splits)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        splits, factor = ctx.how
        part = cut(gradient, splits).contiguous()
        return part if factor == 1.0 else part * factor, None, None


class Part(torch.autograd.Function):
    """(whole, splits) -> this rank's tile. Backward: the whole gradient on every rank, gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: Sequence[Split]) -> Tensor:
        ctx.splits = splits
        part = cut(x, splits)
        return part.clone(memory_format=torch.contiguous_format)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gathered(gradient.contiguous(), ctx.splits), None


def gathered(x: Tensor, splits: Sequence[Split]) -> Tensor:
    """The whole, of every rank's `x`."""
    out = x
    for split in splits:
        move = moves(split.bounds, [(0, split.n)] * split.axis.size, split.axis.place)
        out = assemble(out, split.dim, move, begin_fetch(out, split.dim, move, split.axis).land())
    return out.clone() if out is x else out


def cut(x: Tensor, splits: Sequence[Split]) -> Tensor:
    """This rank's part of a whole, a view."""
    for split in splits:
        x = x.narrow(split.dim, split.own[0], split.size)
    return x


def whole(tile: Tile) -> Tensor:
    """The replicated whole of a tile within a module."""
    found: Tensor = Whole.apply(tile.local, tile.splits, tile.space.factor)
    return found


@handles("mean", "sum")
def _mean_or_sum(op: Op, input: Tile, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tile | Tensor:
    x = input
    dims = sorted(_dims(x, dim))
    local = x.local if dtype is None else x.local.to(dtype)
    exact = local.is_floating_point()
    total = local.sum(dims, keepdim=keepdim, dtype=precise(local.dtype) if exact else None)
    count = 1
    for each in dims:
        count *= x.shape[each]
    cutting = [split for split in x.splits if split.dim in dims]
    y: Any
    if not cutting:
        shift = [split.at(split.dim - (0 if keepdim else sum(d < split.dim for d in dims))) for split in x.splits]
        y = Tile(total, shift, x.space)
    elif len(cutting) == len(x.splits):
        y = replicated_sum(total, x.space)
    else:
        raise op.refuse("over some of the split dims only; reduce over all of them, or none")
    y = y / count if op.name == "mean" else y
    return y.to(local.dtype) if exact and y.dtype != local.dtype else y


def _dims(x: Tile, dim: Any) -> set[int]:
    if dim is None or dim == () or dim == []:
        return set(range(x.ndim))
    return {d % x.ndim for d in ([dim] if isinstance(dim, int) else dim)}


@handles("flatten", "reshape", "view", "unflatten")
def _regrouped(op: Op, input: Tile, *args: Any, **kwargs: Any) -> Tensor:
    """A change of shape that mixes dims needs the whole: gathered, and replicated from here on."""
    whole_input = whole(input)
    if op.name == "view":
        return whole_input.reshape(*args, **kwargs)
    result: Tensor = op.function(whole_input, *args, **kwargs)
    return result
