"""Reading samples by their extents: one `preadv` each, no HDF5 library, and a checksum on what came.

Files are opened per process and never across a fork: a worker process drops what it inherited and opens its own. At
most `MAX_OPEN` shards are open, with their uids and checksums, so that memory does not grow with the data set; the
larger table of parameters is read by the row.
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

from exitwave.ingest.codecs import decompress
from exitwave.ingest.errors import DamagedDataError
from exitwave.ingest.files import byte_view, crc32c, open_to_read
from exitwave.ingest.records import Extent, PublishedShard
from exitwave.ingest.schema import TABLES

__all__ = ["MAX_OPEN", "ShardFiles", "read_extent", "read_sample"]

MAX_OPEN = 256  # a quarter of the usual limit of a process
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


def read_sample(fd: int, extent: Extent, row: int, out: Array) -> bool:
    """Fills `out` with the stored bytes of sample `row`, decompressed; whether the file had them."""
    offset, length = extent.place(row)
    if not extent.compression:
        return read_extent(fd, out, offset)
    chunk = np.empty(length, np.uint8)
    if not read_extent(fd, chunk, offset):
        return False
    try:
        decompress(extent.compression, chunk, out, extent.numpy_dtype.itemsize)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class _OpenShard:
    """A shard open in this process: descriptor, where it was found, extents by field, uids (n,) uint64.

    `sums`: field -> (n,) uint32, the checksums of the array fields and of "params".
    """

    fd: int
    path: Path
    staged: bool
    extents: dict[str, Extent]
    uids: Array
    sums: dict[str, Array]


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
        self._open: OrderedDict[str, _OpenShard] = OrderedDict()

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

    def read(self, record: PublishedShard, row: int, arrays: dict[str, Array]) -> np.uint64:
        """Fills `arrays` (field or "params" -> one sample's bytes, uint8) with sample `row`; returns its uid.

        DamagedDataError naming shard, uid and field when a checksum is wrong or bytes are missing.
        """
        self._after_fork()
        with self._lock:
            while True:
                try:
                    shard = self._get(record)
                    for field, out in arrays.items():
                        self._read_field(shard, record, row, field, out)
                    uid: np.uint64 = shard.uids[row]
                    return uid
                except _StagedDamage as damage:
                    self._set_aside(record, damage.path, str(damage))

    def read_table(self, record: PublishedShard, name: str) -> Array:
        """One of the small tables of a shard, whole: "uid" (n,), "params" (n,) compound, …"""
        self._after_fork()
        with self._lock:
            while True:
                try:
                    shard = self._get(record)
                    return self._table(shard.fd, shard.path, shard.staged, record, shard.extents[name])
                except _StagedDamage as damage:
                    self._set_aside(record, damage.path, str(damage))

    def _after_fork(self) -> None:
        if self._pid != os.getpid():
            for inherited in self._open.values():  # the parent's own descriptors are not touched by closing ours
                os.close(inherited.fd)
            self._reset()

    def _read_field(self, shard: _OpenShard, record: PublishedShard, row: int, field: str, out: Array) -> None:
        extent = shard.extents[field]
        try:
            whole = read_sample(shard.fd, extent, row, out)
        except OSError as error:
            raise self._damage(
                shard.path, shard.staged, record, f"{self._sample(shard, row)}{field}: {error}"
            ) from error
        if not whole:
            raise self._damage(
                shard.path, shard.staged, record, f"{self._sample(shard, row)}{field}: the file is short"
            )
        if self.verify and (found := crc32c(out)) != (expected := int(shard.sums[field][row])):
            why = f"{self._sample(shard, row)}{field}: crc32c {found:08x}, expected {expected:08x}"
            raise self._damage(shard.path, shard.staged, record, why)

    @staticmethod
    def _sample(shard: _OpenShard, row: int) -> str:
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

    def _get(self, record: PublishedShard) -> _OpenShard:
        """The shard, opened now or before; the least recently used one is closed when too many are open."""
        if (shard := self._open.get(record.shard_id)) is not None:
            self._open.move_to_end(record.shard_id)
            return shard
        shard = self._open[record.shard_id] = self._open_now(record)
        if len(self._open) > MAX_OPEN:
            os.close(self._open.popitem(last=False)[1].fd)
        return shard

    def _open_now(self, record: PublishedShard) -> _OpenShard:
        path, staged = self.root / record.path, False
        fd = None
        if self.staged is not None:
            with contextlib.suppress(OSError):  # then the data set itself has it
                fd = open_to_read(self.staged / f"{record.shard_id}.h5")
                path, staged = self.staged / f"{record.shard_id}.h5", True
        try:
            fd = open_to_read(path) if fd is None else fd
        except OSError as error:
            raise DamagedDataError(f"shard {record.shard_id}: {path}: {error.strerror}. {_WHAT_TO_DO}") from error
        try:
            extents = {extent.field: extent for extent in record.extents}
            tables = {
                name: self._table(fd, path, staged, record, extents[name])
                for name in ("uid", "crc32c", "params_crc32c")
            }
        except BaseException:
            os.close(fd)
            raise
        names = [extent.field for extent in record.extents if extent.field not in TABLES]
        sums = {name: tables["crc32c"][:, column] for column, name in enumerate(names)}
        return _OpenShard(
            fd=fd,
            path=path,
            staged=staged,
            extents=extents,
            uids=tables["uid"],
            sums={**sums, "params": tables["params_crc32c"]},
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
