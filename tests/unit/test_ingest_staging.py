"""Staging: each byte once, shared by the stagers of a node, stopped and resumed."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ingest_samples import make_dataset, write_shard

from exitwave.ingest import load_manifest, open_dataset, stage, staging_copy
from exitwave.ingest.errors import InterruptedRunError, UsageError
from exitwave.ingest.files import FileLock, hash_file
from exitwave.ingest.manifest import ManifestWriter
from exitwave.ingest.staging_run import Limits


def test_all_ready_then_nothing_to_do(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "tve"), tmp_path / "cache"
    manifest = load_manifest(root)
    events: list[tuple[str, dict[str, Any]]] = []
    report = stage(root, cache, emit=lambda kind, **fields: events.append((kind, fields)))
    assert (report.shards, report.bytes_copied, report.bytes_reused) == (3, manifest.nbytes, 0)
    for shard in manifest.shards:
        assert hash_file(cache / "tiny" / "ready" / f"{shard.shard_id}.h5") == shard.xxh3_128
    assert events[0] == ("stage_started", {"shards": 3, "bytes": 0, "total": manifest.nbytes})
    assert ("stage_progress", {"bytes": manifest.nbytes, "total": manifest.nbytes}) in events
    assert events[-1] == ("stage_finished", report.to_json())
    again = stage(root, cache)
    assert (again.shards, again.bytes_copied, again.bytes_reused) == (3, 0, manifest.nbytes)


def test_what_is_staged_is_read_without_the_source(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "t"), tmp_path / "cache"
    stage(root, cache)
    expected = open_dataset(root)[2]["cbed"]
    (root / load_manifest(root).shards[0].path).unlink()
    assert (open_dataset(root, cache=cache)[2]["cbed"] == expected).all()


def test_a_grown_data_set_is_topped_up_and_a_tombstone_evicted_when_room_is_needed(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "tt"), tmp_path / "cache"
    stage(root, cache)
    first = load_manifest(root).shards[0]
    with ManifestWriter(root, epoch=1) as writer:
        writer.commit(write_shard(root, 5), split="train", producer={})
        writer.tombstone(first.shard_id, "wrong")
    ready = cache / "tiny" / "ready"
    assert stage(root, cache).bytes_copied == first.nbytes  # all shards here have one size
    assert len(list(ready.iterdir())) == 3
    report = stage(root, cache, capacity_bytes=2 * first.nbytes)
    assert report.bytes_copied == 0
    assert sorted(p.stem for p in ready.iterdir()) == [s.shard_id for s in load_manifest(root).shards]


def test_capacity_below_the_data_set_is_refused_with_the_minimum(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "tt"), tmp_path / "cache"
    needed = load_manifest(root).nbytes
    with pytest.raises(UsageError, match=f"at least {needed} bytes"):
        stage(root, cache, capacity_bytes=needed - 1)
    assert list((cache / "tiny" / "ready").iterdir()) == []
    assert stage(root, cache, capacity_bytes=needed).shards == 2


@pytest.mark.parametrize("kind", ["event", "function"])
def test_stopped_in_mid_copy_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    root, cache = make_dataset(tmp_path / "d", "ttt"), tmp_path / "cache"
    monkeypatch.setattr(staging_copy, "CHUNK", 4096)
    size, event = load_manifest(root).shards[0].nbytes, threading.Event()
    real = os.pwrite

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if (root / "second").exists() and offset > size / 2:
            event.set()
        return real(fd, data, offset)

    def emit(kind: str, **fields: Any) -> None:
        if kind == "cache_ready":
            (root / "second").touch()

    monkeypatch.setattr(os, "pwrite", pwrite)

    with pytest.raises(InterruptedRunError, match="Run it again"):
        stage(root, cache, emit=emit, stop=event if kind == "event" else event.is_set, limits=Limits(in_flight=1))
    assert list((cache / "tiny" / "part").iterdir()) == []
    report = stage(root, cache)
    assert (report.bytes_reused, report.bytes_copied) == (size, 2 * size)


def test_several_stagers_copy_each_byte_once(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "ttttt"), tmp_path / "cache"
    reports = []
    threads = [threading.Thread(target=lambda: reports.append(stage(root, cache))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    nbytes = load_manifest(root).nbytes
    assert sum(r.bytes_copied for r in reports) == nbytes
    assert [r.bytes_copied + r.bytes_reused for r in reports] == [nbytes] * 4


def test_waiting_for_another_stager_can_be_stopped(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "t"), tmp_path / "cache"
    stage(root, cache)
    with FileLock(cache / "tiny" / "stager.lock"), pytest.raises(InterruptedRunError):
        stage(root, cache, stop=lambda: True)


def test_a_shard_that_appears_late_is_waited_for(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "t"), tmp_path / "cache"
    path = root / load_manifest(root).shards[0].path
    path.rename(tmp_path / "late")

    def appear() -> None:
        time.sleep(0.3)
        os.link(tmp_path / "late", path)

    thread = threading.Thread(target=appear)
    thread.start()
    assert stage(root, cache).shards == 1
    thread.join()


def test_a_cache_in_a_file_is_refused(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", "t")
    (tmp_path / "cache").touch()
    with pytest.raises(UsageError, match="is a file"):
        stage(root, tmp_path / "cache")


def test_who_waits_for_another_stager_is_told_for_whom(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "t"), tmp_path / "cache"
    stage(root, cache)
    heard: list[dict[str, Any]] = []
    stop = threading.Event()

    def emit(kind: str, **fields: Any) -> None:
        heard.append({"kind": kind, **fields})
        stop.set()

    with FileLock(cache / "tiny" / "stager.lock"), pytest.raises(InterruptedRunError, match="while another process"):
        stage(root, cache, emit=emit, stop=stop)
    assert len(heard) == 1 and f"pid {os.getpid()}" in heard[0]["holder"]
