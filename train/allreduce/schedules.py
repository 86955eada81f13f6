"""When a complete tensor group may be reduced: one class for each protocol, between the engine and the agreement.

The engine reports each tensor group that is complete on this rank; the schedule answers with *runs*, neighbouring
groups to reduce by one collective now. All ranks receive the same runs in the same order, whatever order they report
in.

- `StaticSchedule`: the plan's order is the schedule. A group waits for all groups before it. No message is sent.
- `CoordinatorSchedule` (in `coordinator`): rank 0 decides.
- `BitvectorSchedule`: ranks agree by cycles of `negotiation`, one begun by each completed group. In one backward pass
  every rank completes every group once (what has no gradient is completed at the end, as zeros), so all ranks take
  part in the same number of cycles, none of which blocks the backward pass: their results are looked at as they come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from exitwave.train.allreduce import negotiation
from exitwave.train.allreduce.fusion import runs_of
from exitwave.train.allreduce.groups import GroupPlan
from exitwave.train.transport import Handle, Transport

__all__ = ["BitvectorSchedule", "Run", "Schedule", "StaticSchedule", "Wait", "plan_requests"]

Run = tuple[int, ...]
Wait = Callable[[Handle[torch.Tensor], Callable[[], str]], torch.Tensor]


class Schedule(Protocol):
    """One protocol's answer to "what may be reduced now"; used from one backward pass to the next."""

    cycles: int  # negotiations so far
    polls: bool  # whether `poll` between completions can tell anything new

    def complete(self, group: int) -> list[Run]:
        """Tensor group `group` is complete on this rank; what may be reduced now."""

    def poll(self) -> list[Run]:
        """What may be reduced by now, without waiting."""

    def finish(self, wait: Wait) -> Iterator[Run]:
        """After every group was completed: the rest, until all groups were given out. Ready for the next pass then."""


class StaticSchedule:
    """The plan's order, without a message."""

    polls = False

    def __init__(self, n_groups: int) -> None:
        self.cycles = 0
        self._n_groups = n_groups
        self._complete: set[int] = set()
        self._next = 0

    def complete(self, group: int) -> list[Run]:
        self._complete.add(group)
        return self.poll()

    def poll(self) -> list[Run]:
        runs: list[Run] = []
        while self._next in self._complete:
            runs.append((self._next,))  # never fused by what happens to be ready: other ranks may see another moment
            self._next += 1
        return runs

    def finish(self, wait: Wait) -> Iterator[Run]:
        yield from self.poll()
        if self._next != self._n_groups:
            raise AssertionError(f"finish was called with {self._next} of {self._n_groups} groups complete")
        self._complete.clear()
        self._next = 0


@dataclass(frozen=True)
class _Cycle:
    number: int
    handle: Handle[torch.Tensor]


class BitvectorSchedule:
    """Agreement by AND of bit vectors, cycles pipelined behind the backward pass."""

    polls = True

    def __init__(
        self, control: Transport, requests: Sequence[tuple[negotiation.Request, ...]], arena_of: Sequence[int]
    ) -> None:
        """`requests[g]`: the members of tensor group g, the same on all ranks; they fill the cache from the start."""
        self.cycles = 0
        self._control = control
        self._requests = list(requests)
        self._group_of = {members[0].group: g for g, members in enumerate(requests)}
        self._arena_of = arena_of
        self._state = negotiation.State(cache=tuple(request for members in requests for request in members))
        self._flying: deque[_Cycle] = deque()

    def complete(self, group: int) -> list[Run]:
        self._state = negotiation.submit(self._state, self._requests[group])
        words = torch.tensor(negotiation.begin(self._state).words, dtype=torch.int64)
        self._flying.append(_Cycle(self.cycles, self._control.allreduce(words, "and")))
        self.cycles += 1
        return self.poll()

    def poll(self) -> list[Run]:
        runs: list[Run] = []
        while self._flying and self._flying[0].handle.done():
            runs += self._decide(self._flying.popleft().handle.wait(1.0))
        return runs

    def finish(self, wait: Wait) -> Iterator[Run]:
        while self._flying:
            cycle = self._flying.popleft()
            words = wait(cycle.handle, lambda number=cycle.number: f"negotiation cycle {number}")  # type: ignore[misc]
            yield from self._decide(words)
        if self._state.pending:
            raise AssertionError(f"cycles ended with {len(self._state.pending)} tensors pending")

    def _decide(self, words: torch.Tensor) -> list[Run]:
        decision = negotiation.step(self._state, negotiation.Bits(words=tuple(words.tolist())))
        if decision.send is not None:
            raise AssertionError("a cycle of a verified plan met an unknown or changed tensor")
        self._state = decision.state
        return runs_of([self._group_of[members[0].group] for members in decision.execute], self._arena_of)


def plan_requests(plan: GroupPlan, signatures: dict[str, str]) -> list[tuple[negotiation.Request, ...]]:
    """The requests of a plan: one for each tensor, `signatures[name]` being what must agree."""
    return [
        tuple(
            negotiation.Request(
                name=name, signature=signatures[name], group=f"group {group.index}", group_size=len(group.names)
            )
            for name in group.names
        )
        for group in plan.groups
    ]
