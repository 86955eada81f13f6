"""A writer process commits shards while a reader trains on them: held back, resumed, and done again exactly."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ingest_samples import make_dataset, sample
from torch.utils.data import DataLoader

from exitwave.ingest import collate
from exitwave.ingest.errors import InterruptedRunError, UsageError
from exitwave.ingest.growing import BACKPRESSURE_NAME, GrowingDataset, ReservoirSampler, held_back
from exitwave.ingest.manifest import ManifestWriter, load_manifest

SUPPORT = Path(__file__).resolve().parents[1] / "support"
SETTINGS: dict[str, Any] = {"global_batch": 4, "seed": 11, "capacity": 12, "watermark": 6}


def sampler_for(root: Path, **more: Any) -> ReservoirSampler:
    return ReservoirSampler(GrowingDataset(root), **{"rank": 0, "world_size": 1, **SETTINGS, **more})


def train(sampler: ReservoirSampler, *, workers: int = 0, pause_s: float = 0.0) -> list[list[int]]:
    """The uids of each batch; each is checked against what the writer wrote, and committed."""
    found = []
    options: dict[str, Any] = {"num_workers": workers}
    if workers:
        options |= {"multiprocessing_context": "fork", "prefetch_factor": 3}
    source: Any = sampler.dataset
    for batch in DataLoader(source, batch_sampler=sampler, collate_fn=collate, **options):  # type: ignore[arg-type]
        uids = batch["uid"].numpy().view(np.uint64).tolist()
        for k, uid in enumerate(uids):
            task, row = (uid - (1 << 63)) >> 32, uid & 0xFFFF
            assert np.array_equal(batch["potential"][k].numpy(), sample(task, row)[2]["potential"])
        sampler.commit(SETTINGS["global_batch"])
        found.append(uids)
        time.sleep(pause_s)
    return found


def produce(root: Path, first: int, last: int, pause_s: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(SUPPORT / "ingest_producer.py"), str(root), str(first), str(last), str(pause_s)]
    return subprocess.Popen(command, cwd=SUPPORT, env={"PYTHONPATH": str(SUPPORT), "PATH": "/usr/bin:/bin"})


@pytest.mark.parametrize("workers", [0, 2])
def test_training_over_shards_that_arrive_and_again_from_the_log(tmp_path: Path, workers: int) -> None:
    root = make_dataset(tmp_path / "d", "tv")  # four samples for training: below the watermark
    writer = produce(root, 2, 14, 0.05)
    try:
        sampler = sampler_for(root, steps=80)
        held = False
        first = []
        while not first:
            first = train(sampler, workers=workers, pause_s=0.02)
            held = held or (root / BACKPRESSURE_NAME).exists()
    finally:
        writer.wait(60)
    assert writer.returncode == 0
    assert len(load_manifest(root).shards) == 14
    state = pickle.loads(pickle.dumps(sampler.state_dict()))
    assert state["step"] == 80
    assert len(state["log"]) > 2, "it saw the data set grow"
    assert held_back(root) is None, "nobody waits for a trainer that has ended"
    seen = {uid for batch in first for uid in batch}
    assert len(seen) > SETTINGS["capacity"], "more than fit at once"
    assert sum(n for n in sampler.reuse().values()) >= len(seen)

    again = sampler_for(root, steps=80, replay=state)
    assert train(again) == first, "all has long arrived, and the run is the same"
    resumed = sampler_for(root, steps=80, replay=state)
    halves = []
    for _, batch in zip(range(30), resumed, strict=False):
        halves.append(batch)
        resumed.commit(4)
    other = sampler_for(root, steps=80, replay=state)
    other.load_state_dict(resumed.state_dict())
    assert train(other) == first[30:], "resumed twice removed, it goes on"


def test_ranks_draw_pieces_of_one_batch(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", "ttt")
    whole = list(sampler_for(root, steps=9))
    told: list[int] = []

    def first_rank(seq: int) -> int:
        told.append(seq)
        return seq

    batches = [list(sampler_for(root, rank=0, world_size=3, steps=9, agree=first_rank))]
    for rank in (1, 2):
        answers = iter(told)
        batches.append(list(sampler_for(root, rank=rank, world_size=3, steps=9, agree=lambda _, a=answers: next(a))))
    assert [a + b + c for a, b, c in zip(*batches, strict=True)] == whole
    with pytest.raises(UsageError, match="several ranks need `agree`"):
        sampler_for(root, world_size=2)


def test_producers_are_held_back_and_let_go(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", "t" * 5)
    assert held_back(root) is None
    batches = iter(sampler_for(root, capacity=6, watermark=6))
    next(batches)
    why = held_back(root)
    assert why == "14 samples wait for a place among 6 not yet seen"
    for _ in range(60):
        next(batches)
    assert held_back(root) is None, "all is in by now"
    next(iter(batches))
    path = root / BACKPRESSURE_NAME
    path.write_text(json.dumps({"hold": True, "why": "x", "time": time.time() - 100}))
    assert held_back(root) is None, "a trainer that died holds nobody"
    path.write_text("{")
    assert held_back(root) is None
    assert "bytes free, expected" in str(held_back(root, min_free_bytes=1 << 62))


def test_too_little_arrived(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", "t")
    with pytest.raises(InterruptedRunError, match="4 samples arrived, expected 6 to begin with"):
        next(iter(sampler_for(root, wait_s=0.1, poll_s=0.02)))
    ended = sampler_for(root, steps=3, all_arrived=lambda: True)
    assert [len(set(batch)) for batch in ended] == [4, 4, 4], "the campaign is over: what there is must do"


def test_a_run_over_other_shards_is_refused(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", "ttt")
    sampler = sampler_for(root, steps=5)
    for _ in sampler:
        sampler.commit(4)
    state = sampler.state_dict()
    with pytest.raises(UsageError, match="capacity 12 then, 13 now"):
        sampler_for(root, capacity=13).load_state_dict(state)
    with ManifestWriter(root, epoch=1) as writer:
        writer.tombstone(load_manifest(root).shards[1].shard_id, "damaged")
    with pytest.raises(UsageError, match="shards_digest"):
        sampler_for(root).load_state_dict(state)
    with pytest.raises(UsageError, match="commit of 3 samples"):
        sampler.commit(3)
