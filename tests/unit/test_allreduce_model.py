"""A model check of the protocols: every interleaving of a few ranks, safety and liveness, and defects that are found.

The transition function is the real code; `protocol_search` says what is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from protocol_machines import Broken, ScheduleMachine, SessionMachine, group
from protocol_search import Found, search

from exitwave.train.allreduce import coordinator, negotiation, readiness, schedules


def known(*names: str, size: int = 1) -> list[negotiation.Request]:
    return [request for name in names for request in group(name, size)]


def session(ranks: int, *names: str, cached: bool = False, size: int = 1, **options: Any) -> SessionMachine:
    script = tuple((group(name, size),) for name in names)
    return SessionMachine([script] * ranks, known(*names, size=size) if cached else (), **options)


def changing(ranks: int, odd: bool = False, **options: Any) -> SessionMachine:
    """Group a changes its signature the second time, everywhere or on the last rank alone; group b does not."""
    changed = (group("a"), group("a", signature="float32 (5,)"))
    steady = (group("a"), group("a")) if odd else changed
    scripts = [(steady, (group("b"),))] * (ranks - 1) + [(changed, (group("b"),))]
    return SessionMachine(scripts, known("a", "b"), **options)


CASES: dict[str, tuple[Callable[[], Any], int]] = {  # what -> machine, orders of execution that must occur
    "static, 3 ranks x 3 groups": (lambda: ScheduleMachine("static", 3, [1, 2, 1]), 1),
    "bitvector, 3 ranks x 3 groups": (lambda: ScheduleMachine("bitvector", 3, [1, 2, 1]), 6),
    "coordinator, 3 ranks x 3 groups": (lambda: ScheduleMachine("coordinator", 3, [1, 2, 1]), 6),
    "bitvector, 2 ranks x 3 groups x 2 passes": (lambda: ScheduleMachine("bitvector", 2, [1, 1, 1], 2), 36),
    "coordinator, 2 ranks x 2 groups x 2 passes": (lambda: ScheduleMachine("coordinator", 2, [1, 1], 2), 4),
    "bitvector, 3 ranks x 3 groups, a joined rank": (
        lambda: ScheduleMachine("bitvector", 3, [1, 1, 1], joined=frozenset({1})),  # it completes them as 0, 1, 2
        2,
    ),
    "by name, unknown, 3 ranks x 2 groups": (lambda: session(3, "a", "b"), 2),
    "by name, unknown, 2 ranks x 3 groups": (lambda: session(2, "a", "b", "c"), 6),
    "by name, known, 2 ranks x 2 groups of 2": (lambda: session(2, "a", "b", cached=True, size=2), 2),
    "by name, a signature changes, 2 ranks": (lambda: changing(2), 3),
    "by name, a signature changes on one rank, 2 ranks": (lambda: changing(2, odd=True), 3),
    "by name, a rank may stop, 2 ranks x 2 groups": (lambda: session(2, "a", "b", cached=True, stops=1), 5),
}

LONG: dict[str, tuple[Callable[[], Any], int]] = {
    "by name, known, 3 ranks x 3 groups": (lambda: session(3, "a", "b", "c", cached=True, idles=False), 6),
    "by name, unknown, 3 ranks x 3 groups": (lambda: session(3, "a", "b", "c", idles=False), 6),
    "by name, a signature changes, 3 ranks": (lambda: changing(3, idles=False), 3),
    "by name, a signature changes on one rank, 3 ranks": (lambda: changing(3, odd=True, idles=False), 3),
    "bitvector, 3 ranks x 2 groups x 2 passes": (lambda: ScheduleMachine("bitvector", 3, [1, 1], 2), 4),
    "coordinator, 3 ranks x 2 groups x 2 passes": (lambda: ScheduleMachine("coordinator", 3, [1, 1], 2), 4),
}


def check(what: str, case: tuple[Callable[[], Any], int], capsys: pytest.CaptureFixture[str]) -> None:
    machine, orders = case
    found: Found = search(machine(), most_states=8_000_000)
    with capsys.disabled():
        print(f"\n{what}: {found.states:,} states, {found.transitions:,} transitions: safe and live")
    assert found.orders == orders, "the search missed orders that can occur, or met others"


SLOW = ("coordinator, 3 ranks x 3 groups",)


@pytest.mark.parametrize("what", [pytest.param(c, marks=pytest.mark.long) if c in SLOW else c for c in CASES])
def test_every_interleaving_is_safe_and_live(what, capsys):
    check(what, CASES[what], capsys)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("what", LONG)
def test_every_interleaving_of_the_larger_cases_is_safe_and_live(what, capsys):
    check(what, LONG[what], capsys)


# ------------------------------------------------------------------------------------------------- seeded defects


_EXECUTE, _STEP, _PACK, _INSERT = negotiation._execute, negotiation.step, readiness.pack, negotiation._insert
_DECIDE = coordinator.decide


def own_readiness(state, *, erased):
    """Reduces what is ready on this rank, whatever the others said."""
    ready = frozenset(bit for bit, r in enumerate(state.cache) if r in state.pending)
    return _EXECUTE(replace(state, agreed=replace(state.agreed, ready=ready)), erased=erased)


def own_order(state, *, erased):
    """Reduces in the order of submission on this rank."""
    decision = _EXECUTE(state, erased=erased)
    names = [r.name for r in state.pending]
    return replace(decision, execute=tuple(sorted(decision.execute, key=lambda members: names.index(members[0].name))))


def drops(state, *, erased):
    """Forgets what was not ready everywhere."""
    decision = _EXECUTE(state, erased=erased)
    return replace(decision, state=replace(decision.state, pending=()))


def doubles(state, *, erased):
    """Leaves pending what it reduced."""
    decision = _EXECUTE(state, erased=erased)
    return replace(decision, state=replace(decision.state, pending=state.pending))


def repeats(state, *, erased):
    """Reduces again what an earlier, pipelined cycle reduced."""
    everything = tuple(r for r in state.cache if r is not None)
    decision = _EXECUTE(replace(state, pending=everything), erased=erased)
    done = {r.name for members in decision.execute for r in members}
    return replace(
        decision, state=replace(decision.state, pending=tuple(r for r in state.pending if r.name not in done))
    )


def own_rows_first(state, rows):
    """Inserts its own names before those of the others."""
    own = {r.name for r in state.pending}
    return _INSERT(state, sorted(rows, key=lambda row: not {r.name for r in row} & own))


def first_rank_wins(state, rows):
    """Overlooks that ranks ask for different things under one name."""
    met: dict[str, negotiation.Request] = {}
    for row in rows:
        for request in row:
            met.setdefault(request.name, request)
    return _INSERT(state, [tuple(met.values())])


def torn(pending):
    """Offers a group of which only a part is ready."""
    groups: dict[str, list[negotiation.Request]] = {}
    for request in pending:
        groups.setdefault(request.group, []).append(request)
    return {name: tuple(members) for name, members in groups.items()}


def silent_about(status):
    """Never sets one of the status bits."""

    def pack(ready, n_entries, **bits):
        return _PACK(ready, n_entries, **{**bits, status: False})

    return pack


def erases_its_own(state, message):
    """Erases what it found invalid itself, not what all found."""
    if isinstance(message, negotiation.Erase):
        bits = negotiation._invalid_bits(state, state.places())
        message = replace(message, words=readiness.pack_bits(bits, len(state.cache)))
    return _STEP(state, message)


def stops_alone(state, message):
    """Leaves when it wants to, whatever the others know."""
    if isinstance(message, negotiation.Bits):
        first, *rest = message.words
        message = replace(message, words=((first & ~1) if state.wants_shutdown else (first | 1), *rest))
    return _STEP(state, message)


def impatient(self):
    """A static schedule that reduces whatever is complete."""
    given = vars(self).setdefault("_given", set())
    runs = [(group,) for group in sorted(self._complete - given)]
    given.update(self._complete)
    self._next = len(given)
    return runs


def early(table, requests):
    """A coordinator that does not wait for the last rank."""
    soon = [table.counts[t] + requests.count(t) for t in range(len(table.counts))]
    almost = [g for g, members in enumerate(table.members) if all(soon[t] == table.size - 1 for t in members)]
    after, order = _DECIDE(table, requests)
    return after, (*order, *almost)


def overtakes(self):
    """Rank 0 begins a cycle before it has sent the order of the one before."""
    if self._unsent:
        self._requests = self._send(self._unsent.popleft())
    return self._requests is not None


def by_itself(self, group):
    """A rank beside rank 0 that does not wait for the order."""
    runs = _COMPLETE(self, group)
    return [*runs, (group,)]


_COMPLETE = coordinator.CoordinatorSchedule.complete

NAMED = [
    lambda: session(2, "a", "b", cached=True),
    lambda: session(2, "a", cached=True, size=2),
    lambda: session(2, "a", "b"),
    lambda: changing(2),
    lambda: changing(2, odd=True),
    lambda: session(2, "a", cached=True, stops=1),
]
PIPELINED = {name: [lambda name=name: ScheduleMachine(name, 2, [1, 1])] for name in ("static", "bitvector")}
PIPELINED["coordinator"] = [lambda: ScheduleMachine("coordinator", 2, [1, 1])]

DEFECTS = [
    (negotiation, "_execute", own_readiness, NAMED),
    (negotiation, "_execute", own_order, NAMED),
    (negotiation, "_execute", drops, NAMED),
    (negotiation, "_execute", doubles, NAMED),
    (negotiation, "_execute", repeats, PIPELINED["bitvector"]),
    (negotiation, "_execute", own_readiness, PIPELINED["bitvector"]),
    (negotiation, "_insert", own_rows_first, NAMED),
    (negotiation, "_insert", first_rank_wins, NAMED),
    (negotiation, "_whole_groups", torn, NAMED),
    (readiness, "pack", silent_about("uncached"), NAMED),
    (readiness, "pack", silent_about("invalid"), NAMED),
    (readiness, "pack", silent_about("shutdown"), NAMED),
    (negotiation, "step", erases_its_own, NAMED),
    (negotiation, "step", stops_alone, NAMED),
    (schedules.StaticSchedule, "poll", impatient, PIPELINED["static"]),
    (coordinator, "decide", early, PIPELINED["coordinator"]),
    (coordinator.CoordinatorSchedule, "_advance", overtakes, PIPELINED["coordinator"]),
    (coordinator.CoordinatorSchedule, "complete", by_itself, PIPELINED["coordinator"]),
]


def outcome(machines) -> str:
    for make in machines:
        try:
            search(make(), most_states=400_000)
        except Broken as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("where", "name", "defect", "machines"),
    DEFECTS,
    ids=[f"{name}-{getattr(defect, '__name__', name)}-{k}" for k, (_, name, defect, _) in enumerate(DEFECTS)],
)
def test_a_defect_in_the_protocol_is_found(where, name, defect, machines, monkeypatch):
    monkeypatch.setattr(where, name, defect)
    assert outcome(machines), f"{defect.__doc__} went unnoticed"


@pytest.mark.parametrize("machines", [NAMED, *PIPELINED.values()], ids=["by name", *PIPELINED])
def test_without_a_defect_nothing_is_found(machines):
    assert outcome(machines) == ""
