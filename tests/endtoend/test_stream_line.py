"""The whole line on two ranks through a streaming cache."""

from __future__ import annotations

from pathlib import Path

import line
import pytest

from exitwave.ingest import load_manifest
from exitwave.ingest.events import read_events

pytestmark = pytest.mark.long


def test_a_pipeline_that_streams(tmp_path: Path) -> None:
    sections = "stage: {mode: stream, capacity: 10MB}\ntrain:\n"
    done = line.exitwave("run", line.write_pipeline(tmp_path, ("train:\n", sections)), "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    events = read_events(tmp_path / "run" / "train" / "events.jsonl")
    kinds = [event["kind"] for event in events]
    assert kinds.count("cache_stager") == 1, "one of the two ranks stages"
    (read,) = [event for event in events if event["kind"] == "cache_read"]
    assert read["hits"] > 0
    shards = load_manifest(tmp_path / "run" / "dataset").shards
    ready = list((tmp_path / "run" / "cache").glob("*/ready/*.h5"))
    assert {path.stem for path in ready} <= {shard.shard_id for shard in shards} and ready
    again = line.exitwave("run", tmp_path / "pipeline.yaml", "--out", tmp_path / "run")
    assert again.returncode == 0, again.stderr


def test_a_capacity_below_two_batches_is_refused_by_the_training(tmp_path: Path) -> None:
    pipeline = line.write_pipeline(tmp_path)
    done = line.exitwave("simulate", pipeline, "--out", tmp_path / "d", "--quiet")
    assert done.returncode == 0, done.stderr
    train = ["train", pipeline, "--data", tmp_path / "d", "--out", tmp_path / "r"]
    done = line.exitwave(*train, "--cache", tmp_path / "c", "--cache-capacity", "1kB")
    assert done.returncode == 2 and "capacity of 1000 bytes is too small: expected at least" in done.stderr, done.stderr
    done = line.exitwave(*train, "--cache-capacity", "1kB")
    assert done.returncode == 2 and "name its folder with --cache" in done.stderr
