"""Functions of each element alone: computed on the pieces, once their tiles agree.

Operands are tiles of the same dims (re-tiled onto the first's bounds where theirs differ, as after pooling odd sizes)
and replicated tensors that broadcast: of size 1, or of the global size, along a split dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from exitwave.train.spatial.draws import HOW_TO_DRAW
from exitwave.train.spatial.reduce import cut
from exitwave.train.spatial.tile import Op, Space, Split, Tile, handles, retiled

__all__ = ["aligned"]

_NAMES = """
relu relu6 leaky_relu elu selu celu gelu silu mish sigmoid logsigmoid tanh hardtanh hardsigmoid hardswish
softplus softsign softshrink hardshrink tanhshrink threshold prelu log_sigmoid add sub rsub subtract mul
multiply div divide true_divide truediv rtruediv pow rpow square sqrt rsqrt reciprocal exp expm1 log log1p
log2 log10 sin cos tan asin acos atan atan2 sinh cosh erf abs absolute neg negative positive sign floor ceil
round trunc frac clamp clip clamp_min clamp_max where maximum minimum lerp addcmul addcdiv fmod remainder
nan_to_num isnan isinf isfinite lt le gt ge eq ne less greater logical_and logical_or logical_not and or
invert iadd isub imul itruediv masked_fill zeros_like ones_like full_like to float double half bfloat16 type
type_as contiguous clone detach requires_grad_ cpu
""".split()  # noqa: SIM905
_IN_PLACE = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div"}


def aligned(space: Space, operands: Sequence[Any], refuse: Any) -> tuple[list[Any], tuple[Split, ...]]:
    """Every operand as its local piece, all of one layout, and the splits of the result."""
    ndim = max(x.ndim for x in operands if isinstance(x, Tile | Tensor))
    first = next(x for x in operands if isinstance(x, Tile))
    splits = tuple(split.at(split.dim + ndim - first.ndim) for split in first.splits)
    found: list[Any] = []
    for x in operands:
        if isinstance(x, Tile):
            own = tuple(split.at(split.dim + ndim - x.ndim) for split in x.splits)
            if [(s.axis, s.dim, s.n) for s in own] != [(s.axis, s.dim, s.n) for s in splits]:
                raise refuse(f"operands are split differently: {first!r} and {x!r}")
            if own != splits:
                x = retiled(x, [split.at(split.dim - ndim + x.ndim) for split in splits])
            found.append(x.local)
        elif isinstance(x, Tensor) and x.ndim:
            found.append(_own(space.shared(x), ndim, splits, refuse))
        else:
            found.append(space.shared(x) if isinstance(x, Tensor) else x)
    return found, splits


def _own(x: Tensor, ndim: int, splits: Sequence[Split], refuse: Any) -> Tensor:
    """A replicated operand's part beside a tile."""
    for split in splits:
        dim = split.dim - (ndim - x.ndim)
        if dim < 0 or (x.shape[dim] == 1 and split.n != 1):
            continue
        if x.shape[dim] != split.n:
            raise refuse(f"a replicated tensor of shape {tuple(x.shape)} beside dim {split.dim} of {split.n} places")
        x = cut(x, [split.at(dim)]).clone()  # a view would keep the whole alive until backward: a mask, say
    return x


@handles(*_NAMES, *(name + "_" for name in _NAMES if not name.endswith("_")))
def _pointwise(op: Op, *args: Any, **kwargs: Any) -> Any:
    names = list(kwargs)
    values = [*args, *kwargs.values()]
    in_place = op.name in _IN_PLACE or op.name.endswith("_") or bool(kwargs.get("inplace"))
    if kwargs.get("out") is not None:
        raise op.refuse("out= is not supported for split tensors")
    if op.name == "where" and len(values) == 1:
        raise op.refuse("with a condition alone: the places would be those of the tile, not of the whole")
    if op.name == "prelu" and isinstance(values[1], Tensor) and values[1].numel() > 1:
        weight = values[1]  # one a channel: it broadcasts along dim 1, not along the last
        values[1] = weight.view(-1, *[1] * (values[0].ndim - 2))
        x, w = values
        return torch.where(x >= 0, x, x * w)
    locals_, splits = aligned(op.space, values, op.refuse)
    if in_place:
        target = values[0]
        if not isinstance(target, Tile) or target.splits != splits:
            raise op.refuse("in place, with a target that is not split as the result")
    result = op.function(*locals_[: len(args)], **dict(zip(names, locals_[len(args) :], strict=True)))
    if not isinstance(result, Tensor):
        return result
    if in_place:
        target = values[0]
        target.local = result
        return target
    return Tile(result, splits, op.space)


@handles(
    "dropout", "dropout_", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "rrelu"
)
def _random(op: Op, input: Any, p: Any = 0.5, training: bool = True, *args: Any, **kwargs: Any) -> Any:
    if op.name != "rrelu" and (not training or p == 0):
        return input
    raise op.refuse(HOW_TO_DRAW)


@handles("softmax", "log_softmax")
def _along(op: Op, input: Tile, dim: int | None = None, *args: Any, **kwargs: Any) -> Tile:
    if dim is None or input.split_of(dim % input.ndim) is not None:
        raise op.refuse(f"along the split dim {dim}; only along dims that are not split")
    return input.like(op.function(input.local, dim, *args, **kwargs))


@handles("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits")
def _loss(op: Op, input: Any, target: Any, *args: Any, reduction: str = "mean", **kwargs: Any) -> Any:
    if args or kwargs.get("weight") is not None or kwargs.get("pos_weight") is not None:
        raise op.refuse("weights or positional options are not supported for split tensors")
    (one, other), splits = aligned(op.space, [input, target], op.refuse)
    each = Tile(op.function(one, other, reduction="none", **kwargs), splits, op.space)
    return each if reduction == "none" else getattr(each, reduction)()
