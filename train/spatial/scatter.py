"""Wholes and tiles outside of modules: `scatter`, `gather`, sums over tiles, and where this rank's tile lies.

Outside of a parallelized module a tile is a plain tensor, this rank's piece, and `mesh` and `dims` say what it is a
piece of. The loss is one number that all spatial ranks share: computed by each of them from the same whole, or as the
`total` or `mean` over their tiles.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from exitwave.ingest.errors import UsageError
from exitwave.train.spatial.links import Axis, Grid, open_grid
from exitwave.train.spatial.reduce import Part, Whole, replicated_sum
from exitwave.train.spatial.tile import Space, Split, precise
from exitwave.train.spatial.tiles import Bounds, even_bounds

__all__ = ["agreed_splits", "gather", "mean", "own_slices", "scatter", "total"]


def scatter(
    x: Tensor,
    mesh: DeviceMesh | Grid,
    dims: Mapping[str, int],
    *,
    bounds: Mapping[str, Bounds] | None = None,
    multiple_of: int = 1,
) -> Tensor:
    """This rank's tile of `x`, which every rank holds whole; backward gives every rank the whole gradient.

    Args:
        x: any shape, the same on all ranks of the spatial mesh dims.
        mesh: a DeviceMesh with named dims.
        dims: name of a mesh dim -> dim of `x` that is split along it.
        bounds: name of a mesh dim -> 0 = b[0] <= … <= b[R] = size; by default as `even_bounds` makes them.
        multiple_of: tiles begin at multiples of this (default bounds only).

    Raises:
        UsageError: unknown mesh dims, or dims or bounds that do not fit the shape.
    """
    part: Tensor = Part.apply(x, _splits(x.shape, mesh, dims, bounds, multiple_of))
    return part


def own_slices(
    shape: Sequence[int], mesh: DeviceMesh | Grid, dims: Mapping[str, int], *, multiple_of: int = 1
) -> tuple[slice, ...]:
    """Where this rank's tile lies in a whole of `shape`: what `scatter` would take."""
    slices = [slice(0, n) for n in shape]
    for split in _splits(shape, mesh, dims, None, multiple_of):
        slices[split.dim] = slice(*split.own)
    return tuple(slices)


def gather(y: Tensor, mesh: DeviceMesh | Grid, dims: Mapping[str, int]) -> Tensor:
    """The whole on every rank, of tiles of any sizes (`dims`: mesh dim -> dim of `y`).

    Backward: every rank takes its part of the whole's gradient, which is the same on all ranks when all compute the
    same from it.

    Raises:
        UsageError: on all ranks, tiles that do not fit together.
    """
    splits = agreed_splits(y.shape, "", _axes(mesh, dims, y.ndim))
    found: Tensor = Whole.apply(y, splits, 1.0)
    return found


def total(x: Tensor, mesh: DeviceMesh | Grid, dims: Mapping[str, int]) -> Tensor:
    """The sum of all elements of all tiles, a scalar that is the same on all spatial ranks; differentiable."""
    return replicated_sum(_own_sum(x), Space(tuple(axis for axis, _ in _axes(mesh, dims, None))))


def mean(x: Tensor, mesh: DeviceMesh | Grid, dims: Mapping[str, int]) -> Tensor:
    """The mean of all elements of all tiles (of any sizes), the same on all spatial ranks; differentiable."""
    space = Space(tuple(axis for axis, _ in _axes(mesh, dims, None)))
    count = space.sum(x.new_full((), x.numel(), dtype=torch.int64))
    found = replicated_sum(_own_sum(x), space) / float(count)
    return found.to(x.dtype) if x.is_floating_point() else found


def _own_sum(x: Tensor) -> Tensor:
    """The sum of this rank's tile; of half precision in single precision, which does not overflow."""
    return x.sum(dtype=precise(x.dtype)) if x.is_floating_point() else x.sum()


def _axes(mesh: DeviceMesh | Grid, dims: Mapping[str, int], ndim: int | None) -> list[tuple[Axis, int]]:
    """Each axis with its tensor dim, in the mesh's order."""
    grid = open_grid(mesh)
    for name in dims:
        grid[name]
    if not dims:
        raise UsageError("dims: expected at least one mesh dim with its tensor dim, e.g. {'spatial': 2}")
    found = [(axis, dims[axis.name]) for axis in grid.axes if axis.name in dims]
    if ndim is not None:
        if any(not -ndim <= dim < ndim for _, dim in found):
            raise UsageError(f"dims {dict(dims)}: a tensor of {ndim} dims has no such dim")
        found = [(axis, dim % ndim) for axis, dim in found]
    if len({dim for _, dim in found}) < len(found):
        raise UsageError(f"dims {dict(dims)}: one tensor dim cannot be split along two mesh dims")
    return found


def _splits(
    shape: Sequence[int],
    mesh: DeviceMesh | Grid,
    dims: Mapping[str, int],
    bounds: Mapping[str, Bounds] | None,
    multiple_of: int,
) -> list[Split]:
    splits = []
    for axis, dim in _axes(mesh, dims, len(shape)):
        b = tuple((bounds or {}).get(axis.name, ())) or even_bounds(shape[dim], axis.size, multiple_of)
        if len(b) != axis.size + 1 or b[0] != 0 or b[-1] != shape[dim] or list(b) != sorted(b):
            raise UsageError(
                f"bounds of mesh dim {axis.name!r}: expected {axis.size + 1} numbers rising from 0 to {shape[dim]}, "
                f"got {b}"
            )
        splits.append(Split(axis, dim, b))
    return splits


def agreed_splits(shape: Sequence[int], signature: str, axes: Sequence[tuple[Axis, int]]) -> list[Split]:
    """How tiles of this rank's `shape` make up a whole; collective over the axes.

    `signature` must be the same on all ranks. Raises UsageError on all ranks where tiles do not fit together.
    """
    payload = json.dumps([list(shape), signature]).encode()
    for axis, _ in axes:  # after the last axis every rank holds what all ranks of the space said, in one order
        payload = json.dumps([json.loads(said) for said in axis.gather(payload)]).encode()
    said = json.loads(payload)
    return [Split(axis, dim, b) for (axis, dim), b in zip(axes, _fitted(said, axes), strict=True)]


def _fitted(said: list[object], axes: Sequence[tuple[Axis, int]]) -> list[Bounds]:
    """Bounds of each axis, of what all ranks said: nested lists, the last axis outermost, of [shape, signature]."""
    flat: list[tuple[tuple[int, ...], list[int], str]] = []  # (place on each axis, shape, signature)

    def walk(node: list[object], place: tuple[int, ...]) -> None:
        if len(place) == len(axes):
            flat.append((place, node[0], node[1]))  # type: ignore[arg-type]
            return
        for number, child in enumerate(node):
            walk(child, (number, *place))  # type: ignore[arg-type]

    walk(said, ())
    first_shape, first_signature = flat[0][1], flat[0][2]
    sizes = [[0] * axis.size for axis, _ in axes]
    for place, shape, _ in flat:
        for k, (_, dim) in enumerate(axes):
            if not any(place[:k] + place[k + 1 :]) and dim < len(shape):
                sizes[k][place[k]] = shape[dim]
    for place, shape, signature in flat:
        expected = list(first_shape)
        for k, (_, dim) in enumerate(axes):
            if dim < len(expected):
                expected[dim] = sizes[k][place[k]]
        if shape != expected or signature != first_signature:
            names = {axis.name: at for (axis, _), at in zip(axes, place, strict=True)}
            raise UsageError(
                f"tiles do not fit together: at mesh place {names} expected {expected} {first_signature}, "
                f"got {shape} {signature}"
            )
    return [tuple(sum(some[:r]) for r in range(len(some) + 1)) for some in sizes]
