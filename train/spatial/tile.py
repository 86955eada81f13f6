"""Inside a parallelized module activations are `Tile`s: a piece of a tensor that knows the whole it belongs to.

A `Tile` shows the *global* shape, as the module's code was written for, and carries out torch functions by
`__torch_function__`: each has a handler here or in the modules beside (`handles`), which computes on the local piece,
exchanges halos, or gathers. A function without a handler has no exact form that we know, and is refused by name: on all
ranks alike, since every decision is made from global shapes and bounds, which all ranks hold.

Two kinds of values meet in a module: tiles, and *replicated* plain tensors, the same on every spatial rank: parameters,
buffers, masks made from global shapes, and whatever follows a gather or a global pooling. Gradients follow one rule:
the loss is one number, shared by all spatial ranks. So the gradient of a replicated value is the same on all ranks;
where tiles use it (`Space.shared`) the ranks' parts are summed, where it comes from tiles (`Space.factor`) each rank
keeps its own part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from exitwave.ingest.errors import UsageError
from exitwave.train.spatial.halo import Fetch
from exitwave.train.spatial.links import Axis
from exitwave.train.spatial.tiles import Bounds, Range, moves

__all__ = ["Op", "Space", "Split", "Tile", "UnsupportedLayerError", "fetched", "handles", "precise", "retiled"]


class UnsupportedLayerError(UsageError):
    """A layer or setting without an exact spatial form; raised on all ranks, names the layer."""


@dataclass(frozen=True)
class Split:
    """Tensor dim `dim` is split along `axis` by `bounds`."""

    axis: Axis
    dim: int
    bounds: Bounds

    @property
    def n(self) -> int:
        """Places of the whole dim."""
        return self.bounds[-1]

    @property
    def own(self) -> Range:
        """This rank's places."""
        return (self.bounds[self.axis.place], self.bounds[self.axis.place + 1])

    @property
    def size(self) -> int:
        """How many these are."""
        return self.own[1] - self.own[0]

    def at(self, dim: int) -> Split:
        """The same split of another dim of the tensor."""
        return Split(self.axis, dim, self.bounds)

    def by(self, bounds: Bounds) -> Split:
        """The same dim split by other bounds."""
        return Split(self.axis, self.dim, bounds)


@dataclass(eq=False)
class Space:
    """What the tiles of one parallelized module share."""

    axes: tuple[Axis, ...]
    data: tuple[Axis, ...] = ()
    batch_norm: str = "global"
    overlap: bool = False
    partial: bool = False  # weight gradients stay this rank's part
    where: list[str] = field(default_factory=list)  # names of the layers that are running, outermost first
    entered: tuple[Split, ...] = ()  # how the input of the call was split
    tracking: bool = False  # the call was made with gradients enabled
    modes: list[TorchFunctionMode] = field(default_factory=list)  # that the call has entered

    @property
    def ranks(self) -> int:
        """Spatial ranks that share a sample."""
        count = 1
        for axis in self.axes:
            count *= axis.size
        return count

    @property
    def factor(self) -> float:
        """What the gradient of a replicated value is multiplied by when it enters the tiles it came from.

        With partial weight gradients replicated values carry 1/ranks of the gradient (their layers' parts then add up
        to the whole), and tiles all of it.
        """
        return float(self.ranks) if self.partial else 1.0

    def sum(self, tensor: Tensor) -> Tensor:
        """`tensor` summed in place over all spatial ranks."""
        for axis in self.axes:
            axis.sum(tensor)
        return tensor

    def weight_factor(self, *tensors: Tensor | None) -> float | None:
        """How gradients of replicated tensors that tiles used are made: None as they are, else summed, times this."""
        if not self.partial:
            return 1.0
        return None if all(tensor is None or tensor.is_leaf for tensor in tensors) else 1.0 / self.ranks

    def shared(self, tensor: Tensor) -> Tensor:
        """A replicated tensor for use with tiles."""
        factor = self.weight_factor(tensor)
        if not tensor.requires_grad or factor is None or not torch.is_grad_enabled():
            return tensor
        shared: Tensor = _Shared.apply(tensor, self, factor)
        return shared

    def refuse(self, what: str, why: str) -> UnsupportedLayerError:
        """The error to raise."""
        layer = f"layer {self.where[-1]}: " if self.where else ""
        return UnsupportedLayerError(f"spatial parallelism: {layer}{what}: {why}")


class _Shared(torch.autograd.Function):
    """A replicated tensor enters an operation on tiles; backward: the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, space: Space, factor: float) -> Tensor:
        ctx.how = (space, factor)
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        space, factor = ctx.how
        total = space.sum(gradient.clone(memory_format=torch.contiguous_format))
        return total if factor == 1.0 else total.mul_(factor), None, None


@dataclass(frozen=True)
class Op:
    """A torch function called on tiles: where, which."""

    space: Space
    function: Callable[..., Any]
    name: str

    def refuse(self, why: str) -> UnsupportedLayerError:
        """The error to raise."""
        return self.space.refuse(self.name, why)


Handler = Callable[..., Any]
_HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Registers handler(op, *args, **kwargs) for torch functions and tensor methods of these names."""

    def register(handler: Handler) -> Handler:
        for name in names:
            _HANDLERS[name] = handler
        return handler

    return register


def _dispatch(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name = getattr(function, "__name__", str(function))
    short = name[2:-2] if name.startswith("__") and name.endswith("__") else name
    space = next(tile.space for tile in tiles_of((args, kwargs)))
    op = Op(space, function, short)
    handler = _HANDLERS.get(short)
    if space.tracking and not torch.is_grad_enabled() and _within_a_function():
        raise op.refuse(
            "within an autograd Function, or a checkpoint with use_reentrant=True, which give split tensors no "
            "gradient; write it as torch functions, or use use_reentrant=False"
        )
    if handler is None:
        raise op.refuse("no exact form is known for split tensors; move it out of the parallelized module, or gather")
    try:
        return handler(op, *args, **kwargs)
    except TypeError as error:
        if "handler" in str(error) or "argument" in str(error):
            raise op.refuse(f"called in a way that is not supported for split tensors ({error})") from error
        raise


def _within_a_function() -> bool:
    """True in the forward pass of an autograd Function: autograd takes a `Tile` for a number, and tracks nothing."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _APPLY:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def precise(dtype: torch.dtype) -> torch.dtype:
    """What sums of numbers of this type are made in, as torch makes them."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def tiles_of(value: Any) -> list[Tile]:
    """All tiles in nested tuples, lists and dictionaries."""
    if isinstance(value, Tile):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tile for item in value for tile in tiles_of(item)]
    return []


class Tile:
    """`local`: this rank's piece (a plain tensor); `splits`: which dims are split how, in the order of dims."""

    __slots__ = ("local", "space", "splits")

    def __init__(self, local: Tensor, splits: Sequence[Split], space: Space) -> None:
        self.local = local
        self.splits = tuple(sorted(splits, key=lambda split: split.dim))
        self.space = space

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatch(function, args, kwargs or {})

    def like(self, local: Tensor) -> Tile:
        """Another piece with the same splits."""
        return Tile(local, self.splits, self.space)

    def split_of(self, dim: int) -> Split | None:
        """How dim `dim` is split."""
        return next((split for split in self.splits if split.dim == dim), None)

    @property
    def shape(self) -> torch.Size:
        """The global shape."""
        shape = list(self.local.shape)
        for split in self.splits:
            shape[split.dim] = split.n
        return torch.Size(shape)

    @property
    def ndim(self) -> int:
        return self.local.ndim

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        return self.local.device

    @property
    def requires_grad(self) -> bool:
        return self.local.requires_grad

    @property
    def is_cuda(self) -> bool:
        return self.local.is_cuda

    @property
    def T(self) -> Any:
        raise self.space.refuse("T", "use permute or transpose")

    def size(self, dim: int | None = None) -> Any:
        """The global shape, or one size of it."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.local.ndim

    def numel(self) -> int:
        """Elements of the whole."""
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        return self.local.is_floating_point()

    def is_complex(self) -> bool:
        return self.local.is_complex()

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        splits = ", ".join(f"dim {s.dim} {s.own} of {s.n}" for s in self.splits)
        return f"Tile(shape={tuple(self.shape)}, {splits}, dtype={self.dtype})"

    def __bool__(self) -> bool:
        raise self.space.refuse("bool", "the ranks hold different pieces and would decide differently")

    def __setitem__(self, index: Any, value: Any) -> None:
        raise self.space.refuse("assignment to a part", "not supported for split tensors")

    def __iter__(self) -> Any:
        raise self.space.refuse("iteration", "not supported for split tensors; use unbind or index")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(torch.Tensor, name, None) if not name.startswith("__") else None
        if method is None:
            raise AttributeError(f"a Tile has no attribute {name!r}")
        if not callable(method):
            raise self.space.refuse(name, "not supported for split tensors")
        return lambda *args, **kwargs: _dispatch(method, (self, *args), kwargs)


def _operator(name: str) -> Callable[..., Any]:
    method = getattr(torch.Tensor, name)

    def call(self: Tile, *args: Any) -> Any:
        return _dispatch(method, (self, *args), {})

    call.__name__ = name
    return call


_OPERATORS = """
add radd sub rsub mul rmul truediv rtruediv pow rpow neg abs matmul rmatmul getitem iadd isub imul itruediv lt le gt ge
eq ne and or invert
""".split()  # noqa: SIM905
for _name in _OPERATORS:
    setattr(Tile, f"__{_name}__", _operator(f"__{_name}__"))
Tile.__hash__ = object.__hash__  # type: ignore[method-assign]


def fetched(x: Tensor, split: Split, needs: Sequence[Range], fill: float = 0.0, *, owned: bool = False) -> Tensor:
    """The places of a split dim that this rank needs, by `needs` of all ranks; see `halo.Fetch`.

    Nothing happens where no rank needs anything but its own. `owned`: the result may be changed in place.
    """
    own = tuple(zip(split.bounds[:-1], split.bounds[1:], strict=True))
    if tuple(needs) == own:
        return x
    move = moves(split.bounds, needs, split.axis.place)
    found: Tensor = Fetch.apply(x, split.dim, move, split.axis, fill)
    return found.clone() if owned and move.nothing else found


def retiled(tile: Tile, splits: Sequence[Split]) -> Tile:
    """The same whole split by other bounds (the same dims and axes)."""
    local = tile.local
    for old, new in zip(tile.splits, splits, strict=True):
        local = fetched(local, old, tuple(zip(new.bounds[:-1], new.bounds[1:], strict=True)), owned=True)
    return Tile(local, splits, tile.space)
