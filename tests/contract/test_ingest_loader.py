"""The data set and the sampler under PyTorch's plain DataLoader, with every way of starting its workers.

One suite over 0 workers, fork, forkserver and spawn: the batches are the same, and prefetch running ahead of the
commits leaves no trace in the position.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ingest_samples import flip_bit, make_dataset, sample
from torch.utils.data import DataLoader

from exitwave.ingest import GlobalSampler, ShardDataset, collate, load_manifest, stage
from exitwave.ingest.errors import DamagedDataError, UsageError

WORKERS: dict[str, dict[str, Any]] = {
    "here": {"num_workers": 0},
    "fork": {"num_workers": 2, "multiprocessing_context": "fork", "prefetch_factor": 2},
    "forkserver": {"num_workers": 1, "multiprocessing_context": "forkserver"},
    "spawn": {"num_workers": 2, "multiprocessing_context": "spawn"},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("loader") / "d", "ttttte")


def sampler_for(data: ShardDataset, *, rank: int = 0, world_size: int = 1, **more: Any) -> GlobalSampler:
    return GlobalSampler(data, rank=rank, world_size=world_size, global_batch=6, seed=1, **more)


def uids(batch: dict[str, Any]) -> list[int]:
    return [int(u) for u in batch["uid"].numpy().view(np.uint64)]


@pytest.mark.parametrize("how", WORKERS)
def test_batches_are_right_and_prefetch_does_not_count(root: Path, how: str) -> None:
    data = ShardDataset(root, split="train")
    sampler = sampler_for(data)
    expected = [[int(data.data.uids[i]) for i in batch] for batch in sampler]
    data[0]  # open files in the parent, before the workers are made
    got, committed = [], []
    for batch in DataLoader(data, batch_sampler=sampler, collate_fn=collate, **WORKERS[how]):
        got.append(uids(batch))
        committed.append(sampler.committed)
        assert batch["cbed"].shape == (6, 2, 3, 8, 8)
        assert batch["cbed"].dtype == torch.float32
        assert batch["uid"].dtype == torch.int64
        for k, uid in enumerate(uids(batch)):
            task, row = (uid - (1 << 63)) >> 32, uid & 0xFFFF
            arrays = sample(task, row)[2]
            assert np.array_equal(batch["cbed"][k].numpy(), arrays["cbed"])
            assert np.array_equal(batch["potential"][k].numpy(), arrays["potential"])
            assert batch["params"]["energy_keV"][k] == 100 + task
        sampler.commit(6)
    assert got == expected
    assert len(got) == 3
    assert committed == [0, 6, 12]
    assert (sampler.epoch, sampler.committed) == (1, 0)


@pytest.mark.parametrize("how", ["here", "fork"])
def test_resumed_in_mid_epoch_on_two_ranks(root: Path, how: str) -> None:
    data = ShardDataset(root, split="train")
    whole = sampler_for(data)
    expected = [u for b in DataLoader(data, batch_sampler=whole, collate_fn=collate) for u in uids(b)]
    first = sampler_for(data)
    loader = iter(DataLoader(data, batch_sampler=first, collate_fn=collate, **WORKERS[how]))
    got = uids(next(loader))
    first.commit(6)  # workers are further on by now; only this was learnt
    state = pickle.loads(pickle.dumps(first.state_dict()))
    del loader
    pieces = []
    for rank in range(2):
        sampler = sampler_for(data, rank=rank, world_size=2)
        sampler.load_state_dict(state)
        assert len(sampler) == 2
        pieces.append([uids(b) for b in DataLoader(data, batch_sampler=sampler, collate_fn=collate, **WORKERS[how])])
    got += [u for step in zip(*pieces, strict=True) for piece in step for u in piece]
    assert got == expected


def test_evaluation_on_more_ranks_than_the_last_batch_has_samples(root: Path) -> None:
    data = ShardDataset(root, split="test", fields=("potential",))
    seen, batches = [], set()
    for rank in range(6):
        sampler = sampler_for(data, rank=rank, world_size=6, tail="keep", shuffle=False)
        got = [b for b in DataLoader(data, batch_sampler=sampler, collate_fn=collate)]
        batches.add(len(got))
        assert all(b["potential"].shape[1:] == (6, 5) for b in got), "also when this rank has none"
        seen += [u for b in got for u in uids(b)]
    assert sorted(seen) == sorted(data.data.uids.tolist())
    assert batches == {1}


def test_collate_copies_nothing_of_a_batched_read_and_stacks_a_list(root: Path) -> None:
    data = ShardDataset(root, fields=("cbed",))
    samples = data.__getitems__([3, 1])
    batch = collate(samples)
    assert batch["cbed"].data_ptr() == samples.stacked["cbed"].ctypes.data
    again = collate([data[3], data[1]])
    assert torch.equal(again["cbed"], batch["cbed"])
    assert torch.equal(again["uid"], batch["uid"])
    assert np.array_equal(again["params"], batch["params"])


def test_from_the_cache_without_the_source(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "tt"), tmp_path / "cache"
    stage(root, cache)
    for shard in load_manifest(root).shards:
        os.unlink(root / shard.path)  # noqa: PTH108
    data = ShardDataset(root, cache=cache)
    assert len(data) == 8
    assert np.array_equal(data[5]["cbed"], sample(1, 1)[2]["cbed"])


def test_damage_in_a_worker_reaches_the_trainer_by_name(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", "tt")
    shard = load_manifest(root).shards[0]
    flip_bit(root / shard.path, shard.extent("cbed").offset)
    data = ShardDataset(root)
    loader = DataLoader(data, batch_size=8, collate_fn=collate, **WORKERS["fork"])
    with pytest.raises(DamagedDataError, match=rf"shard {shard.shard_id}, sample 0 \(uid {sample(0, 0)[0]:#x}\), cbed"):
        list(loader)


def test_unknown_fields_and_splits_show_at_once(root: Path) -> None:
    with pytest.raises(UsageError, match="no field 'volume'"):
        ShardDataset(root, fields=("cbed", "volume"))
    with pytest.raises(UsageError, match="no split 'val'"):
        ShardDataset(root, split="val")
