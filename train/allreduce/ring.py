"""Reduce-scatter and all-gather among ranks in a ring, over point-to-point calls: the wire of `overlap="step"`.

Both work on *rows*, a tensor of shape (ranks, n) whose row r belongs to rank r:

    reduce_scatter:  afterwards row r of rank r is the sum of all ranks' rows r   (the other rows are used up)
    all_gather:      before, row r of rank r is valid; afterwards every row is, on every rank

Each takes size-1 exchanges, in each of which every rank sends one row to its right and receives one from its left.
What makes the ring fast on gloo, where a connection sends what it is given in order:

1.  A receive is posted before the send of the same exchange. It travels as a small note, "ready to receive", and a note
    behind megabytes of payload makes the other side wait: the link would work one way at a time.
2.  Exchanges are only *started* here; `Exchange.advance` waits for one and starts the next, so that several transfers
    can be under way and the link never runs dry (`pump` keeps two).

With two ranks the sum is own + other, the same to the bit as allreduce's. NCCL has native collectives that use both
directions: `NativeRing` is a thin layer over them, which no test here runs (there is no GPU in the project's tests).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from exitwave.train.transport import TorchTransport

__all__ = ["Exchange", "NativeRing", "PointToPointRing", "Ring", "open_ring"]


class Exchange(Protocol):
    """A reduce-scatter or an all-gather under way."""

    def advance(self) -> bool:
        """Wait for what was started and start what follows; True when all is over. Raises `TransportError`."""


class Ring(Protocol):
    """Starts exchanges. Every rank starts the same ones in the same order."""

    def reduce_scatter(self, rows: torch.Tensor) -> Exchange:
        """See the module's text. `rows`: contiguous, (ranks, n)."""

    def all_gather(self, rows: torch.Tensor) -> Exchange:
        """See the module's text. `rows`: contiguous, (ranks, n)."""

    def sever(self) -> None:
        """End what is under way with an error; see `TorchTransport.sever`."""


def open_ring(transport: TorchTransport) -> Ring:
    """The ring for the transport's backend. The transport is the ring's own from here on."""
    return PointToPointRing(transport) if transport.point_to_point else NativeRing(transport)


class PointToPointRing:
    """The ring of the module's text, on gloo."""

    def __init__(self, transport: TorchTransport) -> None:
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.right, self.left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        self._number = 0
        self._spare: dict[tuple[torch.dtype, torch.device, int], list[torch.Tensor]] = {}

    def reduce_scatter(self, rows: torch.Tensor) -> Exchange:
        return _RingExchange(self, rows, reduce=True, number=self._next())

    def all_gather(self, rows: torch.Tensor) -> Exchange:
        return _RingExchange(self, rows, reduce=False, number=self._next())

    def sever(self) -> None:
        self.transport.sever()

    def _next(self) -> int:
        self._number += 1
        return self._number

    def borrow(self, like: torch.Tensor) -> torch.Tensor:
        """Room for one row; fresh memory would cost page faults each time."""
        kept = self._spare.setdefault((like.dtype, like.device, like.numel()), [])
        return kept.pop() if kept else torch.empty_like(like)

    def give_back(self, row: torch.Tensor) -> None:
        self._spare[row.dtype, row.device, row.numel()].append(row)


class _RingExchange:
    """With W ranks, in exchange s = 0 .. W-2, rank r

    reducing:   sends row r-s-1, receives row r-s-2 and adds its own to it (the last is row r);
    gathering:  sends row r-s, receives row r-s-1.
    """

    def __init__(self, ring: PointToPointRing, rows: torch.Tensor, *, reduce: bool, number: int) -> None:
        self._ring = ring
        self._rows = rows
        self._reduce = reduce
        self._tag = number % 2**16 * 2**12  # tags must differ among what is under way; ranks count alike
        self._s = 0
        self._start()

    def _start(self) -> None:
        ring, rows = self._ring, self._rows
        sent = (ring.rank - self._s - (1 if self._reduce else 0)) % ring.size
        self._received = (sent - 1) % ring.size
        target = rows[self._received]
        self._into = ring.borrow(target) if self._reduce else target
        tag = self._tag + self._s
        self._receiving = ring.transport.receive(self._into, ring.left, tag)
        self._sending = ring.transport.send(rows[sent], ring.right, tag)

    def advance(self) -> bool:
        self._receiving.wait()
        if self._reduce:
            self._rows[self._received].add_(self._into)
        self._sending.wait()
        if self._reduce:
            self._ring.give_back(self._into)
        self._s += 1
        if self._s == self._ring.size - 1:
            return True
        self._start()
        return False


class NativeRing:
    """The backend's own collectives (NCCL)."""

    def __init__(self, transport: TorchTransport) -> None:
        self._backend = transport.backend
        self._rank = transport.rank

    def reduce_scatter(self, rows: torch.Tensor) -> Exchange:
        options = dist.ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]
        return _NativeExchange(self._backend._reduce_scatter_base(rows[self._rank], rows.view(-1), options))

    def all_gather(self, rows: torch.Tensor) -> Exchange:
        options = c10d.AllgatherOptions()  # type: ignore[attr-defined]
        return _NativeExchange(self._backend._allgather_base(rows.view(-1), rows[self._rank], options))

    def sever(self) -> None:
        """Nothing: waiting for NCCL happens on the device, and its own watchdog ends it."""


class _NativeExchange:
    def __init__(self, work: Any) -> None:
        self._work = work

    def advance(self) -> bool:
        self._work.wait()
        torch.cuda.current_stream().synchronize()  # the pump's thread runs ahead of nobody's stream
        return True
