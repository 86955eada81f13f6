"""A Transport whose ranks live in one process: hundreds of them for property tests, or threads for small ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from exitwave.train.transport import Board, Handle, ReduceKind, TransportError

__all__ = ["LoopbackHub", "LoopbackTransport"]

T = TypeVar("T")


@dataclass
class _Round:
    """One collective of a loopback hub: what each rank brought, and the outcome once the last has come."""

    brought: dict[int, tuple[str, Any]] = field(default_factory=dict)
    results: list[Any] | None = None
    error: str | None = None
    ready: threading.Event = field(default_factory=threading.Event)


class LoopbackHub:
    """All ranks of a transport inside this process: threads, or one thread that plays every rank in turn.

    Nothing runs in the background: a collective completes inside the call of the last rank that joins it, so a
    single-threaded test chooses every interleaving itself.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._rounds: list[_Round] = []
        self._next_round = [0] * size
        self._lost: dict[int, str] = {}
        self._letters: dict[tuple[int, int, int], list[torch.Tensor]] = {}  # (sender, receiver, tag) -> in order
        self._posted = threading.Condition(self._lock)
        self.notes: dict[str, str] = {}

    def transport(self, rank: int) -> LoopbackTransport:
        """Rank `rank`'s end."""
        return LoopbackTransport(self, rank)

    def lose(self, rank: int, why: str = "lost") -> None:
        """Let a rank die: every collective that it has not joined, now or later, fails on all others."""
        with self._lock:
            self._lost[rank] = why
            for number in range(self._next_round[rank], len(self._rounds)):
                self._fail(self._rounds[number])
            self._posted.notify_all()

    def join(self, rank: int, kind: str, value: Any) -> _Round:
        """Take part in this rank's next collective."""
        with self._lock:
            number = self._next_round[rank]
            self._next_round[rank] += 1
            while len(self._rounds) <= number:
                self._rounds.append(_Round())
            this = self._rounds[number]
            this.brought[rank] = (kind, value)
            if any(self._next_round[lost] <= number for lost in self._lost):
                self._fail(this)
            elif len(this.brought) == self.size and not this.ready.is_set():
                self._complete(this)
            return this

    def post(self, sender: int, receiver: int, tag: int, tensor: torch.Tensor) -> None:
        """Leave a message."""
        with self._posted:
            self._letters.setdefault((sender, receiver, tag), []).append(tensor.clone())
            self._posted.notify_all()

    def take(self, sender: int, receiver: int, tag: int, into: torch.Tensor) -> None:
        """Wait for a message. Raises `TransportError` when its sender is lost, ValueError for another shape."""
        with self._posted:
            while not self._letters.get((sender, receiver, tag)):
                if sender in self._lost:
                    raise TransportError(f"connection closed by rank {sender} ({self._lost[sender]})")
                self._posted.wait()
            found = self._letters[sender, receiver, tag].pop(0)
        if found.shape != into.shape or found.dtype != into.dtype:
            raise ValueError(f"a message of {found.dtype} {tuple(found.shape)} into {into.dtype} {tuple(into.shape)}")
        into.copy_(found)

    def _fail(self, this: _Round) -> None:
        if not this.ready.is_set():
            this.error = "connection closed by rank " + ", ".join(f"{r} ({why})" for r, why in self._lost.items())
            this.ready.set()

    def _complete(self, this: _Round) -> None:
        kinds = {kind for kind, _ in this.brought.values()}
        values = [this.brought[rank][1] for rank in range(self.size)]
        if len(kinds) > 1:
            this.error = f"ranks started different collectives: {sorted(kinds)}"
        else:
            try:
                this.results = _loopback_result(next(iter(kinds)), values)
            except ValueError as error:
                this.error = str(error)
        this.ready.set()


def _loopback_result(kind: str, values: list[Any]) -> list[Any]:
    """What each rank receives. Tensors are written in place, in rank order, from one common result."""
    name, _, detail = kind.partition(":")
    if name == "gather":
        return [list(values) for _ in values]
    shapes = {(tuple(v.shape), v.dtype) for v in values}
    if len(shapes) > 1:
        raise ValueError(f"tensors differ between ranks: {sorted(map(str, shapes))}")
    if name == "collect":
        return [torch.stack(values) if rank == int(detail) else value for rank, value in enumerate(values)]
    if name == "broadcast":
        common = values[int(detail)].clone()
    else:
        common = values[0].clone()
        for value in values[1:]:
            common = _COMBINE[detail](common, value)
    for value in values:
        value.copy_(common)
    return values


_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
}


class _RoundHandle(Generic[T]):
    def __init__(self, this: _Round, rank: int) -> None:
        self._round = this
        self._rank = rank

    def done(self) -> bool:
        return self._round.ready.is_set()

    def wait(self, timeout_s: float) -> T:
        if not self._round.ready.wait(timeout_s):
            raise TimeoutError(f"still in flight after {timeout_s:.3g} s")
        if self._round.error is not None:
            raise TransportError(f"the collective failed: {self._round.error}")
        assert self._round.results is not None
        result: T = self._round.results[self._rank]
        return result


class _Letter:
    """A message under way; a send is over at once."""

    def __init__(self, take: Callable[[], None] | None) -> None:
        self._take = take

    def wait(self) -> None:
        if self._take is not None:
            self._take()


class _HubBoard:
    def __init__(self, notes: dict[str, str]) -> None:
        self._notes = notes

    def post(self, key: str, text: str) -> None:
        self._notes[key] = text

    def read(self, keys: Sequence[str]) -> list[str | None]:
        return [self._notes.get(key) for key in keys]


class LoopbackTransport:
    """One rank's end of a `LoopbackHub`."""

    def __init__(self, hub: LoopbackHub, rank: int) -> None:
        self._hub = hub
        self._rank = rank

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._hub.size

    @property
    def board(self) -> Board:
        return _HubBoard(self._hub.notes)

    def allreduce(self, tensor: torch.Tensor, op: ReduceKind = "sum") -> Handle[torch.Tensor]:
        return _RoundHandle(self._hub.join(self._rank, f"allreduce:{op}", tensor), self._rank)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Handle[torch.Tensor]:
        return _RoundHandle(self._hub.join(self._rank, f"broadcast:{root}", tensor), self._rank)

    def collect(self, tensor: torch.Tensor, root: int) -> Handle[torch.Tensor]:
        return _RoundHandle(self._hub.join(self._rank, f"collect:{root}", tensor), self._rank)

    def gather(self, payload: bytes) -> Handle[list[bytes]]:
        return _RoundHandle(self._hub.join(self._rank, "gather", payload), self._rank)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> _Letter:
        """Leave `tensor` for rank `to`."""
        self._hub.post(self._rank, to, tag, tensor.detach())
        return _Letter(None)

    def receive(self, tensor: torch.Tensor, sender: int, tag: int) -> _Letter:
        """Take what rank `sender` leaves under this tag, when waited for."""
        return _Letter(partial(self._hub.take, sender, self._rank, tag, tensor))
