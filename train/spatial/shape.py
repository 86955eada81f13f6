"""Functions that join, cut, turn or pad tiles without mixing their split dims."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from exitwave.train.spatial.pointwise import aligned
from exitwave.train.spatial.tile import Op, Split, Tile, fetched, handles

__all__: list[str] = []


@handles("cat", "concat", "concatenate")
def _cat(op: Op, tensors: Sequence[Any], dim: int = 0) -> Tile:
    first = next(x for x in tensors if isinstance(x, Tile))
    dim %= first.ndim
    if first.split_of(dim) is not None:
        raise op.refuse(f"along the split dim {dim}; only along dims that are not split")
    pieces, splits = aligned(op.space, tensors, op.refuse)
    return Tile(torch.cat(pieces, dim), splits, op.space)


@handles("stack")
def _stack(op: Op, tensors: Sequence[Any], dim: int = 0) -> Tile:
    pieces, splits = aligned(op.space, tensors, op.refuse)
    dim %= pieces[0].ndim + 1
    return Tile(torch.stack(pieces, dim), [s.at(s.dim + (s.dim >= dim)) for s in splits], op.space)


@handles("unsqueeze")
def _unsqueeze(op: Op, input: Tile, dim: int) -> Tile:
    dim %= input.ndim + 1
    return Tile(input.local.unsqueeze(dim), [s.at(s.dim + (s.dim >= dim)) for s in input.splits], op.space)


@handles("squeeze")
def _squeeze(op: Op, input: Tile, dim: Any = None) -> Tile:
    if not isinstance(dim, int) or input.split_of(dim % input.ndim) is not None:
        raise op.refuse("name one dim that is not split")
    dim %= input.ndim
    if input.local.shape[dim] != 1:
        return input
    return Tile(input.local.squeeze(dim), [s.at(s.dim - (s.dim > dim)) for s in input.splits], op.space)


@handles("permute")
def _permute(op: Op, input: Tile, *dims: Any) -> Tile:
    order = [d % input.ndim for d in (dims[0] if isinstance(dims[0], list | tuple) else dims)]
    return Tile(input.local.permute(order), [s.at(order.index(s.dim)) for s in input.splits], op.space)


@handles("transpose", "swapaxes", "swapdims")
def _transpose(op: Op, input: Tile, dim0: int, dim1: int) -> Tile:
    order = list(range(input.ndim))
    order[dim0], order[dim1] = order[dim1 % input.ndim], order[dim0 % input.ndim]
    return _permute(op, input, order)


@handles("movedim", "moveaxis")
def _movedim(op: Op, input: Tile, source: int, destination: int) -> Tile:
    order = list(range(input.ndim))
    order.insert(destination % input.ndim, order.pop(source % input.ndim))
    return _permute(op, input, order)


@handles("getitem")
def _getitem(op: Op, input: Tile, index: Any) -> Tile:
    """Slices of step 1, numbers, None and an ellipsis; numbers only where the dim is not split."""
    given = list(index) if isinstance(index, tuple) else [index]
    if any(not (i is None or i is Ellipsis or isinstance(i, slice | int)) or isinstance(i, bool) for i in given):
        raise op.refuse("only slices, numbers, None and ... can index split tensors")
    if Ellipsis in given:
        at = given.index(Ellipsis)
        filled = sum(i is not None and i is not Ellipsis for i in given)
        given[at : at + 1] = [slice(None)] * (input.ndim - filled)
    local_index: list[Any] = []
    splits: list[Split] = []
    dim = target = 0
    for i in given + [slice(None)] * (input.ndim - sum(i is not None for i in given)):
        if i is None:
            target += 1
            local_index.append(None)
            continue
        split = input.split_of(dim)
        dim += 1
        if split is None:
            local_index.append(i)
        elif isinstance(i, int) or i.step not in (None, 1):
            raise op.refuse(f"dim {dim - 1} is split; it can be cut by slices of step 1, not {i}")
        else:
            low, high, _ = i.indices(split.n)
            high = max(low, high)
            kept = tuple(min(max(b, low), high) for b in split.bounds)
            place, start = split.axis.place, split.own[0]
            mine = (kept[place], kept[place + 1])
            local_index.append(slice(mine[0] - start, mine[1] - start) if mine[1] > mine[0] else slice(0, 0))
            splits.append(Split(split.axis, target, tuple(b - low for b in kept)))
        target += not isinstance(i, int)
    return Tile(input.local[tuple(local_index)], splits, op.space)


@handles("narrow")
def _narrow(op: Op, input: Tile, dim: int, start: int, length: int) -> Tile:
    dim %= input.ndim
    index: list[Any] = [slice(None)] * input.ndim
    start = start % input.shape[dim] if start < 0 else start
    index[dim] = slice(start, start + length)
    return _getitem(op, input, tuple(index))


@handles("select")
def _select(op: Op, input: Tile, dim: int, index: int) -> Tile:
    place: list[Any] = [slice(None)] * input.ndim
    place[dim % input.ndim] = index
    return _getitem(op, input, tuple(place))


@handles("chunk", "split", "unbind", "tensor_split")
def _pieces(op: Op, input: Tile, *args: Any, dim: int | None = None, **kwargs: Any) -> tuple[Tile, ...]:
    own = list(args)
    if dim is None:
        takes = 0 if op.name == "unbind" else 1
        dim = own.pop(takes) if len(own) > takes else 0
    dim %= input.ndim
    if input.split_of(dim) is not None:
        raise op.refuse(f"along the split dim {dim}; only along dims that are not split")
    gone = op.name == "unbind"
    splits = [s.at(s.dim - (gone and s.dim > dim)) for s in input.splits]
    return tuple(Tile(part, splits, op.space) for part in op.function(input.local, *own, dim=dim, **kwargs))


@handles("pad", "_pad")
def _pad(op: Op, input: Tile, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tile:
    if mode != "constant":
        raise op.refuse(f"mode={mode!r}; only constant padding (zeros) is supported for split tensors")
    local, splits, plain = input.local, list(input.splits), [0] * (2 * input.ndim)
    for i in range(len(pad) // 2):
        dim, before, after = input.ndim - 1 - i, int(pad[2 * i]), int(pad[2 * i + 1])
        split = input.split_of(dim)
        if split is None:
            plain[2 * i], plain[2 * i + 1] = before, after
            continue
        m = split.n + before + after
        if m < 0:
            raise op.refuse(f"padding {before}, {after} of dim {dim} of {split.n} places")
        bounds = (0, *(min(max(b + before, 0), m) for b in split.bounds[1:-1]), m)
        needs = [(a - before, e - before) if e > a else (0, 0) for a, e in pairwise(bounds)]
        local = fetched(local, split, needs, value or 0.0, owned=True)
        splits[splits.index(split)] = split.by(bounds)
    if any(plain):
        local = F.pad(local, plain, value=value)
    return Tile(local, splits, op.space)


@handles("expand")
def _expand(op: Op, input: Tile, *sizes: Any) -> Tile:
    wanted = list(sizes[0] if isinstance(sizes[0], list | tuple) else sizes)
    if len(wanted) != input.ndim:
        raise op.refuse("only to the same number of dims")
    for split in input.splits:
        if wanted[split.dim] not in (-1, split.n):
            raise op.refuse(f"dim {split.dim} is split")
        wanted[split.dim] = -1
    return input.like(input.local.expand(wanted))


@handles("linear")
def _linear(op: Op, input: Any, weight: Tensor, bias: Tensor | None = None) -> Tile:
    if not isinstance(input, Tile):
        raise op.refuse("expected a split input")
    if input.split_of(input.ndim - 1) is not None:
        raise op.refuse("the last dim is split; flatten first (which gathers)")
    shared = input.space.shared
    return input.like(F.linear(input.local, shared(weight), None if bias is None else shared(bias)))
