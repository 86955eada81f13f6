"""The data sets that `exitwave bench ingest` measures on, and the same samples in the formats of its peers.

Samples are random numbers: nothing compresses, and every byte counts. Each peer's files are made as its own
documentation has it, with its own defaults but for what must be equal: the samples, and no compression.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.dataset import Dataset
from exitwave.ingest.manifest import MANIFEST_NAME, ManifestWriter, create_dataset, encode_line, load_manifest
from exitwave.ingest.records import Header, StructureInfo
from exitwave.ingest.schema import PARAMS_DTYPE, FieldSpec
from exitwave.ingest.shard import ShardWriter

__all__ = [
    "SAMPLE_SHAPE",
    "make_dataset",
    "manifest_sums",
    "repeat_shard",
    "samples",
    "write_plain",
    "write_webdataset",
]

SAMPLE_SHAPE = (8, 8, 32, 64)  # float32: 512 KiB

Array = np.ndarray[Any, Any]


def samples(first: int, n: int, shape: tuple[int, ...]) -> Iterator[tuple[int, Array]]:
    """(uid, values) of samples first..first+n-1: functions of the number alone; uids fit into 63 bits."""
    for i in range(first, first + n):
        yield (i + 1) * 0x9E3779B97F4A7C15 % (1 << 63), np.random.default_rng(i).random(shape, dtype=np.float32)


def make_dataset(
    root: Path, *, n: int, per_shard: int, shape: tuple[int, ...] = SAMPLE_SHAPE, structures: int = 4
) -> Path:
    """A data set of `n` samples with one field "cbed", written by the real writers."""
    field = FieldSpec(name="cbed", dtype="float32", shape=shape, axes=("Ry", "Rx", "Qy", "Qx")[-len(shape) :], unit="1")
    create_dataset(root, Header(dataset_id=f"bench-{n}", campaign_hash="bench", fields=(field,)))
    with ManifestWriter(root, epoch=1) as manifest:
        for task, first in enumerate(range(0, n, per_shard)):
            count = min(per_shard, n - first)
            with ShardWriter(
                root,
                shard_id=f"{task % 256:02x}{task:014x}",
                task=task,
                campaign_hash="bench",
                simulator="random",
                n=count,
                fields=(field,),
                params_dtype=PARAMS_DTYPE,
            ) as shard:
                for index in range(structures):
                    shard.add_structure(
                        _structure(index),
                        numbers=[79],
                        positions_A=[[0, 0, 0]],
                        cell_A=np.eye(3),
                        pbc=[1, 1, 0],
                        wyckoff="a",
                    )
                params = np.zeros(1, PARAMS_DTYPE)
                for row, (uid, values) in enumerate(samples(first, count, shape)):
                    params["sample_index"], params["structure"] = first + row, row % structures
                    shard.write(row, uid=uid, params=params[0], arrays={"cbed": values})
                manifest.commit(shard.publish(), split="train", producer={})
    return root


def repeat_shard(root: Path, like: Path, times: int) -> Path:
    """A data set whose manifest names the one shard of `like` `times` over, each under an id of its own.

    To a loader it is as large as it says: it opens, checks and keeps each of them.
    """
    found = load_manifest(like)
    (shard,) = found.shards
    (root / shard.path).parent.mkdir(parents=True)
    (root / shard.path).hardlink_to(like / shard.path)
    with (root / MANIFEST_NAME).open("wb") as file:
        file.write(encode_line(found.header.to_json()))
        for k in range(times):
            line = replace(shard, seq=k, task=k, shard_id=f"{k % 256:02x}{k:014x}", xxh3_128=f"{k:032x}")
            file.write(encode_line(line.to_json()))
    return root


def _structure(index: int) -> StructureInfo:
    return StructureInfo(
        index=index,
        formula="Au",
        space_group=225,
        prototype_group=index,
        source="benchmark",
        licence="CC0-1.0",
        sha256="00" * 32,
        zone_axis=(0, 0, 1),
    )


def manifest_sums(data: Dataset) -> Counter[tuple[int, int]]:
    """The multiset of (uid, crc32c of the one field) that the committed shards hold, from their tables."""
    return Counter(zip(data.uids.tolist(), data.checksums("cbed").tolist(), strict=True))


def write_plain(path: Path, n: int, shape: tuple[int, ...] = SAMPLE_SHAPE) -> Path:
    """All samples in one file, for a peer in another environment: `samples.f4`, `uids.u8` and `shape.json`."""
    path.mkdir()
    uids = []
    with (path / "samples.f4").open("wb") as file:
        for uid, values in samples(0, n, shape):
            file.write(values.tobytes())
            uids.append(uid)
    (path / "uids.u8").write_bytes(np.array(uids, "<u8").tobytes())
    (path / "shape.json").write_text(json.dumps(shape))
    return path


def write_webdataset(path: Path, n: int, per_shard: int, shape: tuple[int, ...] = SAMPLE_SHAPE) -> Path:
    """Tar files of `per_shard` samples: `<uid>.npy`."""
    import webdataset

    path.mkdir()
    with webdataset.ShardWriter(str(path / "%06d.tar"), maxcount=per_shard, verbose=0) as writer:
        for uid, values in samples(0, n, shape):
            writer.write({"__key__": f"{uid:016x}", "cbed.npy": values})
    return path
