"""Encoded fields: what readers give, what the shard holds, and that encoding and scale survive every way there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ingest_samples import GOLD, PARAMS_DTYPE, flip_bit, sample, shard_id

from exitwave.ingest import codecs, open_dataset, verify_dataset
from exitwave.ingest.codecs import decode
from exitwave.ingest.errors import DamagedDataError, UsageError
from exitwave.ingest.extents import Extent
from exitwave.ingest.manifest import ManifestWriter, create_dataset, load_manifest
from exitwave.ingest.records import Header
from exitwave.ingest.schema import FieldSpec
from exitwave.ingest.shard import ShardReader, ShardWriter

HALF = FieldSpec(
    name="cbed", dtype="float16", shape=(2, 8, 8), axes=("R", "Qy", "Qx"), unit="1", encoding="sqrt-f2", scale=1e-6
)
PLAIN = FieldSpec(name="potential", dtype="float32", shape=(6, 5), axes=("H", "W"), unit="V Å")


def intensities(task: int, row: int) -> np.ndarray[Any, Any]:
    """Over twelve decades, as diffraction patterns have them."""
    rng = np.random.default_rng([task, row])
    return (10.0 ** rng.uniform(-17, -5, HALF.shape)).astype(np.float32)


@pytest.fixture
def encoded(tmp_path: Path) -> Path:
    root = tmp_path / "d"
    create_dataset(root, Header(dataset_id="half", campaign_hash="c0ffee", fields=(HALF, PLAIN)))
    with (
        ShardWriter(
            root,
            shard_id=shard_id(0),
            task=0,
            campaign_hash="c0ffee",
            simulator="random",
            n=4,
            fields=(HALF, PLAIN),
            params_dtype=PARAMS_DTYPE,
        ) as shard,
        ManifestWriter(root, epoch=1) as manifest,
    ):
        shard.add_structure(GOLD, numbers=[79], positions_A=[[0, 0, 0]], cell_A=np.eye(3), pbc=[1, 1, 0], wyckoff="a")
        for row in range(4):
            uid, params, arrays = sample(0, row)
            stored = (np.sqrt(intensities(0, row)) / HALF.scale).astype(np.float16)
            shard.write(row, uid=uid, params=params, arrays={"cbed": stored, "potential": arrays["potential"]})
        manifest.commit(shard.publish(), split="train", producer={})
    return root


def test_readers_give_values_within_half_precision(encoded: Path) -> None:
    data = open_dataset(encoded)
    batch = data.read([2, 0], ["cbed", "potential"])
    assert batch["cbed"].dtype == np.float32
    expected = np.stack([intensities(0, 2), intensities(0, 0)])
    large = expected > (HALF.scale * 6.2e-5) ** 2  # below, half precision is subnormal
    assert np.allclose(batch["cbed"][large], expected[large], rtol=2 * 2**-11 * 1.01, atol=0)
    assert np.array_equal(batch["potential"][1], sample(0, 0)[2]["potential"])
    assert np.array_equal(data[2]["cbed"], batch["cbed"][0])
    assert verify_dataset(encoded).ok
    with ShardReader(encoded / data.shards[0].path) as reader:
        assert np.array_equal(reader.read("cbed", 2), batch["cbed"][0])
        assert reader.fields[0].encoding == "sqrt-f2"
        assert reader.fields[0].scale == HALF.scale
    stats = data.shards[0].stats["fields"]["cbed"]
    assert stats["max"] == pytest.approx(max(intensities(0, r).max() for r in range(4)), rel=1e-3)
    xarray = pytest.importorskip("xarray")
    assert isinstance(data.to_xarray(), xarray.Dataset)
    assert data.to_xarray()["cbed"].dtype == np.float32


def test_the_manifest_keeps_encoding_and_scale(encoded: Path) -> None:
    manifest = load_manifest(encoded)
    assert manifest.header.fields == (HALF, PLAIN)
    extent = manifest.shards[0].extent("cbed")
    assert (extent.encoding, extent.scale) == ("sqrt-f2", HALF.scale)
    assert "encoding" not in manifest.shards[0].extent("potential").to_json()


def test_damage_is_found_on_the_stored_bytes(encoded: Path) -> None:
    shard = load_manifest(encoded).shards[0]
    flip_bit(encoded / shard.path, shard.extent("cbed").place(1)[0] + 3)
    with pytest.raises(DamagedDataError, match=r"sample 1 .*cbed: crc32c"):
        open_dataset(encoded).read([1], ["cbed"])


def test_a_compressed_extent_reads_through_the_table_of_decompressors(
    encoded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zlib stands in here for what a codec does; the chunks lie behind the shard's own bytes, in reverse order."""
    import zlib
    from dataclasses import replace

    from exitwave.ingest.extent_io import read_sample
    from exitwave.ingest.files import open_to_read

    def inflate(data: np.ndarray[Any, Any], out: np.ndarray[Any, Any], itemsize: int) -> None:
        assert itemsize == 2
        plain = np.frombuffer(zlib.decompress(data.tobytes()), np.uint8)
        if plain.size != out.size:
            raise ValueError(f"{plain.size} bytes, expected {out.size}")
        out[:] = plain

    monkeypatch.setitem(codecs.DECOMPRESSORS, "zlib", inflate)
    shard = load_manifest(encoded).shards[0]
    path, extent = encoded / shard.path, shard.extent("cbed")
    rows = [path.read_bytes()[o : o + n] for o, n in map(extent.place, range(4))]
    chunks, at = {}, 0
    with (encoded / "chunks").open("wb") as file:
        for row in reversed(range(4)):
            packed = zlib.compress(rows[row])
            file.write(packed)
            chunks[row] = (at, len(packed))
            at += len(packed)
    packed_extent = replace(extent, offset=0, compression="zlib", chunks=tuple(chunks[r] for r in range(4)))
    assert Extent.from_json(packed_extent.to_json()) == packed_extent
    assert packed_extent.end == at
    fd = open_to_read(encoded / "chunks")
    out = np.empty(extent.stride, np.uint8)
    for row in range(4):
        assert read_sample(fd, packed_extent, row, out) == ""
        assert out.tobytes() == rows[row]
    assert read_sample(fd, packed_extent, 0, out[:-1]), "bytes that do not fit are no sample"


def test_what_this_version_cannot_read_is_refused() -> None:
    with pytest.raises(UsageError, match="encoding 'log-f2' is not known; there are sqrt-f2"):
        codecs.check_codec("cbed", "<f2", "log-f2")
    with pytest.raises(UsageError, match="stored as sqrt-f2, expected <f2"):
        codecs.check_codec("cbed", "<f4", "sqrt-f2")
    with pytest.raises(UsageError, match="compression 'rar' is not known"):
        codecs.check_codec("cbed", "<f4", "", "rar")


def test_plain_fields_are_not_copied() -> None:
    array = np.arange(4.0)
    assert decode(PLAIN, array) is array
