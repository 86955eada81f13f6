"""`parallelize`: an ordinary module computes on tiles, with the same parameters and the same `state_dict`.

The module keeps its class and code. Hooks turn this rank's tiles (plain tensors) into `Tile`s when it is called, and
back when it returns, and keep the name of the running layer for messages. What happens between is in `tile` and its
handlers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from exitwave.ingest.errors import UsageError
from exitwave.train.spatial import norm, pointwise, pooling, resample, shape  # noqa: F401  their handlers
from exitwave.train.spatial.draws import HOW_TO_DRAW, Draws
from exitwave.train.spatial.links import Axis, Grid, open_grid
from exitwave.train.spatial.scatter import agreed_splits
from exitwave.train.spatial.tile import Space, Split, Tile, retiled
from exitwave.train.spatial.tiles import even_bounds

__all__ = ["parallelize"]

M = TypeVar("M", bound=nn.Module)

_RANDOM = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU)


def parallelize(
    module: M,
    mesh: DeviceMesh | Grid,
    dims: Mapping[str, int],
    *,
    batch_norm: Literal["global", "spatial", "local"] = "global",
    overlap: bool = False,
    weight_gradients: Literal["summed", "partial"] = "summed",
    timeout_s: float = 300.0,
) -> M:
    """Makes `module` compute on tiles: called with this rank's tile it returns this rank's tile of the result.

    Collective over the mesh. Parameters and buffers become those of the first rank of each spatial set; names and
    shapes are compared first. The module is changed by hooks only and returned.

    Args:
        module: any module of layers that have an exact spatial form; others raise when they are met.
        mesh: a DeviceMesh with named dims; those not in `dims` are data dims.
        dims: name of a mesh dim -> dim of the input that is split along it.
        batch_norm: whose statistics batch normalisation takes (see `norm`).
        overlap: compute the interior while halos travel.
        weight_gradients: "summed": after backward `.grad` is summed over the spatial ranks, for averaging over data
            ranks. "partial": `.grad` is a part whose sum over the spatial ranks is the gradient, for one reduction over
            all ranks, e.g. GroupedAllreduce(module, average_over=data ranks).
        timeout_s: how long a rank waits for another.

    Called with plain tensors, also in lists, tuples and dictionaries: those with more dims than the largest of `dims`
    are tiles of any sizes that fit together, others are replicated. The result's tiles are those of the input where the
    size is the same, otherwise those that `scatter` makes. A result that was gathered on the way (flatten, global
    pooling) is the same on every rank.

    Raises:
        UsageError: unknown mesh dims; parameters that differ between ranks; a module that is parallelized already.
        UnsupportedLayerError: on all ranks, from the module's call: a layer or setting without an exact form, by name.
        LostRankError: a rank is gone.
    """
    grid = open_grid(mesh, timeout_s=timeout_s)
    axes = _spatial_axes(grid, dims)
    if batch_norm not in ("global", "spatial", "local") or weight_gradients not in ("summed", "partial"):
        raise UsageError(
            f"parallelize: expected batch_norm global, spatial or local and weight_gradients summed or partial, "
            f"got {batch_norm!r} and {weight_gradients!r}"
        )
    if any("_exitwave_space" in m.__dict__ for m in module.modules()):
        raise UsageError("parallelize: the module, or a part of it, is parallelized already")
    space = Space(
        axes=tuple(axis for axis, _ in axes),
        data=tuple(axis for axis in grid.axes if axis.name not in dims),
        batch_norm=batch_norm,
        overlap=overlap,
        partial=weight_gradients == "partial",
    )
    _equalise(module, space, options=[sorted(dims.items()), batch_norm, weight_gradients])
    module.__dict__["_exitwave_space"] = _Token(space)
    module.register_forward_pre_hook(_entering(space, axes), with_kwargs=True)
    for name, layer in module.named_modules():
        shown = f"{name!r} ({type(layer).__name__})" if name else f"({type(layer).__name__})"
        layer.register_forward_pre_hook(_named(space, shown, root=layer is module, deepest=max(d for _, d in axes)))
        layer.register_forward_hook(_left(space), always_call=True)
    module.register_forward_hook(_leaving(space))
    module.register_forward_hook(_ended(space), always_call=True)
    return module


class _Token:
    """Marks a parallelized module; a copy of the module shares its connections."""

    def __init__(self, space: Space) -> None:
        self.space = space

    def __deepcopy__(self, memo: Any) -> _Token:
        return self


def _spatial_axes(grid: Grid, dims: Mapping[str, int]) -> list[tuple[Axis, int]]:
    for name in dims:
        grid[name]
    axes = [(axis, dims[axis.name]) for axis in grid.axes if axis.name in dims]
    values = [dim for _, dim in axes]
    if not axes or min(values) < 2 or len(set(values)) < len(values):
        raise UsageError(
            f"dims {dict(dims)}: expected different dims of space, 2 or more (0 is the batch, 1 the channels), "
            "e.g. {'spatial': 2}"
        )
    return axes


def _equalise(module: nn.Module, space: Space, options: list[Any]) -> None:
    """All spatial ranks hold the parameters and buffers of the first; raises on all where modules differ."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    said = json.dumps([options, [(n, list(t.shape), str(t.dtype), t.requires_grad) for n, t in state.items()]])
    agreed_splits([1] * len(space.axes), said, [(axis, k) for k, axis in enumerate(space.axes)])
    with torch.no_grad():
        for tensor in state.values():
            for axis in space.axes:
                if tensor.is_contiguous():
                    axis.share(tensor.data)
                else:
                    tensor.copy_(axis.share(tensor.contiguous()))


def _entering(space: Space, axes: list[tuple[Axis, int]]) -> Callable[..., Any]:
    deepest = max(dim for _, dim in axes)

    def enter(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        space.where.clear()
        space.modes.clear()
        space.entered = ()
        space.tracking = torch.is_grad_enabled()

        def tile(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.ndim <= deepest:
                return value
            signature = f"{value.dtype}, training={called.training}, "
            signature += f"requires_grad={value.requires_grad}, gradients={torch.is_grad_enabled()}"
            splits = tuple(agreed_splits(value.shape, signature, axes))
            space.entered = space.entered or splits
            return Tile(value, splits, space)

        tiles = tuple(_mapped(tile, value) for value in args), {n: _mapped(tile, value) for n, value in kwargs.items()}
        space.modes.append(Draws(called, space))
        space.modes[-1].__enter__()
        return tiles

    return enter


def _named(space: Space, name: str, *, root: bool, deepest: int) -> Callable[..., None]:
    def enter(layer: nn.Module, args: Any) -> None:
        outside = not root and not space.where and torch._C._current_graph_task_id() == -1  # not recomputed in backward
        space.where.append(name)
        if outside and any(isinstance(x, Tensor) and x.ndim > deepest for x in args):
            raise space.refuse(
                type(layer).__name__,
                "called by itself: only a call of the whole parallelized module knows its input as tiles; parallelize "
                "the part that is called, or call the whole",
            )
        if isinstance(layer, _RANDOM) and layer.training and getattr(layer, "p", 1.0) > 0:
            raise space.refuse(type(layer).__name__, HOW_TO_DRAW)

    return enter


def _left(space: Space) -> Callable[..., None]:
    def leave(*_: Any) -> None:
        if space.where:
            space.where.pop()

    return leave


def _ended(space: Space) -> Callable[..., None]:
    def end(*_: Any) -> None:
        if space.modes:
            space.modes.pop().__exit__(None, None, None)

    return end


def _leaving(space: Space) -> Callable[..., Any]:
    def leave(_: nn.Module, __: Any, result: Any) -> Any:
        return _plain(result, space)

    return leave


def _plain(result: Any, space: Space) -> Any:
    """Tiles become this rank's pieces; replicated results carry their share of the gradient (see `Space.factor`)."""
    if isinstance(result, Tile):
        return retiled(result, [_as_promised(split, space) for split in result.splits]).local
    if isinstance(result, Tensor):
        return _Shared.apply(result, space.factor) if space.partial and result.requires_grad else result
    return _mapped(lambda value: _plain(value, space), result, inside=True)


def _mapped(function: Callable[[Any], Any], value: Any, *, inside: bool = False) -> Any:
    """`function` of all that lists, tuples and dictionaries hold; `inside`: it has seen to `value` itself already."""
    if isinstance(value, dict):
        return {name: _mapped(function, each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        values = [_mapped(function, each) for each in value]
        return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
    return value if inside else function(value)


def _as_promised(split: Split, space: Space) -> Split:
    """The input's bounds where the size is the same, else those of `scatter`: whatever the layers between have made."""
    given = next((entered.bounds for entered in space.entered if entered.axis is split.axis), ())
    return split.by(given if given and given[-1] == split.n else even_bounds(split.n, split.axis.size))


class _Shared(torch.autograd.Function):
    """A replicated result leaves the module; its gradient is divided among the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: float) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None
