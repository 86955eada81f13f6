"""What one rank's convolution is: exchanges, settings, torch's own operations on the extended tensor and its parts.

A `Plan` is made once a call, from global shapes. Parts: the interior of the output, which the tile alone suffices for,
the border around it, and, of the input's gradient, the strips that belong to neighbours. Strips are small beside the
tile, and are computed on their own before all else: while they travel, the rest is computed as without overlap, and no
more is held at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exitwave.train.spatial.tile import Space, Split
from exitwave.train.spatial.tiles import Moves, Range, Window

__all__ = ["Plan", "Step", "border", "interior", "returned_strips"]

_STRIPS_SHARE = 8  # strips are computed on their own where that is at most one in so many of the rows of outputs


@dataclass(frozen=True, kw_only=True)
class Step:
    """One split dim: the tile and the exchange that makes it what the outputs need."""

    split: Split
    move: Moves
    outputs: Range  # of this rank
    before: int = 0  # transposed: places to cut at the beginning
    window: Window | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    space: Space
    steps: tuple[Step, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]  # 0 along split dims
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    transposed: bool
    groups: int
    shape: tuple[int, ...]  # of this rank's output
    weight_factor: float | None

    @property
    def empty(self) -> bool:
        return 0 in self.shape

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, cut: bool = True) -> Tensor:
        """The convolution of the extended tensor, cut to this rank's outputs (or of a part of it, uncut)."""
        y = torch.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups
        )
        for step in self.steps if cut else ():
            if y.shape[step.split.dim] != self.shape[step.split.dim]:
                y = y.narrow(step.split.dim, step.before, self.shape[step.split.dim])
        return y

    def of_input(self, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The gradient of the extended input; `dy` has been uncut."""
        found: Tensor = self._gradients(dy, x, weight, (True, False, False))[0]
        return found

    def of_weights(self, dy: Tensor, x: Tensor, weight: Tensor, need_w: bool, need_b: bool) -> tuple[Any, Any]:
        """This rank's parts of the gradients of weight and bias, each None where it is not needed."""
        if not (need_w or need_b):
            return None, None
        if self.empty:
            dw = torch.zeros_like(weight) if need_w else None
            return dw, weight.new_zeros(self._channels(weight)) if need_b else None
        return self._gradients(dy, x, weight, (False, need_w, need_b))[1:]

    def _channels(self, weight: Tensor) -> int:
        return weight.shape[1] * self.groups if self.transposed else weight.shape[0]

    def _gradients(self, dy: Tensor, x: Tensor, weight: Tensor, mask: tuple[bool, bool, bool]) -> tuple[Any, Any, Any]:
        found = torch.ops.aten.convolution_backward(
            dy,
            x,
            weight,
            [self._channels(weight)] if mask[2] else None,
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups,
            mask,
        )
        return found[0], found[1], found[2]

    def uncut(self, dy: Tensor, x: Tensor) -> Tensor:
        """The gradient of what `run` made before it cut."""
        if not self.transposed:
            return dy
        shape = list(dy.shape)
        for step in self.steps:
            dim = step.split.dim
            i = dim - 2
            window = (x.shape[dim] - 1) * self.stride[i] - 2 * self.padding[i] + self.output_padding[i] + 1
            shape[dim] = window + _reach(step)
        if shape == list(dy.shape):
            return dy
        full = dy.new_zeros(shape)
        part = full
        for step in self.steps:
            part = part.narrow(step.split.dim, step.before, dy.shape[step.split.dim])
        part.copy_(dy)
        return full


def _reach(step: Step) -> int:
    assert step.window is not None
    return step.window.extent - 1


def _inside(plan: Plan) -> list[Range] | None:
    """For each split dim the outputs that the tile alone suffices for; None where there are none, or only those."""
    found = []
    for step in plan.steps:
        assert step.window is not None
        low, high = step.window.inside(step.split.own)
        low, high = max(low, step.outputs[0]), min(high, step.outputs[1])
        if high <= low:
            return None
        found.append((low, high))
    return None if all(step.outputs == inner for step, inner in zip(plan.steps, found, strict=True)) else found


def interior(x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan) -> Tensor | None:
    """The output with its interior computed, or None where there is no interior or nothing else."""
    inner = None if plan.empty else _inside(plan)
    if inner is None:
        return None
    y = x.new_empty(plan.shape)
    _compute(y, x, weight, bias, plan, inner, [step.split.own[0] for step in plan.steps])
    return y


def border(y: Tensor, extended: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan) -> None:
    """The outputs outside of the interior: along each split dim the slabs before and behind it."""
    inner = _inside(plan)
    assert inner is not None
    starts = [step.move.need[0] for step in plan.steps]
    box = [step.outputs for step in plan.steps]
    for number, (low, high) in enumerate(inner):
        for slab in ((box[number][0], low), (high, box[number][1])):
            if slab[1] > slab[0]:
                _compute(y, extended, weight, bias, plan, [*box[:number], slab, *box[number + 1 :]], starts)
        box[number] = (low, high)


def _compute(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: Plan,
    outputs: list[Range],
    starts: list[int],
) -> None:
    """Outputs of one box, from `x` whose first places are `starts`, written into `y`."""
    target = y
    for step, span, start in zip(plan.steps, outputs, starts, strict=True):
        assert step.window is not None
        low, high = step.window.need(span)
        x = x.narrow(step.split.dim, low - start, high - low)
        target = target.narrow(step.split.dim, span[0] - step.outputs[0], span[1] - span[0])
    target.copy_(plan.run(x, weight, bias, cut=False))


def returned_strips(dy: Tensor, x: Tensor, weight: Tensor, plan: Plan) -> list[Tensor] | None:
    """The gradients of the last dim's received strips, one a receive; None where they come cheaper with the whole.

    `x`: the extended input. An input place gets its gradient from the outputs whose windows reach it, which are few.
    """
    step = plan.steps[-1]
    if not step.move.receives:
        return []
    if plan.transposed or plan.empty:
        return None
    assert step.window is not None
    dim, window, start = step.split.dim, step.window, step.move.need[0]
    rows, spans = dy.shape[dim], []
    for _, low, high in step.move.receives:
        low, high = low - start, high - start  # places of `x`
        first = max(0, -(-(low - window.extent + 1) // window.stride))
        spans.append((low, high, first, min(rows, (high - 1) // window.stride + 1)))
    if sum(max(end - first, 0) for _, _, first, end in spans) * _STRIPS_SHARE > rows:
        return None
    strips = []
    for low, high, first, end in spans:
        shape = list(x.shape)
        shape[dim] = high - low
        strip = x.new_zeros(shape)
        if end > first:
            begin, stop = first * window.stride, (end - 1) * window.stride + window.extent
            part = plan.of_input(dy.narrow(dim, first, end - first), x.narrow(dim, begin, stop - begin), weight)
            at, upto = max(low, begin), min(high, stop)
            strip.narrow(dim, at - low, upto - at).copy_(part.narrow(dim, at - begin, upto - at))
        strips.append(strip)
    return strips
