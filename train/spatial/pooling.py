"""Pooling of tiles: fetch what the windows of this rank's outputs need, padding included, then pool without padding.

Where a dim is not split its padding is left to torch, so that no padded copy is made beside the fetched one.

Average pooling divides by the number of places that torch counts (`count_include_pad`, windows that hang over the end),
which is a product over dims, computed from global places. Adaptive pooling to one place is a sum over all ranks; to
more places it is a small linear map along each dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from exitwave.train.spatial.convolution import checked_input, tuple_of
from exitwave.train.spatial.reduce import replicated_sum
from exitwave.train.spatial.resample import mapped
from exitwave.train.spatial.tile import Op, Split, Tile, fetched, handles, precise
from exitwave.train.spatial.tiles import Range, Window

__all__: list[str] = []


class _Nothing(torch.autograd.Function):
    """An empty tensor of a given shape that hangs on `x` in the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Sequence[int]) -> Tensor:
        ctx.shape = x.shape
        return x.new_empty(shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_zeros(ctx.shape), None


def _windowed(
    op: Op, x: Tile, windows: list[Window], fill: float
) -> tuple[Tensor, list[int], list[Range], list[Split]]:
    """The local tensor extended to what this rank's outputs need, the padding that is left for torch, the outputs
    [A, B) in each dim, the new splits."""
    local, left, outputs, splits = x.local, [0] * len(windows), [], []
    for i, window in enumerate(windows):
        n, m = x.shape[i + 2], window.outputs(x.shape[i + 2])
        if m < 1:
            raise op.refuse(f"dim {i + 2} of {n} places is smaller than the window of {window.extent}")
        if 2 * window.before > window.kernel:
            raise op.refuse(f"padding {window.before} is more than half of the kernel {window.kernel}")
        split = x.split_of(i + 2)
        if split is None:
            outputs.append((0, m))
            low, high = window.need((0, m))
            if replace(window, ceil_mode=False).outputs(n) == m:
                left[i] = window.before
            elif low < 0 or high > n:  # the last window hangs over the end
                pads = [0] * (2 * (len(windows) - i))
                pads[-2:] = [-low, max(0, high - n)]
                local = F.pad(local, pads, value=fill)
            continue
        new = split.by(window.output_bounds(split.bounds))
        local = fetched(local, split, window.needs(new.bounds), fill)
        outputs.append(new.own)
        splits.append(new)
    return local, left, outputs, splits


def _settings(nd: int, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> list[Window]:
    kernel = tuple_of(kernel_size, nd)
    steps = kernel if stride is None or stride == [] or stride == () else tuple_of(stride, nd)
    pads, gaps = tuple_of(padding, nd), tuple_of(dilation, nd)
    return [
        Window(kernel=k, stride=s, dilation=d, before=p, after=p, ceil_mode=ceil_mode)
        for k, s, d, p in zip(kernel, steps, gaps, pads, strict=True)
    ]


@handles("max_pool2d", "max_pool3d")
def _max_pool(
    op: Op,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tile:
    if return_indices:
        raise op.refuse("return_indices: indices would be of the tile, not of the whole")
    nd = int(op.name[-2])
    x = checked_input(op, input, nd)
    windows = _settings(nd, kernel_size, stride, padding, dilation, ceil_mode)
    local, left, outputs, splits = _windowed(op, x, windows, float("-inf"))
    shape = (*local.shape[:2], *(end - first for first, end in outputs))
    if 0 in shape:
        return Tile(_Nothing.apply(local, shape), splits, x.space)
    pool = F.max_pool2d if nd == 2 else F.max_pool3d
    kernel, step = [w.kernel for w in windows], [w.stride for w in windows]
    y = pool(local, kernel, step, left, [w.dilation for w in windows])
    return Tile(_trimmed(y, shape), splits, x.space)


@handles("avg_pool2d", "avg_pool3d")
def _avg_pool(
    op: Op,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tile:
    nd = int(op.name[-2])
    x = checked_input(op, input, nd)
    windows = _settings(nd, kernel_size, stride, padding, 1, ceil_mode)
    local, left, outputs, splits = _windowed(op, x, windows, 0.0)
    shape = (*local.shape[:2], *(end - first for first, end in outputs))
    if 0 in shape:
        return Tile(_Nothing.apply(local, shape), splits, x.space)
    counts = [
        [_counted(w, n, o, count_include_pad) for o in range(*span)]
        for w, n, span in zip(windows, x.shape[2:], outputs, strict=True)
    ]
    pool = F.avg_pool2d if nd == 2 else F.avg_pool3d
    kernel, step = [w.kernel for w in windows], [w.stride for w in windows]
    full = all(count == w.kernel for w, some in zip(windows, counts, strict=True) for count in some)
    if full or divisor_override:
        return Tile(
            _trimmed(pool(local, kernel, step, left, divisor_override=divisor_override), shape), splits, x.space
        )
    y = _trimmed(pool(local.to(precise(x.dtype)), kernel, step, left, divisor_override=1), shape)
    divisor = torch.ones((), dtype=y.dtype, device=y.device)
    for some in counts:
        divisor = divisor.unsqueeze(-1) * torch.tensor(some, dtype=y.dtype, device=y.device)
    return Tile((y / divisor).to(x.dtype), splits, x.space)


def _counted(window: Window, n: int, output: int, count_include_pad: bool) -> int:
    """Places that torch divides by along one dim, for one output."""
    first = output * window.stride - window.before
    end = min(first + window.kernel, n + window.before)
    return end - first if count_include_pad else min(end, n) - max(first, 0)


def _trimmed(y: Tensor, shape: Sequence[int]) -> Tensor:
    """Unsplit dims may hold places behind the last window, which make no further output."""
    assert tuple(y.shape) == tuple(shape), (tuple(y.shape), tuple(shape))
    return y


@handles("adaptive_avg_pool2d", "adaptive_avg_pool3d")
def _adaptive_avg_pool(op: Op, input: Any, output_size: Any) -> Tile | Tensor:
    nd = int(op.name[-2])
    x = checked_input(op, input, nd)
    sizes = _sizes(x, output_size, nd)
    if all(sizes[split.dim - 2] == 1 for split in x.splits) and all(size == 1 for size in sizes):
        count = 1
        for n in x.shape[2:]:
            count *= n
        own = x.local.sum(tuple(range(2, nd + 2)), keepdim=True, dtype=precise(x.dtype))
        return (replicated_sum(own, x.space) / count).to(x.dtype)
    y = x
    for i, m in enumerate(sizes):
        n = x.shape[i + 2]
        if m != n:
            weights = torch.zeros(m, n, dtype=torch.float64)
            for o in range(m):
                low, high = o * n // m, -(-(o + 1) * n // m)
                weights[o, low:high] = 1.0 / (high - low)
            y = mapped(y, weights, i + 2)
    return y


@handles("adaptive_max_pool2d", "adaptive_max_pool3d")
def _adaptive_max_pool(op: Op, input: Any, output_size: Any, return_indices: bool = False) -> Tile:
    nd = int(op.name[-2])
    x = checked_input(op, input, nd)
    sizes = _sizes(x, output_size, nd)
    if return_indices:
        raise op.refuse("return_indices: indices would be of the tile, not of the whole")
    if any(n % m for n, m in zip(x.shape[2:], sizes, strict=True)):
        raise op.refuse(f"only sizes that divide the input's {tuple(x.shape[2:])}, got {sizes}")
    kernel = [n // m for n, m in zip(x.shape[2:], sizes, strict=True)]
    return _max_pool(Op(op.space, op.function, f"max_pool{nd}d"), x, kernel)


def _sizes(x: Tile, output_size: Any, nd: int) -> list[int]:
    given = tuple_of(output_size, nd)
    return [x.shape[i + 2] if m is None else int(m) for i, m in enumerate(given)]
