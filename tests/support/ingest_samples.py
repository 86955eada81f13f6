"""Small data sets for the tests of ingest: real shards, written by the real writer, of random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.manifest import ManifestWriter, create_dataset
from exitwave.ingest.records import Header, PublishedShard, StructureInfo
from exitwave.ingest.schema import PARAMS_DTYPE, FieldSpec
from exitwave.ingest.shard import ShardWriter

FIELDS = (
    FieldSpec(name="cbed", dtype="float32", shape=(2, 3, 8, 8), axes=("Ry", "Rx", "Qy", "Qx"), unit="fraction"),
    FieldSpec(name="potential", dtype="float32", shape=(6, 5), axes=("H", "W"), unit="V Å", meaning="<projected>"),
)
GOLD = StructureInfo(
    index=0,
    formula="Au",
    space_group=225,
    prototype_group=2**63 + 5,
    source="made up",
    licence="CC0-1.0",
    sha256="00" * 32,
    zone_axis=(0, 0, 1),
)


def sample(task: int, row: int, fields: tuple[FieldSpec, ...] = FIELDS) -> tuple[int, np.void, dict[str, np.ndarray]]:
    """uid, params and arrays of a sample: a function of (task, row) only."""
    rng = np.random.default_rng([task, row])
    params = np.zeros((), PARAMS_DTYPE)
    params["energy_keV"], params["sample_index"], params["structure"] = 100 + task, row, 0
    arrays = {f.name: rng.random(f.shape).astype(f.dtype) for f in fields}
    return (task << 32) + row + (1 << 63), params[()], arrays


def shard_id(task: int) -> str:
    return f"{task % 256:02x}{task:014x}"


def open_writer(root: Path, task: int, *, n: int = 4, fields: tuple[FieldSpec, ...] = FIELDS) -> ShardWriter:
    return ShardWriter(
        root,
        shard_id=shard_id(task),
        task=task,
        campaign_hash="c0ffee",
        simulator="random",
        n=n,
        fields=fields,
        params_dtype=PARAMS_DTYPE,
    )


def write_shard(root: Path, task: int, *, n: int = 4, fields: tuple[FieldSpec, ...] = FIELDS) -> PublishedShard:
    with open_writer(root, task, n=n, fields=fields) as writer:
        cell = np.eye(3) * 4.08
        writer.add_structure(GOLD, numbers=[79], positions_A=[[0, 0, 0]], cell_A=cell, pbc=[1, 1, 0], wyckoff="a")
        for row in range(n):
            uid, params, arrays = sample(task, row, fields)
            writer.write(row, uid=uid, params=params, arrays=arrays)
        return writer.publish()


def make_dataset(root: Path, splits: str = "ttvte", *, n: int = 4, fields: Any = FIELDS, generation: int = 0) -> Path:
    """A data set with one shard of `n` samples per letter of `splits`: t(rain), v(al), e (test)."""
    create_dataset(root, Header(dataset_id="tiny", campaign_hash="c0ffee", fields=fields, name="tiny & small"))
    names = {"t": "train", "v": "val", "e": "test"}
    with ManifestWriter(root, epoch=1) as writer:
        for task, letter in enumerate(splits):
            published = write_shard(root, task, n=n, fields=fields)
            writer.commit(published, split=names[letter], producer={"host": "here"}, generation=generation)
    return root


def flip_bit(path: Path, byte: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)
