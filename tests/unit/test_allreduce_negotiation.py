"""The bit-vector protocol over many in-process ranks and schedules: no deadlock, one order, none lost or doubled."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from exitwave.ingest.errors import UsageError
from exitwave.train.allreduce import negotiation as n
from exitwave.train.allreduce.coordinator import CoordinatorSchedule, Table, decide
from exitwave.train.allreduce.schedules import BitvectorSchedule, StaticSchedule
from exitwave.train.loopback import LoopbackHub


def group(name: str, size: int = 1, signature: str = "float32 (3,)") -> tuple[n.Request, ...]:
    return tuple(n.Request(name=f"{name}.{i}", signature=signature, group=name, group_size=size) for i in range(size))


def cycle(states: list[n.State]) -> list[n.Decision]:
    """One cycle of all ranks; returns each rank's decision with everything executed in it. Exchanges as a transport."""
    messages: list[n.Message | None] = [n.begin(state) for state in states]
    decisions: list[n.Decision] = []
    executed: list[tuple[tuple[n.Request, ...], ...]] = [() for _ in states]
    while True:
        kinds = {type(message) for message in messages}
        assert len(kinds) == 1, "ranks left the cycle at different places"
        if kinds == {type(None)}:
            return [replace(d, execute=e) for d, e in zip(decisions, executed, strict=True)]
        combined = _combine(messages)
        decisions = [n.step(state, combined) for state in states]
        states = [d.state for d in decisions]
        executed = [e + d.execute for e, d in zip(executed, decisions, strict=True)]
        messages = [d.send for d in decisions]


def _combine(messages: list) -> n.Message:
    first = messages[0]
    if isinstance(first, n.Unknown):
        return n.Unknown(rows=tuple(message.rows[0] for message in messages))
    words = list(first.words)
    for message in messages[1:]:
        assert len(message.words) == len(words), "ranks hold caches of different sizes"
        for k, word in enumerate(message.words):
            words[k] = words[k] & word if isinstance(first, n.Bits) else words[k] | word
    return type(first)(words=tuple(words))


class Ranks:
    """All ranks of one world, and what each has executed."""

    def __init__(self, size: int) -> None:
        self.states = [n.State() for _ in range(size)]
        self.log: list[list[str]] = [[] for _ in range(size)]

    def submit(self, rank: int, requests: tuple[n.Request, ...]) -> None:
        self.states[rank] = n.submit(self.states[rank], requests)

    def cycle(self) -> n.Decision:
        decisions = cycle(self.states)
        self.states = [d.state for d in decisions]
        first = decisions[0]
        for rank, decision in enumerate(decisions):
            assert decision.execute == first.execute
            assert decision.mismatch == first.mismatch
            assert decision.shutdown == first.shutdown
            assert self.states[rank].cache == self.states[0].cache
            self.log[rank] += [members[0].group for members in decision.execute]
            for members in decision.execute:
                assert len(members) == members[0].group_size, "a tensor group was torn"
        return first


def run_schedule(size: int, sizes: list[int], epochs: int, seed: int) -> int:
    """Submit all groups on all ranks in permuted orders at random times, over several epochs; returns the cycles."""
    rng = random.Random(seed)
    ranks = Ranks(size)
    groups = [group(f"g{k}", s) for k, s in enumerate(sizes)]
    cycles = 0
    for epoch in range(epochs):
        # Members are submitted one by one, in any order: a group moves only when it is whole.
        members = [request for requests in groups for request in requests]
        waiting = [rng.sample(members, len(members)) for _ in range(size)]
        while True:
            for rank in range(size):
                for _ in range(rng.randint(0, 4)):
                    if waiting[rank]:
                        ranks.submit(rank, (waiting[rank].pop(),))
            ranks.cycle()
            cycles += 1
            if not any(waiting) and not any(s.pending for s in ranks.states):
                break
            assert cycles < 50 * (len(groups) + 5) * epochs, "no progress"
        for log in ranks.log:
            assert log == ranks.log[0], "ranks executed different orders"
            assert sorted(log) == sorted([f"g{k}" for k in range(len(groups))] * (epoch + 1)), "lost or doubled"
    return cycles


schedule = given(
    size=st.integers(1, 32),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=12),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@schedule
@example(size=32, sizes=[1] * 12, epochs=2, seed=0)
def test_any_schedule_ends_with_one_order_on_all_ranks(size, sizes, epochs, seed):
    run_schedule(size, sizes, epochs, seed)


@pytest.mark.long
@settings(max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@schedule
def test_thousands_of_schedules_end_with_one_order_on_all_ranks(size, sizes, epochs, seed):
    run_schedule(size, sizes, epochs, seed)


@settings(max_examples=100, deadline=None)
@given(size=st.integers(2, 16), n_groups=st.integers(2, 8), seed=st.integers(0, 2**32))
def test_a_rank_that_never_submits_a_group_holds_up_that_group_alone(size, n_groups, seed):
    rng = random.Random(seed)
    ranks = Ranks(size)
    groups = [group(f"g{k}", rng.randint(1, 3)) for k in range(n_groups)]
    lazy, held = rng.randrange(size), rng.randrange(n_groups)
    for rank in range(size):
        for k in rng.sample(range(n_groups), n_groups):
            if (rank, k) != (lazy, held):
                ranks.submit(rank, groups[k])
    for _ in range(5):
        ranks.cycle()
    assert sorted(ranks.log[0]) == sorted(f"g{k}" for k in range(n_groups) if k != held)
    for rank, state in enumerate(ranks.states):
        assert {r.group for r in state.pending} == (set() if rank == lazy else {f"g{held}"})
    ranks.submit(lazy, groups[held])
    ranks.cycle()
    assert not any(s.pending for s in ranks.states)


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 16), seed=st.integers(0, 2**32))
def test_a_signature_that_changes_everywhere_is_erased_and_learnt_again(size, seed):
    rng = random.Random(seed)
    ranks = Ranks(size)
    for version in ("float32 (3,)", "float32 (5,)", "float32 (3,)"):
        groups = [group("changing", 2, version), group("steady", 3)]
        late = {rank: rng.sample(groups, 2) for rank in range(size)}
        for _ in range(8):
            for rank in range(size):
                if late[rank] and rng.random() < 0.6:
                    ranks.submit(rank, late[rank].pop())
            assert ranks.cycle().mismatch is None
        for rank in range(size):
            for rest in late[rank]:
                ranks.submit(rank, rest)
        for _ in range(4):
            ranks.cycle()
        assert not any(s.pending for s in ranks.states)
        cached = {r.signature for r in ranks.states[0].cache if r is not None and r.group == "changing"}
        assert cached == {version}
    assert sorted(ranks.log[0]) == ["changing"] * 3 + ["steady"] * 3
    assert len(ranks.states[0].cache) == 5, "erased places were not used again"


@settings(max_examples=100, deadline=None)
@given(size=st.integers(2, 16), seed=st.integers(0, 2**32), cached_before=st.booleans())
def test_a_mismatch_fails_all_ranks_alike_naming_tensor_ranks_and_values(size, seed, cached_before):
    rng = random.Random(seed)
    ranks = Ranks(size)
    if cached_before:
        for rank in range(size):
            ranks.submit(rank, group("x"))
        ranks.cycle(), ranks.cycle()
        assert ranks.log[0] == ["x"]
    odd = rng.randrange(size)
    waiting = rng.sample(range(size), size)
    said = None
    for _ in range(4 * size):
        for rank in [waiting.pop() for _ in range(rng.randint(0, 3)) if waiting]:
            ranks.submit(rank, group("x", signature="float64 (7,)" if rank == odd else "float32 (3,)"))
        said = ranks.cycle().mismatch
        if said:
            break
    assert said is not None and "x.0" in said
    assert f"rank {odd}: float64 (7,)" in said
    assert "float32 (3,)" in said
    assert ranks.log[0] == (["x"] if cached_before else []), "mismatched data moved"


def test_a_shutdown_by_one_rank_ends_the_cycle_on_all():
    ranks = Ranks(3)
    for rank in range(3):
        ranks.submit(rank, group("x"))
    ranks.states[1] = replace(ranks.states[1], wants_shutdown=True)
    assert ranks.cycle().shutdown
    assert ranks.log == [[], [], []]


def test_a_name_submitted_twice_is_refused_and_leaves_nothing_behind():
    state = n.submit(n.State(), group("x", 2))
    with pytest.raises(UsageError, match=r"x\.0 was submitted twice"):
        n.submit(state, (*group("y"), *group("x", 2)))
    assert {r.group for r in state.pending} == {"x"}


# ------------------------------------------------------------------- schedules: pipelined cycles, as the engine runs


class Late:
    """A transport whose results are seen some time after they are there, as over a network."""

    def __init__(self, inner, rng: random.Random) -> None:
        self._inner, self._rng = inner, rng
        self.rank, self.size = inner.rank, inner.size

    def allreduce(self, tensor, op):
        return self._late(self._inner.allreduce(tensor, op))

    def broadcast(self, tensor, root):
        return self._late(self._inner.broadcast(tensor, root))

    def collect(self, tensor, root):
        return self._late(self._inner.collect(tensor, root))

    def _late(self, handle):
        return SimpleNamespace(wait=handle.wait, done=lambda: handle.done() and self._rng.random() < 0.3)


def run_pipelined(protocol: str, size: int, sizes: list[int], epochs: int, seed: int) -> None:
    rng = random.Random(seed)
    hub = LoopbackHub(size)
    groups = [group(f"group {k}", s) for k, s in enumerate(sizes)]
    arena_of = [rng.randrange(2) for _ in groups]
    make = {
        "bitvector": lambda late: BitvectorSchedule(late, groups, arena_of),
        "coordinator": lambda late: CoordinatorSchedule(late, [len(members) for members in groups], arena_of),
        "static": lambda late: StaticSchedule(len(groups)),
    }[protocol]
    ends = [make(Late(hub.transport(r), rng)) for r in range(size)]
    for _ in range(epochs):
        waiting = [rng.sample(range(len(groups)), len(groups)) for _ in range(size)]
        got: list[list[tuple[int, ...]]] = [[] for _ in range(size)]
        while any(waiting):
            rank = rng.choice([r for r in range(size) if waiting[r]])
            got[rank] += ends[rank].complete(waiting[rank].pop())
            if rng.random() < 0.5:
                other = rng.randrange(size)
                got[other] += ends[other].poll()
        for rank in range(size):
            got[rank] += ends[rank].finish(lambda handle, what: handle.wait(0.0))
            assert got[rank] == got[0], "ranks would start different collectives"
        assert sorted(k for run in got[0] for k in run) == list(range(len(groups)))
    expected = 0 if protocol == "static" else epochs * len(groups)
    assert [end.cycles for end in ends] == [expected] * size


pipelined = given(
    protocol=st.sampled_from(["bitvector", "coordinator", "static"]),
    size=st.integers(1, 32),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=10),
    epochs=st.integers(1, 2),
    seed=st.integers(0, 2**32),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@pipelined
@example(protocol="bitvector", size=32, sizes=[1] * 10, epochs=2, seed=1)
@example(protocol="coordinator", size=32, sizes=[1] * 10, epochs=2, seed=1)
def test_pipelined_cycles_give_all_ranks_the_same_collectives(protocol, size, sizes, epochs, seed):
    run_pipelined(protocol, size, sizes, epochs, seed)


@pytest.mark.long
@settings(max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@pipelined
def test_thousands_of_pipelined_schedules(protocol, size, sizes, epochs, seed):
    run_pipelined(protocol, size, sizes, epochs, seed)


def test_the_coordinator_orders_groups_once_all_their_tensors_are_ready_on_all_ranks():
    table = Table(members=((0, 1), (2,)), size=2, counts=(0, 0, 0))
    table, order = decide(table, [2, 0, 1])
    assert order == ()
    table, order = decide(table, [2, 0])
    assert order == (1,)
    table, order = decide(table, [1])
    assert order == (0,)
    assert table.counts == (0, 0, 0)
    with pytest.raises(ValueError, match="tensor 2 was submitted 3 times by 2 ranks"):
        decide(table, [2, 2, 2])


def test_bitvector_reduces_early_what_all_have_and_static_waits_for_the_plans_order():
    groups = [group(f"group {k}") for k in range(3)]
    hub = LoopbackHub(2)
    a, b = (BitvectorSchedule(hub.transport(r), groups, [0, 0, 0]) for r in range(2))
    assert a.complete(2) == []
    assert b.complete(2) == [(2,)]
    assert a.poll() == [(2,)]
    static = StaticSchedule(3)
    assert static.complete(2) == []
    assert static.complete(0) == [(0,)]
    assert static.complete(1) == [(1,), (2,)]
