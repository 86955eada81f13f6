"""Compressed shards: the same samples by every way of reading, damage found, bytes the same on every run."""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from ingest_samples import flip_bit
from views_data import FIELDS, arrays_of, make_views_dataset, params_of, structure_info, tree, uid_of, write_task

from exitwave.ingest import load_manifest, open_dataset, stage, verify_dataset
from exitwave.ingest.codecs import DECOMPRESSORS
from exitwave.ingest.compress import COMPRESSIONS, compress_chunk, decompress_chunk, shard_writer
from exitwave.ingest.errors import DamagedDataError, UsageError
from exitwave.ingest.exporting import ExportSpec, export_samples
from exitwave.ingest.schema import PARAMS_DTYPE, FieldSpec
from exitwave.ingest.shard import ShardReader
from exitwave.ingest.subset import subset_dataset
from exitwave.ingest.verify import check_shard

hdf5plugin = pytest.importorskip("hdf5plugin")
BOTH = pytest.mark.parametrize("compression", COMPRESSIONS)
COUNTS = (
    FieldSpec(name="cbed", dtype="uint16", shape=(4, 4, 32, 32), axes=("Ry", "Rx", "Qy", "Qx"), unit="electrons"),
    FieldSpec(name="dose", dtype="float64", shape=(), unit="e"),
)


def test_every_compression_can_be_read() -> None:
    assert set(DECOMPRESSORS) == set(COMPRESSIONS)
    with pytest.raises(UsageError, match="expected one of bitshuffle-lz4, blosc2-zstd"):
        shard_writer(Path("x"), compression="gzip", shard_id="aa", task=0, campaign_hash="", simulator="", n=1,
                     fields=FIELDS, params_dtype=PARAMS_DTYPE)  # fmt: skip


@BOTH
def test_all_ways_of_reading_give_the_same(tmp_path: Path, compression: str) -> None:
    root = make_views_dataset(tmp_path / "d", "ttv", compression=compression)
    assert verify_dataset(root).ok
    for sample in open_dataset(root):
        task, row = (int(sample["uid"]) - (1 << 63)) >> 32, int(sample["uid"]) & 0xFF
        assert all(np.array_equal(sample[name], wanted) for name, wanted in arrays_of(task, row).items())
    shard = load_manifest(root).shards[1]
    assert shard.extent("cbed").compression == compression and not shard.extent("uid").compression
    with ShardReader(root / shard.path) as reader:
        assert np.array_equal(reader.read("cbed", 2), arrays_of(1, 2)["cbed"])
        assert [f.axes for f in reader.fields] == [f.axes for f in FIELDS]
        assert reader.structure(1).info == structure_info(1)
    with h5py.File(root / shard.path) as file:  # plain h5py, as others would read it
        assert np.array_equal(file["potential"][0], arrays_of(1, 0)["potential"])
    stage(root, tmp_path / "cache")
    staged = open_dataset(root, cache=tmp_path / "cache")
    assert np.array_equal(staged[4]["cbed"], arrays_of(1, 1)["cbed"])
    export_samples(open_dataset(root), [0], ExportSpec(format="hspy"), tmp_path / "x.hspy")
    subset_dataset(root, tmp_path / "s", where="defocus_A < 5")
    assert verify_dataset(tmp_path / "s").ok
    assert load_manifest(tmp_path / "s").shards[0].extent("cbed").compression == compression


@BOTH
def test_counts_become_small_and_bytes_are_reproducible(tmp_path: Path, compression: str) -> None:
    rng = np.random.default_rng(1)
    samples = [
        {"cbed": rng.poisson(0.05, COUNTS[0].shape).astype("u2"), "dose": np.array(row * 1.5)} for row in range(5)
    ]

    def write(root: Path, order: list[int]) -> Any:
        with shard_writer(root, compression=compression, shard_id="ab", task=0, campaign_hash="c", simulator="s", n=5,
                          fields=COUNTS, params_dtype=PARAMS_DTYPE) as writer:  # fmt: skip
            for row in order:
                writer.write(row, uid=row + 1, params=params_of(0, row), arrays=samples[row])
            return writer.publish()

    first = write(tmp_path / "a", [0, 1, 2, 3, 4])
    write(tmp_path / "b", [3, 1, 4, 0, 2])
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    raw = 5 * 2 * int(np.prod(COUNTS[0].shape))
    assert sum(length for _, length in first.extent("cbed").chunks) < raw / 5
    assert first.stats["fields"]["dose"] == {"min": 0.0, "max": 6.0, "mean": 3.0}
    assert sorted(p.name for p in (tmp_path / "a").rglob("*") if p.is_file()) == ["ab.h5"]


@BOTH
def test_every_flipped_bit_is_found_and_named(tmp_path: Path, compression: str) -> None:
    root = make_views_dataset(tmp_path / "d", "t", compression=compression)
    (shard,) = load_manifest(root).shards
    path = root / shard.path
    whole = path.read_bytes()
    draw = random.Random(7)
    for _ in range(60):
        row = draw.randrange(3)
        field = draw.choice(["cbed", "potential"])
        offset, length = shard.extent(field).place(row)
        flip_bit(path, offset + draw.randrange(length), draw.randrange(8))
        (bad,) = verify_dataset(root).bad
        assert (bad.shard, bad.uid, bad.field) == (shard.shard_id, uid_of(0, row), field)
        with pytest.raises(DamagedDataError, match=rf"{shard.shard_id}.*{uid_of(0, row):#018x}.*{field}"):
            open_dataset(root)[row]
        path.write_bytes(whole)
    path.write_bytes(whole[: shard.extent("potential").chunks[0][0]])
    assert not verify_dataset(root).ok


DAMAGE = """
import pathlib, sys
from exitwave.ingest.errors import DamagedDataError
from exitwave.ingest import load_manifest, open_dataset, verify_dataset
root = pathlib.Path(sys.argv[1])
(shard,) = load_manifest(root).shards
path, (offset, _) = root / shard.path, shard.extent("cbed").place(1)
whole = path.read_bytes()
for bit in range(8 * 16):
    damaged = bytearray(whole)
    damaged[offset + bit // 8] ^= 1 << bit % 8
    path.write_bytes(damaged)
    (bad,) = verify_dataset(root).bad
    assert (bad.field, "compressed bytes" in bad.why) == ("cbed", True), bad
    try:
        open_dataset(root, verify=False)[1]
    except DamagedDataError:
        continue
    raise AssertionError(bit)
"""


@BOTH
def test_a_damaged_head_of_a_chunk_takes_no_process_down(tmp_path: Path, compression: str) -> None:
    """The sizes there lead a decompressor out of its memory: what is damaged must not come to it."""
    root = make_views_dataset(tmp_path / "d", "t", compression=compression)
    ran = subprocess.run([sys.executable, "-c", DAMAGE, root], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, (ran.returncode, ran.stderr)


def test_a_manifest_without_the_sums_of_chunks_is_read_as_before(tmp_path: Path) -> None:
    root = make_views_dataset(tmp_path / "d", "t", compression="bitshuffle-lz4")
    (shard,) = load_manifest(root).shards
    data = shard.to_json()
    for extent in data["extents"]:
        extent.pop("chunk_crc32c", None)
    old = type(shard).from_json(data)
    assert not old.extent("cbed").chunk_sums and not check_shard(root, old)
    data["extents"][0] |= {"chunk_crc32c": [1]}
    with pytest.raises(UsageError, match="1 sums of 3 chunks"):
        type(shard).from_json(data)


@BOTH
def test_a_chunk_that_is_none_is_a_value_error(compression: str) -> None:
    array = np.arange(4096, dtype="<f4")
    chunk = np.frombuffer(compress_chunk(compression, array), np.uint8)
    out = np.empty(array.nbytes, np.uint8)
    decompress_chunk(compression, chunk, out, 4)
    assert np.array_equal(out.view("<f4"), array)
    for bad in (chunk[:0], chunk[:7], chunk[: chunk.size // 2], np.zeros(64, np.uint8)):
        try:
            decompress_chunk(compression, bad, out, 4)
        except ValueError:
            continue
        assert not np.array_equal(out.view("<f4"), array)


def test_threads_and_forked_processes_read_at_once(tmp_path: Path) -> None:
    root = make_views_dataset(tmp_path / "d", "tt", compression="bitshuffle-lz4")
    data = open_dataset(root)
    assert np.array_equal(data[0]["cbed"], arrays_of(0, 0)["cbed"])
    wrong: list[int] = []

    def read_all() -> None:
        for i in range(6):
            if not np.array_equal(data[i]["cbed"], arrays_of(i // 3, i % 3)["cbed"]):
                wrong.append(i)

    threads = [threading.Thread(target=read_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    child = multiprocessing.get_context("fork").Process(target=lambda: (read_all(), os._exit(len(wrong))))
    child.start()
    child.join(60)
    assert child.exitcode == 0 and not wrong


def test_without_hdf5plugin_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "hdf5plugin", None)
    with pytest.raises(UsageError, match=r"pip install 'exitwave\[formats\]'"):
        write_task(tmp_path, 0, compression="blosc2-zstd")
