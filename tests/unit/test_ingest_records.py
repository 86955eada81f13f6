"""Records survive the way into JSON and back, and refuse what would lead out of a data set."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exitwave.ingest.errors import UsageError
from exitwave.ingest.extents import Extent, dtype_from_json, dtype_to_json
from exitwave.ingest.records import Header, PublishedShard, ShardRecord, StructureInfo, Tombstone
from exitwave.ingest.schema import PARAMS_DTYPE, FieldSpec

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,20}", fullmatch=True)
SIZES = st.integers(0, 2**40)


@st.composite
def extents(draw: st.DrawFn, n: int) -> Extent:
    dtype = draw(st.sampled_from(["<f4", "<f2", "<u8", "|u1"]))
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
    stride = np.dtype(dtype).itemsize * int(np.prod(shape, dtype=int))
    return Extent(field=draw(NAMES), dtype=dtype, shape=(n, *shape), offset=draw(SIZES), stride=stride)


@st.composite
def structures(draw: st.DrawFn) -> StructureInfo:
    return StructureInfo(
        index=draw(st.integers(0, 9)),
        formula=draw(st.text(max_size=9)),
        space_group=draw(st.integers(0, 230)),
        prototype_group=draw(st.integers(0, 2**64 - 1)),
        source=draw(st.text(max_size=9)),
        licence=draw(st.text(max_size=9)),
        sha256=draw(st.text("0123456789abcdef", max_size=64)),
        zone_axis=tuple(draw(st.lists(st.integers(-9, 9), min_size=3, max_size=3))),  # type: ignore[arg-type]
    )


@st.composite
def shards(draw: st.DrawFn) -> dict[str, Any]:
    n = draw(st.integers(1, 50))
    fields = tuple(draw(st.lists(extents(n), max_size=3)))
    return {
        "shard_id": draw(NAMES),
        "task": draw(SIZES),
        "path": f"shards/{draw(NAMES)}.h5",
        "nbytes": max([1, *(e.offset + e.nbytes for e in fields)]),
        "n": n,
        "xxh3_128": draw(st.text("0123456789abcdef", min_size=32, max_size=32)),
        "extents": fields,
        "structures": tuple(draw(st.lists(structures(), max_size=2))),
        "stats": {"fields": {"cbed": {"mean": draw(st.floats(allow_nan=False, allow_infinity=False))}}},
    }


def through_json(record: Any) -> Any:
    return type(record).from_json(json.loads(json.dumps(record.to_json())))


@settings(max_examples=60, deadline=None)
@given(fields=shards(), seq=SIZES, generation=SIZES, split=st.text(max_size=8), epoch=SIZES)
def test_shards_round_trip(fields: dict[str, Any], seq: int, generation: int, split: str, epoch: int) -> None:
    published = PublishedShard(**fields)
    assert through_json(published) == published
    record = ShardRecord(**fields, seq=seq, generation=generation, split=split, producer={"host": "é"}, epoch=epoch)
    assert through_json(record) == record
    assert record.to_json()["status"] == "committed"


@given(seq=SIZES, shard=NAMES, why=st.text(), epoch=SIZES)
def test_tombstones_round_trip(seq: int, shard: str, why: str, epoch: int) -> None:
    tombstone = Tombstone(seq=seq, shard_id=shard, why=why, epoch=epoch)
    assert through_json(tombstone) == tombstone


def test_headers_round_trip() -> None:
    header = Header(
        dataset_id="d-1",
        campaign_hash="ff",
        fields=(FieldSpec(name="cbed", dtype="float32", shape=(1, 2), axes=("a", "b"), unit="V Å", meaning="m"),),
        name="gold",
        created="2026-01-01T00:00:00Z",
        exitwave_version="0.1.0",
    )
    assert through_json(header) == header


def test_compound_dtypes_round_trip() -> None:
    assert dtype_from_json(json.loads(json.dumps(dtype_to_json(PARAMS_DTYPE)))) == PARAMS_DTYPE
    extent = Extent(
        field="params",
        dtype=tuple(tuple(tuple(x) if isinstance(x, list) else x for x in c) for c in dtype_to_json(PARAMS_DTYPE)),
        shape=(3,),
        offset=0,
        stride=PARAMS_DTYPE.itemsize,
    )
    assert through_json(extent) == extent
    assert extent.numpy_dtype == PARAMS_DTYPE


BASE: dict[str, Any] = {
    "shard_id": "ab",
    "task": 0,
    "path": "shards/ab/ab.h5",
    "nbytes": 100,
    "n": 2,
    "xxh3_128": "",
    "extents": [{"field": "x", "dtype": "<f4", "shape": [2, 3], "offset": 8, "stride": 12}],
    "structures": [],
    "stats": {},
}


@pytest.mark.parametrize("path", ["/etc/passwd", "../other/a.h5", "shards/../../a.h5", "", "a\0b"])
def test_paths_that_leave_the_data_set_are_refused(path: str) -> None:
    with pytest.raises(UsageError, match="leaves the data set"):
        PublishedShard.from_json({**BASE, "path": path})


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "x" * 200])
def test_shard_ids_that_are_no_file_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="may hold only"):
        PublishedShard.from_json({**BASE, "shard_id": name})


@pytest.mark.parametrize(
    "change", [{"stride": 13}, {"offset": -1}, {"offset": 90}, {"shape": [3, 3]}, {"shape": [], "stride": 4}]
)
def test_extents_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="expected"):
        PublishedShard.from_json({**BASE, "extents": [{**BASE["extents"][0], **change}]})


def test_alike_shards_share_what_is_alike() -> None:
    extent = Extent(field="a", dtype="<f4", shape=(2, 3), offset=64, stride=12)
    info = StructureInfo(
        index=0,
        formula="Au",
        space_group=225,
        prototype_group=1,
        source="COD",
        licence="CC0-1.0",
        sha256="0" * 64,
        zone_axis=(0, 0, 1),
    )
    shards = [
        PublishedShard.from_json(
            json.loads(
                json.dumps(
                    PublishedShard(
                        shard_id=f"s{task}",
                        task=task,
                        path=f"shards/s{task}.h5",
                        nbytes=100,
                        n=2,
                        xxh3_128="0",
                        extents=(extent,),
                        structures=(info,),
                        stats={"fields": {"a": {"min": float(task)}}},
                    ).to_json()
                )
            )
        )
        for task in range(2)
    ]
    assert shards[0].extents[0] is shards[1].extents[0]
    assert shards[0].structures[0] is shards[1].structures[0]
    assert [shard.stats["fields"]["a"]["min"] for shard in shards] == [0.0, 1.0]
