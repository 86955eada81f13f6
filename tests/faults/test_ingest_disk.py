"""Full disks, read-only folders and damaged bytes."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ingest_samples import FIELDS, GOLD, flip_bit, make_dataset, open_writer, sample, shard_id, write_shard

from exitwave.ingest import load_manifest, open_dataset, stage, verify_dataset
from exitwave.ingest.errors import DamagedDataError, InterruptedRunError, UsageError
from exitwave.ingest.events import EventLog, read_events
from exitwave.ingest.files import write_atomic
from exitwave.ingest.manifest import ManifestWriter, create_dataset
from exitwave.ingest.records import Header
from exitwave.ingest.schema import FieldSpec
from exitwave.ingest.staging_run import Limits

LARGE = (FieldSpec(name="cbed", dtype="float32", shape=(8, 8, 32, 32)),)  # 256 KiB a sample


def mount(path: Path, *options: str) -> None:
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(path)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    path = tmp_path / "small"
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mount(path, "-o", "size=1m")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder that may not be written to; for root, who may write anywhere, on a read-only file system."""
    path = tmp_path / "locked"
    if os.geteuid() == 0:
        mount(path, "-o", "size=1m,ro")
        yield path
        subprocess.run(["umount", "-l", str(path)], check=True)
    else:
        path.mkdir(mode=0o555)
        yield path
        path.chmod(0o755)


def fill(disk: Path) -> Path:
    """Takes all that is left of the disk."""
    with (disk / "ballast").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            pass
    return disk / "ballast"


def files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_disk_full_shows_before_the_first_sample(small_disk: Path) -> None:
    create_dataset(small_disk / "d", Header(dataset_id="d", campaign_hash="c", fields=LARGE))
    with pytest.raises(InterruptedRunError, match=r"no space left on the device\. 2097152 bytes were needed"):
        write_shard(small_disk / "d", 0, n=8, fields=LARGE)
    assert files(small_disk) == ["d/manifest.jsonl"]
    published = write_shard(small_disk / "d", 0, n=2, fields=LARGE)  # there is still room for less
    assert published.n == 2


def test_disk_full_while_the_shard_is_finished(small_disk: Path) -> None:
    with pytest.raises(InterruptedRunError, match="no space left"), open_writer(small_disk, 0) as writer:
        for row in range(4):
            uid, params, arrays = sample(0, row)
            writer.write(row, uid=uid, params=params, arrays=arrays)
        atoms = 20_000
        writer.add_structure(
            GOLD,
            numbers=np.ones(atoms),
            positions_A=np.ones((atoms, 3)),
            cell_A=np.eye(3),
            pbc=np.ones(3),
            wyckoff="a",
        )
        fill(small_disk)
        writer.publish()
    assert files(small_disk) == ["ballast"]
    (small_disk / "ballast").unlink()
    assert write_shard(small_disk, 0).n == 4


def test_disk_full_at_the_commit(small_disk: Path) -> None:
    root = make_dataset(small_disk / "d", "t")
    published = write_shard(root, 1)
    log = EventLog(root / "events.jsonl")
    log.emit("started")
    before = (root / "manifest.jsonl").read_bytes()
    with ManifestWriter(root, epoch=1) as writer:
        ballast = fill(small_disk)
        with pytest.raises(InterruptedRunError, match="no space left"):
            writer.commit(published, split="train", producer={"note": "x" * 20_000})
        assert (root / "manifest.jsonl").read_bytes() == before
        with pytest.raises(InterruptedRunError, match="no space left"):
            log.emit("shard_committed", note="x" * 20_000)
        with pytest.raises(InterruptedRunError, match="no space left"):
            write_atomic(root / "campaign.yaml", b"x" * 20_000)
        ballast.unlink()
        writer.commit(published, split="train", producer={})
    log.emit("after")
    assert [e["kind"] for e in read_events(log.path)] == ["started", "after"]
    assert [s.task for s in load_manifest(root).shards] == [0, 1]
    assert "campaign.yaml" not in files(root)


def test_disk_full_while_staging(tmp_path: Path, small_disk: Path) -> None:
    root = make_dataset(tmp_path / "d", "ttt", n=2, fields=LARGE)
    with pytest.raises(InterruptedRunError, match=r"no space left on the device\. \d+ bytes were needed"):
        stage(root, small_disk)
    ready = files(small_disk / "tiny" / "ready")
    assert ready == [f"{shard_id(0)}.h5"], "what fitted is ready, nothing is half there"
    assert files(small_disk / "tiny" / "part") == []
    data = open_dataset(root, cache=small_disk)
    assert np.array_equal(data[5]["cbed"], sample(2, 1, LARGE)[2]["cbed"]), "the rest is read from the data set itself"


def test_folders_that_cannot_be_written_are_named(tmp_path: Path, read_only: Path) -> None:
    root = make_dataset(tmp_path / "d", "t")
    attempts = [
        lambda: create_dataset(read_only / "d", Header(dataset_id="d", campaign_hash="c", fields=FIELDS)),
        lambda: write_shard(read_only, 0),
        lambda: stage(root, read_only),
        lambda: EventLog(read_only / "events.jsonl"),
        lambda: write_atomic(read_only / "f", b""),
    ]
    for attempt in attempts:
        with pytest.raises(UsageError, match=r"locked.*cannot be written \(.*\)\. Choose a folder"):
            attempt()


@pytest.mark.parametrize("field", ["cbed", "potential", "params"])
def test_verify_names_shard_uid_and_field(tmp_path: Path, field: str) -> None:
    root = make_dataset(tmp_path / "d", "tv")
    report = verify_dataset(root)
    assert (report.ok, report.shards, report.samples, report.bad) == (True, 2, 8, ())
    assert report.bytes == sum(p.stat().st_size for p in root.rglob("*.h5"))
    shard = load_manifest(root).shards[1]
    extent = shard.extent(field)
    flip_bit(root / shard.path, extent.offset + 2 * extent.stride + 5, 7)
    report = verify_dataset(root)
    assert not report.ok
    (bad,) = report.to_json()["bad"]
    assert (bad["shard"], bad["uid"], bad["field"]) == (shard.shard_id, sample(1, 2)[0], field)


def test_every_single_bit_flip_of_a_shard_is_found(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", "t", n=2)
    (shard,) = load_manifest(root).shards
    rng, named, outside = random.Random(1), 0, 0
    arrays = [shard.extent("cbed"), shard.extent("potential")]
    for _ in range(300):
        byte, bit = rng.randrange(shard.nbytes), rng.randrange(8)
        flip_bit(root / shard.path, byte, bit)
        bad = verify_dataset(root).bad
        assert bad, f"bit {bit} of byte {byte}"
        if any(e.offset <= byte < e.offset + e.nbytes for e in arrays):
            assert bad[0].uid is not None
            named += 1
        else:
            outside += 1
        flip_bit(root / shard.path, byte, bit)
    assert verify_dataset(root).ok
    assert min(named, outside) > 20


def test_verify_finds_short_missing_doubled_and_uncommitted(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", "ttttt")
    shards = load_manifest(root).shards
    os.truncate(root / shards[0].path, shards[0].nbytes - 10)
    (root / shards[1].path).unlink()
    with (root / shards[2].path).open("ab") as file:
        file.write(b"more")
    half = (root / shards[3].path).read_bytes()[: shards[3].nbytes // 2]  # half-copied, preallocated to full size
    (root / shards[3].path).write_bytes(half + bytes(shards[3].nbytes - len(half)))
    orphan = write_shard(root, 9)
    report = verify_dataset(root)
    whys = {i: [b.why for b in report.bad if b.shard == shards[i].shard_id] for i in range(5)}
    assert f"{shards[0].nbytes - 10} bytes, expected {shards[0].nbytes}" in whys[0][0]
    assert "No such file" in whys[1][0]
    assert f"{shards[2].nbytes + 4} bytes, expected" in whys[2][0]
    assert whys[3]
    assert whys[4] == []
    assert report.uncommitted == (orphan.path,)


def test_every_half_copied_file_is_found(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", "t", n=2)
    (shard,) = load_manifest(root).shards
    whole = (root / shard.path).read_bytes()
    last = len(whole.rstrip(b"\0"))
    for cut in [*range(0, last, 997), last - 1]:
        (root / shard.path).write_bytes(whole[:cut] + bytes(len(whole) - cut))
        assert not verify_dataset(root).ok, f"zeros from byte {cut} on"
    (root / shard.path).write_bytes(whole)
    assert verify_dataset(root).ok


def test_damaged_local_copies_are_set_aside_and_made_again(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "tt"), tmp_path / "cache"
    stage(root, cache)
    ready = cache / "tiny" / "ready"
    shards = load_manifest(root).shards
    data = open_dataset(root, cache=cache)
    for shard, name in ((shards[0], "cbed"), (shards[1], "params")):
        flip_bit(ready / f"{shard.shard_id}.h5", shard.extent(name).offset + 2)
    for i in (0, 4):
        with pytest.warns(UserWarning, match="set aside in .*quarantine, reading the data set itself"):
            assert np.array_equal(data[i]["cbed"], sample(i // 4, 0)[2]["cbed"])
    assert files(ready) == []
    assert len(files(cache / "tiny" / "quarantine")) == 2
    assert stage(root, cache).bytes_copied == sum(s.nbytes for s in shards)
    os.truncate(ready / f"{shards[0].shard_id}.h5", 100)
    report = stage(root, cache)
    assert (report.quarantined, report.bytes_copied) == (1, shards[0].nbytes)
    assert len(files(ready)) == 2


def test_a_source_that_is_damaged_stops_the_staging_by_name(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "d", "ttt"), tmp_path / "cache"
    shard = load_manifest(root).shards[1]
    flip_bit(root / shard.path, shard.extent("cbed").offset)
    with pytest.raises(DamagedDataError, match=rf"shard {shard.shard_id} is damaged .*uid {sample(1, 0)[0]:#x}, cbed"):
        stage(root, cache)
    assert f"{shard.shard_id}.h5" not in files(cache / "tiny" / "ready")
    assert files(cache / "tiny" / "part") == []
    assert files(cache / "tiny" / "quarantine") == [f"{shard.shard_id}.json"]
    os.truncate(root / shard.path, 1000)
    with pytest.raises(DamagedDataError, match="1000 bytes, expected"):
        stage(root, cache, limits=Limits(missing_deadline_s=0.1))
    (root / shard.path).unlink()
    with pytest.raises(DamagedDataError, match="No such file"):
        stage(root, cache, limits=Limits(missing_deadline_s=0.1))


@pytest.mark.parametrize("what", ["folder", "pipe"])
def test_a_shard_that_is_no_plain_file_is_damage_and_nobody_waits_for_it(tmp_path: Path, what: str) -> None:
    root = make_dataset(tmp_path / "d", "tt")
    shard = load_manifest(root).shards[1]
    path = root / shard.path
    path.unlink()
    if what == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    (bad,) = verify_dataset(root).bad
    assert bad.shard == shard.shard_id
    assert bad.why.startswith(f"{shard.path}: a ") and bad.why.endswith("not a plain file")
    with pytest.raises(DamagedDataError, match=f"{shard.shard_id} is damaged .*not a plain file"):
        stage(root, tmp_path / "cache", limits=Limits(missing_deadline_s=0.1))
    data = open_dataset(root)
    with pytest.raises(DamagedDataError, match=f"shard {shard.shard_id}: .*not a plain file"):
        data[len(data) - 1]


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", "t")
    with pytest.raises(UsageError, match=r"/proc/nothing/tiny: no folder for the cache can be made there"):
        stage(root, Path("/proc/nothing"))
