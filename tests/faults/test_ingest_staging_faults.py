"""What goes wrong with caches, sources and their users: each row has one behaviour, and one clear message."""

from __future__ import annotations

import errno
import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ingest_samples import FIELDS, flip_bit, make_dataset, sample, write_shard

from exitwave.ingest import load_manifest, open_dataset, stage
from exitwave.ingest.errors import DamagedDataError, InterruptedRunError, UsageError
from exitwave.ingest.files import FileLock, hash_file
from exitwave.ingest.manifest import ManifestWriter, create_dataset
from exitwave.ingest.placement import shares
from exitwave.ingest.records import Header, ShardRecord
from exitwave.ingest.schema import FieldSpec
from exitwave.ingest.staging import Share
from exitwave.ingest.staging_home import CacheHome, pin
from exitwave.ingest.staging_plan import CachePlanner
from exitwave.ingest.staging_run import Limits, StagingRun
from exitwave.ingest.staging_sources import StorageSource
from exitwave.ingest.storage import PosixStorage, Reader, open_storage
from exitwave.workflows.staging import StageChoices, _peers, parse_share

LARGE = (FieldSpec(name="cbed", dtype="float32", shape=(8, 8, 32, 32)),)  # 256 KiB a sample


def home_of(root: Path, cache: Path) -> CacheHome:
    return CacheHome(cache, load_manifest(root).header)


def check_whole(root: Path, cache: Path) -> None:
    home = home_of(root, cache)
    for shard in load_manifest(root).shards:
        assert hash_file(home.ready_path(shard.shard_id)) == shard.xxh3_128
    assert not list(home.part.iterdir())


# --- the source ---------------------------------------------------------------------------------------------------


class Troubled(PosixStorage):
    """A storage with the troubles of a shared one: `trouble(path, offset)` may wait, raise, or change what is read."""

    def __init__(self, root: Path, trouble: Any) -> None:
        super().__init__(root)
        self.trouble = trouble

    def open(self, path: str) -> Reader:
        reader, trouble = super().open(path), self.trouble

        class Slow:
            def readinto(self, view: memoryview, offset: int) -> int:
                count = reader.readinto(view[:4096], offset)
                trouble(path, offset, view[:count])
                return count

            def close(self) -> None:
                reader.close()

        return Slow()


def run_with(root: Path, cache: Path, storage: PosixStorage, limits: Limits, seconds: float = 20.0) -> StagingRun:
    manifest, home = load_manifest(root), home_of(root, cache)
    home.make()
    planner = CachePlanner({s.shard_id: s.nbytes for s in manifest.shards})
    planner.needs(s.shard_id for s in manifest.shards)
    run = StagingRun(
        home,
        manifest.shards,
        planner,
        StorageSource(storage),
        limits=limits,
        emit=lambda kind, **fields: None,
        stop=lambda: False,
        diagnose=lambda shard: [],
    )
    deadline = time.monotonic() + seconds
    try:
        while not planner.complete():
            assert time.monotonic() < deadline
            run.turn(0.05)
    finally:
        run.close()
    return run


def test_a_source_that_stalls_is_left_and_asked_again(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", "ttt")
    stalled, release = [], threading.Event()

    def trouble(path: str, offset: int, data: memoryview) -> None:
        if offset >= 8192 and len(stalled) < 2:
            stalled.append(path)
            release.wait(30)  # as a read from a server that is gone

    limits = Limits(stall_s=0.3, stall_bytes_per_s=1e3)
    run = run_with(root, tmp_path / "cache", Troubled(root, trouble), limits)
    release.set()
    assert len(stalled) == 2 and run.counts.retries >= 2
    check_whole(root, tmp_path / "cache")


def test_bytes_that_change_on_the_way_are_copied_again(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", "ttt")
    hurt: set[str] = set()

    def trouble(path: str, offset: int, data: memoryview) -> None:
        if path not in hurt:
            hurt.add(path)
            data[0] ^= 1

    run = run_with(root, tmp_path / "cache", Troubled(root, trouble), Limits())
    assert run.counts.retries == 3
    check_whole(root, tmp_path / "cache")


def test_a_source_that_fails_for_a_while_is_tried_again(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", "tt")
    until = time.monotonic() + 0.6

    def trouble(path: str, offset: int, data: memoryview) -> None:
        if time.monotonic() < until:
            raise OSError(errno.ESTALE, "Stale file handle", path)

    run_with(root, tmp_path / "cache", Troubled(root, trouble), Limits(missing_deadline_s=10))
    check_whole(root, tmp_path / "cache")
    until = time.monotonic() + 99
    with pytest.raises(DamagedDataError, match="Stale file handle"):
        run_with(root, tmp_path / "other", Troubled(root, trouble), Limits(missing_deadline_s=0.2))


def test_a_damaged_source_is_skipped_by_a_tombstone_only(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "ttt"), tmp_path / "cache"
    shard = load_manifest(root).shards[1]
    flip_bit(root / shard.path, shard.extent("cbed").offset)
    for _ in range(2):
        with pytest.raises(DamagedDataError, match=rf"shard {shard.shard_id} is damaged.*sample uid 0x"):
            stage(root, cache)
    record = json.loads((home_of(root, cache).quarantine / f"{shard.shard_id}.json").read_text())
    assert record["bad"][0]["uid"] == sample(1, 0)[0]
    with ManifestWriter(root, epoch=1) as writer:
        writer.tombstone(shard.shard_id, "damaged")
    assert stage(root, cache).shards == 2
    check_whole(root, cache)


# --- the disk -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_is_made_room_on_by_what_was_set_aside_and_is_in_no_need(tmp_path: Path, small_disk: Path) -> None:
    root = make_dataset(tmp_path / "d", "ttt", n=3, fields=LARGE)  # 2.3 MB
    home = home_of(root, small_disk)
    home.make()
    (home.quarantine / "old.h5").write_bytes(bytes(2 << 20))
    assert stage(root, small_disk).shards == 3
    check_whole(root, small_disk)
    first = load_manifest(root).shards[0]
    with ManifestWriter(root, epoch=1) as writer:
        writer.tombstone(first.shard_id, "wrong")
        for task in (7, 8, 9):
            writer.commit(write_shard(root, task, n=3, fields=LARGE), split="train", producer={})
    report = stage(root, small_disk)  # 3.9 MB: fits once the shard of the tombstone is gone
    assert (report.shards, report.evicted) == (5, 1)
    check_whole(root, small_disk)


def test_a_disk_that_stays_full_ends_it_with_what_fits_and_the_rest_is_read_from_the_data_set(
    tmp_path: Path, small_disk: Path
) -> None:
    root = make_dataset(tmp_path / "d", "t" * 7, n=3, fields=LARGE)
    with pytest.raises(InterruptedRunError, match="no space left"):
        stage(root, small_disk)
    home = home_of(root, small_disk)
    assert 3 <= len(list(home.ready.iterdir())) <= 5 and not list(home.part.iterdir())
    data = open_dataset(root, cache=small_disk)
    for task in range(7):
        assert np.array_equal(data[3 * task]["cbed"], sample(task, 0, LARGE)[2]["cbed"])


# --- the cache ----------------------------------------------------------------------------------------------------


def test_the_data_set_itself_is_never_evicted(tmp_path: Path) -> None:
    """A cache limit must not delete the only copy there is: eviction reaches below `ready/` only."""
    root = make_dataset(tmp_path / "d", "tttt")
    sizes = [s.nbytes for s in load_manifest(root).shards]
    stage(root, tmp_path)  # the cache beside the data set
    with ManifestWriter(root, epoch=1) as writer:
        for shard in load_manifest(root).shards[:2]:
            writer.tombstone(shard.shard_id, "wrong")
    report = stage(root, tmp_path, capacity_bytes=sum(sizes[2:]))
    assert report.evicted == 2
    assert len(list(root.rglob("*.h5"))) == 4


def test_the_last_copy_of_a_shard_is_never_evicted(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "tttt"), tmp_path / "cache"
    stage(root, cache)
    shards = load_manifest(root).shards
    (root / shards[3].path).unlink()  # what the capacity would evict first
    events: list[str] = []
    size = shards[0].nbytes
    report = stage(root, cache, capacity_bytes=2 * size, partial=True, emit=lambda kind, **f: events.append(kind))
    assert (report.shards, report.evicted, events.count("cache_last_copy")) == (2, 1, 1)
    assert np.array_equal(open_dataset(root, cache=cache)[12]["cbed"], sample(3, 0)[2]["cbed"])


def test_what_a_reader_holds_is_not_evicted(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "tt"), tmp_path / "cache"
    stage(root, cache)
    home, shard = home_of(root, cache), load_manifest(root).shards[0]
    fd = os.open(home.ready_path(shard.shard_id), os.O_RDONLY)
    assert pin(fd)
    assert not home.evict(shard.shard_id)
    assert os.pread(fd, shard.nbytes, 0) == (root / shard.path).read_bytes()
    os.close(fd)  # as the kernel does for a process that is killed
    assert home.evict(shard.shard_id)
    assert home.evict(shard.shard_id), "gone already"


def test_evicting_frees_the_space_under_a_reader_that_has_the_file_open(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "t"), tmp_path / "cache"
    stage(root, cache)
    home, shard = home_of(root, cache), load_manifest(root).shards[0]
    fd = os.open(home.ready_path(shard.shard_id), os.O_RDONLY)
    assert home.evict(shard.shard_id)
    assert os.fstat(fd).st_blocks == 0 and not pin(fd)
    os.close(fd)


def test_an_existing_cache_is_used_and_trimmed_to_a_smaller_capacity(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "tttt"), tmp_path / "cache"
    stage(root, cache)
    size = load_manifest(root).shards[0].nbytes
    report = stage(root, cache, capacity_bytes=2 * size, partial=True)
    assert (report.shards, report.bytes_copied, report.evicted) == (2, 0, 2)
    assert len(list(home_of(root, cache).ready.iterdir())) == 2


def test_two_data_sets_of_one_name_are_told_apart(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "tt"), tmp_path / "cache"
    stage(root, cache)
    other = tmp_path / "e"
    create_dataset(other, Header(dataset_id="tiny", campaign_hash="another", fields=FIELDS, name="another"))
    with pytest.raises(UsageError, match=r"another data set of the same name, tiny & small .*Choose another --cache"):
        stage(other, cache)
    with pytest.raises(UsageError, match="another data set of the same name"):
        open_dataset(other, cache=cache)
    moved = tmp_path / "moved"
    shutil.copytree(root, moved)
    assert stage(moved, cache).bytes_copied == 0, "a copy of the data set is the same data set"


def test_two_files_of_one_name_do_not_overwrite_each_other(tmp_path: Path) -> None:
    """Shards lie under their ids, which are hashes of what they are, whatever their files are called."""
    roots = [make_dataset(tmp_path / "d", "tt"), tmp_path / "e"]
    create_dataset(roots[1], Header(dataset_id="small", campaign_hash="c", fields=FIELDS))
    with ManifestWriter(roots[1], epoch=1) as writer:
        writer.commit(write_shard(roots[1], 0, n=2), split="train", producer={})  # the first one's name, other bytes
    cache = tmp_path / "cache"
    for root in roots:
        stage(root, cache)
    for root in roots:
        check_whole(root, cache)


def test_a_cache_of_another_user_is_refused(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "t"), tmp_path / "cache"
    if os.geteuid() != 0:
        pytest.skip("giving a folder to another user needs root")
    home = home_of(root, cache)
    home.path.mkdir(parents=True)
    os.chown(home.path, 12345, 12345)
    with pytest.raises(UsageError, match=r"belongs to uid 12345, and you are root.*choose another --cache"):
        stage(root, cache)
    assert not list(home.path.iterdir())


def test_one_who_may_not_write_there_is_told_so(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    root, cache = make_dataset(tmp_path / "d", "t"), tmp_path / "cache"
    cache.mkdir(mode=0o755)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 0o5 != 0o5 and folder.stat().st_uid == os.geteuid() and "pytest" in str(folder):
            folder.chmod(0o755)
    if not all(folder.stat().st_mode & 0o1 for folder in tmp_path.parents):
        pytest.skip("the tests' folder is closed to other users")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setuid(65534)
            stage(root, cache)
        except UsageError as error:
            code = 0 if "cannot be written" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_after_a_cancelled_run_the_next_one_goes_on_at_once(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "t" * 24), tmp_path / "cache"
    for _ in range(3):
        calls = iter(range(10**6))
        with pytest.raises(InterruptedRunError):
            stage(root, cache, stop=lambda calls=calls: next(calls) > 3, limits=Limits(in_flight=1))
        with FileLock(home_of(root, cache).lock_path):
            pass
    began = time.monotonic()
    assert stage(root, cache).shards == 24
    assert time.monotonic() - began < 10
    check_whole(root, cache)


# --- URLs ---------------------------------------------------------------------------------------------------------


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A data set, and its address on a web server."""
    root = make_dataset(tmp_path / "d", "tve")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield root, f"http://127.0.0.1:{server.server_port}/d"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("scheme", ["http", "file", "memory"])
def test_a_data_set_behind_a_url_is_staged_and_then_opened(
    tmp_path: Path, served: tuple[Path, str], scheme: str
) -> None:
    root, url = served
    if scheme == "http":
        pytest.importorskip("aiohttp")
    elif scheme == "file":
        url = f"file://{root}"
    else:
        import fsspec

        fsspec.filesystem("memory").put(str(root), "/d", recursive=True)
        url = "memory://d"
    cache = tmp_path / "cache"
    report = stage(url, cache)
    assert report.shards == 3
    check_whole(root, cache)
    data = open_dataset(report.home, cache=cache)
    assert np.array_equal(data[5]["cbed"], sample(1, 1)[2]["cbed"])
    assert stage(url, cache).bytes_copied == 0


def test_urls_that_lead_nowhere_are_told(tmp_path: Path, served: tuple[Path, str]) -> None:
    root, url = served
    for wrong, what in (
        (f"{url}/nothing", "there is no manifest.jsonl"),
        (f"file://{tmp_path}/none", "there is no manifest.jsonl"),
        ("nosuch://there/data", "nosuch"),
    ):
        with pytest.raises(UsageError, match=what):
            stage(wrong, tmp_path / "cache")
    shard = load_manifest(root).shards[1]
    flip_bit(root / shard.path, shard.extent("cbed").offset)
    with pytest.raises(DamagedDataError, match=f"shard {shard.shard_id} is damaged in the data set: xxh3_128"):
        stage(url, tmp_path / "cache")
    (root / shard.path).unlink()
    with pytest.raises(DamagedDataError, match=shard.shard_id):
        stage(url, tmp_path / "cache", limits=Limits(missing_deadline_s=0.1))


def test_storages_answer_alike(served: tuple[Path, str]) -> None:
    root, url = served
    shard: ShardRecord = load_manifest(root).shards[0]
    for storage in (open_storage(root), open_storage(url), open_storage(f"file://{root}")):
        assert storage.size(shard.path) == shard.nbytes
        reader = storage.open(shard.path)
        data = bytearray(shard.nbytes + 10)
        at = 0
        while count := reader.readinto(memoryview(data)[at:], at):
            at += count
        reader.close()
        assert at == shard.nbytes and bytes(data[:at]) == (root / shard.path).read_bytes()
        with pytest.raises(OSError):
            storage.open("shards/none.h5")


# --- the command --------------------------------------------------------------------------------------------------


def exitwave(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "exitwave.workflows", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command_knows_its_modes(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "t" * 8), tmp_path / "cache"
    size = load_manifest(root).shards[0].nbytes
    done = exitwave("stage", root, "--cache", cache, "--mode", "stream", "--capacity", 3 * size, "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["mode"], document["shards"]) == (0, "stream", 3)
    share = ["--mode", "partition", "--share", "1/2", "--exchange", "0.5", "--epoch", "1"]
    done = exitwave("stage", root, "--cache", tmp_path / "n1", *share)
    assert done.returncode == 0 and "4 shards ready" in done.stdout
    mine = {p.stem for p in (tmp_path / "n1" / "tiny" / "ready").iterdir()}
    assert stage(root, tmp_path / "n2", share=Share(node=1, nodes=2, exchange=0.5, epoch=1)).shards == 4
    theirs = {p.stem for p in (tmp_path / "n2" / "tiny" / "ready").iterdir()}
    assert mine | theirs == {s.shard_id for s in load_manifest(root).shards} and not mine & theirs
    done = exitwave("stage", root, "--cache", cache, "--mode", "stream")
    assert done.returncode == 2 and "a capacity is needed" in done.stderr


def test_choices_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x" * 32)
    choices: list[tuple[dict[str, Any], str]] = [
        ({"mode": "mirror"}, "expected replicate, stream, partition"),
        ({"mode": "partition"}, "share of this node"),
        ({"share": (0, 2)}, "share of this node"),
        ({"peers": ["a:1"]}, "go together"),
        ({"peers": ["a:1"], "me": "a:1", "secret_file": secret, "mode": "stream", "capacity_bytes": 1}, "streams from"),
    ]
    for choice, what in choices:
        with pytest.raises(UsageError, match=what):
            StageChoices(**choice)
    for text in ("3/2", "0/2", "x", "1/0"):
        with pytest.raises(UsageError, match="expected K/N"):
            parse_share(text)
    assert parse_share("2/4") == (1, 4)
    with pytest.raises(UsageError, match="chmod 600"):
        secret.chmod(0o644)
        _peers(StageChoices(peers=["a:1"], me="a:1", secret_file=secret))
    secret.chmod(0o600)
    assert _peers(StageChoices(peers=["a:1"], me="a:1", secret_file=secret)).secret == b"x" * 32


@settings(max_examples=40, deadline=None)
@given(n=st.integers(0, 40), nodes=st.integers(1, 6), epoch=st.integers(0, 4), exchange=st.floats(0, 1))
def test_shares_are_a_partition_and_exchange_what_was_asked(n: int, nodes: int, epoch: int, exchange: float) -> None:
    names = [f"s{i}" for i in range(n)]
    now = shares(names, nodes, epoch=epoch, exchange=exchange)
    following = shares(names, nodes, epoch=epoch + 1, exchange=exchange)
    assert sorted(i for share in now for i in share) == sorted(names)
    assert max(map(len, now)) - min(map(len, now)) <= 1
    for before, after in zip(now, following, strict=True):
        assert len(after) == len(before)
        assert len(set(before) & set(after)) >= len(before) - round(exchange * len(before))
    if exchange == 0:
        assert [set(s) for s in now] == [set(s) for s in following]
