"""Reads a whole data set again, every byte, and says what is wrong: shard, sample and field.

A sample's bytes are covered by its checksum per field, the rest of a shard by the file's hash, the manifest by the
checksum in each of its lines.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.extent_io import read_extent, read_sample
from exitwave.ingest.files import byte_view, crc32c, hash_file, open_to_read
from exitwave.ingest.manifest import load_manifest
from exitwave.ingest.records import PublishedShard
from exitwave.ingest.schema import TABLES

__all__ = ["Bad", "VerifyReport", "check_shard", "verify_dataset"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Bad:
    """One thing that is wrong. `uid` or `field` is None where the damage is not one sample's or one field's."""

    shard: str
    uid: int | None
    field: str | None
    why: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """`bytes` were read. `uncommitted`: files under shards/ that the manifest does not list, no damage in itself."""

    ok: bool
    shards: int
    samples: int
    bytes: int
    bad: tuple[Bad, ...]
    uncommitted: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "bad": [bad.to_json() for bad in self.bad], "uncommitted": list(self.uncommitted)}


def verify_dataset(root: str | Path, *, emit: Callable[..., Any] | None = None) -> VerifyReport:
    """Re-reads all committed shards of the data set at `root`; UsageError when its manifest cannot be read.

    `emit(kind, **fields)` is told verify_progress (bytes, total) after each shard.
    """
    root = Path(root)
    manifest = load_manifest(root)
    bad: list[Bad] = []
    seen: dict[int, str] = {}
    done = 0
    for shard in manifest.shards:
        bad += check_shard(root, shard, seen)
        done += shard.nbytes
        if emit is not None:
            emit("verify_progress", bytes=done, total=manifest.nbytes)
    listed = {shard.path for shard in manifest.shards}
    files = (path.relative_to(root).as_posix() for path in sorted((root / "shards").rglob("*.h5")))
    return VerifyReport(
        ok=not bad,
        shards=len(manifest.shards),
        samples=manifest.n_samples,
        bytes=done,
        bad=tuple(bad),
        uncommitted=tuple(path for path in files if path not in listed),
    )


def check_shard(root: Path, shard: PublishedShard, seen: dict[int, str] | None = None) -> list[Bad]:
    """What is wrong with one shard. `seen` (uid -> shard) collects uids over shards: one that repeats is wrong."""
    path = root / shard.path

    def wrong(why: str, uid: int | None = None, field: str | None = None) -> Bad:
        return Bad(shard=shard.shard_id, uid=uid, field=field, why=why)

    try:
        fd = open_to_read(path)
    except OSError as error:
        return [wrong(f"{shard.path}: {error.strerror}")]
    try:
        size = os.fstat(fd).st_size
        bad = _check_samples(fd, shard, wrong, {} if seen is None else seen)
        if size != shard.nbytes:
            bad.insert(0, wrong(f"{shard.path}: {size} bytes, expected {shard.nbytes}"))
        elif (found := hash_file(path)) != shard.xxh3_128 and not bad:
            bad.append(wrong(f"xxh3_128 {found}, expected {shard.xxh3_128}: bytes outside the samples changed"))
        return bad
    except OSError as error:
        return [wrong(f"{shard.path}: {error.strerror}")]
    finally:
        os.close(fd)


def _check_samples(fd: int, shard: PublishedShard, wrong: Callable[..., Bad], seen: dict[int, str]) -> list[Bad]:
    tables: dict[str, Array] = {}
    bad: list[Bad] = []
    damaged = set()
    for name in TABLES:
        extent = shard.extent(name)
        table = tables[name] = np.zeros(extent.shape, extent.numpy_dtype)
        data = byte_view(table, table.dtype)
        whole = read_extent(fd, data, extent.offset)
        found, expected = crc32c(data), shard.stats.get("tables_crc32c", {}).get(name)
        if not whole or (expected is not None and found != expected):
            damaged.add(name)
            why = f"crc32c {found:08x}, expected {expected:08x}" if whole else "the file is short"
            bad.append(wrong(f"table /{name}: {why}", None, name))
    uids: list[int | None] = [None] * shard.n if "uid" in damaged else [int(uid) for uid in tables["uid"]]
    for uid in uids:
        if uid is not None and seen.setdefault(uid, shard.shard_id) != shard.shard_id:
            bad.append(wrong(f"uid stands in shard {seen[uid]} as well", uid, "uid"))
    # A damaged table of checksums cannot accuse the samples: the file's hash then speaks for them.
    if "params_crc32c" not in damaged and "params" in damaged:
        for row, uid in enumerate(uids):
            data = byte_view(tables["params"][row : row + 1], tables["params"].dtype)
            if crc32c(data) != tables["params_crc32c"][row]:
                bad = [b for b in bad if b.field != "params" or b.uid is not None]
                bad.append(wrong(f"crc32c {crc32c(data):08x}, expected another", uid, "params"))
    if "crc32c" not in damaged:
        fields = [extent for extent in shard.extents if extent.field not in TABLES]
        for column, extent in enumerate(fields):
            buffer = np.empty(extent.stride, np.uint8)
            for row, uid in enumerate(uids):
                why = read_sample(fd, extent, row, buffer)
                found, expected = crc32c(buffer), int(tables["crc32c"][row, column])
                if why or found != expected:
                    why = why or f"crc32c {found:08x}, expected {expected:08x}"
                    bad.append(wrong(f"sample {row}: {why}", uid, extent.field))
    return bad
