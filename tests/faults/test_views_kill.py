"""Kills and full disks in export, ingest, subset, merge and migrate: nothing half-written, the same command goes on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from views_data import FIELDS, make_views_dataset, tree, write_task

from exitwave.ingest import load_manifest, open_dataset, verify_dataset
from exitwave.ingest.errors import InterruptedRunError
from exitwave.ingest.manifest import ManifestWriter
from exitwave.ingest.migrate import dataset_version

OLD = Path(__file__).resolve().parents[1] / "data" / "dataset-version-1"
MAP = """
fields: {cbed: {array: /c, axes: [sample, Ry, Rx, Qy, Qx]}}
parameters: {energy_keV: 200}
shard_bytes: 9000
"""
# The verb's own code in a process of its own, which kills itself where `N` units are done.
CHILD = """
import os, signal, sys
from exitwave.workflows import verbs_views
from exitwave.workflows.cli import run
at, arguments = int(sys.argv[1]), sys.argv[2:]
feeding = verbs_views._feeding
def deadly(feed):
    emit = feeding(feed)
    def told(kind, **fields):
        emit(kind, **fields)
        if fields["done"] >= at:
            os.kill(os.getpid(), signal.SIGKILL)
    return told
verbs_views._feeding = deadly
sys.exit(run(arguments))
"""


def run_cli(*arguments: str | Path, kill_at: int | None = None) -> subprocess.CompletedProcess[str]:
    first = [sys.executable, "-c", CHILD, str(10**9 if kill_at is None else kill_at)]
    return subprocess.run([*first, *map(str, arguments)], capture_output=True, text=True, timeout=120)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_views_dataset(tmp_path / "d", "ttve")


def foreign(path: Path) -> Path:
    with h5py.File(path, "w") as file:
        file["c"] = np.random.default_rng(3).random((6, 3, 4, 8, 6)).astype("f4")
    return path


def some_long(*verbs: str, long: tuple[str, ...]) -> pytest.MarkDecorator:
    """All of them by `make test-long`, the first few always."""
    return pytest.mark.parametrize("verb", [*verbs, *(pytest.param(v, marks=pytest.mark.long) for v in long)])


@some_long("hspy", "subset", "ingest", "migrate", long=("zarr", "webdataset", "merge"))
def test_killed_in_mid_way_then_again(source: Path, tmp_path: Path, verb: str) -> None:
    out = tmp_path / "out"
    command: list[Any] = ["export", source, "--format", verb, "--out", out]
    if verb == "subset":
        command = ["subset", source, "--where", "defocus_A < 15", "--out", out]
    elif verb == "merge":
        second = make_views_dataset(tmp_path / "e", "tt", name="e", first=10)
        command = ["merge", source, second, "--out", out]
    elif verb == "ingest":
        (tmp_path / "map.yaml").write_text(MAP)
        command = ["ingest", foreign(tmp_path / "f.h5"), "--map", tmp_path / "map.yaml", "--out", out]
    elif verb == "migrate":
        out = Path(shutil.copytree(OLD, out))
        command = ["migrate", out]
    before = tree(source), tree(out) if out.exists() else None
    killed = run_cli(*command, kill_at=4)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tree(out) if out.exists() else None) == before[1]
    again = run_cli(*command)
    assert again.returncode == 0, again.stderr
    assert tree(source) == before[0]
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".") or p.name.endswith(".migrated")]
    if verb in ("subset", "merge", "ingest", "migrate"):
        assert verify_dataset(out).ok
        expected = {"subset": 8, "merge": 18, "ingest": 6, "migrate": open_dataset(OLD).__len__()}[verb]
        assert len(open_dataset(out)) == expected
    if verb == "migrate":
        assert dataset_version(out) > 1 and tree(tmp_path / "out.version-1") == before[1]
    if verb == "hspy":
        assert len(list(out.iterdir())) == 12


def test_ctrl_c_between_samples_exits_75(source: Path, tmp_path: Path) -> None:
    code = CHILD.replace("signal.SIGKILL)", "signal.SIGINT)").replace('fields["done"] >= at', 'fields["done"] == at')
    command = ["export", str(source), "--format", "hspy", "--out", str(tmp_path / "out")]
    stopped = subprocess.run([sys.executable, "-c", code, "4", *command], capture_output=True, text=True, timeout=120)
    assert stopped.returncode == 75, stopped.stderr
    assert "run the same command again" in stopped.stderr and "Traceback" not in stopped.stderr
    assert not (tmp_path / "out").exists()
    assert run_cli(*command).returncode == 0 and len(list((tmp_path / "out").iterdir())) == 12


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 KiB."""
    path = tmp_path / "small"
    path.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(path)]).returncode:
        pytest.skip("mounting a small file system needs root")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@some_long("hspy", "subset", long=("emd", "zarr", "webdataset", "ingest"))
def test_a_full_disk_is_an_interruption(tmp_path: Path, small_disk: Path, verb: str) -> None:
    source = make_views_dataset(tmp_path / "d", "t" * 16, n=3)
    out = small_disk / "out"
    command: list[Any] = ["export", source, "--format", verb, "--out", out]
    if verb == "subset":
        command = ["subset", source, "--where", "defocus_A < 15", "--out", out]
    elif verb == "ingest":
        with h5py.File(tmp_path / "f.h5", "w") as file:
            file["c"] = np.random.default_rng(3).random((80, 3, 4, 8, 6)).astype("f4")
        (tmp_path / "map.yaml").write_text(MAP)
        command = ["ingest", tmp_path / "f.h5", "--map", tmp_path / "map.yaml", "--out", out]
    full = run_cli(*command)
    assert full.returncode == 75, (full.stdout, full.stderr)
    assert "disk is full" in full.stderr or "no space left" in full.stderr
    assert "Traceback" not in full.stderr and not out.exists()
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    again = run_cli(*command)
    assert again.returncode == 0, again.stderr
    assert [p.name for p in small_disk.iterdir()] == ["out"]
    if verb in ("subset", "ingest"):
        assert verify_dataset(out).ok and len(open_dataset(out)) == {"subset": 32, "ingest": 80}[verb]


@pytest.mark.parametrize("compression", ["bitshuffle-lz4", "blosc2-zstd"])
def test_a_compressed_shard_meets_a_full_disk(small_disk: Path, compression: str) -> None:
    root = make_views_dataset(small_disk / "d", "t", n=1)
    before = tree(root)
    with pytest.raises(InterruptedRunError, match="no space left"):
        write_task(root, 5, n=200, compression=compression)
    assert tree(root) == before
    with ManifestWriter(root, epoch=2) as writer:  # there is still room for less
        writer.commit(write_task(root, 6, n=2, compression=compression), split="train", producer={})
    assert verify_dataset(root).ok and len(load_manifest(root).shards) == 2 and FIELDS


def test_two_builders_of_one_target(source: Path, tmp_path: Path) -> None:
    """The second is refused at once, naming the first."""
    hold = "print('holding', flush=True); import time; time.sleep(60)"
    code = CHILD.replace("os.kill(os.getpid(), signal.SIGKILL)", hold)
    command = ["export", str(source), "--format", "hspy", "--out", str(tmp_path / "out")]
    first = subprocess.Popen([sys.executable, "-c", code, "2", *command], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None and first.stdout.readline() == "holding\n"
        second = run_cli(*command)
        assert second.returncode == 2 and "held by another process" in second.stderr
    finally:
        first.kill()
        first.wait()
    time.sleep(0.1)
    assert run_cli(*command).returncode == 0
