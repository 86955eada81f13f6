"""The cache's planner: for any sequence of needs and events it keeps its promises, and evicts as Belady does."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from exitwave.ingest.errors import UsageError
from exitwave.ingest.staging_plan import CachePlanner, State, StateError, check_capacity, window_bytes

IDS = [f"s{i}" for i in range(8)]
THERE = (State.READY, State.PINNED)


class AnyCache(RuleBasedStateMachine):
    """Whatever happens to a cache, in whatever order, its promises hold."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = {i: 10 + 7 * k for k, i in enumerate(IDS)}
        self.capacity = 130
        self.planner = CachePlanner(self.sizes, capacity_bytes=self.capacity, in_flight=3, irreplaceable={"s1"})
        self.evicting: set[str] = set()

    @rule(order=st.lists(st.sampled_from(IDS), max_size=20))
    def need(self, order: list[str]) -> None:
        self.planner.needs(order)

    @precondition(lambda self: not self.evicting)
    @rule(held=st.sets(st.sampled_from(IDS), max_size=2))
    def decide(self, held: set[str]) -> None:
        before = {i: self.planner.state(i) for i in IDS}
        decision = self.planner.decide(hold=held)
        assert not set(decision.start) & held
        assert all(before[i] is State.ABSENT and self.planner.state(i) is State.RESERVED for i in decision.start)
        assert all(before[i] is State.READY and self.planner.state(i) is State.EVICTING for i in decision.evict)
        assert "s1" not in decision.evict, "the last copy there is"
        uses = [self.planner.next_use(i) for i in decision.start]
        assert uses == sorted(uses)
        if decision.evict:
            assert decision.blocked is not None
            least = min(self.planner.next_use(i) for i in decision.evict)
            kept = [i for i in IDS if self.planner.state(i) is State.READY and i != "s1"]
            assert all(self.planner.next_use(i) <= least for i in kept), "Belady"
            assert least > self.planner.next_use(decision.blocked), "nothing goes for what is needed later than it"
        self.evicting = set(decision.evict)

    @precondition(lambda self: self.evicting)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        shard_id = data.draw(st.sampled_from(sorted(self.evicting)))
        self.evicting.discard(shard_id)
        if data.draw(st.booleans()):
            self.planner.evicted(shard_id)
        else:
            self.planner.not_evicted(shard_id)
            assert self.planner.state(shard_id) is State.PINNED

    @rule(data=st.data())
    def copy_goes_on(self, data: st.DataObject) -> None:
        flying = self.planner.ids(State.RESERVED, State.COPYING, State.VERIFYING)
        if not flying:
            return
        shard_id = data.draw(st.sampled_from(flying))
        steps = {
            State.RESERVED: self.planner.copying,
            State.COPYING: self.planner.verifying,
            State.VERIFYING: self.planner.ready,
        }
        if data.draw(st.booleans()):
            steps[self.planner.state(shard_id)](shard_id)
        else:
            self.planner.failed(shard_id)
            assert self.planner.state(shard_id) is State.ABSENT

    @rule(data=st.data())
    def reader(self, data: st.DataObject) -> None:
        there = self.planner.ids(*THERE)
        if not there:
            return
        shard_id = data.draw(st.sampled_from(there))
        pins = self.planner.pins(shard_id)
        what = data.draw(st.sampled_from(["pin", "unpin", "damaged"]))
        if what == "damaged":
            self.planner.quarantined(shard_id)
            self.planner.gone(shard_id)
            assert self.planner.state(shard_id) is State.ABSENT
        elif what == "pin" or pins == 0:
            self.planner.pin(shard_id)
        else:
            self.planner.unpin(shard_id)
            assert self.planner.state(shard_id) is (State.PINNED if pins > 1 else State.READY)

    @rule()
    def disk_is_full(self) -> None:
        self.planner.disk_is_full()

    @invariant()
    def within_capacity(self) -> None:
        counted = sum(self.sizes[i] for i in IDS if self.planner.state(i) is not State.ABSENT)
        assert self.planner.used_bytes == counted <= self.capacity + self.sizes["s1"]
        assert counted <= self.capacity or self.planner.state("s1") in THERE, "only a last copy may be too much"
        flying = self.planner.ids(State.RESERVED, State.COPYING, State.VERIFYING)
        assert self.planner.copies_in_flight == len(flying) <= 3
        assert all((self.planner.pins(i) > 0) == (self.planner.state(i) is State.PINNED) for i in IDS)


AnyCache.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyCache = AnyCache.TestCase


def run(order: list[str], sizes: dict[str, int], capacity: int) -> tuple[int, int]:
    """Accesses in order, the copy of what is needed done before it is read; (copies, evictions)."""
    planner = CachePlanner(sizes, capacity_bytes=capacity, in_flight=1)
    copies = evictions = 0
    for k, shard_id in enumerate(order):
        planner.needs(order[k:])
        while planner.state(shard_id) is not State.READY:
            decision = planner.decide()
            assert decision.evict or decision.start, "it never stands still while something is needed"
            for victim in decision.evict:
                planner.evicted(victim)
                evictions += 1
            for started in decision.start:
                planner.copying(started)
                planner.verifying(started)
                planner.ready(started)
                copies += 1
    return copies, evictions


def fewest_misses(order: list[str], slots: int) -> int:
    """Belady's optimum for shards of one size, the textbook way."""
    held: set[str] = set()
    misses = 0
    for k, shard_id in enumerate(order):
        if shard_id in held:
            continue
        misses += 1
        if len(held) == slots:
            rest = order[k:]
            held.remove(max(held, key=lambda i: rest.index(i) if i in rest else math.inf))
        held.add(shard_id)
    return misses


@settings(max_examples=60, deadline=None)
@given(order=st.lists(st.sampled_from(IDS), min_size=1, max_size=40), slots=st.integers(1, 8))
def test_copies_are_as_few_as_can_be(order: list[str], slots: int) -> None:
    copies, _ = run(order, dict.fromkeys(IDS, 5), 5 * slots)
    assert copies == fewest_misses(order, slots)


def test_epochs_over_a_small_cache_keep_what_a_least_recently_used_one_would_lose() -> None:
    rng, names = random.Random(3), [f"s{i:02d}" for i in range(40)]
    order = [i for _ in range(5) for i in rng.sample(names, 40)]
    copies, _ = run(order, dict.fromkeys(names, 1), 30)
    assert copies < 0.5 * len(order)


@given(order=st.lists(st.sampled_from(IDS), max_size=30), window=st.integers(1, 10))
def test_the_window_is_the_most_that_is_needed_at_once(order: list[str], window: int) -> None:
    sizes = {i: 3 + k for k, i in enumerate(IDS)}
    runs = [set(order[k : k + window]) for k in range(len(order))]
    assert window_bytes(order, sizes, window) == max((sum(sizes[i] for i in r) for r in runs), default=0)


def test_a_shard_larger_than_the_cache_blocks_and_nothing_is_evicted_for_it() -> None:
    planner = CachePlanner({"small": 10, "large": 100}, capacity_bytes=50)
    planner.found("small", 10)
    planner.needs(["large", "small"])
    decision = planner.decide()
    assert (decision.blocked, decision.evict, decision.start) == ("large", (), ())


def test_a_capacity_made_smaller_evicts_what_is_needed_last() -> None:
    planner = CachePlanner(dict.fromkeys("abc", 10), capacity_bytes=20)
    for name in ("a", "b", "c", "old"):
        planner.found(name, 10)
    planner.needs("cab")
    assert planner.decide().evict == ("old", "b")


def test_a_step_that_no_shard_takes_is_refused() -> None:
    planner = CachePlanner({"a": 1})
    for call in (planner.ready, planner.copying, planner.failed, planner.evicted, planner.pin):
        with pytest.raises(StateError):
            call("a")
    planner.found("a", 1)
    with pytest.raises(StateError):
        planner.found("a", 1)
    with pytest.raises(StateError):
        planner.unpin("a")


def test_too_small_a_capacity_names_the_minimum() -> None:
    check_capacity(30, 30, "2 shards")
    check_capacity(None, 30, "2 shards")
    with pytest.raises(UsageError, match="capacity of 29 bytes is too small: expected at least 30 bytes for 2 shards"):
        check_capacity(29, 30, "2 shards")
