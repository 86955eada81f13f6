"""A shard: its layout on disk, its checks, and that one task makes one sequence of bytes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import google_crc32c
import h5py
import numpy as np
import pytest
from ingest_samples import FIELDS, GOLD, open_writer, sample, shard_id, write_shard

from exitwave.ingest.errors import DamagedDataError, UsageError
from exitwave.ingest.files import shard_path
from exitwave.ingest.schema import PARAMS_DTYPE, FieldSpec
from exitwave.ingest.shard import ShardReader
from exitwave.ingest.shard_check import describe_shard, find_published

BIG = (
    FieldSpec(name="cbed", dtype="float32", shape=(4, 4, 32, 32)),
    FieldSpec(name="volume", dtype="f2", shape=(7, 999)),
)


def test_what_was_written_is_read_by_plain_h5py(tmp_path: Path) -> None:
    published = write_shard(tmp_path, 3)
    with h5py.File(tmp_path / published.path) as file:
        assert file.attrs["format"] == "exitwave-shard"
        assert (file.attrs["shard_id"], file.attrs["task"], file.attrs["format_version"]) == (shard_id(3), 3, 2)
        assert (file.attrs["campaign_hash"], file.attrs["simulator"]) == ("c0ffee", "random")
        assert file["params"].dtype == PARAMS_DTYPE
        assert file["crc32c"].shape == (4, len(FIELDS))
        assert file["structures/0"].attrs["formula"] == "Au"
        assert file["structures/0/positions_A"].shape == (1, 3)
        for row in range(4):
            uid, params, arrays = sample(3, row)
            assert file["uid"][row] == uid
            assert file["params"][row] == params
            for column, field in enumerate(FIELDS):
                assert np.array_equal(file[field.name][row], arrays[field.name])
                assert file["crc32c"][row, column] == google_crc32c.value(arrays[field.name].tobytes())


def test_the_manifest_gives_each_sample_as_one_run_of_bytes(tmp_path: Path) -> None:
    published = write_shard(tmp_path, 1, n=5, fields=BIG)
    raw = (tmp_path / published.path).read_bytes()
    assert len(raw) == published.nbytes
    for field in BIG:
        extent = published.extent(field.name)
        assert extent.offset % 4096 == 0, "arrays above 64 KiB start 4 KiB-aligned"
        for row in range(5):
            start = extent.offset + row * extent.stride
            expected = sample(1, row, BIG)[2][field.name].tobytes()
            assert raw[start : start + extent.stride] == expected
    assert published.nbytes < 1.1 * sum(extent.nbytes for extent in published.extents) + 16384


def test_small_shards_are_not_bloated_by_alignment(tmp_path: Path) -> None:
    published = write_shard(tmp_path, 1, n=1)
    assert published.nbytes < 32_000


def test_the_same_task_twice_makes_the_same_bytes_also_in_another_process_and_second(tmp_path: Path) -> None:
    first = write_shard(tmp_path / "a", 7)
    time.sleep(1.1)
    code = "import pathlib, sys; from ingest_samples import write_shard; write_shard(pathlib.Path(sys.argv[1]), 7)"
    helpers = Path(__file__).parents[1] / "support"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "b")], check=True, cwd=helpers)
    assert (tmp_path / "a" / first.path).read_bytes() == (tmp_path / "b" / first.path).read_bytes()
    assert write_shard(tmp_path / "a", 7) == first  # again, on top of itself: adopted
    assert [p.name for p in (tmp_path / "a" / "shards").rglob("*") if p.is_file()] == [f"{shard_id(7)}.h5"]


def test_reader(tmp_path: Path) -> None:
    published = write_shard(tmp_path, 2)
    with ShardReader(tmp_path / published.path) as reader:
        assert reader.fields == tuple(
            FieldSpec(name=f.name, dtype="<f4", shape=f.shape, axes=f.axes, unit=f.unit, meaning=f.meaning)
            for f in FIELDS
        )
        assert np.array_equal(reader.read("potential", 1), sample(2, 1)[2]["potential"])
        structure = reader.structure(0)
        assert structure.info == GOLD
        assert structure.numbers.tolist() == [79]
        assert structure.pbc.tolist() == [True, True, False]
        assert structure.wyckoff == "a"
        with pytest.raises(UsageError, match="no structure 5"):
            reader.structure(5)
    assert find_published(tmp_path, shard_id(2)) == published
    assert find_published(tmp_path, shard_id(99)) is None


def test_statistics_are_those_of_the_samples(tmp_path: Path) -> None:
    stats = write_shard(tmp_path, 2).stats["fields"]["cbed"]
    values = np.stack([sample(2, row)[2]["cbed"] for row in range(4)])
    assert stats["min"] == values.min()
    assert stats["max"] == values.max()
    assert stats["mean"] == pytest.approx(values.mean(dtype=np.float64), rel=1e-12)


def test_leaving_without_publish_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), open_writer(tmp_path, 0) as writer:
        uid, params, arrays = sample(0, 0)
        writer.write(0, uid=uid, params=params, arrays=arrays)
        raise KeyboardInterrupt
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_samples_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    uid, params, arrays = sample(0, 0)
    bad = arrays["cbed"].copy()
    bad[0, 0, 0, 0] = np.nan
    cases: list[tuple[str, dict]] = [
        ("not finite", {"arrays": {**arrays, "cbed": bad}}),
        ("expected float32", {"arrays": {**arrays, "cbed": arrays["cbed"].astype("f8")}}),
        (r"expected float32 \(2, 3, 8, 8\)", {"arrays": {**arrays, "cbed": arrays["cbed"][:1]}}),
        ("expected .'cbed', 'potential'.", {"arrays": {"cbed": arrays["cbed"]}}),
        ("expected each row", {"row": 4}),
        ("params of dtype", {"params": np.zeros((), [("x", "f8")])[()]}),
    ]
    with open_writer(tmp_path, 0) as writer:
        for match, change in cases:
            call = {"row": 0, "uid": uid, "params": params, "arrays": arrays, **change}
            with pytest.raises(UsageError, match=match) as error:
                writer.write(call.pop("row"), **call)
            assert shard_id(0) in str(error.value)
        writer.write(0, uid=uid, params=params, arrays=arrays)
        with pytest.raises(UsageError, match="expected each row"):
            writer.write(0, uid=uid, params=params, arrays=arrays)
        with pytest.raises(UsageError, match=r"rows \[1, 2, 3\] of 4 were never written"):
            writer.publish()
        for row in (1, 2, 3):
            writer.write(row, uid=uid, params=params, arrays=arrays)
        with pytest.raises(UsageError, match="stands twice"):
            writer.publish()


def test_other_formats_are_named(tmp_path: Path) -> None:
    path = tmp_path / write_shard(tmp_path, 0).path
    with h5py.File(path, "r+") as file:
        file.attrs["format_version"] = 3
    with pytest.raises(
        UsageError, match=r"found format 'exitwave-shard' version 3, expected .* version 1 or 2\. Read it with"
    ):
        ShardReader(path)
    with h5py.File(tmp_path / "plain.h5", "w") as file:
        file["x"] = 1
    with pytest.raises(UsageError, match="found format None"):
        ShardReader(tmp_path / "plain.h5")
    (tmp_path / "text.h5").write_text("no HDF5")
    with pytest.raises(DamagedDataError, match="cannot be opened as HDF5"):
        ShardReader(tmp_path / "text.h5")
    with pytest.raises(UsageError, match="no such shard"):
        ShardReader(tmp_path / "absent.h5")


def test_a_damaged_shard_is_not_adopted(tmp_path: Path) -> None:
    published = write_shard(tmp_path, 0)
    path = tmp_path / shard_path(shard_id(0))
    data = bytearray(path.read_bytes())
    data[published.extent("cbed").offset + published.extent("cbed").stride + 1] ^= 4
    path.write_bytes(data)
    with pytest.raises(DamagedDataError, match=r"sample 1 .*cbed: wrong checksum"):
        describe_shard(path, published.path)
    with pytest.raises(DamagedDataError, match="sample 1"):
        find_published(tmp_path, shard_id(0))
    with pytest.raises(DamagedDataError, match="other bytes"):
        write_shard(tmp_path, 0)
