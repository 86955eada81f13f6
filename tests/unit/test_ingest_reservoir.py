"""The reservoir: nothing overwritten unseen, producers held back when it must be, uniform, and the same again."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exitwave.ingest.errors import UsageError
from exitwave.ingest.reservoir import Reservoir

STEPS = st.lists(st.tuples(st.sampled_from(["offer", "draw"]), st.integers(1, 9)), max_size=80)


@settings(max_examples=150, deadline=None)
@given(capacity=st.integers(1, 20), seed=st.integers(0, 2**64), steps=STEPS)
def test_any_course_of_arrivals_and_draws(capacity: int, seed: int, steps: list[tuple[str, int]]) -> None:
    one, two = (Reservoir(capacity=capacity, watermark=1, seed=seed) for _ in range(2))
    arrived, uses, taken_in = 0, Counter[int](), []
    for what, n in steps:
        if what == "offer":
            for _ in range(n):
                full = len(one.items) == capacity
                unseen = all(uses[i] == 0 for i in one.items)
                before = list(one.items)
                got = one.offer(arrived)
                assert got == two.offer(arrived)
                assert got == (not (full and unseen))
                if not got:
                    assert one.items == before
                    break
                if full:
                    (gone,) = set(before) - set(one.items)
                    assert uses[gone] > 0, "what was never seen is never overwritten"
                taken_in.append(arrived)
                arrived += 1
        elif one.ready():
            batch = one.draw(n)
            assert batch == two.draw(n)
            assert set(batch) <= set(one.items)
            assert len(set(batch)) == min(n, len(one.items)), "different ones while there are enough"
            uses.update(batch)
    assert len(one.items) == len(set(one.items)) == min(len(taken_in), capacity)
    assert one.reuse() == dict(sorted(Counter(uses[i] for i in taken_in).items()))


def test_draws_are_uniform() -> None:
    reservoir = Reservoir(capacity=50, watermark=50, seed=3)
    assert [reservoir.offer(i) for i in range(51)] == [True] * 50 + [False]
    counts = Counter(i for _ in range(4000) for i in reservoir.draw(5))
    chi_square = sum((counts[i] - 400) ** 2 / 400 for i in range(50))
    assert chi_square < 85.4  # 49 degrees of freedom, p = 0.001


def test_overwriting_is_uniform_over_the_seen() -> None:
    gone: Counter[int] = Counter()
    for seed in range(2000):
        reservoir = Reservoir(capacity=10, watermark=1, seed=seed)
        for i in range(10):
            reservoir.offer(i)
        seen = set(reservoir.draw(5))
        assert reservoir.offer(10)
        (lost,) = set(range(10)) - set(reservoir.items)
        assert lost in seen
        gone[sorted(seen).index(lost)] += 1
    assert sum((gone[k] - 400) ** 2 / 400 for k in range(5)) < 18.5  # 4 degrees of freedom, p = 0.001


def test_the_watermark() -> None:
    reservoir = Reservoir(capacity=4, watermark=2, seed=0)
    with pytest.raises(ValueError, match="nothing to draw from"):
        reservoir.draw(1)
    reservoir.offer(7)
    assert not reservoir.ready()
    assert reservoir.ready(all_arrived=True)
    reservoir.offer(8)
    assert reservoir.ready()
    for bad in ({"capacity": 2, "watermark": 3}, {"capacity": 1, "watermark": 0}):
        with pytest.raises(UsageError, match="expected 1 <= watermark <= capacity"):
            Reservoir(**bad, seed=0)
