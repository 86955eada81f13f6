"""Reductions of single tensors, with the argument meanings of Horovod's functions.

    allreduce(x) = postscale_factor · reduce over ranks of (prescale_factor · x)     (divided by the size for Average)

Every rank of the process set makes the same calls. A call is negotiated before the data moves: ranks that differ in
name, shape, dtype, operation or scales all raise `MismatchError`; ranks that wait for different names, or for a rank
that never calls, all raise `StallError`. Tensors that require gradients pass them through: the gradient of a reduction
by Sum or Average is the same reduction of the gradients.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from exitwave.ingest.errors import UsageError
from exitwave.train.allreduce.agreement import broadcast_tensors, describe
from exitwave.train.allreduce.join import refuse_while_joining
from exitwave.train.allreduce.negotiation import Request
from exitwave.train.allreduce.session import Session
from exitwave.train.transport import ReduceKind, TorchTransport

__all__ = ["Average", "Max", "Min", "Op", "Product", "Sum", "allreduce", "broadcast_parameters", "grouped_allreduce"]


class Op(enum.Enum):
    """How values are combined over ranks."""

    AVERAGE = "average"
    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"


Average, Sum, Product, Min, Max = Op.AVERAGE, Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX


@dataclass(frozen=True, kw_only=True)
class _How:
    op: Op
    prescale: float
    postscale: float

    def __str__(self) -> str:
        return f"allreduce {self.op.value}, prescale {self.prescale!r}, postscale {self.postscale!r}"


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
    *,
    timeout_s: float = 120.0,
) -> torch.Tensor:
    """The reduction of `tensor` over the ranks of `process_set`, as a new tensor on every rank.

    Args:
        tensor: any shape; the same shape and dtype on all ranks.
        average: True for Average, False for Sum; give this or `op`. Neither: Average.
        name: the same on all ranks; None numbers the unnamed calls of the process set.
        op: Average, Sum, Product, Min or Max.
        prescale_factor, postscale_factor: multiply before and after the reduction.
        process_set: a torch.distributed process group of which this rank is a member; None means all ranks.
        timeout_s: taken from the first call on a process set.

    Raises:
        UsageError, MismatchError, StallError: see the module's text.
    """
    names = None if name is None else [name]
    return _reduce([tensor], names, average, op, prescale_factor, postscale_factor, process_set, timeout_s)[0]


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
    *,
    timeout_s: float = 120.0,
) -> list[torch.Tensor]:
    """`allreduce` of several tensors as one atomic tensor group, fused by dtype; arguments as there."""
    names = None if name is None else [f"{name}.{i}" for i in range(len(tensors))]
    return _reduce(list(tensors), names, average, op, prescale_factor, postscale_factor, process_set, timeout_s)


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]],
    root_rank: int = 0,
    process_set: Any = None,
    *,
    timeout_s: float = 120.0,
) -> None:
    """Overwrite `params` (a state_dict, or named_parameters()) with rank `root_rank`'s, on all ranks, in place.

    Entries that are not tensors are left alone. `root_rank` counts within the process set.
    """
    items = list(params.items()) if isinstance(params, Mapping) else list(params)
    tensors = {name: value for name, value in items if isinstance(value, torch.Tensor)}
    size = _size(process_set)
    if not 0 <= root_rank < size:
        raise UsageError(f"broadcast_parameters: root_rank {root_rank} is not in the process set of {size} ranks")
    if size == 1 or not tensors:
        return
    refuse_while_joining("broadcast_parameters")
    session = _session(process_set, timeout_s)
    signatures = {name: f"broadcast from {root_rank}, {describe(tensor)}" for name, tensor in tensors.items()}
    session.agree(_requests("broadcast", signatures))
    broadcast_tensors(
        session.data, list(tensors.values()), root_rank, lambda handle, what: session.watch.wait(handle, lambda: what)
    )


def _reduce(
    tensors: list[torch.Tensor],
    names: list[str] | None,
    average: bool | None,
    op: Op | None,
    prescale: float,
    postscale: float,
    process_set: Any,
    timeout_s: float,
) -> list[torch.Tensor]:
    if average is not None and op is not None:
        raise UsageError("allreduce: give average or op, not both")
    if op is None:
        op = Op.SUM if average is False else Op.AVERAGE
    how = _How(op=Op(op), prescale=float(prescale), postscale=float(postscale))
    if not tensors:
        return []
    refuse_while_joining(f"allreduce of {names[0] if names else 'a tensor'}")
    size = _size(process_set)
    session = _session(process_set, timeout_s) if size > 1 else None
    if names is None:
        names = _next_names(session, len(tensors))
    for tensor, name in zip(tensors, names, strict=True):
        exact = not (tensor.is_floating_point() or tensor.is_complex())
        if (
            tensor.is_complex()
            or tensor.is_sparse
            or (exact and (how.op is Op.AVERAGE or prescale != 1 or postscale != 1))
        ):
            error = UsageError(
                f"allreduce {name}: {how} does not serve {describe(tensor)}; integers take op=Sum, unscaled"
            )
            if session is not None:
                session.fail(error)
            raise error
    results: Any = _Reduce.apply(session, how, tuple(names), *tensors)
    return list(results)


class _Reduce(torch.autograd.Function):
    """autograd's view of `_exchange`."""

    @staticmethod
    def forward(
        ctx: Any, session: Session | None, how: _How, names: tuple[str, ...], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.session, ctx.how, ctx.names = session, how, names
        return tuple(_exchange(session, how, names, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        if ctx.how.op not in (Op.AVERAGE, Op.SUM):
            raise UsageError(f"allreduce by {ctx.how.op.value} has no gradient here; use Average or Sum")
        names = tuple(f"gradient of {name}" for name in ctx.names)
        return (None, None, None, *_exchange(ctx.session, ctx.how, names, gradients))


def _exchange(
    session: Session | None, how: _How, names: Sequence[str], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Negotiate, fuse by dtype and device, scale, reduce, scale, and cut apart again."""
    size = 1 if session is None else session.size
    post = how.postscale / (size if how.op is Op.AVERAGE else 1)
    if session is not None:
        signatures = {name: f"{how}, {describe(t)}" for name, t in zip(names, tensors, strict=True)}
        if len(signatures) != len(names):
            session.fail(UsageError(f"allreduce: a name occurs twice in {', '.join(names)}"))
        if len({t.device for t in tensors}) > 1:
            where = ", ".join(f"{name} on {t.device}" for name, t in zip(names, tensors, strict=True))
            session.fail(UsageError(f"allreduce: the tensors of one group must be on one device, got {where}"))
        session.agree(_requests(names[0], signatures))
    results: list[torch.Tensor | None] = [None] * len(tensors)
    kinds = list(dict.fromkeys((t.dtype, t.device) for t in tensors))
    for kind in kinds:
        places = [i for i, t in enumerate(tensors) if (t.dtype, t.device) == kind]
        flat = torch.cat([tensors[i].detach().reshape(-1) for i in places])
        if how.prescale != 1.0:
            flat.mul_(how.prescale)
        if session is not None:
            kind_of: ReduceKind = "sum" if how.op is Op.AVERAGE else how.op.value
            session.watch.wait(session.data.allreduce(flat, kind_of), lambda: ", ".join(names[:8]))
        if post != 1.0:
            flat.mul_(post)
        for i, piece in zip(places, flat.split([tensors[i].numel() for i in places]), strict=True):
            results[i] = piece.view(tensors[i].shape)
    return [result for result in results if result is not None]


def _requests(group: str, signatures: Mapping[str, str]) -> list[Request]:
    return [
        Request(
            name=name, signature=signature, group=f"{group} and {len(signatures) - 1} more", group_size=len(signatures)
        )
        for name, signature in signatures.items()
    ]


# ------------------------------------------------------------------------------------- sessions of this process


_sessions: dict[int, tuple[Any, Session, list[int]]] = {}  # id of the group -> the group (kept: ids recur), session


def _group(process_set: Any) -> Any:
    if process_set is not None and not isinstance(process_set, dist.ProcessGroup):
        raise UsageError(f"process_set: expected a torch.distributed process group, got {process_set!r}")
    return process_set if process_set is not None else dist.group.WORLD


def _size(process_set: Any) -> int:
    if not (dist.is_available() and dist.is_initialized()):
        if _sessions:
            raise UsageError("torch.distributed was shut down: the ranks that this call would speak to are gone")
        if process_set is not None:
            raise UsageError("process_set was given, but torch.distributed is not initialised")
        return 1
    if process_set is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(_group(process_set)) < 0:
        raise UsageError("this rank is not a member of the process set that it calls on")
    return dist.get_world_size(_group(process_set))


def _session(process_set: Any, timeout_s: float) -> Session:
    group = _group(process_set)
    if id(group) not in _sessions:
        data = TorchTransport(group, timeout_s=timeout_s, label="data")
        control = TorchTransport(group, backend="gloo", timeout_s=timeout_s, label="control")
        _sessions[id(group)] = (group, Session(data, control, timeout_s=timeout_s), [0])
    return _sessions[id(group)][1]


def _next_names(session: Session | None, count: int) -> list[str]:
    for _, known, counter in _sessions.values():
        if known is session:
            counter[0] += 1
            return [f"allreduce.noname.{counter[0]}" + (f".{i}" if count > 1 else "") for i in range(count)]
    return [f"allreduce.noname.{i}" for i in range(count)]
