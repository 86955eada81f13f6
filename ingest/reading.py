"""Reading samples by their extents: one `preadv` each, no HDF5 library, and a checksum on what came.

Files are opened per process and never across a fork: a worker process drops what it inherited and opens its own. At
most `MAX_OPEN` shards are open, with their small tables, so that memory does not grow with the data set.
With a cache, a shard staged there is read there; a staged copy that turns out damaged is set aside in `quarantine/`
and its shard read from the data set instead.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.errors import DamagedDataError
from exitwave.ingest.files import byte_view, crc32c
from exitwave.ingest.records import Extent, PublishedShard
from exitwave.ingest.schema import TABLES

__all__ = ["MAX_OPEN", "OpenShard", "ShardFiles", "read_extent"]

MAX_OPEN = 64
_WHAT_TO_DO = "`exitwave verify` lists all that is damaged; take such shards out or simulate them again."

Array = np.ndarray[Any, Any]


def read_extent(fd: int, out: Array, offset: int) -> bool:
    """Fills `out` (bytes) from `offset`; whether the file had enough."""
    view = out.data
    while view:
        count = os.preadv(fd, [view], offset)
        if count == 0:
            return False
        view, offset = view[count:], offset + count
    return True


@dataclass(frozen=True, kw_only=True)
class OpenShard:
    """A shard open in this process: descriptor, where it was found, extents by field, and the small tables.

    uids (n,) uint64, params (n,) compound and as plain bytes, sums (n, fields) uint32 in the order of `columns`.
    """

    fd: int
    path: Path
    staged: bool
    extents: dict[str, Extent]
    columns: dict[str, int]
    uids: Array
    params: Array
    params_bytes: Array
    sums: Array


class ShardFiles:
    """The open shards of this process. Safe to pickle, to fork with, and to call from several threads."""

    def __init__(self, root: Path, *, staged: Path | None, verify: bool) -> None:
        self.root = root
        self.staged = staged
        self.verify = verify
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()  # anew: one inherited over a fork may be held for ever
        self._open: OrderedDict[str, OpenShard] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root, "staged": self.staged, "verify": self.verify}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def close(self) -> None:
        """Closes all files; reading opens them again."""
        opened, pid = self._open, self._pid
        self._reset()
        for shard in opened.values() if pid == os.getpid() else ():
            os.close(shard.fd)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def read(self, record: PublishedShard, row: int, arrays: dict[str, Array]) -> tuple[np.uint64, np.void]:
        """Fills `arrays` (field -> one sample, C-contiguous) with sample `row` of a shard.

        Returns its uid, and the bytes of its params: copying a compound field by field would cost as much as the rest.
        DamagedDataError naming shard, uid and field when a checksum is wrong or bytes are missing.
        """
        self._after_fork()
        with self._lock:
            while True:
                try:
                    shard = self._get(record)
                    for field, out in arrays.items():
                        self._read_field(shard, record, row, field, byte_view(out, out.dtype))
                    return shard.uids[row], shard.params_bytes[row]
                except _StagedDamage as damage:
                    self._set_aside(record, damage.path, str(damage))

    def open(self, record: PublishedShard) -> OpenShard:
        """The shard with its tables, opened now or before. Its descriptor may be closed by the next call."""
        self._after_fork()
        with self._lock:
            while True:
                try:
                    return self._get(record)
                except _StagedDamage as damage:
                    self._set_aside(record, damage.path, str(damage))

    def _after_fork(self) -> None:
        if self._pid != os.getpid():
            for inherited in self._open.values():  # the parent's own descriptors are not touched by closing ours
                os.close(inherited.fd)
            self._reset()

    def _read_field(self, shard: OpenShard, record: PublishedShard, row: int, field: str, out: Array) -> None:
        extent = shard.extents[field]
        try:
            whole = read_extent(shard.fd, out, extent.offset + row * extent.stride)
        except OSError as error:
            raise self._damage(
                shard.path, shard.staged, record, f"{self._sample(shard, row)}{field}: {error}"
            ) from error
        if not whole:
            raise self._damage(
                shard.path, shard.staged, record, f"{self._sample(shard, row)}{field}: the file is short"
            )
        if self.verify and (found := crc32c(out)) != (expected := int(shard.sums[row, shard.columns[field]])):
            why = f"{self._sample(shard, row)}{field}: crc32c {found:08x}, expected {expected:08x}"
            raise self._damage(shard.path, shard.staged, record, why)

    @staticmethod
    def _sample(shard: OpenShard, row: int) -> str:
        return f"sample {row} (uid {int(shard.uids[row]):#018x}), "

    @staticmethod
    def _damage(path: Path, staged: bool, record: PublishedShard, why: str) -> DamagedDataError:
        if staged:
            return _StagedDamage(path, f"shard {record.shard_id}, {why}, in the staged copy {path}")
        return DamagedDataError(f"shard {record.shard_id}, {why}, in {path}. {_WHAT_TO_DO}")

    def _set_aside(self, record: PublishedShard, path: Path, why: str) -> None:
        if (gone := self._open.pop(record.shard_id, None)) is not None:
            os.close(gone.fd)
        quarantine = path.parent.parent / "quarantine"
        warnings.warn(f"{why}: set aside in {quarantine}, reading the data set itself", stacklevel=4)
        quarantine.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another process may have been faster
            path.rename(quarantine / path.name)

    def _get(self, record: PublishedShard) -> OpenShard:
        """The shard, opened now or before; the least recently used one is closed when too many are open."""
        if (shard := self._open.get(record.shard_id)) is not None:
            self._open.move_to_end(record.shard_id)
            return shard
        shard = self._open[record.shard_id] = self._open_now(record)
        if len(self._open) > MAX_OPEN:
            os.close(self._open.popitem(last=False)[1].fd)
        return shard

    def _open_now(self, record: PublishedShard) -> OpenShard:
        path, staged = self.root / record.path, False
        fd = None
        if self.staged is not None:
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(self.staged / f"{record.shard_id}.h5", os.O_RDONLY | os.O_CLOEXEC)
                path, staged = self.staged / f"{record.shard_id}.h5", True
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if fd is None else fd
        except OSError as error:
            raise DamagedDataError(f"shard {record.shard_id}: {path}: {error.strerror}. {_WHAT_TO_DO}") from error
        try:
            extents = {extent.field: extent for extent in record.extents}
            tables = {name: self._table(fd, path, staged, record, extents[name]) for name in TABLES}
        except BaseException:
            os.close(fd)
            raise
        params = tables["params"]
        if (split := getattr(record, "split", None)) and "split" in (params.dtype.names or ()):
            params["split"] = split.encode()  # the manifest's word on the split is the last
        return OpenShard(
            fd=fd,
            path=path,
            staged=staged,
            extents=extents,
            columns={e.field: i for i, e in enumerate(e for e in record.extents if e.field not in TABLES)},
            uids=tables["uid"],
            params=params,
            params_bytes=params.view(f"V{params.dtype.itemsize}"),
            sums=tables["crc32c"],
        )

    def _table(self, fd: int, path: Path, staged: bool, record: PublishedShard, extent: Extent) -> Array:
        table = np.empty(extent.shape, dtype=extent.numpy_dtype)
        data = byte_view(table, table.dtype)
        if not read_extent(fd, data, extent.offset):
            raise self._damage(path, staged, record, f"/{extent.field}: the file is short")
        expected = record.stats.get("tables_crc32c", {}).get(extent.field)
        if expected is not None and crc32c(data) != expected:
            raise self._damage(path, staged, record, f"/{extent.field}: crc32c {crc32c(data):08x}, not {expected:08x}")
        return table


class _StagedDamage(DamagedDataError):
    def __init__(self, path: Path, why: str) -> None:
        super().__init__(why)
        self.path = path
