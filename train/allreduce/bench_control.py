"""What agreement costs on the wire: control messages of one step at 2 to 512 ranks, for each protocol.

The schedules are the real ones, driven for every rank of one process through one backward pass. Their control transport
(`CountingHub`) carries every collective out by messages from one rank to another, and counts them:

- allreduce: recursive doubling (Thakur, Rabenseifner, Gropp 2005, doi:10.1177/1094342005051521): as many rounds as the
  logarithm of the ranks, in each of which every rank exchanges its words with one other; where the number of ranks is
  no power of two, the excess ranks hand their words in before and are told after;
- collect: every rank sends its request to the root, which has to hear each one;
- broadcast: a binomial tree.

What limits a protocol is its busiest rank: it sends and receives one message after the other. So `coordinator` grows
with the ranks, `bitvector` with their logarithm, and `static` sends none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from exitwave.train.allreduce.coordinator import CoordinatorSchedule
from exitwave.train.allreduce.negotiation import Request
from exitwave.train.allreduce.schedules import BitvectorSchedule, Schedule, StaticSchedule
from exitwave.train.transport import ReduceKind

__all__ = ["RANKS", "CountingHub", "control_rows", "control_table", "control_targets", "measure_control"]

RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
_PROTOCOLS = ("coordinator", "bitvector", "static")
_GROUPS, _TENSORS = 9, 8  # tensor groups a step, tensors a group: 72 tensors, as the seed paper's network has


class CountingHub:
    """All ranks' control transports inside one process, by counted point-to-point messages."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.messages = [0] * size  # sent and received, by rank
        self.bytes = [0] * size
        self._next = [0] * size
        self._rounds: list[dict[int, tuple[str, torch.Tensor]]] = []
        self._results: dict[int, list[torch.Tensor]] = {}

    def join(self, rank: int, kind: str, tensor: torch.Tensor) -> _Counted:
        """Take part in this rank's next collective; it is carried out when the last rank comes."""
        number = self._next[rank]
        self._next[rank] += 1
        while len(self._rounds) <= number:
            self._rounds.append({})
        brought = self._rounds[number]
        brought[rank] = (kind, tensor)
        if len(brought) == self.size:
            kinds = {one for one, _ in brought.values()}
            if len(kinds) > 1:
                raise AssertionError(f"ranks started different collectives: {sorted(kinds)}")
            name, _, detail = kind.partition(":")
            values = [brought[r][1] for r in range(self.size)]
            if name == "broadcast":
                results = self._broadcast(values, int(detail))
            elif name == "collect":
                results = self._collect(values, int(detail))
            else:
                results = self._allreduce(values)
            self._results[number] = results
        return _Counted(self._results, number, rank)

    def _send(self, source: int, target: int, tensor: torch.Tensor) -> torch.Tensor:
        nbytes = tensor.numel() * tensor.element_size()
        for rank in (source, target):
            self.messages[rank] += 1
            self.bytes[rank] += nbytes
        return tensor.clone()

    def _allreduce(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        words = [value.clone() for value in values]
        power = 1 << (self.size.bit_length() - 1)
        for rank in range(power, self.size):  # excess ranks hand in
            words[rank - power] &= self._send(rank, rank - power, words[rank])
        for k in range(power.bit_length() - 1):
            heard = [self._send(rank ^ 1 << k, rank, words[rank ^ 1 << k]) for rank in range(power)]
            words[:power] = [own & other for own, other in zip(words[:power], heard, strict=True)]
        for rank in range(power, self.size):
            words[rank] = self._send(rank - power, rank, words[rank - power])
        return words

    def _collect(self, values: Sequence[torch.Tensor], root: int) -> list[torch.Tensor]:
        rows = [values[r] if r == root else self._send(r, root, values[r]) for r in range(self.size)]
        return [torch.stack(rows) if rank == root else values[rank] for rank in range(self.size)]

    def _broadcast(self, values: Sequence[torch.Tensor], root: int) -> list[torch.Tensor]:
        results: list[Any] = [None] * self.size
        results[root] = values[root]
        have = [root]
        missing = [rank for rank in range(self.size) if rank != root]
        while missing:
            for source in list(have):
                if missing:
                    target = missing.pop(0)
                    results[target] = self._send(source, target, results[source])
                    have.append(target)
        return results


@dataclass(frozen=True)
class _Counted:
    results: dict[int, list[torch.Tensor]]
    number: int
    rank: int

    def done(self) -> bool:
        return self.number in self.results

    def wait(self, timeout_s: float) -> torch.Tensor:
        return self.results[self.number][self.rank]


class _End:
    """One rank's control transport; it has no gather and no board, which no schedule uses."""

    def __init__(self, hub: CountingHub, rank: int) -> None:
        self._hub = hub
        self.rank, self.size = rank, hub.size

    def allreduce(self, tensor: torch.Tensor, op: ReduceKind) -> _Counted:
        if op != "and":
            raise AssertionError(f"schedules agree by AND, not by {op}")
        return self._hub.join(self.rank, "allreduce", tensor)

    def collect(self, tensor: torch.Tensor, root: int) -> _Counted:
        return self._hub.join(self.rank, f"collect:{root}", tensor)

    def broadcast(self, tensor: torch.Tensor, root: int) -> _Counted:
        return self._hub.join(self.rank, f"broadcast:{root}", tensor)


def measure_control(protocol: str, size: int) -> CountingHub:
    """One backward pass of all ranks by `protocol`; the hub with its counts. Checks that all got the same order."""
    hub = CountingHub(size)
    arena_of = [0] * _GROUPS
    groups = [
        tuple(
            Request(name=f"{g}.{t}", signature="float32 (64,)", group=f"group {g}", group_size=_TENSORS)
            for t in range(_TENSORS)
        )
        for g in range(_GROUPS)
    ]

    def end(rank: int) -> Schedule:
        control: Any = _End(hub, rank)
        if protocol == "coordinator":
            return CoordinatorSchedule(control, [_TENSORS] * _GROUPS, arena_of)
        if protocol == "bitvector":
            return BitvectorSchedule(control, groups, arena_of)
        return StaticSchedule(_GROUPS)

    ends = [end(rank) for rank in range(size)]
    runs: list[list[tuple[int, ...]]] = [[] for _ in ends]
    for group in range(_GROUPS):
        for rank, schedule in enumerate(ends):
            runs[rank] += schedule.complete(group)
    for rank, schedule in enumerate(ends):
        runs[rank] += schedule.finish(lambda handle, what: handle.wait(0.0))
    orders = {tuple(g for run in own for g in run) for own in runs}
    if len(orders) != 1 or len(next(iter(orders))) != _GROUPS:
        raise AssertionError(f"{protocol}: ranks reduced in different orders")
    return hub


def control_rows(ranks: Sequence[int] = RANKS) -> list[dict[str, Any]]:
    """Messages and bytes of one step, of the busiest rank and of all (each message once)."""
    rows = []
    for protocol in _PROTOCOLS:
        for size in ranks:
            hub = measure_control(protocol, size)
            rows.append(
                {
                    "protocol": protocol,
                    "ranks": size,
                    "busiest_messages": max(hub.messages),
                    "busiest_bytes": max(hub.bytes),
                    "all_messages": sum(hub.messages) // 2,
                    "all_bytes": sum(hub.bytes) // 2,
                    "tensors": _GROUPS * _TENSORS,
                    "tensor_groups": _GROUPS,
                }
            )
    return rows


def control_targets(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How the busiest rank's messages grow from the fewest ranks to the most: linear, logarithmic, not at all."""
    targets = []
    for protocol, shape in {"coordinator": "linear", "bitvector": "logarithmic", "static": "none"}.items():
        own = sorted((row for row in rows if row["protocol"] == protocol), key=lambda row: row["ranks"])
        first, last = own[0], own[-1]
        if shape == "none":
            value, target = float(max(row["busiest_messages"] for row in own)), 0.0
            holds = value == 0
        else:
            value = last["busiest_messages"] / first["busiest_messages"]
            ranks = last["ranks"] / first["ranks"]
            target = ranks if shape == "linear" else math.log2(last["ranks"]) / math.log2(first["ranks"])
            holds = 0.9 * target <= value if shape == "linear" else value <= 1.01 * target
        name = (
            f"control plane: busiest rank's messages, {first['ranks']} -> {last['ranks']} ranks, {protocol} ({shape})"
        )
        targets.append({"name": name, "value": value, "target": target, "holds": holds})
    return targets


def control_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people."""
    tensors = f"{rows[0]['tensors']} tensors in {rows[0]['tensor_groups']} groups"
    lines = [
        f"control plane of one step, {tensors}",
        f"{'protocol':<12} {'ranks':>5} {'busiest rank: messages':>23} {'bytes':>10} "
        f"{'all ranks: messages':>20} {'bytes':>11}",
    ]
    for row in rows:
        lines.append(
            f"{row['protocol']:<12} {row['ranks']:>5} {row['busiest_messages']:>23,} {row['busiest_bytes']:>10,} "
            f"{row['all_messages']:>20,} {row['all_bytes']:>11,}"
        )
    return "\n".join(lines)
