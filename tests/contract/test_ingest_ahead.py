"""Reading one batch ahead, and torchdata's StatefulDataLoader: neither changes which sample comes when."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ingest_samples import flip_bit, make_dataset
from torch.utils.data import DataLoader

from exitwave.ingest import GlobalSampler, ShardDataset, collate, load_manifest
from exitwave.ingest import batches as batches_module
from exitwave.ingest.ahead import ReadAhead, with_ahead
from exitwave.ingest.errors import DamagedDataError


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("ahead") / "d", "ttttte")


@pytest.fixture(autouse=True)
def every_batch_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "_WORTH_A_THREAD", 1)


def uids(batch: dict[str, Any]) -> list[int]:
    return [int(u) for u in batch["uid"].numpy().view(np.uint64)]


def epoch_of(data: ShardDataset, **more: Any) -> tuple[GlobalSampler, DataLoader[Any]]:
    sampler = GlobalSampler(data, rank=0, world_size=1, global_batch=3, seed=1, **more)
    return sampler, DataLoader(data, batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]


class Read:
    """Counts and notes in which thread; a batch that holds -1 cannot be read."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], bool]] = []

    def __call__(self, numbers: Sequence[int]) -> list[int]:
        self.seen.append((list(numbers), threading.current_thread() is threading.main_thread()))
        if -1 in numbers:
            raise DamagedDataError("no such sample")
        return [10 * n for n in numbers]


def test_batches_know_the_next_one_and_only_that() -> None:
    given = list(with_ahead([[1], [2, 3], []]))
    assert given == [[1], [2, 3], []]
    walk = with_ahead([[1], [2], [3]])
    first = next(walk)
    assert first.ahead == [2]
    assert first.ahead is not None and first.ahead.ahead is None
    assert next(walk).ahead == [3]
    assert first.ahead is None
    last = next(walk)
    assert last.ahead is None
    sent = pickle.loads(pickle.dumps(given[1]))
    assert type(sent) is list and sent == [2, 3]


def test_what_was_begun_is_given_once_and_only_to_who_asks_for_it() -> None:
    read = Read()
    ahead = ReadAhead(read)
    ahead.begin([1, 2])
    assert ahead.get([1, 2]) == [10, 20]
    assert read.seen == [([1, 2], False)]
    ahead.begin([3])
    assert ahead.get([4]) == [40]
    assert ahead.get([3]) == [30]
    assert read.seen[-1] == ([3], True)
    ahead.begin([-1])
    assert ahead.get([5]) == [50]  # the error of a batch nobody asks for is nobody's
    ahead.begin([-1])
    with pytest.raises(DamagedDataError):
        ahead.get([-1])
    again = pickle.loads(pickle.dumps(ahead))
    assert again.get([6]) == [60]


def test_after_a_fork_the_child_reads_for_itself() -> None:
    started, release = threading.Event(), threading.Event()

    def slow(numbers: Sequence[int]) -> list[int]:
        if threading.current_thread() is not threading.main_thread():
            started.set()
            release.wait(20)
        return list(numbers)

    ahead = ReadAhead(slow)
    ahead.begin([7])
    assert started.wait(20)
    child = os.fork()
    if child == 0:
        os._exit(0 if ahead.get([7]) == [7] else 1)  # the thread that began it is not there
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        release.set()
    assert ahead.get([7]) == [7]


def test_an_epoch_is_the_same_and_was_read_ahead(root: Path) -> None:
    plain, ahead = ShardDataset(root, split="train"), ShardDataset(root, split="train", read_ahead=True)
    expected = [uids(b) for b in epoch_of(plain)[1]]
    reads: list[bool] = []
    original = ahead.data.read

    def read(indices: Sequence[int], fields: Sequence[str]) -> dict[str, Any]:
        reads.append(threading.current_thread() is threading.main_thread())
        return original(indices, fields)

    ahead.data.read = read  # type: ignore[method-assign]
    sampler, loader = epoch_of(ahead)
    got, kept = [], []
    for batch in loader:
        got.append(uids(batch))
        kept.append((batch["cbed"], batch["cbed"].clone()))
        assert sampler.committed == 3 * (len(got) - 1)
        sampler.commit(3)
    assert got == expected
    assert reads == [True] + [False] * (len(expected) - 1)
    assert all(bool((held == copy).all()) for held, copy in kept)  # no batch in use was written to


def test_a_damaged_sample_stops_the_epoch_at_its_own_batch(root: Path, tmp_path: Path) -> None:
    copy = make_dataset(tmp_path / "d", "ttttte")
    data = ShardDataset(copy, split="train", read_ahead=True)
    order = [i for batch in epoch_of(data)[0] for i in batch]
    record, row = data.data.record_of(order[7])  # of the third batch
    extent = record.extent("cbed")
    flip_bit(copy / record.path, extent.place(row)[0] + 5)
    assert load_manifest(copy).shards
    got = 0
    with pytest.raises(DamagedDataError, match=record.shard_id):
        for _ in epoch_of(data)[1]:
            got += 1
    assert got == 2


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 4])
def test_stateful_data_loader_goes_on_where_it_was(root: Path, workers: int, stop: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    data = ShardDataset(root, split="train", read_ahead=True)

    def loader_of() -> tuple[GlobalSampler, Any]:
        sampler = epoch_of(data)[0]
        options: dict[str, Any] = {"multiprocessing_context": "fork", "prefetch_factor": 2} if workers else {}
        return sampler, stateful.StatefulDataLoader(
            data, batch_sampler=sampler, collate_fn=collate, num_workers=workers, **options
        )

    def run(sampler: GlobalSampler, loader: Any, steps: int) -> list[list[int]]:
        got: list[list[int]] = []
        while len(got) < steps:
            for batch in loader:
                got.append(uids(batch))
                sampler.commit(3)
                if len(got) == steps:
                    break
        return got

    per_epoch = len(epoch_of(data)[0])
    expected = run(*loader_of(), 2 * per_epoch + 1)
    for first in (stop, per_epoch + stop):  # in the first epoch, and in the second
        sampler, loader = loader_of()
        got = run(sampler, loader, first)
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        sampler, loader = loader_of()
        loader.load_state_dict(state)
        got += run(sampler, loader, len(expected) - first)
        assert got == expected
        assert sampler.epoch == 2 and sampler.committed == 3
