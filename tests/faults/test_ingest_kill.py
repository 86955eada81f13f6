"""SIGKILL, the real one, at every state of writing, committing and staging: nothing half-written is ever seen.

A child process sends itself the signal at a chosen system call. After each kill the data set must load, every file
under a final name must be whole, and running the same work again must end as if nothing had happened, with the very
bytes of a run that was never killed.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ingest_samples import make_dataset, shard_id, write_shard

from exitwave.ingest import load_manifest, stage, verify_dataset
from exitwave.ingest.events import read_events
from exitwave.ingest.files import hash_file, shard_path
from exitwave.ingest.shard_check import find_published

CHILD = Path(__file__).parents[1] / "support" / "ingest_child.py"
NEW = 7


def child(verb: str, dataset: Path, argument: object, point: str) -> int:
    command = [sys.executable, str(CHILD), verb, str(dataset), str(argument), point]
    quiet = subprocess.DEVNULL if point != "never" else None
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=quiet).returncode


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("reference")
    return hash_file(root / write_shard(root, NEW).path)


def check_after_write(root: Path, reference: str, *, committed: bool | None = None) -> None:
    manifest = load_manifest(root)
    tasks = [shard.task for shard in manifest.shards]
    assert tasks in ([0], [0, NEW])
    if committed is not None:
        assert (NEW in tasks) is committed
    if (root / shard_path(shard_id(NEW))).exists():
        assert find_published(root, shard_id(NEW)) is not None
        assert hash_file(root / shard_path(shard_id(NEW))) == reference
    assert verify_dataset(root).ok


def finish_write(root: Path, reference: str) -> None:
    assert child("write", root, NEW, "never") == 0
    check_after_write(root, reference, committed=True)
    assert load_manifest(root).torn_tail is False
    assert list((root / "shards" / ".part").iterdir()) == []
    assert [p.name for p in root.rglob("*.h5")].count(f"{shard_id(NEW)}.h5") == 1
    assert all(event["kind"] == "shard_committed" for event in read_events(root / "events.jsonl"))


# In the order in which they come: four samples of two fields, then four tables, are eleven pwrites (the lock's is not
# among them); publish is fsync, link, unlink; the commit is one write and an fsync; the event another.
WRITE_POINTS = {
    "space not yet reserved": ("posix_fallocate:1:before", False),
    "in the middle of a sample": ("pwrite:4:half", False),
    "samples written, tables not": ("pwrite:9:before", False),
    "file whole but not synced": ("fsync:1:before", False),
    "before it is linked": ("link:1:before", False),
    "linked, temporary name still there": ("link:1:after", False),
    "linked, folder not synced": ("fsync:2:before", False),
    "before the manifest's line": ("write:1:before", False),
    "half a line in the manifest": ("write:1:half", False),
    "line written but not synced": ("write:1:after", True),
    "committed, half an event": ("write:2:half", True),
}


@pytest.mark.parametrize("point", WRITE_POINTS, ids=lambda p: p.replace(" ", "-"))
def test_killed_while_writing_a_shard(tmp_path: Path, reference: str, point: str) -> None:
    root = make_dataset(tmp_path / "d", "t")
    call, committed = WRITE_POINTS[point]
    assert child("write", root, NEW, call) == -signal.SIGKILL
    check_after_write(root, reference, committed=committed)
    finish_write(root, reference)


def test_two_kills_in_a_row(tmp_path: Path, reference: str) -> None:
    root = make_dataset(tmp_path / "d", "t")
    for point in ("link:1:after", "write:1:half"):
        assert child("write", root, NEW, point) == -signal.SIGKILL
        check_after_write(root, reference, committed=False)
    assert load_manifest(root).torn_tail
    finish_write(root, reference)


# `pwrite` is of a chunk of 4096 bytes, by one of several copies in flight.
STAGE_POINTS = {
    "nothing made yet": "mkdir:3:after",
    "lock taken, data set not written down": "rename:1:before",
    "space not yet reserved": "posix_fallocate:1:before",
    "space reserved": "posix_fallocate:1:after",
    "first chunk": "pwrite:2:half",
    "in mid copy": "pwrite:5:half",
    "all bytes there but not synced": "fdatasync:1:before",
    "synced but not verified": "fdatasync:1:after",
    "verified but not ready": "rename:2:before",
    "ready, folder not synced": "rename:2:after",
    "one ready, another in mid copy": "rename:3:before",
    "all ready": "rename:4:after",
}


def check_ready(root: Path, cache: Path) -> int:
    shards = {shard.shard_id: shard for shard in load_manifest(root).shards}
    ready = list((cache / "tiny" / "ready").glob("*"))
    for path in ready:
        assert hash_file(path) == shards[path.stem].xxh3_128, "being under ready/ means verified"
    return len(ready)


@pytest.mark.parametrize("point", STAGE_POINTS, ids=lambda p: p.replace(" ", "-"))
def test_killed_while_staging(tmp_path: Path, point: str) -> None:
    root, cache = make_dataset(tmp_path / "d", "tve"), tmp_path / "cache"
    assert child("stage", root, cache, STAGE_POINTS[point]) == -signal.SIGKILL
    before = check_ready(root, cache)
    report = stage(root, cache)
    assert check_ready(root, cache) == 3
    assert report.bytes_reused == sum(s.nbytes for s in load_manifest(root).shards[:before]), "no byte copied twice"
    assert list((cache / "tiny" / "part").iterdir()) == []
    assert list((cache / "tiny" / "quarantine").iterdir()) == []


EVICT_POINTS = {
    "nothing evicted": "unlink:1:before",
    "name gone, space not yet": "ftruncate:2:before",  # the first one is the lock's
    "one evicted": "ftruncate:2:after",
    "in the second eviction": "unlink:2:after",
}


@pytest.mark.parametrize("point", EVICT_POINTS, ids=lambda p: p.replace(" ", "-"))
def test_killed_while_evicting(tmp_path: Path, point: str) -> None:
    root, cache = make_dataset(tmp_path / "d", "tvet"), tmp_path / "cache"
    stage(root, cache)
    assert child("trim", root, cache, EVICT_POINTS[point]) == -signal.SIGKILL
    assert check_ready(root, cache) in (2, 3, 4)
    assert child("trim", root, cache, "never") == 0
    assert check_ready(root, cache) == 2
    assert stage(root, cache).bytes_reused == sum(s.nbytes for s in load_manifest(root).shards[:2])
    assert check_ready(root, cache) == 4


@pytest.mark.long
def test_killed_at_any_moment(tmp_path: Path, reference: str) -> None:
    """Two hundred kills at random times, the work going on after each until it is done."""
    rng = random.Random(11)
    kills, longest = 0, {"write": 0.05, "stage": 0.02}
    while kills < 200:
        root, cache = make_dataset(tmp_path / f"d{kills}", "t"), tmp_path / f"c{kills}"
        for verb, argument in (("write", NEW), ("stage", cache)):
            while True:
                command = [sys.executable, str(CHILD), verb, str(root), str(argument), "never"]
                with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
                    assert process.stdout is not None
                    assert process.stdout.readline() == b"ready\n"
                    time.sleep(rng.uniform(0, longest[verb]))
                    process.kill()
                if process.returncode == 0:
                    longest[verb] *= 0.9  # the machine is faster than thought: kill earlier
                    break
                longest[verb] *= 1.03
                kills += 1
                check_after_write(root, reference)
                if verb == "stage" and (cache / "tiny" / "ready").exists():
                    check_ready(root, cache)
        finish_write(root, reference)
        assert check_ready(root, cache) == 2
