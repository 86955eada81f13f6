"""The protocols of the allreduce engine as machines without threads or sockets: the real code, driven move by move.

A *local* is one rank's whole memory as an immutable value. A machine turns it into the next one:

- `act`: the rank does something of its own accord (a gradient becomes ready, a cycle begins);
- `hear`: the result of its next collective reaches it.

Either may start collectives: the messages returned join, in order, the rank's stream of collectives. Collectives are
matched by their order, as on any transport; one has a result as soon as every rank has joined it, and each rank hears
of it at a moment of its own. Whoever drives the machines chooses all moments: at random (`protocol_walk`) or all
of them (`protocol_search`).

`Broken` is raised for whatever the protocol promises and did not keep.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from exitwave.train.allreduce import negotiation as n
from exitwave.train.allreduce.coordinator import CoordinatorSchedule
from exitwave.train.allreduce.schedules import BitvectorSchedule, StaticSchedule

__all__ = ["Broken", "ScheduleMachine", "SessionMachine", "group"]

Script = tuple[tuple[tuple[n.Request, ...], ...], ...]  # group -> version -> members


class Broken(AssertionError):
    """An invariant does not hold."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


def group(name: str, size: int = 1, signature: str = "float32 (3,)") -> tuple[n.Request, ...]:
    """A tensor group to be submitted."""
    return tuple(n.Request(name=f"{name}.{i}", signature=signature, group=name, group_size=size) for i in range(size))


# ------------------------------------------------------------- calls by name: cycles one after the other, slow path


@dataclass(frozen=True)
class SessionLocal:
    state: n.State
    left: tuple[tuple[int, frozenset[int]], ...]  # for each group: its next version, the members not submitted of it
    log: tuple[tuple[str, str], ...] = ()  # what was executed: group, signature
    listens: bool = False  # within a cycle
    ended: str = ""  # "mismatch: …", "shutdown"


class SessionMachine:
    """`negotiation` as `session` drives it. Members of a group are submitted one by one, at any moment."""

    def __init__(
        self, scripts: Sequence[Script], cached: Sequence[n.Request] = (), stops: int | None = None, idles: bool = True
    ) -> None:
        """`scripts[rank]`: what that rank will submit, version after version; `stops`: a rank that may ask for an end;
        `idles`: cycles may begin with nothing pending, too (`session` begins none then)."""
        self.scripts = scripts
        self.size = len(scripts)
        self._cached = tuple(cached)
        self._stops = stops
        self._idles = idles

    def start(self, rank: int) -> SessionLocal:
        left = tuple((0, frozenset(range(len(versions[0])))) for versions in self.scripts[rank])
        return SessionLocal(state=n.State(cache=self._cached), left=left)

    def restarted(self, ranks: Sequence[int], locals_: Sequence[SessionLocal]) -> SessionMachine:
        """A new world of those ranks: an empty cache, what was pending is pending still."""
        machine = _Restarted([self.scripts[rank] for rank in ranks])
        machine.locals = [replace(one, state=n.State(pending=one.state.pending), listens=False) for one in locals_]
        return machine

    def moves(self, rank: int, local: SessionLocal) -> list[Hashable]:
        if local.ended:
            return []
        found: list[Hashable] = []
        if not local.listens and (self._idles or local.state.pending):
            found.append("begin")
        if rank == self._stops and not local.state.wants_shutdown:
            found.append("stop")
        pending = {request.name for request in local.state.pending}
        for g, (version, members) in enumerate(local.left):
            for member in sorted(members):
                if self.scripts[rank][g][version][member].name not in pending:
                    found.append((g, member))
        return found

    def act(self, rank: int, local: SessionLocal, move: Any) -> tuple[SessionLocal, list[Any]]:
        if move == "begin":
            return replace(local, listens=True), [n.begin(local.state)]
        if move == "stop":
            return replace(local, state=replace(local.state, wants_shutdown=True)), []
        g, member = move
        version, members = local.left[g]
        state = n.submit(local.state, [self.scripts[rank][g][version][member]])
        left = list(local.left)
        left[g] = (version, members - {member})
        return replace(local, state=state, left=tuple(left)), []

    def hear(self, rank: int, local: SessionLocal, message: Any) -> tuple[SessionLocal, list[Any]]:
        require(local.listens, "heard of a collective that was not joined")
        decision = n.step(local.state, message)
        left, log = list(local.left), list(local.log)
        for members in decision.execute:
            first = members[0]
            require(len(members) == first.group_size, f"tensor group {first.group} was torn")
            require(
                all(m in local.state.pending for m in members), f"{first.group} was reduced without being submitted"
            )
            log.append((first.group, first.signature))
            g = next(i for i, versions in enumerate(self.scripts[rank]) if versions[0][0].group == first.group)
            version, rest = left[g]
            again = sum(1 for name, _ in log if name == first.group)
            require(again <= len(self.scripts[rank][g]), f"tensor group {first.group} was reduced more than once")
            require(not rest, f"tensor group {first.group} was reduced before all its members were ready")
            if version + 1 < len(self.scripts[rank][g]):
                left[g] = (version + 1, frozenset(range(len(self.scripts[rank][g][version + 1]))))
        ended = f"mismatch: {decision.mismatch}" if decision.mismatch else "shutdown" if decision.shutdown else ""
        after = SessionLocal(
            state=decision.state,
            left=tuple(left),
            log=tuple(log),
            listens=decision.send is not None and not ended,
            ended=ended,
        )
        return after, [decision.send] if after.listens else []

    def combine(self, messages: Sequence[Any]) -> Any:
        first = messages[0]
        require(len({type(m) for m in messages}) == 1, "ranks are at different places of a cycle")
        if isinstance(first, n.Unknown):
            return n.Unknown(rows=tuple(message.rows[0] for message in messages))
        require(len({len(m.words) for m in messages}) == 1, "ranks hold caches of different sizes")
        words = list(first.words)
        for message in messages[1:]:
            for k, word in enumerate(message.words):
                words[k] = words[k] & word if isinstance(first, n.Bits) else words[k] | word
        return type(first)(words=tuple(words))

    def log(self, local: SessionLocal) -> tuple[Any, ...]:
        return local.log

    def shared(self, local: SessionLocal) -> Any:
        """What ranks that heard the same must hold alike."""
        return (local.state.cache, local.log, local.ended)

    def done(self, rank: int, local: SessionLocal) -> bool:
        if local.ended or local.state.wants_shutdown:
            return bool(local.ended)
        submitted = sum(len(versions) for versions in self.scripts[rank])
        return len(local.log) == submitted and not local.state.pending

    def final(self, rank: int, local: SessionLocal) -> None:
        """Raise `Broken` unless each submission was reduced exactly once (where nothing ended it before)."""
        require(local.ended != "" or not local.state.pending, "something stayed pending")
        if not local.ended:
            expected = sorted((v[0].group, v[0].signature) for versions in self.scripts[rank] for v in versions)
            require(sorted(local.log) == expected, f"lost or doubled: {local.log}")


class _Restarted(SessionMachine):
    locals: list[SessionLocal]

    def start(self, rank: int) -> SessionLocal:
        return self.locals[rank]


# --------------------------------------------------------------- the engine's schedules: cycles pipelined, fixed plan


class _Ear:
    """What a schedule sees of its control transport during one move: joins are noted, results are those heard."""

    def __init__(self, rank: int, size: int, started: int, results: tuple[torch.Tensor, ...]) -> None:
        self.rank, self.size = rank, size
        self.started = started
        self.results = results
        self.joined: list[tuple[str, torch.Tensor]] = []

    def allreduce(self, tensor: torch.Tensor, op: str) -> _Later:
        return self._join(op, tensor)

    def broadcast(self, tensor: torch.Tensor, root: int) -> _Later:
        return self._join(f"broadcast {root}", tensor)

    def collect(self, tensor: torch.Tensor, root: int) -> _Later:
        return self._join(f"collect {root}", tensor)

    def _join(self, kind: str, tensor: torch.Tensor) -> _Later:
        self.joined.append((kind, tensor.clone()))
        self.started += 1
        return _Later(self.started - 1)


_ear: list[_Ear] = []  # of the move under way; handles outlive the moves in which they were made


@dataclass(frozen=True)
class _Later:
    number: int

    def done(self) -> bool:
        return self.number < len(_ear[-1].results)

    def wait(self, timeout_s: float) -> torch.Tensor:
        if not self.done():
            raise Broken("a schedule waits within a backward pass")
        return _ear[-1].results[self.number].clone()


@dataclass(frozen=True, eq=False)
class ScheduleLocal:
    schedule: Any
    left: tuple[int, ...]  # groups not complete in this pass
    passes_left: int
    log: tuple[int, ...] = ()
    started: int = 0
    results: tuple[torch.Tensor, ...] = ()

    def key(self) -> Hashable:
        # A schedule reads each result as it hears of it, so that only how many there were can matter later.
        return (self.left, self.passes_left, self.log, self.started, len(self.results), _frozen(self.schedule))

    def __hash__(self) -> int:
        return hash(self.key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScheduleLocal) and self.key() == other.key()


def _frozen(schedule: Any) -> Hashable:
    fixed = ("_control", "_arena_of", "_group_of")
    return tuple((k, _freeze(v)) for k, v in sorted(vars(schedule).items()) if k not in fixed)


def _freeze(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return tuple(value.flatten().tolist())
    if isinstance(value, list | tuple | deque):
        return tuple(map(_freeze, value))
    if isinstance(value, set):
        return frozenset(value)
    if isinstance(value, dict):
        return tuple(sorted(value.items()))
    return value


class ScheduleMachine:
    """A schedule of the engine (its real class), through some backward passes.

    A rank in `joined` has run out of samples: it completes all groups in the plan's order at once, as zeros.
    """

    def __init__(
        self, protocol: str, size: int, sizes: Sequence[int], passes: int = 1, joined: frozenset[int] = frozenset()
    ) -> None:
        self.protocol = protocol
        self.size = size
        self._groups = [group(f"group {k}", s) for k, s in enumerate(sizes)]
        self._passes = passes
        self._joined = joined

    def start(self, rank: int) -> ScheduleLocal:
        ear: Any = _Ear(rank, self.size, 0, ())
        arena_of = [0] * len(self._groups)
        schedule: Any
        if self.protocol == "bitvector":
            schedule = BitvectorSchedule(ear, self._groups, arena_of)
        elif self.protocol == "coordinator":
            schedule = CoordinatorSchedule(ear, [len(members) for members in self._groups], arena_of)
        else:
            schedule = StaticSchedule(len(self._groups))
        return ScheduleLocal(schedule, tuple(range(len(self._groups))), self._passes - 1)

    def moves(self, rank: int, local: ScheduleLocal) -> list[Hashable]:
        if rank in self._joined:
            return list(local.left[:1])
        return list(local.left)

    def act(self, rank: int, local: ScheduleLocal, move: Any) -> tuple[ScheduleLocal, list[Any]]:
        left = tuple(g for g in local.left if g != move)
        return self._play(rank, replace(local, left=left), lambda schedule: schedule.complete(move))

    def hear(self, rank: int, local: ScheduleLocal, message: Any) -> tuple[ScheduleLocal, list[Any]]:
        _, values = message
        result = torch.tensor(values, dtype=torch.int64)
        return self._play(rank, replace(local, results=(*local.results, result)), lambda schedule: schedule.poll())

    def _play(self, rank: int, local: ScheduleLocal, what: Any) -> tuple[ScheduleLocal, list[Any]]:
        schedule = copy.copy(local.schedule)
        for name, value in vars(schedule).items():
            if isinstance(value, set | deque):
                setattr(schedule, name, copy.copy(value))
        ear = _Ear(rank, self.size, local.started, local.results)
        schedule._control = ear
        _ear.append(ear)
        try:
            runs = what(schedule)
            log = (*local.log, *(g for run in runs for g in run))
            left, passes_left = local.left, local.passes_left
            complete = not left and len(log) == len(self._groups) * (self._passes - passes_left)
            if complete and ear.started == len(local.results):
                # The end of backward. `finish` waits for what is in flight; here it was heard, move by move.
                log = (*log, *(g for run in schedule.finish(lambda handle, what: handle.wait(0)) for g in run))
                if passes_left:
                    left, passes_left = tuple(range(len(self._groups))), passes_left - 1
        finally:
            _ear.pop()
        schedule._control = None
        after = ScheduleLocal(schedule, left, passes_left, log, ear.started, local.results)
        return after, [(kind, _nested(tensor)) for kind, tensor in ear.joined]

    def combine(self, messages: Sequence[Any]) -> Any:
        kinds = {kind for kind, _ in messages}
        require(len(kinds) == 1, f"ranks started different collectives: {sorted(kinds)}")
        kind = next(iter(kinds))
        name, _, root = kind.partition(" ")
        values = [torch.tensor(value, dtype=torch.int64) for _, value in messages]
        require(len({v.shape for v in values}) == 1, "ranks brought tensors of different sizes")
        if name == "broadcast":
            result = values[int(root)]
        elif name == "collect":
            result = torch.stack(values)
        elif name == "and":
            result = values[0]
            for value in values[1:]:
                result = result & value
        else:
            result = torch.stack(values).sum(0)
        return kind, _nested(result)

    def log(self, local: ScheduleLocal) -> tuple[Any, ...]:
        return local.log

    def shared(self, local: ScheduleLocal) -> Any:
        """Nothing: a rank may act on what it knows before others have heard it. Logs are compared as prefixes."""
        return None

    def done(self, rank: int, local: ScheduleLocal) -> bool:
        whole = len(local.log) >= len(self._groups) * self._passes
        return not local.left and not local.passes_left and whole and local.started == len(local.results)

    def final(self, rank: int, local: ScheduleLocal) -> None:
        n_groups = len(self._groups)
        for k in range(self._passes):
            mine = sorted(local.log[k * n_groups : (k + 1) * n_groups])
            require(mine == list(range(n_groups)), f"lost or doubled in pass {k}: {local.log}")
        require(len(local.log) == n_groups * self._passes, f"doubled: {local.log}")


def _nested(tensor: torch.Tensor) -> Any:
    """As tuples, so that a message is a value."""
    rows = tensor.tolist()
    return tuple(tuple(row) if isinstance(row, list) else row for row in rows)
