"""The order through a window of shards: a permutation, mixed enough, the same for ever, and known ahead by shard."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ingest_samples import make_dataset

from exitwave.ingest import GlobalSampler, ShardDataset, Window
from exitwave.ingest.errors import UsageError
from exitwave.ingest.order import ORDER_VERSION, partition
from exitwave.ingest.prefetch_order import AccessOrder
from exitwave.ingest.windows import SampleOrder, ShardLayout, accesses

COUNTS = st.lists(st.integers(1, 40), min_size=1, max_size=60)
SEEDS = st.integers(0, 2**64 - 1)


def layout(counts: list[int], *, per_shard: int = 8) -> ShardLayout:
    """Shard s holds structures of its own but for one, which its neighbour holds as well."""
    structures = [tuple(range(s * (per_shard - 1), (s + 1) * (per_shard - 1) + 1)) for s in range(len(counts))]
    return ShardLayout(ids=[f"s{s}" for s in range(len(counts))], counts=np.array(counts), structures=structures)


def order_of(counts: list[int], seed: int = 1, window: Window | None = None) -> SampleOrder:
    return SampleOrder(sum(counts), seed=seed, window=window or Window(), layout=layout(counts))


@settings(max_examples=120, deadline=None)
@given(counts=COUNTS, seed=SEEDS, epoch=st.integers(0, 10**6), shards=st.integers(1, 12), structures=st.integers(1, 90))
def test_an_epoch_is_a_permutation(counts: list[int], seed: int, epoch: int, shards: int, structures: int) -> None:
    n = sum(counts)
    got = order_of(counts, seed, Window(shards=shards, structures=structures)).at(np.arange(n), epoch)
    assert np.array_equal(np.sort(got), np.arange(n))


@settings(max_examples=60, deadline=None)
@given(counts=COUNTS, seed=SEEDS, world_size=st.integers(1, 7), batch=st.integers(1, 64), data=st.data())
def test_ranks_are_balanced_and_a_resume_on_others_goes_on(
    counts: list[int], seed: int, world_size: int, batch: int, data: st.DataObject
) -> None:
    """The pieces of any number of ranks, joined, are the sequence; what follows any position does not depend on it."""
    n = sum(counts)
    whole = order_of(counts, seed).at(np.arange(n), 4)
    low = data.draw(st.integers(0, n - 1))
    at = np.arange(low, min(low + batch, n))
    later = order_of(counts, seed)  # nothing is carried over from the run before
    pieces = [later.at(partition(at, rank, world_size), 4) for rank in range(world_size)]
    assert np.array_equal(np.concatenate(pieces), whole[at])
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(1, 30), min_size=25, max_size=60), seed=SEEDS)
def test_a_window_mixes_ten_shards_and_64_structures_and_is_done_before_the_next(counts: list[int], seed: int) -> None:
    order = order_of(counts, seed)
    n, given_layout = sum(counts), layout(counts)
    shards = order.shards_at(np.arange(n), 0)
    last = {s: p for p, s in enumerate(shards.tolist())}
    windows, first = [], 0
    while first < n:  # a window ends where no shard met so far comes again
        end = first
        while True:
            reach = max(last[s] for s in set(shards[first : end + 1].tolist()))
            if reach == end:
                break
            end = reach
        windows.append(set(shards[first : end + 1].tolist()))
        first = end + 1
    joined = set().union(*windows)
    assert sum(map(len, windows)) == len(joined) == len(counts), "no shard is needed in two windows"
    bounds = order._epoch(0).windows
    for low, high in pairwise(bounds):
        mixed = order._epoch(0).shards[low:high].tolist()
        assert len(mixed) >= 10
        assert len({x for s in mixed for x in given_layout.structures[s]}) >= 64
        assert high - low <= 20 or high == len(counts)


@settings(max_examples=60, deadline=None)
@given(counts=COUNTS, seed=SEEDS, data=st.data())
def test_shards_are_known_in_order_of_need(counts: list[int], seed: int, data: st.DataObject) -> None:
    order, n = order_of(counts, seed), sum(counts)
    start, count = data.draw(st.integers(0, n)), data.draw(st.integers(0, n + 5))
    need = [f"s{s}" for s in order.shards_at(np.arange(start, min(start + count, n)), 2).tolist()]
    assert list(accesses(order, 2, start, count)) == list(dict.fromkeys(need))


def test_the_order_of_version_1_never_changes() -> None:
    """Checkpoints of old runs depend on these numbers; another order needs another ORDER_VERSION."""
    assert ORDER_VERSION == 1
    order = order_of([3, 5, 4, 6] * 8, seed=2026)
    assert order.at(np.arange(12), 0).tolist() == [3, 13, 124, 58, 62, 60, 46, 92, 65, 45, 112, 37]
    assert order.at(np.arange(12), 1).tolist() == [121, 5, 21, 56, 42, 25, 52, 55, 124, 49, 87, 86]


def test_memory_is_for_shards_not_for_samples() -> None:
    """10^9 samples in two million shards: what a position costs does not depend on how many samples there are."""
    shards = 2_000
    peaks = []
    for per_shard in (10, 500_000):  # 2·10^4 and 10^9 samples
        counts = np.full(shards, per_shard)
        many = ShardLayout(ids=range(shards), counts=counts, structures=[(s,) for s in range(shards)])  # type: ignore[arg-type]
        tracemalloc.start()
        order = SampleOrder(int(counts.sum()), seed=0, window=Window(), layout=many)
        got = order.at(np.arange(256) + order.n_samples // 2, 0)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(np.unique(got)) == 256
    assert peaks[1] < 1.2 * peaks[0] < 2_000_000


def test_the_sampler_records_the_window(tmp_path: Path) -> None:
    data = ShardDataset(make_dataset(tmp_path / "d", "t" * 12))
    window = Window(shards=3, structures=1)
    one = GlobalSampler(data, rank=0, world_size=1, global_batch=8, seed=3, window=window)
    batches = list(one)
    assert sorted(i for b in batches for i in b) == list(range(48))
    assert len({i // 4 for b in batches[:1] for i in b}) <= 3
    one.commit(16)
    two = [GlobalSampler(data, rank=r, world_size=2, global_batch=8, seed=3, window=window) for r in range(2)]
    for sampler in two:
        sampler.load_state_dict(one.state_dict())
    assert [a + b for a, b in zip(*map(list, two), strict=True)] == batches[2:]
    for other in (None, Window(shards=4, structures=1)):
        sampler = GlobalSampler(data, rank=0, world_size=1, global_batch=8, seed=3, window=other)
        with pytest.raises(UsageError, match=r"window \[3, 1\] then"):
            sampler.load_state_dict(one.state_dict())


def test_a_checkpoint_from_before_there_were_windows_goes_on(tmp_path: Path) -> None:
    data = ShardDataset(make_dataset(tmp_path / "d", "tt"))
    sampler = GlobalSampler(data, rank=0, world_size=1, global_batch=4, seed=3)
    state = sampler.state_dict()
    del state["window"]
    sampler.load_state_dict(state)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="0 shards"):
        Window(shards=0)
    with pytest.raises(UsageError, match="needs to know the shards"):
        SampleOrder(10, seed=0, window=Window())
    with pytest.raises(UsageError, match="10 samples in the shards, expected 11"):
        SampleOrder(11, seed=0, layout=layout([10]))
    with pytest.raises(UsageError, match="does not know the shards"):
        list(accesses(SampleOrder(10, seed=0), 0, 0, 1))
    with pytest.raises(ValueError, match=r"expected 0\.\.9"):
        order_of([10]).at(np.array([10]), 0)


def test_the_prefetcher_follows_the_window(tmp_path: Path) -> None:
    data = ShardDataset(make_dataset(tmp_path / "d", "t" * 12))
    sampler = GlobalSampler(data, rank=0, world_size=1, global_batch=8, seed=3, window=Window(shards=3, structures=1))
    need = [data.data.record_of(i)[0].shard_id for batch in sampler for i in batch]
    assert list(AccessOrder.of(data.data, sampler).accesses(0)) == need
