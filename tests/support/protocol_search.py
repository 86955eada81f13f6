"""Every interleaving: an exhaustive search over a few ranks, with the protocols' real code as the transition function.

The search visits every state that any order of readiness, of cycles and of deliveries can lead to.

Safety, in each state: ranks that heard the same hold the same cache, log and verdict; logs are prefixes of one order;
no tensor group is torn, lost or doubled; all ranks' collectives match (the machines check the last three).
Liveness: from each state the goal can still be reached (backward reachability over the whole graph): every submission
reduced once on every rank, or the same end on all. No fairness is needed beyond that: a rank that only idles in a
circle has a way out at any moment.

Rank memories and messages are numbered as they are met, and each transition of a rank is computed once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from protocol_machines import Broken

__all__ = ["Found", "search"]


@dataclass(frozen=True)
class Found:
    """What a search without findings saw."""

    states: int
    transitions: int
    goals: int
    orders: int  # different orders of execution among the goals


class _Numbers:
    """Value <-> number, as they come."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._number: dict[Hashable, int] = {}

    def of(self, value: Any) -> int:
        number = self._number.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


# A world: each rank's local, how many of the collectives in flight it has heard, and those collectives' rows, of which
# row k holds each rank's message or -1. Collectives that all ranks have heard are gone.
_World = tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, ...], ...]]


class _Search:
    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.size = machine.size
        self.locals, self.messages = _Numbers(), _Numbers()
        self._moves: dict[tuple[int, int], list[Any]] = {}
        self._acts: dict[tuple[int, int, Any], tuple[int, tuple[int, ...]]] = {}
        self._hears: dict[tuple[int, int, int], tuple[int, tuple[int, ...]]] = {}
        self._combined: dict[tuple[int, ...], int] = {}
        self._log: dict[int, tuple[Any, ...]] = {}
        self._shared: dict[int, Any] = {}
        self._done: dict[tuple[int, int], bool] = {}

    def start(self) -> _World:
        return tuple(self.locals.of(self.machine.start(r)) for r in range(self.size)), (0,) * self.size, ()

    def next(self, world: _World) -> list[_World]:
        found = []
        locals_, heard, rows = world
        for rank in range(self.size):
            for move in self.moves(rank, locals_[rank]):
                found.append(self._after(world, rank, self.act(rank, locals_[rank], move), heard[rank]))
            if heard[rank] < len(rows) and -1 not in rows[heard[rank]]:
                result = self.combined(rows[heard[rank]])
                found.append(self._after(world, rank, self.hear(rank, locals_[rank], result), heard[rank] + 1))
        return found

    def _after(self, world: _World, rank: int, change: tuple[int, tuple[int, ...]], heard_now: int) -> _World:
        local, messages = change
        locals_, heard, rows = world
        locals_ = (*locals_[:rank], local, *locals_[rank + 1 :])
        heard = (*heard[:rank], heard_now, *heard[rank + 1 :])
        if messages:
            table = [list(row) for row in rows]
            place = sum(1 for row in table if row[rank] != -1)
            for message in messages:
                if place == len(table):
                    table.append([-1] * self.size)
                table[place][rank] = message
                place += 1
            rows = tuple(map(tuple, table))
        past = min(heard)
        if past:
            heard, rows = tuple(h - past for h in heard), rows[past:]
        return locals_, heard, rows

    def check(self, world: _World) -> None:
        locals_, heard, _ = world
        logs = [self.log(local) for local in locals_]
        longest = max(logs, key=len)
        for log in logs:
            if log != longest[: len(log)]:
                raise Broken(f"ranks executed different orders: {logs}")
        for a in range(self.size):
            for b in range(a):
                if heard[a] == heard[b] and self.shared(locals_[a]) != self.shared(locals_[b]):
                    raise Broken(f"ranks {b} and {a} heard the same and hold different things")

    def is_goal(self, world: _World) -> bool:
        locals_, _, _ = world
        if not all(self.done(rank, local) for rank, local in enumerate(locals_)):
            return False
        for rank, local in enumerate(locals_):
            self.machine.final(rank, self.locals.values[local])
        return True

    # -- each transition of a rank once

    def moves(self, rank: int, local: int) -> list[Any]:
        key = (rank, local)
        if key not in self._moves:
            self._moves[key] = self.machine.moves(rank, self.locals.values[local])
        return self._moves[key]

    def act(self, rank: int, local: int, move: Any) -> tuple[int, tuple[int, ...]]:
        key = (rank, local, move)
        if key not in self._acts:
            self._acts[key] = self._numbered(self.machine.act(rank, self.locals.values[local], move))
        return self._acts[key]

    def hear(self, rank: int, local: int, message: int) -> tuple[int, tuple[int, ...]]:
        key = (rank, local, message)
        if key not in self._hears:
            result = self.machine.hear(rank, self.locals.values[local], self.messages.values[message])
            self._hears[key] = self._numbered(result)
        return self._hears[key]

    def _numbered(self, change: tuple[Any, list[Any]]) -> tuple[int, tuple[int, ...]]:
        local, messages = change
        return self.locals.of(local), tuple(self.messages.of(message) for message in messages)

    def combined(self, row: tuple[int, ...]) -> int:
        if row not in self._combined:
            self._combined[row] = self.messages.of(self.machine.combine([self.messages.values[m] for m in row]))
        return self._combined[row]

    def log(self, local: int) -> tuple[Any, ...]:
        if local not in self._log:
            self._log[local] = self.machine.log(self.locals.values[local])
        return self._log[local]

    def shared(self, local: int) -> Any:
        if local not in self._shared:
            self._shared[local] = self.machine.shared(self.locals.values[local])
        return self._shared[local]

    def done(self, rank: int, local: int) -> bool:
        if (rank, local) not in self._done:
            self._done[rank, local] = self.machine.done(rank, self.locals.values[local])
        return self._done[rank, local]


def search(machine: Any, most_states: int = 3_000_000) -> Found:
    """Visit every reachable state. Raises `Broken` with the first violation of safety, or where liveness ends."""
    run = _Search(machine)
    number: dict[_World, int] = {}
    before: list[list[int]] = []  # state -> states that lead to it
    goals: list[int] = []
    orders = set()
    queue: deque[_World] = deque()
    transitions = 0

    def meet(world: _World) -> int:
        known = number.get(world)
        if known is not None:
            return known
        number[world] = len(before)
        before.append([])
        run.check(world)
        if run.is_goal(world):
            goals.append(number[world])
            orders.add(run.log(world[0][0]))
        queue.append(world)
        if len(before) > most_states:
            raise AssertionError(f"more than {most_states} states: choose a smaller case")
        return number[world]

    meet(run.start())
    while queue:
        world = queue.popleft()
        here = number[world]
        for after in run.next(world):
            transitions += 1
            there = meet(after)
            if there != here:
                before[there].append(here)
    reaches = bytearray(len(before))
    stack = list(goals)
    for goal in goals:
        reaches[goal] = 1
    while stack:
        for earlier in before[stack.pop()]:
            if not reaches[earlier]:
                reaches[earlier] = 1
                stack.append(earlier)
    stuck = reaches.count(0)
    if stuck:
        worlds = list(number)
        example = next(w for i, w in enumerate(worlds) if not reaches[i])
        said = [run.log(local) for local in example[0]]
        raise Broken(f"{stuck} of {len(before)} states can never reach the goal, for example one with logs {said}")
    return Found(states=len(before), transitions=transitions, goals=len(goals), orders=len(orders))
