"""Training through a cache that is smaller than the data set is the same training."""

from __future__ import annotations

from pathlib import Path

import pytest
import train_data
import train_launch

from exitwave.ingest import load_manifest
from exitwave.ingest.errors import UsageError
from exitwave.ingest.events import read_events
from exitwave.train.run import read_curve
from exitwave.train.spec import TrainSpec
from exitwave.train.trainer import train


def test_a_streamed_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    data = train_data.make_dataset(tmp_path / "set", train=4, val=1, test=1, per_material=6)
    manifest = load_manifest(data)
    largest = max(shard.nbytes for shard in manifest.shards)
    capacity = sum(s.nbytes for s in manifest.by_split("train")) - largest // 2
    cache = tmp_path / "cache"
    spec = TrainSpec.model_validate({**train_launch.SPEC, "batch": 1, "steps": 12})
    with pytest.raises(UsageError, match="capacity of 1 bytes is too small: expected at least"):
        train(spec, data=data, out=tmp_path / "plain", threads=1, cache=cache, cache_capacity=1)
    train(spec, data=data, out=tmp_path / "plain", threads=1)
    train(spec, data=data, out=tmp_path / "streamed", threads=1, cache=cache, cache_capacity=capacity)
    losses = [[event["loss"] for event in read_curve(tmp_path / run)] for run in ("plain", "streamed")]
    assert losses[0] == losses[1] and len(losses[0]) == 12
    events = read_events(tmp_path / "streamed" / "events.jsonl")
    assert [e["kind"] for e in events].count("cache_stager") == 1
    (read,) = [e for e in events if e["kind"] == "cache_read"]
    assert read["hits"] + read["misses"] >= 12
    ready = list((cache / manifest.header.dataset_id / "ready").iterdir())
    assert 0 < sum(path.stat().st_size for path in ready) <= capacity
