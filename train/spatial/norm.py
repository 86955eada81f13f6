"""Batch, group and instance normalisation of tiles, with the statistics of the whole.

Each rank reduces its piece to counts, means and sums of squared deviations per sample and channel; these small tables
are merged over the ranks by the formula of Chan, Golub and LeVeque (1979), which loses no digits to a large mean,
in the order of ranks. Backward needs two sums per channel over the same ranks (Ioffe and Szegedy, arXiv:1502.03167);
the gradients of weight and bias are these sums too.

Batch normalisation has three scopes: "global" (all samples of all data ranks: one process with the whole batch),
"spatial" (the samples that this rank shares: one process with the local batch) and "local" (this rank's pieces alone,
which no serial run does). Running statistics are those of the scope: with "spatial" they differ between data ranks,
with "local" between all.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from exitwave.train.spatial.convolution import _summed
from exitwave.train.spatial.links import Axis
from exitwave.train.spatial.tile import Op, Space, Tile, handles, precise

__all__: list[str] = []


def _merged(count: Tensor, mean: Tensor, squares: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Counts, means and sums of squared deviations of several sets, merged along `dim`."""
    total = count.sum(dim)
    centre = (count * mean).sum(dim) / total.clamp(min=1)
    off = mean - centre.unsqueeze(dim)
    return total, centre, (squares + count * off * off).sum(dim)


def _over(axes: Sequence[Axis], table: Tensor) -> Tensor:
    """(3, …) of this rank merged over the axes, one after another; every rank gets the same."""
    for axis in axes:
        if axis.size > 1:
            rows = table.new_zeros((axis.size, *table.shape))
            rows[axis.place] = table
            axis.sum(rows)
            table = torch.stack(_merged(rows[:, 0], rows[:, 1], rows[:, 2], 0))
    return table


def _statistics(x: Tensor, groups: int, batch: bool, axes: Sequence[Axis]) -> Tensor:
    """(3, sets): count, mean, squares; a set is a channel over the batch, or a group of channels of one sample."""
    n, c = x.shape[:2]
    flat = x.detach().flatten(2)
    count = torch.full((n, c), float(flat.shape[2]), dtype=flat.dtype, device=flat.device)
    if flat.shape[2]:
        variance, mean = torch.var_mean(flat, 2, correction=0)
    else:
        variance, mean = torch.zeros_like(count), torch.zeros_like(count)
    squares = variance * count
    if batch:
        table = torch.stack(_merged(count, mean, squares, 0))
    else:
        shape = (n, groups, c // groups)
        table = torch.stack(_merged(count.view(shape), mean.view(shape), squares.view(shape), 2))
    return _over(axes, table)


class _Normalise(torch.autograd.Function):
    """(x, weight, bias, table, how) -> (x - mean)/sqrt(var + eps)·weight + bias; `table` as `_statistics` makes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, table: Tensor, how: _How) -> Tensor:
        mean, invstd = how.of_channels(table[1], x), how.of_channels(_invstd(table, how.eps), x)  # (N or 1, C)
        scale = invstd if weight is None else invstd * weight.to(invstd.dtype)
        shift = -mean * scale if bias is None else bias.to(scale.dtype) - mean * scale
        ctx.how = how
        ctx.save_for_backward(x, weight, table)
        ctx.bias_type = None if bias is None else bias.dtype
        fine = _precise(x)
        return torch.addcmul(_wide(shift, x).to(fine.dtype), fine, _wide(scale, x).to(fine.dtype)).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        how: _How = ctx.how
        x, weight, table = ctx.saved_tensors
        mean, invstd = how.of_channels(table[1], x), how.of_channels(_invstd(table, how.eps), x)
        n, c = x.shape[:2]
        kind, x, dy = x.dtype, _precise(x), _precise(dy).contiguous()
        places = prod(x.shape[2:])
        flat_dy, flat_x = dy.view(n * c, 1, places), x.reshape(n * c, places, 1)
        sum_dy = flat_dy.sum(2).view(n, c).to(table.dtype)
        sum_dyx = torch.bmm(flat_dy, flat_x).view(n, c).to(table.dtype)
        sums = torch.stack([sum_dy, (sum_dyx - mean * sum_dy) * invstd])  # (2, N, C): of dy, of dy·xhat
        per_channel = sums.sum(1)
        dw = per_channel[1].to(weight.dtype) if weight is not None else None
        db = per_channel[0].to(ctx.bias_type) if ctx.bias_type is not None else None
        if how.weight_factor is not None:
            dw, db = _summed(how.space, how.weight_factor, dw, db)
        dx = None
        if ctx.needs_input_grad[0]:
            weighted = sums if weight is None else sums * weight.to(sums.dtype)
            of_sets = how.to_sets(weighted).contiguous()
            for axis in how.axes:
                axis.sum(of_sets)
            of_sets = of_sets / table[0].clamp(min=1)
            m1, m2 = how.of_channels(of_sets[0], x), how.of_channels(of_sets[1], x)
            a = invstd if weight is None else invstd * weight.to(invstd.dtype)
            b = -invstd * invstd * m2
            shift = -invstd * m1 - mean * b
            dx = torch.addcmul(_wide(shift, x).to(x.dtype), dy, _wide(a, x).to(x.dtype))
            dx = dx.addcmul_(x, _wide(b, x).to(x.dtype)).to(kind)
        return dx, dw, db, None, None


class _How:
    """Which elements are normalised together, and over which ranks."""

    def __init__(
        self, space: Space, *, groups: int, batch: bool, axes: Sequence[Axis], eps: float, weight_factor: float | None
    ) -> None:
        self.space, self.groups, self.batch, self.axes = space, groups, batch, tuple(axes)
        self.eps, self.weight_factor = eps, weight_factor

    def of_channels(self, sets: Tensor, x: Tensor) -> Tensor:
        """A value a set as (N or 1, C)."""
        if self.batch:
            return sets.view(1, -1)
        return sets.repeat_interleave(x.shape[1] // self.groups, dim=1)

    def to_sets(self, sums: Tensor) -> Tensor:
        """(2, N, C) summed within this rank's part of each set."""
        if self.batch:
            return sums.sum(1)
        return sums.view(*sums.shape[:2], self.groups, -1).sum(3)


def _invstd(table: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(table[2] / table[0].clamp(min=1) + eps)


def _wide(values: Tensor, x: Tensor) -> Tensor:
    """(N or 1, C) -> (N or 1, C, 1, …)."""
    return values.view(*values.shape, *[1] * (x.ndim - 2))


def _precise(x: Tensor) -> Tensor:
    return x.to(precise(x.dtype))


@handles("batch_norm")
def _batch_norm(
    op: Op,
    input: Any,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tile:
    x = _checked(op, input)
    space = x.space
    if not training:
        assert running_mean is not None and running_var is not None
        scale = torch.rsqrt(running_var + eps) * (1.0 if weight is None else weight)
        shift = -running_mean * scale if bias is None else bias - running_mean * scale
        local = _precise(x.local)
        wide = [space.shared(t).view(1, -1, *[1] * (x.ndim - 2)).to(local.dtype) for t in (shift, scale)]
        return x.like(torch.addcmul(wide[0], local, wide[1]).to(x.dtype))
    scope = space.batch_norm
    if scope == "local":
        axes: tuple[Axis, ...] = ()
        if any(a == b for split in x.splits for a, b in zip(split.bounds[:-1], split.bounds[1:], strict=True)):
            raise op.refuse('batch_norm="local" and a rank without a tile: there is nothing to take statistics of')
    else:
        axes = space.axes if scope == "spatial" else (*space.axes, *space.data)
    table = _statistics(_precise(x.local), 1, True, axes)
    if scope != "local" and not float(table[0, 0]) > 1:
        raise op.refuse(f"expected more than 1 value per channel in training, got {float(table[0, 0]):g}")
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            unbiased = table[2] / (table[0] - 1).clamp(min=1)
            running_mean.mul_(1 - momentum).add_(table[1].to(running_mean.dtype), alpha=momentum)
            running_var.mul_(1 - momentum).add_(unbiased.to(running_var.dtype), alpha=momentum)
    factor = space.weight_factor(weight, bias)
    how = _How(space, groups=1, batch=True, axes=axes, eps=eps, weight_factor=factor)
    return x.like(_Normalise.apply(x.local, weight, bias, table, how))


@handles("group_norm")
def _group_norm(
    op: Op, input: Any, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tile:
    x = _checked(op, input)
    if x.shape[1] % num_groups:
        raise op.refuse(f"{x.shape[1]} channels do not divide into {num_groups} groups")
    table = _statistics(_precise(x.local), num_groups, False, x.space.axes)
    factor = x.space.weight_factor(weight, bias)
    how = _How(x.space, groups=num_groups, batch=False, axes=x.space.axes, eps=eps, weight_factor=factor)
    return x.like(_Normalise.apply(x.local, weight, bias, table, how))


@handles("instance_norm")
def _instance_norm(
    op: Op,
    input: Any,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tile:
    if running_mean is not None or not use_input_stats:
        raise op.refuse("track_running_stats=True is not supported for split tensors")
    return _group_norm(op, input, input.shape[1], weight, bias, eps)


@handles("layer_norm")
def _layer_norm(
    op: Op,
    input: Tile,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tile:
    if any(split.dim >= input.ndim - len(shape) for split in input.splits):
        raise op.refuse("over split dims; use GroupNorm(1, channels)")
    shared = input.space.shared
    w, b = (None if t is None else shared(t) for t in (weight, bias))
    return input.like(torch.nn.functional.layer_norm(input.local, shape, w, b, eps))


def _checked(op: Op, x: Any) -> Tile:
    if not isinstance(x, Tile) or any(split.dim < 2 for split in x.splits):
        raise op.refuse("expected an input whose dims of space are split, not batch or channels")
    return x
