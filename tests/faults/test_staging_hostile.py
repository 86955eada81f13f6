"""A cache in bad hands: folders that vanish, disks that fail, sources that go away and come back, readers at once."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ingest_samples import flip_bit, make_dataset, sample

from exitwave.ingest import GlobalSampler, ShardDataset, Window, load_manifest, open_dataset, stage
from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import hash_file
from exitwave.ingest.prefetch import Prefetcher
from exitwave.ingest.prefetch_order import AccessOrder
from exitwave.ingest.records import ShardRecord
from exitwave.ingest.staging_copy import Copy, run_copy
from exitwave.ingest.staging_home import CacheHome
from exitwave.ingest.staging_plan import CachePlanner
from exitwave.ingest.staging_run import Limits, StagingRun
from exitwave.ingest.staging_sources import StorageSource
from exitwave.ingest.storage import PosixStorage
from exitwave.ingest.windows import SampleOrder, ShardLayout


def home_of(root: Path, cache: Path) -> CacheHome:
    return CacheHome(cache, load_manifest(root).header)


def wait_for(what: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def prefetcher_of(root: Path, cache: Path, **options: Any) -> Prefetcher:
    data = ShardDataset(root)
    sampler = GlobalSampler(data, rank=0, world_size=1, global_batch=4, seed=5)
    return Prefetcher(root, cache, AccessOrder.of(data.data, sampler), **options)


# --- readers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["cbed", "uid"])
def test_a_damaged_copy_in_a_cache_that_is_not_ours_to_write(tmp_path: Path, where: str) -> None:
    """It cannot be set aside; the data set itself is read, and nobody meets an error or goes round for ever."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    root, cache = make_dataset(tmp_path / "d", "tt"), tmp_path / "cache"
    stage(root, cache)
    shard = load_manifest(root).shards[0]
    flip_bit(home_of(root, cache).ready_path(shard.shard_id), shard.extent(where).offset + 5)
    os.chown(home_of(root, cache).path, 12345, 12345)
    os.chown(home_of(root, cache).ready, 12345, 12345)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 0o5 != 0o5 and folder.stat().st_uid == os.geteuid() and "pytest" in str(folder):
            folder.chmod(0o755)
    if not all(folder.stat().st_mode & 0o1 for folder in tmp_path.parents):
        pytest.skip("the tests' folder is closed to other users")
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            os.setuid(65534)
            with pytest.warns(UserWarning, match="cannot be set aside"):
                data = open_dataset(root, cache=cache)
                for i in (0, 1, 4, 0):
                    assert np.array_equal(data[i]["cbed"], sample(i // 4, i % 4)[2]["cbed"])
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_sampler_and_a_prefetcher_ask_for_epochs_at_the_same_time() -> None:
    counts = np.full(12, 3)
    layout = ShardLayout(ids=[f"{i}" for i in range(12)], counts=counts, structures=[(i,) for i in range(12)])
    order = SampleOrder(36, seed=1, window=Window(shards=3, structures=1), layout=layout)
    wrong: list[BaseException] = []

    def ask(first: int) -> None:
        try:
            for k in range(4000):
                order._epoch(first + k % 2)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=ask, args=(first,)) for first in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong
    assert sorted(order.at(np.arange(36), 2).tolist()) == list(range(36))


# --- the cache's own disk -----------------------------------------------------------------------------------------


def test_a_cache_removed_under_a_stager_is_told_and_made_anew(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "t" * 6), tmp_path / "cache"
    calls = iter(range(10**6))

    def stop() -> bool:
        if next(calls) == 4:
            shutil.rmtree(cache, ignore_errors=True)
        return False

    with pytest.raises(UsageError, match=r"the folder is gone.*Run the same command again"):
        stage(root, cache, stop=stop, limits=Limits(in_flight=1))
    assert stage(root, cache).shards == 6


def test_a_streaming_cache_that_is_removed_is_made_anew(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "t" * 6), tmp_path / "cache"
    with prefetcher_of(root, cache, capacity_bytes=None) as prefetcher:
        wait_for(lambda: len(list(prefetcher.home.ready.glob("*.h5"))) == 6)
        while prefetcher.home.path.exists():
            shutil.rmtree(cache, ignore_errors=True)
        prefetcher.advance(0, 4)
        wait_for(lambda: len(list(prefetcher.home.ready.glob("*.h5"))) == 6)


def test_the_cache_disk_is_not_taken_for_the_data_set(tmp_path: Path) -> None:
    """A descriptor that cannot be written stands for a disk that fails."""
    root = make_dataset(tmp_path / "d", "t")
    (tmp_path / "part").touch()
    shard = load_manifest(root).shards[0]
    source = StorageSource(PosixStorage(root))
    copy = Copy(
        shard=shard, source=source, part=tmp_path / "part", fd=os.open(tmp_path / "part", os.O_RDONLY), digest=None
    )
    ended: list[Copy] = []
    run_copy(copy, ended.append, lambda: False)
    assert ended == [copy] and copy.disk_error is not None and not copy.error and copy.digest is None


def test_strangers_in_the_folders_of_a_cache(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "ttt"), tmp_path / "cache"
    stage(root, cache)
    home = home_of(root, cache)
    (home.ready / "folder.h5").mkdir()
    (home.ready / "dangling.h5").symlink_to(tmp_path / "nowhere")
    (home.part / "folder").mkdir()
    size = load_manifest(root).shards[0].nbytes
    assert stage(root, cache, capacity_bytes=2 * size, partial=True).evicted == 1
    assert not list(home.part.iterdir())


def test_a_url_and_a_cache_that_is_a_file(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", "t")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="part of this path is a file"):
        stage(f"file://{root}", tmp_path / "file")


# --- sources that come back ---------------------------------------------------------------------------------------


def test_a_source_that_was_away_is_asked_again(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "t" * 6), tmp_path / "cache"
    events: list[str] = []
    limits = Limits(missing_deadline_s=0.2, damaged_s=0.5)
    (root / "shards").rename(root / "away")
    with prefetcher_of(
        root, cache, capacity_bytes=None, limits=limits, emit=lambda kind, **f: events.append(kind)
    ) as prefetcher:
        wait_for(lambda: events.count("cache_source_damaged") >= 6)
        (root / "away").rename(root / "shards")
        wait_for(lambda: len(list(prefetcher.home.ready.glob("*.h5"))) == 6)


def test_a_last_copy_may_go_once_its_source_is_back(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "tt"), tmp_path / "cache"
    stage(root, cache)
    shards = load_manifest(root).shards
    there = {"source": False}
    planner = CachePlanner({}, capacity_bytes=shards[0].nbytes)
    for shard in shards:
        planner.found(shard.shard_id, shard.nbytes)
    run = StagingRun(
        home_of(root, cache), shards, planner, StorageSource(PosixStorage(root)), limits=Limits(),
        emit=lambda kind, **fields: None, stop=lambda: False, diagnose=lambda shard: [],
        obtainable=lambda shard: there["source"],
    )  # fmt: skip
    planner.needs([shards[0].shard_id])
    run.turn(0.0)
    assert run.counts.evicted == 0 and planner.irreplaceable
    there["source"] = True
    run.recheck_last_copies()
    run.turn(0.0)
    assert run.counts.evicted == 1 and not planner.irreplaceable
    run.close()


def test_bytes_of_a_copy_that_was_given_up_are_counted(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "t"), tmp_path / "cache"
    shard = load_manifest(root).shards[0]
    release = threading.Event()

    class Stalling(PosixStorage):
        stalled = False

        def open(self, path: str) -> Any:
            reader, storage = super().open(path), self

            class Some:
                def readinto(self, view: memoryview, offset: int) -> int:
                    if offset and not storage.stalled:
                        storage.stalled = True
                        release.wait(20)
                    return reader.readinto(view[:4096], offset)

                def close(self) -> None:
                    reader.close()

            return Some()

    home = home_of(root, cache)
    home.make()
    planner = CachePlanner({shard.shard_id: shard.nbytes})
    planner.needs([shard.shard_id])
    run = StagingRun(
        home, [shard], planner, StorageSource(Stalling(root)), limits=Limits(stall_s=0.2, stall_bytes_per_s=1e3),
        emit=lambda kind, **fields: None, stop=lambda: False, diagnose=lambda shard: [],
    )  # fmt: skip
    deadline = time.monotonic() + 20
    while not planner.complete():
        assert time.monotonic() < deadline
        run.turn(0.05)
    release.set()
    run.close()
    assert run.counts.from_source == shard.nbytes + 4096
    assert hash_file(home.ready_path(shard.shard_id)) == shard.xxh3_128


# --- the prefetcher's thread --------------------------------------------------------------------------------------


def test_a_prefetcher_survives_what_nobody_thought_of(tmp_path: Path) -> None:
    """Also a log that cannot be written: its own telling must not end it."""
    root, cache = make_dataset(tmp_path / "d", "t" * 6), tmp_path / "cache"
    told: list[str] = []

    def emit(kind: str, **fields: Any) -> None:
        told.append(kind)
        if len(told) < 3:
            raise KeyError("a fault of its own")

    with prefetcher_of(root, cache, capacity_bytes=None, emit=emit) as prefetcher:
        wait_for(lambda: len(list(prefetcher.home.ready.glob("*.h5"))) == 6)


def test_looking_ahead_stops_where_the_cache_ends() -> None:
    """Through a window the last shard of an epoch comes at its end: 10^8 samples are not walked through to see it."""
    shards, n = 5000, 20_000
    layout = ShardLayout(
        ids=[f"{i}" for i in range(shards)], counts=np.full(shards, n), structures=[(i,) for i in range(shards)]
    )
    order = SampleOrder(shards * n, seed=1, window=Window(), layout=layout)
    access = AccessOrder(
        ids=layout.ids, starts=np.arange(shards + 1) * n, n_samples=shards * n, samples_per_epoch=shards * n,
        global_batch=64, seed=1, order=order,
    )  # fmt: skip
    sizes = dict.fromkeys(layout.ids, 1000)
    began = time.perf_counter()
    ahead = access.upcoming(0, 0, sizes=sizes, at_most_bytes=200_000)
    assert 200 < len(ahead) < 400
    assert time.perf_counter() - began < 10


def test_a_record_of_a_damaged_source_is_left_for_people(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "tt"), tmp_path / "cache"
    shard: ShardRecord = load_manifest(root).shards[0]
    flip_bit(root / shard.path, shard.extent("cbed").offset)
    with pytest.raises(Exception, match=shard.shard_id):
        stage(root, cache)
    record = json.loads((home_of(root, cache).quarantine / f"{shard.shard_id}.json").read_bytes())
    assert record["bad"] and record["shard"] == shard.shard_id
