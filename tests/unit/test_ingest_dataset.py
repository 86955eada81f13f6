"""Reading: what comes is what was written, from any process, and damage is named."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from ingest_samples import FIELDS, GOLD, flip_bit, make_dataset, sample

from exitwave.ingest import open_dataset, open_shards
from exitwave.ingest.dataset import Dataset
from exitwave.ingest.errors import DamagedDataError, UsageError


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "d", "ttvte")


def check(data: Dataset, i: int, task: int, row: int) -> None:
    uid, params, arrays = sample(task, row)
    got = data[i]
    assert set(got) == {"cbed", "potential", "uid", "params"}
    assert got["uid"] == np.uint64(uid)
    assert got["uid"].dtype == np.uint64
    assert got["params"]["energy_keV"] == params["energy_keV"]
    for field in FIELDS:
        assert np.array_equal(got[field.name], arrays[field.name])


def test_every_sample(root: Path) -> None:
    data = open_dataset(root)
    assert len(data) == 20
    for i in range(20):
        check(data, i, i // 4, i % 4)
    check(data, -1, 4, 3)
    check(data, np.int64(5), 1, 1)
    for i in (20, -21):
        with pytest.raises(IndexError):
            data[i]
    assert [int(s["uid"]) for s in data] == data.uids.tolist()
    assert data.record_of(9) == (data.shards[2], 1)


def test_splits_are_views_and_the_manifest_names_them(root: Path) -> None:
    data = open_dataset(root)
    assert data.splits == ("test", "train", "val")
    assert [len(data.split(s)) for s in data.splits] == [4, 12, 4]
    train = data.split("train")
    check(train, 8, 3, 0)
    assert set(train.params["split"]) == {b"train"}
    assert data.params["sample_index"].tolist() == [0, 1, 2, 3] * 5
    assert np.unique(data.uids).size == 20
    assert data.uids.dtype == np.uint64
    with pytest.raises(UsageError, match="no split 'dev'; there are test, train, val"):
        data.split("dev")


def test_structures(root: Path) -> None:
    structure = open_dataset(root).structure(7)
    assert structure.info == GOLD
    assert structure.cell_A[0, 0] == 4.08


def test_xarray_reads_lazily_and_the_same(root: Path) -> None:
    data = open_dataset(root)
    view = data.to_xarray()
    assert view["cbed"].dims == ("sample", "Ry", "Rx", "Qy", "Qx")
    assert view["cbed"].attrs["units"] == "fraction"
    assert np.array_equal(view["cbed"][3, 1].values, sample(0, 3)[2]["cbed"][1])
    assert np.array_equal(
        view["potential"][[2, 17], 1:3].values, np.stack([data[i]["potential"][1:3] for i in (2, 17)])
    )
    assert np.array_equal(view["potential"][::7].values, np.stack([data[i]["potential"] for i in (0, 7, 14)]))
    assert float(view["energy_keV"][19]) == 104
    assert view["split"].values.tolist()[:2] == ["train", "train"]


def test_html(root: Path) -> None:
    page = open_dataset(root)._repr_html_()
    assert "tiny &amp; small" in page
    assert "&lt;projected&gt;" in page
    assert "Ry 2 × Rx 3 × Qy 8 × Qx 8" in page
    assert "train 12" in page
    assert "20 samples in 5 shards" in repr(open_dataset(root))


def test_pickled_and_forked_data_sets_open_their_own_files(root: Path) -> None:
    data = open_dataset(root)
    check(data, 0, 0, 0)
    check(pickle.loads(pickle.dumps(data)), 6, 1, 2)
    mine = {shard.fd for shard in data._files._open.values()}
    assert mine

    def child() -> None:
        before = dict(data._files._open)
        check(data, 0, 0, 0)
        assert all(data._files._open[k] is not v for k, v in before.items() if k in data._files._open)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    for fd in mine:
        os.fstat(fd)  # the child closed its copies, not ours
    check(data, 1, 0, 1)


def test_open_files_are_bounded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_shards, "MAX_OPEN", 2)
    data = open_dataset(root)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for i in np.random.default_rng(0).permutation(20).tolist() * 3:
        check(data, i, i // 4, i % 4)
    assert len(data._files._open) == 2
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2
    data.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    check(data, 3, 0, 3)


def test_unknown_fields_are_refused(root: Path) -> None:
    with pytest.raises(UsageError, match="no field 'volume'; there are cbed, potential"):
        open_dataset(root).read([0], ["volume"])


@pytest.mark.parametrize("field", ["cbed", "potential", "params"])
def test_a_flipped_bit_is_named_by_shard_uid_and_field(tmp_path: Path, field: str) -> None:
    root = make_dataset(tmp_path / "d", "tt")
    shard = open_dataset(root).shards[1]
    extent = shard.extent(field)
    flip_bit(root / shard.path, extent.offset + 2 * extent.stride + extent.stride // 2, 5)
    data, uid = open_dataset(root), sample(1, 2)[0]
    with pytest.raises(DamagedDataError, match=rf"shard {shard.shard_id}, sample 2 \(uid {uid:#x}\), {field}: crc32c"):
        data[6]
    check(data, 5, 1, 1)
    if field != "params":
        assert data.read([6], [f for f in ("cbed", "potential") if f != field])["uid"] == uid
    assert open_dataset(root, verify=False)[6]["uid"] == uid


@pytest.mark.parametrize("table", ["uid", "params_crc32c", "crc32c"])
def test_damaged_tables_are_named(tmp_path: Path, table: str) -> None:
    root = make_dataset(tmp_path / "d", "t")
    shard = open_dataset(root).shards[0]
    flip_bit(root / shard.path, shard.extent(table).offset + 3)
    with pytest.raises(DamagedDataError, match=f"shard {shard.shard_id}, /{table}: crc32c"):
        open_dataset(root)[0]
    flip_bit(root / shard.path, shard.extent(table).offset + 3)
    flip_bit(root / shard.path, shard.extent("params").offset + 3)
    with pytest.raises(DamagedDataError, match=f"shard {shard.shard_id}, /params: crc32c"):
        open_dataset(root).params  # noqa: B018


def test_short_and_missing_files_are_named(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", "tt")
    data = open_dataset(root)
    first, second = data.shards
    cut = first.extent("potential").offset + first.extent("potential").stride + 3
    os.truncate(root / first.path, cut)
    (root / second.path).unlink()
    with pytest.raises(DamagedDataError, match=rf"shard {first.shard_id}, sample 1 .*potential: the file is short"):
        data.read([1], ["potential"])
    with pytest.raises(DamagedDataError, match=f"shard {second.shard_id}: .*No such file"):
        data[4]
