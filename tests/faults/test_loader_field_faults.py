"""Faults that users of other loaders met in the field, each tried on ours; the number is that of the public report.

Those of staging and caches stand with the staging tests; 2 -> 3 -> 1 ranks in `test_loader_ranks_resume`.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ingest_samples import flip_bit, make_dataset, sample
from torch.utils.data import DataLoader

from exitwave.ingest import GlobalSampler, ShardDataset, collate, load_manifest, open_shards
from exitwave.ingest.errors import DamagedDataError
from exitwave.ingest.manifest import ManifestWriter
from exitwave.ingest.schema import FieldSpec

FORK: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork", "prefetch_factor": 2}
HERE: dict[str, Any] = {"num_workers": 0}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("faults") / "d", "t" * 6, n=5)


def sampler_for(data: ShardDataset, **more: Any) -> GlobalSampler:
    return GlobalSampler(data, **{"rank": 0, "world_size": 1, "global_batch": 4, "seed": 2, **more})


def epoch(data: Any, sampler: GlobalSampler, options: dict[str, Any] = HERE, *, steps: int | None = None) -> list[int]:
    """The uids of an epoch, or of its next `steps`, each committed."""
    found: list[int] = []
    for k, batch in enumerate(DataLoader(data, batch_sampler=sampler, collate_fn=collate, **options)):  # type: ignore[arg-type]
        if k == steps:
            break
        found += batch["uid"].numpy().view(np.uint64).tolist()
        left = sampler.samples_per_epoch - sampler.committed
        sampler.commit(min(sampler.global_batch, left))
    return found


def test_streaming_652_memory_does_not_grow_with_the_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_shards, "MAX_OPEN", 8)
    data = ShardDataset(make_dataset(tmp_path / "d", "t" * 72, n=2))
    ours = [tracemalloc.Filter(True, f"{Path(open_shards.__file__).parent}/*")]  # not what threads of other tests take
    tracemalloc.start()
    held = []
    for first in range(0, 144, 24):  # twelve shards at a time
        data.__getitems__(list(range(first, first + 24)))
        gc.collect()
        snapshot = tracemalloc.take_snapshot().filter_traces(ours)
        held.append(sum(trace.size for trace in snapshot.traces))
    tracemalloc.stop()
    assert len(data.data._files._open) == 8
    assert held[-1] < held[0] * 1.1 + 4096, "the sixth dozen of shards takes no more than the first"


@pytest.mark.parametrize("options", [HERE, FORK], ids=["here", "fork"])
def test_streaming_880_a_resume_in_mid_epoch_does_not_start_at_0(root: Path, options: dict[str, Any]) -> None:
    data = ShardDataset(root)
    expected = epoch(data, sampler_for(data))
    first = sampler_for(data)
    begun = epoch(data, first, options, steps=3)
    second = sampler_for(data)
    second.load_state_dict(first.state_dict())
    assert begun + epoch(data, second, options) == expected


def test_litdata_316_the_epoch_after_a_restore_is_the_right_one(root: Path) -> None:
    data = ShardDataset(root)
    whole = sampler_for(data)
    expected = [epoch(data, whole) for _ in range(3)]
    assert expected[0] != expected[1] != expected[2]
    first = sampler_for(data)
    epoch(data, first)
    epoch(data, first, steps=2)
    restored = sampler_for(data)
    restored.load_state_dict(first.state_dict())
    assert restored.epoch == 1
    assert epoch(data, restored) == expected[1][8:]
    assert epoch(data, restored) == expected[2]


def test_datasets_8308_the_second_resume_does_not_restart_from_the_beginning(root: Path) -> None:
    data = ShardDataset(root)
    expected = epoch(data, sampler_for(data))
    found: list[int] = []
    state = None
    for _ in range(3):
        sampler = sampler_for(data)
        if state is not None:
            sampler.load_state_dict(state)
        found += epoch(data, sampler, steps=2)
        state = sampler.state_dict()
    assert found == expected[: len(found)]
    assert len(found) == 24


def test_webdataset_158_an_exact_epoch_has_no_duplicates(root: Path) -> None:
    """Over three ranks with two workers each, and a tail that does not divide: every sample once."""
    data = ShardDataset(root)
    found = [
        uid
        for rank in range(3)
        for uid in epoch(data, sampler_for(data, rank=rank, world_size=3, global_batch=7, tail="keep"), FORK)
    ]
    assert sorted(found) == sorted(data.data.uids.tolist())


def test_streaming_447_one_bad_sample_does_not_make_ranks_uneven(tmp_path: Path) -> None:
    """Nobody skips it alone: the rank that meets it stops by name; a tombstone takes the shard out for all ranks."""
    root = make_dataset(tmp_path / "d", "t" * 4)
    shard = load_manifest(root).shards[2]
    flip_bit(root / shard.path, shard.extent("cbed").place(1)[0])
    data = ShardDataset(root)
    samplers = [sampler_for(data, rank=rank, world_size=2) for rank in range(2)]
    assert len(samplers[0]) == len(samplers[1]) == 4
    stopped = 0
    for sampler in samplers:
        try:
            epoch(data, sampler)
        except DamagedDataError as error:
            stopped += 1
            assert f"shard {shard.shard_id}, sample 1 (uid {sample(2, 1)[0]:#018x}), cbed" in str(error)
    assert stopped == 1
    with ManifestWriter(root, epoch=1) as writer:
        writer.tombstone(shard.shard_id, "a bit flipped")
    data = ShardDataset(root)
    found = [epoch(data, sampler_for(data, rank=rank, world_size=2)) for rank in range(2)]
    assert [len(uids) for uids in found] == [6, 6]


def test_pytorch_25162_validation_is_not_padded(root: Path) -> None:
    """30 samples over four ranks, PyTorch's own sampler sees 32: a sum over the ranks is that over the samples."""
    data = ShardDataset(root)
    expected = sum(float(data[i]["potential"].sum(dtype=np.float64)) for i in range(len(data)))
    total, seen, steps = 0.0, 0, set()
    for rank in range(4):
        sampler = sampler_for(data, rank=rank, world_size=4, global_batch=8, tail="keep", shuffle=False)
        batches = list(DataLoader(data, batch_sampler=sampler, collate_fn=collate))  # type: ignore[arg-type]
        steps.add(len(batches))
        seen += sum(len(batch["uid"]) for batch in batches)
        total += sum(float(batch["potential"].double().sum()) for batch in batches)
    assert seen == len(data) == 30
    assert total == pytest.approx(expected, rel=1e-12)
    assert steps == {4}, "as many steps on each rank"


def test_h5py_2584_forked_workers_while_threads_read(tmp_path: Path) -> None:
    """Four threads read, each batch with helpers of its own, while workers are forked: none waits for a lost lock."""
    big = (FieldSpec(name="cbed", dtype="float32", shape=(16, 16, 32, 32), axes=("Ry", "Rx", "Qy", "Qx"), unit="1"),)
    data = ShardDataset(make_dataset(tmp_path / "d", "tt", n=6, fields=big), fields=("cbed",), threads=2)
    stop = threading.Event()
    wrong: list[BaseException] = []

    def read() -> None:
        try:
            while not stop.is_set():
                batch = data.__getitems__([0, 5, 7, 11])
                assert batch[3]["uid"] == sample(1, 5, big)[0]
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            sampler = sampler_for(data)
            loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate, timeout=60, **FORK)  # type: ignore[arg-type]
            assert sum(len(batch["uid"]) for batch in loader) == 12
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill"])
def test_streaming_781_nothing_is_left_in_shared_memory_and_the_next_start_works(root: Path, how: int) -> None:
    code = (
        "import sys\n"
        "from torch.utils.data import DataLoader\n"
        "from exitwave.ingest import ShardDataset, GlobalSampler, collate\n"
        "data = ShardDataset(sys.argv[1])\n"
        "while True:\n"
        "    sampler = GlobalSampler(data, rank=0, world_size=1, global_batch=4, seed=0)\n"
        "    for batch in DataLoader(data, batch_sampler=sampler, collate_fn=collate, num_workers=2,\n"
        "                            multiprocessing_context='fork'):\n"
        "        print(len(batch['uid']), flush=True)\n"
    )
    before = _of_torch()
    for _ in range(2):
        command = [sys.executable, "-c", code, str(root)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
        assert child.stdout is not None
        for _ in range(9):
            assert child.stdout.readline() == b"4\n", "also after the one before was stopped"
        if how == signal.SIGKILL:
            os.killpg(child.pid, how)  # as a scheduler ends a job: all of it at once
        else:
            os.kill(child.pid, how)
        child.wait(30)
        child.stdout.close()
    deadline = time.monotonic() + 10
    while (left := _of_torch() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def _of_torch() -> set[str]:
    """Others on the machine may use shared memory meanwhile."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("torch_", "exitwave"))}
