"""Convolution and transposed convolution of tiles.

`_Convolve` fetches what the outputs of this rank need, one split dim after another on the already extended tensor (so
that corners arrive), and runs torch's own convolution on it without padding along the split dims. What it keeps for
backward is the tile itself (which the layer before keeps as well) and the strips; the extended tensor is put together
again when it is needed: activations then cost a rank its share and little more.

Backward: the gradient's strips that belong to neighbours go back to their owners, who add them to the tile's; then the
weight's gradient, summed over the spatial ranks, then that of the extended tensor.

With `overlap` the forward pass computes the interior, the outputs that the tile alone suffices for, while the first
dim's strips travel, then the rest; backward computes both gradients while strips travel. Where strips are not small
beside the tile they are cut from the extended tensor's gradient, and travel behind the weight's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exitwave.train.spatial.convolution_plan import Plan, Step, border, interior, returned_strips
from exitwave.train.spatial.halo import assemble, begin_fetch, begin_return, finish_return
from exitwave.train.spatial.tile import Op, Space, Tile, handles
from exitwave.train.spatial.tiles import TransposedWindow, Window, moves

__all__ = ["checked_input", "tuple_of"]


class _Convolve(torch.autograd.Function):
    """(tile, weight, bias, plan) -> the tile of the output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan) -> Tensor:
        ctx.plan, ctx.has_bias = plan, bias is not None
        extended, strips, y = x, [], None
        for number, step in enumerate(plan.steps):
            flight = begin_fetch(extended, step.split.dim, step.move, step.split.axis)
            if number == 0 and plan.space.overlap and not plan.transposed:
                y = interior(x, weight, bias, plan)
            strips.append(flight.land())
            extended = assemble(extended, step.split.dim, step.move, strips[-1])
        if plan.empty:
            y = x.new_empty(plan.shape)
        elif y is not None:
            border(y, extended, weight, bias, plan)
        else:
            y = plan.run(extended, weight, bias)
        ctx.save_for_backward(x, weight, *(strip for some in strips for strip in some))
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        plan: Plan = ctx.plan
        x, weight, *received = ctx.saved_tensors
        extended, strips = x, iter(received)
        for step in plan.steps:
            some = [next(strips) for _ in step.move.receives]
            extended = assemble(extended, step.split.dim, step.move, some)
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        need_b = ctx.has_bias and need_b
        if not plan.empty:
            dy = plan.uncut(dy, extended)
        if not need_x:
            dx, (dw, db) = None, plan.of_weights(dy, extended, weight, need_w, need_b)
        else:
            dx, dw, db = _gradients(plan, dy, extended, weight, need_w, need_b)
        del extended
        if plan.weight_factor is not None:
            dw, db = _summed(plan.space, plan.weight_factor, dw, db)
        return dx, dw, db, None


def _gradients(
    plan: Plan, dy: Tensor, extended: Tensor, weight: Tensor, need_w: bool, need_b: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of the tile, weight and bias.

    The same operations with and without overlap, which only says when this rank waits for the others' strips.
    """
    last, overlap = plan.steps[-1], plan.space.overlap
    where = (last.split.dim, last.move, last.split.axis)

    def of_input() -> Tensor:
        return torch.zeros_like(extended) if plan.empty else plan.of_input(dy, extended, weight)

    strips = returned_strips(dy, extended, weight, plan)
    dx = of_input() if strips is None and overlap else None
    flight = None if strips is None and dx is None else begin_return(extended if dx is None else dx, *where, strips)
    landed = None if flight is None or overlap else flight.land()
    dw, db = plan.of_weights(dy, extended, weight, need_w, need_b)
    if dx is None:
        dx = of_input()
    if landed is None:
        landed = (flight or begin_return(dx, *where)).land()
    dx = finish_return(dx, *where[:2], landed)
    for step in reversed(plan.steps[:-1]):
        back = begin_return(dx, step.split.dim, step.move, step.split.axis).land()
        dx = finish_return(dx, step.split.dim, step.move, back)
    return dx, dw, db


def _summed(space: Space, factor: float, *gradients: Tensor | None) -> list[Tensor | None]:
    """Weight gradients summed over the spatial ranks, in one message an axis."""
    given = [g for g in gradients if g is not None]
    if not given or space.ranks == 1:
        return list(gradients)
    flat = torch.cat([g.reshape(-1) for g in given])
    space.sum(flat)
    if factor != 1.0:
        flat.mul_(factor)
    parts = iter(flat.split([g.numel() for g in given]))
    return [None if g is None else next(parts).view(g.shape) for g in gradients]


def tuple_of(value: int | tuple[int, ...], n: int) -> tuple[int, ...]:
    """A setting as torch takes it, one number or one a dim, as `n` numbers."""
    found = (value,) * n if isinstance(value, int) else tuple(value)
    return found * n if len(found) == 1 else found


def checked_input(op: Op, x: Any, nd: int) -> Tile:
    """`x` as a batch of tiles that are split along spatial dims only."""
    if not isinstance(x, Tile):
        raise op.refuse("expected a split input; a replicated input with split weights is not supported")
    if x.ndim != nd + 2:
        raise op.refuse(f"expected {nd + 2} dims (batch, channels, {nd} of space), got {x.ndim}")
    if any(split.dim < 2 for split in x.splits):
        raise op.refuse("the batch or channel dim is split; only dims of space can be")
    return x


@handles("conv2d", "conv3d")
def _conv(
    op: Op,
    input: Any,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tile:
    nd = weight.ndim - 2
    x = checked_input(op, input, nd)
    stride, dilation = tuple_of(stride, nd), tuple_of(dilation, nd)
    windows = _windows(weight.shape[2:], stride, padding, dilation)
    if x.shape[1] != weight.shape[1] * groups:
        raise op.refuse(f"expected {weight.shape[1] * groups} channels, got {x.shape[1]}")
    for i, window in enumerate(windows):
        if window.outputs(x.shape[i + 2]) < 1:
            raise op.refuse(f"dim {i + 2} of {x.shape[i + 2]} places is smaller than the window of {window.extent}")
    local = x.local
    pads = [0] * nd
    uneven = [0] * (2 * nd)  # of F.pad: last dim first
    steps, splits = [], []
    for i, window in enumerate(windows):
        split = x.split_of(i + 2)
        if split is not None:
            bounds = window.output_bounds(split.bounds)
            splits.append(split.by(bounds))
            move = moves(split.bounds, window.needs(bounds), split.axis.place)
            steps.append(Step(split=split, move=move, outputs=splits[-1].own, window=window))
        elif window.before == window.after:
            pads[i] = window.before
        else:
            uneven[2 * (nd - 1 - i)], uneven[2 * (nd - 1 - i) + 1] = window.before, window.after
    if any(uneven):
        local = torch.nn.functional.pad(local, uneven)
    shape = [local.shape[0], weight.shape[0], *(w.outputs(n) for w, n in zip(windows, x.shape[2:], strict=True))]
    for split in splits:
        shape[split.dim] = split.size
    plan = Plan(
        space=x.space,
        steps=tuple(steps),
        stride=stride,
        padding=tuple(pads),
        dilation=dilation,
        output_padding=(0,) * nd,
        transposed=False,
        groups=groups,
        shape=tuple(shape),
        weight_factor=x.space.weight_factor(weight, bias),
    )
    return Tile(_applied(local, weight, bias, plan), splits, x.space)


def _windows(kernel: Any, stride: Any, padding: Any, dilation: Any) -> list[Window]:
    nd = len(kernel)
    both: list[tuple[int, int]]
    if padding == "same":  # torch: the odd place goes behind
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        both = [(total // 2, total - total // 2) for total in totals]
    else:
        both = [(p, p) for p in tuple_of(0 if padding == "valid" else padding, nd)]
    return [
        Window(kernel=k, stride=s, dilation=d, before=p[0], after=p[1])
        for k, s, d, p in zip(kernel, stride, dilation, both, strict=True)
    ]


@handles("conv_transpose2d", "conv_transpose3d")
def _conv_transpose(
    op: Op,
    input: Any,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tile:
    nd = weight.ndim - 2
    x = checked_input(op, input, nd)
    stride, padding = tuple_of(stride, nd), tuple_of(padding, nd)
    output_padding, dilation = tuple_of(output_padding, nd), tuple_of(dilation, nd)
    if x.shape[1] != weight.shape[0]:
        raise op.refuse(f"expected {weight.shape[0]} channels, got {x.shape[1]}")
    pads, extra = list(padding), list(output_padding)
    steps, splits = [], []
    shape = [x.local.shape[0], weight.shape[1] * groups]
    for i in range(nd):
        window = TransposedWindow(
            kernel=weight.shape[i + 2],
            stride=stride[i],
            dilation=dilation[i],
            padding=padding[i],
            output_padding=output_padding[i],
        )
        n = x.shape[i + 2]
        if n < 1 or window.outputs(n) < 1:
            raise op.refuse(f"dim {i + 2} of {n} places leaves no output")
        if output_padding[i] >= max(stride[i], dilation[i]):
            raise op.refuse(f"output_padding {output_padding[i]} must be smaller than stride or dilation")
        shape.append(window.outputs(n))
        split = x.split_of(i + 2)
        if split is None:
            continue
        bounds = window.output_bounds(split.bounds)
        new = split.by(bounds)
        move = moves(split.bounds, window.needs(bounds, n), split.axis.place)
        before, extra[i] = window.crop(new.own, move.need) if new.size else (0, 0)
        pads[i] = 0
        span = Window(kernel=window.kernel, dilation=window.dilation)
        steps.append(Step(split=split, move=move, outputs=new.own, before=before, window=span))
        splits.append(new)
        shape[i + 2] = new.size
    plan = Plan(
        space=x.space,
        steps=tuple(steps),
        stride=stride,
        padding=tuple(pads),
        dilation=dilation,
        output_padding=tuple(extra),
        transposed=True,
        groups=groups,
        shape=tuple(shape),
        weight_factor=x.space.weight_factor(weight, bias),
    )
    return Tile(_applied(x.local, weight, bias, plan), splits, x.space)


def _applied(x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan) -> Tensor:
    """Under autocast the operands are cast first, as torch casts them."""
    if not torch.is_autocast_enabled(x.device.type):
        y: Tensor = _Convolve.apply(x, weight, bias, plan)
        return y
    dtype = torch.get_autocast_dtype(x.device.type)
    with torch.autocast(x.device.type, enabled=False):
        y = _Convolve.apply(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), plan)
        return y
