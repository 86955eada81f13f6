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
from pathlib import PurePosixPath
from typing import Any

from exitwave.ingest.codecs import check_codec
from exitwave.ingest.errors import UsageError
from exitwave.ingest.extents import Extent
from exitwave.ingest.schema import MANIFEST_FORMAT, MANIFEST_VERSION, FieldSpec

__all__ = [
    "Header",
    "Manifest",
    "PublishedShard",
    "ShardRecord",
    "StructureInfo",
    "Tombstone",
]

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


@lru_cache(maxsize=4096)
def _shared(record: Any) -> Any:
    """An equal record met before: shards are mostly alike, and a manifest has very many of them."""
    return record


def _interned(data: Any) -> Any:
    """JSON whose keys and strings are shared with all others."""
    if isinstance(data, dict):
        return {sys.intern(key): _interned(value) for key, value in data.items()}
    return sys.intern(data) if type(data) is str else data


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
