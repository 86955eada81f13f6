"""Atomic files, temporary names and locks."""

from __future__ import annotations

import multiprocessing
import multiprocessing.synchronize
import os
import subprocess
import sys
import time
from pathlib import Path

import crc32c
import google_crc32c
import numpy as np
import pytest
import xxhash

from exitwave.ingest import files
from exitwave.ingest.errors import DamagedDataError


def test_hashes_are_those_of_the_libraries(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 9_000_000, dtype=np.uint8)
    (tmp_path / "f").write_bytes(data.tobytes())
    assert files.hash_file(tmp_path / "f") == xxhash.xxh3_128_hexdigest(data.tobytes())
    assert files.crc32c(data) == google_crc32c.value(data.tobytes())
    assert files.crc32c(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283  # RFC 3720, B.4's check value
    assert data.flags.writeable


@pytest.mark.parametrize("n", [0, 1, 63, 64, 255, 256, 4095, 5121, (1 << 20) + 7])
def test_checksums_are_the_same_by_either_library(n: int) -> None:
    """From every start within a cache line, and in pieces."""
    data = np.random.default_rng(n).integers(0, 256, n + 64, dtype=np.uint8)
    for start in (0, 1, 7, 63):
        part = data[start : start + n]
        expected = crc32c.crc32c(part.tobytes())
        assert files.crc32c(part) == files.crc32c_more(part.data, 0) == expected
        head = files.crc32c_more(part[: n // 3].data, 0)
        assert files.crc32c_more(part[n // 3 :].data, head) == expected


def test_write_atomic_replaces_and_leaves_nothing(tmp_path: Path) -> None:
    for content in (b"old", b"new"):
        files.write_atomic(tmp_path / "f", content)
    assert (tmp_path / "f").read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_publish_names_adopts_and_never_replaces(tmp_path: Path) -> None:
    final = tmp_path / "final"
    for content, new in ((b"same", True), (b"same", False)):
        (tmp_path / "tmp").write_bytes(content)
        assert files.publish(tmp_path / "tmp", final) is new
        assert [p.name for p in tmp_path.iterdir()] == ["final"]
    (tmp_path / "tmp").write_bytes(b"other")
    with pytest.raises(DamagedDataError, match="other bytes"):
        files.publish(tmp_path / "tmp", final)
    assert final.read_bytes() == b"same"


def test_sweep_takes_the_parts_of_the_dead_only(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from exitwave.ingest.files import part_path; "
    code += "p = part_path(Path(sys.argv[1]), 'shard.h5'); p.touch(); print(p)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    dead = Path(done.stdout.strip())
    mine = files.part_path(tmp_path, "shard.h5")
    pieces = dead.name.rsplit(".", 3)
    elsewhere = tmp_path / ".".join([pieces[0], "another_host", *pieces[2:]])
    recycled = tmp_path / ".".join([*pieces[:2], f"{os.getpid()}-1", "part"])  # our pid, but born at another time
    for path in (mine, elsewhere, recycled, tmp_path / "shard.h5"):
        path.touch()
    assert sorted(files.sweep_parts(tmp_path)) == sorted([dead, recycled])
    assert sorted(tmp_path.iterdir()) == sorted([mine, elsewhere, tmp_path / "shard.h5"])


def _hold(path: Path, ready: multiprocessing.synchronize.Event) -> None:
    with files.FileLock(path):
        ready.set()
        time.sleep(60)


def test_a_lock_excludes_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    child = context.Process(target=_hold, args=(tmp_path / "lock", ready), daemon=True)
    child.start()
    assert ready.wait(30)
    with pytest.raises(files.LockHeldError, match=f"pid {child.pid}"), files.FileLock(tmp_path / "lock"):
        pass
    child.kill()
    child.join()
    with files.FileLock(tmp_path / "lock") as lock:
        assert f"pid {os.getpid()}" in lock.holder()
        assert files.FileLock(tmp_path / "lock").acquire() is False
    assert files.FileLock(tmp_path / "lock").acquire() is True
