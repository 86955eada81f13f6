"""A cache smaller than the data set: ahead of the reader, within its capacity, and never in its way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ingest_samples import flip_bit, make_dataset, sample

from exitwave.ingest import GlobalSampler, ShardDataset, load_manifest, open_dataset, stage
from exitwave.ingest.errors import DamagedDataError, UsageError
from exitwave.ingest.files import FileLock
from exitwave.ingest.prefetch import Prefetcher, minimum_capacity
from exitwave.ingest.prefetch_order import AccessOrder
from exitwave.ingest.staging_home import CacheHome

CHILD = Path(__file__).parents[1] / "support" / "ingest_stream.py"
SHARDS = 20


def wait_for(what: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def on_disk(home: CacheHome) -> int:
    """Bytes of all copies, whole or on their way."""
    total = 0
    for folder in (home.ready, home.part):
        for path in folder.iterdir():
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue
    return total


def opened(root: Path, cache: Path, *, batch: int = 8) -> tuple[ShardDataset, GlobalSampler, AccessOrder]:
    data = ShardDataset(root, cache=cache)
    sampler = GlobalSampler(data, rank=0, world_size=1, global_batch=batch, seed=5)
    return data, sampler, AccessOrder.of(data.data, sampler)


def test_epochs_through_a_cache_of_three_quarters(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "t" * SHARDS), tmp_path / "cache"
    data, sampler, order = opened(root, cache)
    size = load_manifest(root).shards[0].nbytes
    events: list[tuple[str, dict[str, Any]]] = []
    capacity = 18 * size
    seen: list[int] = []
    with Prefetcher(
        root, cache, order, capacity_bytes=capacity, emit=lambda kind, **f: events.append((kind, f))
    ) as prefetcher:
        wait_for(lambda: len(list(prefetcher.home.ready.iterdir())) == 18)
        for _ in range(3):
            for indices in sampler:
                batch = data.__getitems__(indices)
                for k, i in enumerate(indices):
                    assert np.array_equal(batch.stacked["cbed"][k], sample(i // 4, i % 4)[2]["cbed"])
                seen += indices
                sampler.commit(8)
                prefetcher.advance(sampler.epoch, sampler.committed)
                assert on_disk(prefetcher.home) <= capacity
                time.sleep(0.05)
    assert sorted(seen) == sorted(3 * list(range(4 * SHARDS)))
    kinds = [kind for kind, _ in events]
    assert kinds[0] == "cache_stager" and "cache_stager_failed" not in kinds
    assert "cache_evicted" in kinds and "cache_ready" in kinds
    counts = data.data.cache_counts()
    assert counts["hits"] > 5 * counts["misses"]


def test_what_is_not_there_is_read_from_the_data_set(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "ttt"), tmp_path / "cache"
    stage(root, cache)
    home = CacheHome(cache, load_manifest(root).header)
    data = open_dataset(root, cache=cache)
    assert np.array_equal(data[0]["cbed"], sample(0, 0)[2]["cbed"])
    for shard in load_manifest(root).shards:
        assert home.evict(shard.shard_id)  # also the one that is open
    for i in (0, 1, 5, 9):
        assert np.array_equal(data[i]["cbed"], sample(i // 4, i % 4)[2]["cbed"])
    assert not list(home.quarantine.iterdir()), "evicted is not damaged"
    assert data.cache_counts()["misses"] >= 3
    stage(root, cache)
    before = data.cache_counts()["hits"]
    data[1]
    assert data.cache_counts()["hits"] > before, "back in the cache, it is read there again"


def test_a_shard_on_its_way_is_waited_for_so_long_and_no_longer(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "tt"), tmp_path / "cache"
    data = open_dataset(root, cache=cache, cache_wait_s=0.3)
    began = time.monotonic()
    assert np.array_equal(data[0]["cbed"], sample(0, 0)[2]["cbed"])
    assert 0.25 < time.monotonic() - began < 5
    assert data.cache_counts() == {"hits": 0, "misses": 1, "waits": 1} or data.cache_counts()["waits"] >= 1


def test_a_capacity_below_the_window_is_refused_with_the_minimum(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "t" * SHARDS), tmp_path / "cache"
    _, _, order = opened(root, cache, batch=4)
    sizes = {s.shard_id: s.nbytes for s in load_manifest(root).shards}
    needed = minimum_capacity(order, sizes)
    assert 2 * max(sizes.values()) < needed < sum(sizes.values())
    with pytest.raises(UsageError, match=f"expected at least {needed} bytes for the shards that two batches"):
        Prefetcher(root, cache, order, capacity_bytes=needed - 1)
    Prefetcher(root, cache, order, capacity_bytes=needed)


def test_a_cache_smaller_than_a_shard_is_refused_and_nobody_hangs(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "t" * 4), tmp_path / "cache"
    _, _, order = opened(root, cache, batch=1)
    with pytest.raises(UsageError, match="too small"):
        Prefetcher(root, cache, order, capacity_bytes=load_manifest(root).shards[0].nbytes - 1)
    with pytest.raises(UsageError, match="too small"):
        stage(root, cache, capacity_bytes=1)


def test_a_damaged_source_is_told_and_met_by_its_reader_only(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "t" * 6), tmp_path / "cache"
    shard = load_manifest(root).shards[2]
    flip_bit(root / shard.path, shard.extent("cbed").offset + 3)
    data, _, order = opened(root, cache)
    events: list[str] = []
    with Prefetcher(root, cache, order, capacity_bytes=None, emit=lambda kind, **f: events.append(kind)) as prefetcher:
        wait_for(lambda: "cache_source_damaged" in events)
        wait_for(lambda: len(list(prefetcher.home.ready.iterdir())) == 5)
        assert np.array_equal(data[0]["cbed"], sample(0, 0)[2]["cbed"])
        with pytest.raises(DamagedDataError, match=shard.shard_id):
            data[8]
    assert "cache_stager_failed" not in events


def test_a_copy_that_a_reader_sets_aside_is_made_again(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "t" * 4), tmp_path / "cache"
    stage(root, cache)
    shard = load_manifest(root).shards[1]
    data, _, order = opened(root, cache)
    home = CacheHome(cache, load_manifest(root).header)
    flip_bit(home.ready_path(shard.shard_id), shard.extent("cbed").offset + 3)
    with Prefetcher(root, cache, order, capacity_bytes=None) as prefetcher:
        wait_for(lambda: prefetcher.is_stager)
        with pytest.warns(UserWarning, match="set aside"):
            assert np.array_equal(data[4]["cbed"], sample(1, 0)[2]["cbed"])
        wait_for(lambda: home.ready_path(shard.shard_id).exists())
    assert len(list(home.quarantine.glob("*.h5"))) == 1


def test_another_process_takes_over_from_a_killed_stager(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "t" * SHARDS), tmp_path / "cache"
    size = load_manifest(root).shards[0].nbytes
    asked = {"dataset": str(root), "cache": str(cache), "capacity": 17 * size}
    first = subprocess.Popen([sys.executable, str(CHILD), json.dumps(asked)], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None and first.stdout.readline() == "stager\n"
    _, sampler, order = opened(root, cache)
    with Prefetcher(root, cache, order, capacity_bytes=17 * size) as second:
        time.sleep(0.5)
        assert not second.is_stager, "one stager a node"
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        wait_for(lambda: second.is_stager)
        sampler.commit(8)
        second.advance(sampler.epoch, sampler.committed)
        wait_for(lambda: len(list(second.home.ready.iterdir())) == 17)


def test_an_interrupted_stream_leaves_nothing_that_blocks_the_next(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "t" * SHARDS), tmp_path / "cache"
    asked = {"dataset": str(root), "cache": str(cache), "capacity": None}
    shared = set(Path("/dev/shm").iterdir())
    for _ in range(2):
        child = subprocess.Popen(
            [sys.executable, str(CHILD), json.dumps(asked)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert child.stdout is not None and child.stdout.readline() == "stager\n", "an existing cache hangs nobody"
        child.send_signal(signal.SIGINT)
        child.wait(20)
    assert set(Path("/dev/shm").iterdir()) <= shared
    home = CacheHome(cache, load_manifest(root).header)
    with FileLock(home.lock_path):
        pass
    assert stage(root, cache).shards == SHARDS


@settings(max_examples=50, deadline=None)
@given(
    n=st.integers(1, 7),
    rows=st.integers(1, 9),
    batch=st.integers(1, 6),
    world=st.integers(1, 4),
    epoch=st.integers(0, 3),
    data=st.data(),
)
def test_the_order_of_need_is_what_the_samplers_read(
    n: int, rows: int, batch: int, world: int, epoch: int, data: st.DataObject
) -> None:
    class Numbers:
        dataset_id, generation, split_name = "numbers", 0, None

        def n_samples_until(self, generation: int) -> int:
            return n * rows

        def digest_until(self, generation: int) -> str:
            return ""

    batch = max(batch, world)
    if batch > n * rows:
        return
    first = data.draw(st.integers(0, world - 1))
    last = data.draw(st.integers(first + 1, world))
    samplers = [
        GlobalSampler(Numbers(), rank=rank, world_size=world, global_batch=batch, seed=9) for rank in range(world)
    ]
    steps = samplers[0].steps_per_epoch
    start = data.draw(st.integers(0, steps - 1))
    order = AccessOrder(
        ids=[f"s{k}" for k in range(n)],
        starts=np.arange(n + 1) * rows,
        n_samples=n * rows,
        samples_per_epoch=samplers[0].samples_per_epoch,
        global_batch=batch,
        seed=9,
        ranks=(first, last),
        world_size=world,
    )
    for sampler in samplers:
        sampler.epoch, sampler.committed = epoch, start * batch
    batches = list(zip(*[list(samplers[rank]) for rank in range(first, last)], strict=True))
    expected = [i for ranks in batches for piece in ranks for i in piece]
    assert [i for piece in order.samples(epoch, start * batch) for i in piece.tolist()] == expected
    assert list(order.accesses(epoch, start * batch)) == [f"s{i // rows}" for i in expected]
    upcoming = order.upcoming(epoch, start * batch)
    assert len(set(upcoming)) == len(upcoming)
    soonest = [f"s{i}" for i in dict.fromkeys(i // rows for i in expected)]
    assert upcoming[: len(soonest)] == soonest
