"""The axes of a mesh as this package sees them: exchanges and sums along one mesh dim; who is to blame when one fails.

An `Axis` is one dim of a mesh with this rank's place on it; a `Grid` is all of them. Behind an axis stands a `Link`: a
`Transport` that can also send and receive, over torch.distributed (`open_grid` of a DeviceMesh, connections of its own)
or between threads of one process (`exitwave.train.loopback`, for tests of many ranks).

When a rank dies:

1. Its neighbours' transfers break at once. Each reads the notes of its axes: if a verdict stands there it raises that.
2. Otherwise it finds out who is gone: the peer of a broken transfer; after a broken sum, whoever does not answer a roll
   call within seconds.
3. It posts the verdict on all its axes, drops its connections, so that whoever waits for it wakes, and raises
   `LostRankError`. Further ranks find the verdict by rule 1, and all name the same rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from exitwave.ingest.errors import ExitwaveError, UsageError
from exitwave.train.transport import TorchTransport, Transport, TransportError

__all__ = ["Axis", "Exchange", "Grid", "Link", "LostRankError", "open_grid"]

_ROLL_CALL_S = 5.0


class LostRankError(ExitwaveError):
    """A rank of the mesh is gone, or does not answer; the message names it."""


class Transfer(Protocol):
    """A send or a receive under way."""

    def wait(self) -> None:
        """Return when it is over; raises `TransportError` when it cannot be."""


class Link(Transport, Protocol):
    """A Transport with messages between two ranks, matched by (sender, receiver, tag) in their order."""

    def send(self, tensor: Tensor, to: int, tag: int) -> Transfer:
        """Start sending `tensor` (contiguous)."""

    def receive(self, tensor: Tensor, sender: int, tag: int) -> Transfer:
        """Start receiving into `tensor` (contiguous)."""


class Exchange:
    """Messages under way along one axis."""

    def __init__(self, axis: Axis, transfers: list[tuple[int, Transfer]], held: list[Tensor]) -> None:
        self._axis = axis
        self._transfers = transfers
        self._held = held  # what is being sent must live until it is

    def wait(self) -> None:
        """Return when all are over. Raises `LostRankError`."""
        for peer, transfer in self._transfers:
            try:
                transfer.wait()
            except TransportError as error:
                self._axis.fail(error, "exchanging halos", peer)
        self._held.clear()


class Axis:
    """One dim of a mesh: `size` ranks, of which this is at `place`; `ranks` are their global numbers.

    `link` None: an axis of one rank, where nothing travels.
    """

    def __init__(
        self, name: str, place: int, ranks: Sequence[int], link: Link | None, *, timeout_s: float = 300.0
    ) -> None:
        self.name = name
        self.place = place
        self.ranks = tuple(ranks)
        self.timeout_s = timeout_s
        self.together: tuple[Axis, ...] = (self,)  # the axes that a verdict is posted on
        self._link = link
        self._tag = 0
        self._failure: str | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Exchange:
        """Start messages to and from places of this axis; every rank of it calls this in the same order.

        Empty tensors are not sent (both sides know their shapes).
        """
        self._tag = (self._tag + 1) % (1 << 16)
        transfers: list[tuple[int, Transfer]] = []
        peer = -1
        try:
            for peer, tensor in _filled(receives):
                transfers.append((peer, self._alive().receive(tensor, peer, self._tag)))
            for peer, tensor in _filled(sends):
                transfers.append((peer, self._alive().send(tensor, peer, self._tag)))
        except TransportError as error:
            self.fail(error, "exchanging halos", peer)
        return Exchange(self, transfers, [tensor for _, tensor in sends])

    def sum(self, tensor: Tensor) -> Tensor:
        """`tensor` (contiguous) summed in place over the axis, the same bits on all its ranks."""
        if self.size > 1 and tensor.numel():
            self._collective("a sum", lambda link: link.allreduce(tensor))
        return tensor

    def share(self, tensor: Tensor) -> Tensor:
        """`tensor` (contiguous) overwritten with that of place 0."""
        if self.size > 1 and tensor.numel():
            self._collective("a broadcast", lambda link: link.broadcast(tensor, 0))
        return tensor

    def gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, by place."""
        if self.size == 1:
            return [payload]
        found: list[bytes] = self._collective("the agreement on tiles", lambda link: link.gather(payload))
        return found

    def _collective(self, what: str, start: Callable[[Link], Any]) -> Any:
        try:
            return start(self._alive()).wait(self.timeout_s)
        except (TransportError, TimeoutError) as error:
            self.fail(error, what, None)

    def _alive(self) -> Link:
        if self._failure is not None:
            raise LostRankError(self._failure)
        if self._link is None:
            raise LostRankError(f"mesh dim {self.name!r} was closed")
        return self._link

    def fail(self, error: Exception, what: str, peer: int | None) -> None:
        """Find out who is gone, tell the others, raise."""
        if self._failure is None:
            blamed = self._verdict() or self._accuse(error, what, peer)
            for axis in self.together:
                axis.close(blamed)
        raise LostRankError(self._failure or "") from error

    def close(self, verdict: str) -> None:
        """Post the verdict and drop the connections."""
        link, self._link, self._failure = self._link, None, verdict
        if link is not None:
            try:
                link.board.post("verdict", verdict)
            except ExitwaveError:
                return  # the store's host is the rank that died

    def _verdict(self) -> str | None:
        for axis in self.together:
            try:
                if axis._link is not None and (text := axis._link.board.read(["verdict"])[0]):
                    return text
            except ExitwaveError:
                continue
        return None

    def _accuse(self, error: Exception, what: str, peer: int | None) -> str:
        limit = f" within {self.timeout_s:g} s" if isinstance(error, TimeoutError) else ""
        said = str(error).splitlines()[0]
        if peer is not None:
            return f"rank {self.ranks[peer]} (mesh dim {self.name!r}) is gone or hangs: {what} with it failed: {said}"
        found = self._roll_call()
        if isinstance(found, str):
            return found
        who = ", ".join(f"rank {self.ranks[place]}" for place in found) or "a rank that cannot be told"
        return f"{who} (mesh dim {self.name!r}) is gone or does not answer: {what} did not end{limit}: {said}"

    def _roll_call(self) -> list[int] | str:
        """Places that do not answer, or the verdict that another rank reached meanwhile."""
        link = self._alive()
        others = [place for place in range(self.size) if place != self.place]
        deadline = time.monotonic() + min(_ROLL_CALL_S, self.timeout_s)
        try:
            link.board.post(f"here/{self.place}", "")
            while time.monotonic() < deadline:
                verdict = self._verdict()
                if verdict:
                    return verdict
                notes = link.board.read([f"here/{place}" for place in others])
                others = [place for place, note in zip(others, notes, strict=True) if note is None]
                if not others:
                    break
                time.sleep(0.05)
        except ExitwaveError:
            return [0] if self.place else []  # the rendezvous store lives on rank 0
        return others


@dataclass(frozen=True, eq=False)
class Grid:
    """All axes of a mesh, in its order."""

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        for axis in self.axes:
            axis.together = self.axes

    def __getitem__(self, name: str) -> Axis:
        for axis in self.axes:
            if axis.name == name:
                return axis
        names = ", ".join(repr(axis.name) for axis in self.axes)
        raise UsageError(f"mesh: expected one of the dims {names}, got {name!r}")


def open_grid(mesh: DeviceMesh | Grid, *, timeout_s: float = 300.0) -> Grid:
    """The axes of a mesh, with connections of their own; opened once a mesh (the first time collectively).

    Raises UsageError for a mesh without names of its dims, or one that this rank is not in.
    """
    if isinstance(mesh, Grid):
        return mesh
    known: Grid | None = mesh.__dict__.get("_exitwave_grid")
    if known is not None:
        return known
    names, place = mesh.mesh_dim_names, mesh.get_coordinate()
    if not names or place is None:
        raise UsageError(
            "mesh: expected a DeviceMesh with mesh_dim_names that this rank is part of, e.g. "
            'init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "spatial"))'
        )
    axes = []
    for name, at in zip(names, place, strict=True):
        group = mesh.get_group(name)
        ranks = dist.get_process_group_ranks(group)
        link: Link | None = None
        if len(ranks) > 1:
            link = TorchTransport(group, timeout_s=timeout_s, label=f"spatial ({name})")
            if not link.point_to_point:
                raise UsageError(f"mesh dim {name!r}: spatial parallelism needs a gloo process group")
        axes.append(Axis(name, at, ranks, link, timeout_s=timeout_s))
    grid = Grid(tuple(axes))
    mesh.__dict__["_exitwave_grid"] = grid
    return grid


def _filled(messages: Sequence[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    return [(peer, tensor) for peer, tensor in messages if tensor.numel()]


def empty_like_strip(tensor: Tensor, dim: int, size: int) -> Tensor:
    """An uninitialised contiguous tensor as `tensor`, of `size` places along `dim`."""
    shape = list(tensor.shape)
    shape[dim] = size
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
