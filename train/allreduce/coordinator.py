"""The old way, for comparison: rank 0 hears from every rank what is ready there and tells all what to reduce.

1.  Every rank completes each tensor group once in a backward pass, and takes part in one cycle for each: it sends the
    numbers of the group's tensors.
2.  Rank 0 counts, for each tensor, the ranks that have it ready. A tensor group whose tensors are all ready on all
    ranks is appended to the order; groups that become so in one cycle follow the order of the plan.
3.  Rank 0 broadcasts the order of this cycle. All ranks, itself included, reduce by it.

What a cycle costs grows with ranks x tensors of a group, and so do rank 0's table and its time: that is the point of
the comparison. A request is a row of fixed length, gathered at rank 0.

Cycles are pipelined behind the backward pass. Rank 0 starts the requests of cycle k+1 only after it has sent the order
of cycle k; the other ranks start both at once. So all ranks start the same collectives in the same order, and none
waits within backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from exitwave.train.allreduce.fusion import runs_of
from exitwave.train.allreduce.schedules import Run, Wait
from exitwave.train.transport import Handle, Transport

__all__ = ["CoordinatorSchedule", "Table", "decide"]

_ROOT = 0


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rank 0's book: on how many ranks each tensor is ready, since it was last reduced."""

    members: tuple[tuple[int, ...], ...]  # the tensors of each tensor group, numbered over all groups
    size: int  # ranks
    counts: tuple[int, ...]


def decide(table: Table, requests: Sequence[int]) -> tuple[Table, tuple[int, ...]]:
    """Step 2. `requests`: the tensors that some rank has newly ready, once for each such rank; then what to reduce.

    Raises `ValueError` when a tensor was submitted more often than there are ranks.
    """
    counts = list(table.counts)
    for tensor in requests:
        counts[tensor] += 1
        if counts[tensor] > table.size:
            raise ValueError(f"tensor {tensor} was submitted {counts[tensor]} times by {table.size} ranks")
    touched = set(requests)
    order = tuple(
        group
        for group, tensors in enumerate(table.members)
        if touched.intersection(tensors) and all(counts[tensor] == table.size for tensor in tensors)
    )
    for group in order:
        for tensor in table.members[group]:
            counts[tensor] = 0
    return Table(members=table.members, size=table.size, counts=tuple(counts)), order


class CoordinatorSchedule:
    """One rank's end of the protocol above."""

    polls = True

    def __init__(self, control: Transport, group_sizes: Sequence[int], arena_of: Sequence[int]) -> None:
        """`group_sizes[g]`: the number of tensors of group g, the same on all ranks."""
        self.cycles = 0
        self._control = control
        self._arena_of = arena_of
        firsts = [sum(group_sizes[:g]) for g in range(len(group_sizes))]
        members = tuple(tuple(range(a, a + n)) for a, n in zip(firsts, group_sizes, strict=True))
        self._table = Table(members=members, size=control.size, counts=(0,) * sum(group_sizes))
        self._longest = max(group_sizes)
        self._is_root = control.rank == _ROOT
        self._unsent: deque[int] = deque()  # rank 0: complete groups whose cycle has not begun
        self._requests: Handle[torch.Tensor] | None = None  # rank 0: the cycle under way
        self._flying: deque[tuple[int, Handle[torch.Tensor]]] = deque()  # cycle, order (or, beside rank 0, requests)
        self._orders: deque[tuple[int, Handle[torch.Tensor]]] = deque()

    def complete(self, group: int) -> list[Run]:
        if self._is_root:
            self._unsent.append(group)
            return self.poll()
        self._flying.append((self.cycles, self._send(group)))
        order = torch.zeros(len(self._table.members), dtype=torch.int64)
        self._orders.append((self.cycles, self._control.broadcast(order, _ROOT)))
        self.cycles += 1
        return self.poll()

    def poll(self) -> list[Run]:
        runs: list[Run] = []
        if self._is_root:
            while self._advance():
                assert self._requests is not None
                if not self._requests.done():
                    break
                runs += self._lead(self._requests.wait(1.0))
        while self._orders and self._orders[0][1].done():
            runs += self._follow(self._orders.popleft()[1].wait(1.0))
        return runs

    def finish(self, wait: Wait) -> Iterator[Run]:
        while self._is_root and self._advance():
            assert self._requests is not None
            number = self.cycles
            yield from self._lead(wait(self._requests, lambda n=number: f"requests of cycle {n}"))  # type: ignore[misc]
        while self._orders:
            number, handle = self._orders.popleft()
            yield from self._follow(wait(handle, lambda n=number: f"rank 0's order of cycle {n}"))  # type: ignore[misc]
        while self._flying:
            number, handle = self._flying.popleft()
            wait(handle, lambda n=number: f"the messages of cycle {n}")  # type: ignore[misc]

    def _send(self, group: int) -> Handle[torch.Tensor]:
        # Numbers of tensors from 1, 0 where there is none. Rank 0 receives (rank, place in the request).
        request = torch.zeros(self._longest, dtype=torch.int64)
        tensors = self._table.members[group]
        request[: len(tensors)] = torch.tensor(tensors, dtype=torch.int64) + 1
        return self._control.collect(request, _ROOT)

    def _advance(self) -> bool:
        """Rank 0: begin the next cycle if none is under way; whether one is."""
        if self._requests is None and self._unsent:
            self._requests = self._send(self._unsent.popleft())
        return self._requests is not None

    def _lead(self, matrix: torch.Tensor) -> list[Run]:
        """Rank 0: steps 2 and 3."""
        self._requests = None
        self._table, groups = decide(self._table, [tensor - 1 for tensor in matrix.flatten().tolist() if tensor])
        order = torch.zeros(len(self._table.members), dtype=torch.int64)
        order[: len(groups)] = torch.tensor(groups, dtype=torch.int64) + 1
        self._flying.append((self.cycles, self._control.broadcast(order, _ROOT)))
        self.cycles += 1
        return runs_of(groups, self._arena_of)

    def _follow(self, order: torch.Tensor) -> list[Run]:
        return runs_of([group - 1 for group in order.tolist() if group], self._arena_of)
