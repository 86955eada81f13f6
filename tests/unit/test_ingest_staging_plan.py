"""The staging plan: pure decisions, for any cache and any capacity."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitwave.ingest.errors import UsageError
from exitwave.ingest.records import ShardRecord
from exitwave.ingest.staging_plan import plan_staging


def record(task: int, nbytes: int) -> ShardRecord:
    return ShardRecord(
        shard_id=f"s{task}",
        task=task,
        path=f"shards/s{task}.h5",
        nbytes=nbytes,
        n=1,
        xxh3_128="",
        extents=(),
        structures=(),
        seq=task,
        generation=0,
        split="train",
    )


@given(
    sizes=st.lists(st.integers(1, 100), max_size=12),
    ready=st.dictionaries(st.sampled_from([f"s{i}" for i in range(20)]), st.integers(1, 100)),
    spare=st.one_of(st.none(), st.integers(0, 300)),
)
def test_the_plan_fills_the_cache_within_its_capacity(
    sizes: list[int], ready: dict[str, int], spare: int | None
) -> None:
    shards = [record(i, size) for i, size in enumerate(sizes)]
    capacity = None if spare is None else sum(sizes) + spare
    plan = plan_staging(shards, ready, capacity_bytes=capacity)
    assert sorted(s.task for s in plan.copy + plan.reuse) == list(range(len(sizes)))
    assert all(ready[s.shard_id] == s.nbytes for s in plan.reuse)
    assert set(plan.quarantine) == {s.shard_id for s in plan.copy} & set(ready)
    assert not set(plan.evict) & {s.shard_id for s in shards}
    assert plan.bytes_to_copy + plan.bytes_reused == sum(sizes)
    kept = {i: n for i, n in ready.items() if i not in plan.evict and i not in plan.quarantine}
    after = {**kept, **{s.shard_id: s.nbytes for s in shards}}
    assert capacity is None or sum(after.values()) <= capacity
    assert capacity is not None or not plan.evict


def test_too_small_a_capacity_names_the_minimum() -> None:
    with pytest.raises(
        UsageError, match="capacity of 29 bytes is too small: expected at least 30 bytes for the 2 shards"
    ):
        plan_staging([record(0, 10), record(1, 20)], {}, capacity_bytes=29)
