"""The records that pass between the parts: what a shard holds, what the manifest says of it. All are frozen.

Every record that stands in the manifest has `to_json` (plain dicts, lists, strings and numbers) and `from_json`, and
survives the way there and back unchanged. A record knows nothing of files: reading and writing is in `manifest` and
`shard`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from math import prod
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from exitwave.ingest.codecs import check_codec
from exitwave.ingest.errors import UsageError
from exitwave.ingest.schema import MANIFEST_FORMAT, MANIFEST_VERSION, FieldSpec

__all__ = [
    "Extent",
    "Header",
    "Manifest",
    "PublishedShard",
    "ShardRecord",
    "StructureInfo",
    "Tombstone",
    "dtype_from_json",
    "dtype_to_json",
]

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


def dtype_to_json(dtype: np.dtype[Any]) -> Any:
    """A dtype as JSON: a string such as "<f4", or for a compound a list of [name, dtype] or [name, dtype, shape]."""
    if dtype.names is None:
        return dtype.str
    columns: list[list[Any]] = []
    for name in dtype.names:
        part = dtype[name]
        columns.append([name, part.base.str, *([list(part.shape)] if part.shape else [])])
    return columns


def dtype_from_json(data: Any) -> np.dtype[Any]:
    """The inverse of `dtype_to_json`; lists or tuples."""
    if isinstance(data, str):
        return np.dtype(data)
    return np.dtype([(str(c[0]), str(c[1]), tuple(c[2])) if len(c) > 2 else (str(c[0]), str(c[1])) for c in data])


@lru_cache(maxsize=256)
def _cached_dtype(data: Any) -> np.dtype[Any]:
    return dtype_from_json(data)


@lru_cache(maxsize=4096)
def _shared(record: Any) -> Any:
    """An equal record met before: shards are mostly alike, and a manifest has very many of them."""
    return record


def _interned(data: Any) -> Any:
    """JSON whose keys and strings are shared with all others."""
    if isinstance(data, dict):
        return {sys.intern(key): _interned(value) for key, value in data.items()}
    return sys.intern(data) if type(data) is str else data


def _tuples(data: Any) -> Any:
    return tuple(_tuples(item) for item in data) if isinstance(data, list | tuple) else data


def _lists(data: Any) -> Any:
    return [_lists(item) for item in data] if isinstance(data, list | tuple) else data


def check_name(name: str, what: str) -> str:
    """`name` if it may stand in a file name of ours, else UsageError: a manifest must not lead out of its folder."""
    if not _SAFE_NAME.fullmatch(name):
        raise UsageError(f"{what} {name!r} may hold only letters, digits, '_', '-' and '.'")
    return name


def check_relative(path: str) -> str:
    """`path` if it stays inside the data set's folder, else UsageError."""
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or "\0" in path:
        raise UsageError(f"path {path!r} leaves the data set: expected a path below its folder, such as shards/ab/….h5")
    return path


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Where the bytes of one field lie in a shard: sample `i` starts at `offset + i·stride`, both in bytes.

    `shape` includes the leading axis of n samples, `stride` is the bytes of one sample. `dtype` is a NumPy dtype
    string, or for the compound `/params` nested tuples as in `dtype_to_json`. `encoding` and `scale` are those of the
    field. With `compression`, the bytes of sample `i` are what the chunk at `chunks[i]` = (offset, length) gives; the
    `offset` of the extent is 0 then. `chunk_sums`: the CRC-32C of each chunk as it lies in the file, to be looked at
    before it is decompressed (a damaged one can crash or hang a decompressor); none in manifests of before.
    """

    field: str
    dtype: Any
    shape: tuple[int, ...]
    offset: int
    stride: int
    encoding: str = ""
    scale: float = 1.0
    compression: str = ""
    chunks: tuple[tuple[int, int], ...] = ()
    chunk_sums: tuple[int, ...] = ()

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return _cached_dtype(self.dtype)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return self.shape[1:]

    @property
    def nbytes(self) -> int:
        """Bytes of all samples, decompressed."""
        return self.shape[0] * self.stride

    @property
    def end(self) -> int:
        """The byte behind the last one in the file."""
        if self.compression:
            return max((offset + length for offset, length in self.chunks), default=0)
        return self.offset + self.nbytes

    def place(self, row: int) -> tuple[int, int]:
        """Where the bytes of sample `row` lie in the file: offset and length, compressed where they are."""
        return self.chunks[row] if self.compression else (self.offset + row * self.stride, self.stride)

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "field": self.field,
            "dtype": _lists(self.dtype),
            "shape": list(self.shape),
            "offset": self.offset,
            "stride": self.stride,
        }
        if self.encoding:
            data |= {"encoding": self.encoding, "scale": self.scale}
        if self.compression:
            data |= {"compression": self.compression, "chunks": _lists(self.chunks)}
        if self.chunk_sums:
            data["chunk_crc32c"] = list(self.chunk_sums)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Extent:
        extent = cls(
            field=str(data["field"]),
            dtype=_tuples(data["dtype"]),
            shape=tuple(int(s) for s in data["shape"]),
            offset=int(data["offset"]),
            stride=int(data["stride"]),
            encoding=str(data.get("encoding", "")),
            scale=float(data.get("scale", 1.0)),
            compression=str(data.get("compression", "")),
            chunks=tuple((int(offset), int(length)) for offset, length in data.get("chunks", ())),
            chunk_sums=tuple(int(found) for found in data.get("chunk_crc32c", ())),
        )
        expected = extent.numpy_dtype.itemsize * prod(extent.sample_shape)
        if extent.stride != expected or extent.offset < 0 or not extent.shape or min(extent.shape) < 0:
            raise UsageError(
                f"extent of {extent.field!r}: offset {extent.offset}, stride {extent.stride}; "
                f"expected offset >= 0 and stride {expected} for {extent.dtype} {extent.sample_shape}"
            )
        check_codec(extent.field, extent.numpy_dtype, extent.encoding, extent.compression)
        if len(extent.chunks) != (extent.shape[0] if extent.compression else 0) or any(
            offset < 0 or length < 0 for offset, length in extent.chunks
        ):
            raise UsageError(f"extent of {extent.field!r}: {len(extent.chunks)} chunks, expected one a sample")
        if extent.chunk_sums and len(extent.chunk_sums) != len(extent.chunks):
            raise UsageError(
                f"extent of {extent.field!r}: {len(extent.chunk_sums)} sums of {len(extent.chunks)} chunks"
            )
        return extent


def _extent(data: Mapping[str, Any]) -> Extent:
    extent = Extent.from_json(data)
    return extent if extent.compression else _shared(extent)  # each compressed one has places of its own


@dataclass(frozen=True, kw_only=True)
class StructureInfo:
    """What is known of a structure besides its atoms. `index` is its number within the shard, as in `/params`."""

    index: int
    formula: str
    space_group: int
    prototype_group: int
    source: str
    licence: str
    sha256: str
    zone_axis: tuple[int, int, int]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "zone_axis": list(self.zone_axis)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StructureInfo:
        h, k, l_ = (int(v) for v in data["zone_axis"])
        return cls(
            index=int(data["index"]),
            formula=str(data["formula"]),
            space_group=int(data["space_group"]),
            prototype_group=int(data["prototype_group"]),
            source=str(data["source"]),
            licence=str(data["licence"]),
            sha256=str(data["sha256"]),
            zone_axis=(h, k, l_),
        )


@dataclass(frozen=True, kw_only=True)
class PublishedShard:
    """A whole, verified shard under its final name, not yet committed. It is what a worker's receipt carries.

    `path` is relative to the data set. `stats` holds per-field minimum, maximum and mean under "fields", and the
    checksums of the small tables under "tables_crc32c".
    """

    shard_id: str
    task: int
    path: str
    nbytes: int
    n: int
    xxh3_128: str
    extents: tuple[Extent, ...]
    structures: tuple[StructureInfo, ...]
    stats: dict[str, Any] = field(default_factory=dict)

    def extent(self, name: str) -> Extent:
        """The extent of one field; KeyError when the shard has no such field."""
        for extent in self.extents:
            if extent.field == name:
                return extent
        raise KeyError(name)

    def to_json(self) -> dict[str, Any]:
        return {
            "shard_id": self.shard_id,
            "task": self.task,
            "path": self.path,
            "nbytes": self.nbytes,
            "n": self.n,
            "xxh3_128": self.xxh3_128,
            "extents": [extent.to_json() for extent in self.extents],
            "structures": [structure.to_json() for structure in self.structures],
            "stats": self.stats,
        }

    @staticmethod
    def _fields(data: Mapping[str, Any]) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "shard_id": check_name(str(data["shard_id"]), "shard_id"),
            "task": int(data["task"]),
            "path": check_relative(str(data["path"])),
            "nbytes": int(data["nbytes"]),
            "n": int(data["n"]),
            "xxh3_128": str(data["xxh3_128"]),
            "extents": tuple(_extent(extent) for extent in data["extents"]),
            "structures": tuple(_shared(StructureInfo.from_json(structure)) for structure in data["structures"]),
            "stats": _interned(dict(data["stats"])),
        }
        for extent in fields["extents"]:
            if extent.shape[0] != fields["n"] or extent.end > fields["nbytes"]:
                raise UsageError(
                    f"extent of {extent.field!r}: {extent.shape[0]} samples to byte {extent.end}, "
                    f"expected {fields['n']} samples within {fields['nbytes']} bytes"
                )
        return fields

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PublishedShard:
        return cls(**cls._fields(data))


@dataclass(frozen=True, kw_only=True)
class ShardRecord(PublishedShard):
    """A committed shard: one line of the manifest. `epoch` is the fencing epoch of the controller that wrote it."""

    seq: int
    generation: int
    split: str
    producer: dict[str, str] = field(default_factory=dict)
    epoch: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "shard",
            "seq": self.seq,
            "generation": self.generation,
            **super().to_json(),
            "split": self.split,
            "producer": self.producer,
            "epoch": self.epoch,
            "status": "committed",
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ShardRecord:
        return cls(
            **cls._fields(data),
            seq=int(data["seq"]),
            generation=int(data["generation"]),
            split=str(data["split"]),
            producer=_interned({str(k): str(v) for k, v in data["producer"].items()}),
            epoch=int(data.get("epoch", 0)),
        )


@dataclass(frozen=True, kw_only=True)
class Tombstone:
    """Says that a committed shard is no longer part of the data set, and why."""

    seq: int
    shard_id: str
    why: str
    epoch: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"kind": "tombstone", **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Tombstone:
        return cls(
            seq=int(data["seq"]),
            shard_id=check_name(str(data["shard_id"]), "shard_id"),
            why=str(data["why"]),
            epoch=int(data.get("epoch", 0)),
        )


@dataclass(frozen=True, kw_only=True)
class Header:
    """The first line of a manifest. `created` is an ISO 8601 time in UTC, informative only.

    `provenance`: the steps that made this data set from others (ingest, subset, merge, migrate), the oldest first.
    """

    dataset_id: str
    campaign_hash: str
    fields: tuple[FieldSpec, ...]
    name: str = ""
    created: str = ""
    exitwave_version: str = ""
    provenance: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "kind": "header",
            "format": MANIFEST_FORMAT,
            "version": MANIFEST_VERSION,
            "dataset_id": self.dataset_id,
            "campaign_hash": self.campaign_hash,
            "name": self.name,
            "created": self.created,
            "exitwave_version": self.exitwave_version,
            "fields": [_field_to_json(f) for f in self.fields],
        }
        if self.provenance:
            data["provenance"] = [dict(step) for step in self.provenance]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Header:
        return cls(
            dataset_id=check_name(str(data["dataset_id"]), "dataset_id"),
            campaign_hash=str(data["campaign_hash"]),
            name=str(data.get("name", "")),
            created=str(data.get("created", "")),
            exitwave_version=str(data.get("exitwave_version", "")),
            fields=tuple(_field_from_json(f) for f in data["fields"]),
            provenance=tuple(dict(step) for step in data.get("provenance", ())),
        )


def _field_to_json(field: FieldSpec) -> dict[str, Any]:
    data = {**asdict(field), "shape": list(field.shape), "axes": list(field.axes)}
    if not field.encoding:
        del data["encoding"], data["scale"]
    return data


def _field_from_json(data: Mapping[str, Any]) -> FieldSpec:
    field = FieldSpec(
        name=check_name(str(data["name"]), "field"),
        dtype=str(data["dtype"]),
        shape=tuple(int(s) for s in data["shape"]),
        axes=tuple(str(a) for a in data["axes"]),
        unit=str(data["unit"]),
        meaning=str(data["meaning"]),
        encoding=str(data.get("encoding", "")),
        scale=float(data.get("scale", 1.0)),
    )
    check_codec(field.name, field.dtype, field.encoding)
    return field


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is committed. `shards` holds the live ones by (generation, task): who finished first changes nothing.

    `torn_tail` says that the file ends in a line cut short by a crash, which is ignored; `stale` counts lines of
    a controller that had already lost its lease to a later one, ignored as well.
    """

    header: Header
    shards: tuple[ShardRecord, ...]
    tombstones: tuple[Tombstone, ...]
    next_seq: int
    torn_tail: bool = False
    stale: int = 0
    epoch: int = 0

    @property
    def n_samples(self) -> int:
        return sum(shard.n for shard in self.shards)

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    @property
    def generation(self) -> int:
        """The newest generation that has a live shard; 0 for an empty data set."""
        return max((shard.generation for shard in self.shards), default=0)

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(sorted({shard.split for shard in self.shards}))

    def by_split(self, name: str) -> tuple[ShardRecord, ...]:
        return tuple(shard for shard in self.shards if shard.split == name)
