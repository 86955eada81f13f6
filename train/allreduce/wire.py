"""How a run of tensor groups travels: as it is, compressed to 16 bits, or in two levels (within nodes, then across).

A wire starts the reduction of a run's payload (see `fusion`) and gives a handle; once `wait` has returned, the payload
holds the sum.

Compression ("fp16", "bf16"). Gradients are rounded to 16 bits, summed as such, and come back as 32; parameters and
optimizer state stay as they are, in 32 bits. With x_r what rank r contributes (already divided by the number of ranks,
so partial sums stay within the largest gradient), W ranks and the unit roundoff u (2^-11 of float16, 2^-8 of bfloat16),

    |error| <= W · u · sum over r of |x_r|       (one rounding of each x_r, then W-1 of partial sums, to first order)

float16 has few exponents. So each tensor group has a scale, a power of two that brings its largest value to 256; it
follows from the last reduced values, which all ranks share, and costs no message. The first reduction, which has none
before it, travels in 32 bits. If a sum is not finite in 16 bits, or all of a group came out far smaller than foreseen
(below 2^-4), all ranks see so and reduce again in 32. So what underflows is at most W · 2^-21 of the group's largest.

Two levels. With nodes of n ranks each: reduce-scatter within the node (ring), allreduce of a rank's part with its
counterparts in the other nodes, all-gather within the node. Each rank sends 1/n of the payload across nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from exitwave.ingest.errors import UsageError
from exitwave.train.allreduce.fusion import FusionBuffers
from exitwave.train.allreduce.pump import Job, Pump
from exitwave.train.allreduce.ring import Exchange, Ring, open_ring
from exitwave.train.transport import Handle, TorchTransport, Transport

__all__ = ["COMPRESSIONS", "CompressedWire", "HierarchicalWire", "Nodes", "PlainWire", "Wire", "check_node_size"]

COMPRESSIONS = {"fp16": torch.float16, "bf16": torch.bfloat16}
_TARGET = 8  # log2 of what a float16 group's largest value is brought to: 2^8 below overflow, 2^32 above the smallest
_LEAST = 2.0**-4


class Wire(Protocol):
    """See the module's text."""

    def start(self, run: Sequence[int]) -> tuple[Handle[Any], int]:
        """Start reducing the payload of `run`; the handle, and the bytes that travel (of one rank's tensor)."""

    def dtype_of(self, group: int) -> torch.dtype:
        """In which a group's sums may be taken."""


class PlainWire:
    """As it is."""

    def __init__(self, buffers: FusionBuffers, data: Transport) -> None:
        self._buffers, self._data = buffers, data

    def start(self, run: Sequence[int]) -> tuple[Handle[Any], int]:
        payload = self._buffers.payload(run)
        return self._data.allreduce(payload, "sum"), payload.numel() * payload.element_size()

    def dtype_of(self, group: int) -> torch.dtype:
        return self._buffers.dtype_of(group)


class CompressedWire:
    """16 bits on the way. Groups that have 16 bits anyway travel as they are."""

    def __init__(self, buffers: FusionBuffers, data: Transport, kind: str) -> None:
        self._plain = PlainWire(buffers, data)
        self._buffers, self._data = buffers, data
        self._dtype = COMPRESSIONS[kind]
        self._narrow = [
            torch.empty_like(arena, dtype=self._dtype) if arena.element_size() > 2 else None for arena in buffers.arenas
        ]
        self._scales: dict[int, float] = {}  # group -> scale of its next reduction; absent: 32 bits

    def start(self, run: Sequence[int]) -> tuple[Handle[Any], int]:
        narrow = self._narrow[self._buffers.arena_of(run[0])]
        if self._dtype is torch.bfloat16:
            self._scales.update(dict.fromkeys(run, 1.0))
        if narrow is None or any(group not in self._scales for group in run):
            handle, nbytes = self._plain.start(run)
            return (handle if narrow is None else _Learning(self, run, handle)), nbytes
        for group in run:
            gradients, tail = self._buffers.parts_of(group)
            part = self._buffers.parts_of(group, narrow)
            torch.mul(gradients, self._scales[group], out=part[0])
            part[1].copy_(tail)
        payload = self._buffers.payload(run, narrow)
        return _Narrow(self, run, narrow, self._data.allreduce(payload, "sum")), payload.numel() * 2

    def dtype_of(self, group: int) -> torch.dtype:
        return self._dtype

    def learn(self, group: int) -> None:
        """From a group's reduced values: the scale of its next reduction."""
        gradients, _ = self._buffers.parts_of(group)
        largest = float(gradients.abs().amax()) if gradients.numel() else 0.0
        if math.isfinite(largest) and largest > 0.0:
            self._scales[group] = 2.0 ** max(min(_TARGET - math.frexp(largest)[1], 100), -100)
        else:
            self._scales.pop(group, None)  # of zeros nothing can be learnt

    def widen(self, run: Sequence[int], narrow: torch.Tensor) -> bool:
        """Bring sums back; False, nothing done, if some group does not fit into 16 bits."""
        for group in run:
            sums = self._buffers.parts_of(group, narrow)[0]
            if not sums.numel():
                continue
            low, high = (float(end) for end in torch.aminmax(sums))
            if not math.isfinite(low + high):
                return False
            if narrow.dtype is torch.float16 and max(-low, high) < _LEAST:
                return False
        for group in run:
            gradients, tail = self._buffers.parts_of(group)
            part = self._buffers.parts_of(group, narrow)
            gradients.copy_(part[0]).mul_(1.0 / self._scales[group])  # in 32 bits: the product may not fit into 16
            tail.copy_(part[1])
        return True

    def again(self, run: Sequence[int]) -> Handle[Any]:
        return self._plain.start(run)[0]


class _Learning:
    """A reduction in 32 bits from which scales are learnt."""

    def __init__(self, wire: CompressedWire, run: Sequence[int], handle: Handle[Any]) -> None:
        self._wire, self._run, self._handle = wire, run, handle

    def done(self) -> bool:
        return self._handle.done()

    def wait(self, timeout_s: float) -> None:
        self._handle.wait(timeout_s)
        for group in self._run:
            self._wire.learn(group)


class _Narrow:
    """A reduction in 16 bits. Reductions are waited for in one order on all ranks, so one may start another."""

    def __init__(self, wire: CompressedWire, run: Sequence[int], narrow: torch.Tensor, handle: Handle[Any]) -> None:
        self._wire, self._run, self._narrow = wire, run, narrow
        self._handle: Handle[Any] = handle
        self._again = False

    def done(self) -> bool:
        return self._handle.done()

    def wait(self, timeout_s: float) -> None:
        self._handle.wait(timeout_s)
        if not self._again and not self._wire.widen(self._run, self._narrow):
            self._again = True
            self._handle = self._wire.again(self._run)
            self._handle.wait(timeout_s)
        if self._narrow.dtype is torch.float16:
            for group in self._run:
                self._wire.learn(group)


# ------------------------------------------------------------------------------------------------------- two levels


def check_node_size(node_size: int, world_size: int) -> None:
    """UsageError unless nodes of so many ranks make several of all of them."""
    if node_size < 2 or world_size % node_size or world_size == node_size:
        raise UsageError(
            f"node_size={node_size}: expected at least 2 and a divisor of the {world_size} ranks that leaves "
            "several nodes"
        )


class Nodes:
    """Connections of a two-level reduction: ranks 0..n-1 of the process group are one node, the next n another, …"""

    def __init__(self, process_group: Any, node_size: int, timeout_s: float) -> None:
        parent = process_group if process_group is not None else dist.group.WORLD
        ranks = dist.get_process_group_ranks(parent)
        check_node_size(node_size, len(ranks))
        place = dist.get_rank(parent)
        node, within = divmod(place, node_size)
        inner = ranks[node * node_size : (node + 1) * node_size]
        outer = ranks[within::node_size]
        groups = [dist.new_group(members, use_local_synchronization=True) for members in (inner, outer)]
        transports = [
            TorchTransport(group, timeout_s=timeout_s, label=label)
            for group, label in zip(groups, ("node", "across"), strict=True)
        ]
        self.ring: Ring = open_ring(transports[0])
        self.across = transports[1]
        self.node_size, self.within = node_size, within
        # One at a time: two whose parts end in another order on another node would be taken for each other there.
        self._transports = transports
        self.pump = Pump("exitwave-nodes", sever=self._sever, under_way=1)

    def _sever(self) -> None:
        for transport in self._transports:
            transport.sever()


class HierarchicalWire:
    """Within nodes, then across, by a thread that takes the runs in order."""

    def __init__(self, buffers: FusionBuffers, nodes: Nodes) -> None:
        self._buffers, self._nodes = buffers, nodes

    def start(self, run: Sequence[int]) -> tuple[Handle[Any], int]:
        payload = self._buffers.payload(run)
        job = Job(lambda: _TwoLevels(self._nodes, payload))
        self._nodes.pump.submit(job)
        return job, payload.numel() * payload.element_size()

    def dtype_of(self, group: int) -> torch.dtype:
        return self._buffers.dtype_of(group)


class _TwoLevels:
    """An `Exchange` made of three."""

    def __init__(self, nodes: Nodes, payload: torch.Tensor) -> None:
        self._nodes, self._payload = nodes, payload
        length = -(-payload.numel() // nodes.node_size)
        self._rows = payload.new_zeros((nodes.node_size, length))
        self._rows.view(-1)[: payload.numel()] = payload
        self._stage = 0
        self._exchange: Exchange = nodes.ring.reduce_scatter(self._rows)

    def advance(self) -> bool:
        if self._stage == 0:
            if self._exchange.advance():
                own = self._rows[self._nodes.within]
                self._across = self._nodes.across.allreduce(own, "sum")
                self._stage = 1
            return False
        if self._stage == 1:
            self._across.wait(1e6)  # its transport has a limit of its own
            self._exchange = self._nodes.ring.all_gather(self._rows)
            self._stage = 2
            return False
        if not self._exchange.advance():
            return False
        self._payload.copy_(self._rows.view(-1)[: self._payload.numel()])
        return True
