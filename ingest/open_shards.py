"""The shards that a process has open: with their uids and checksums, in the cache where they lie there.

Files are opened per process and never across a fork: a worker process drops what it inherited and opens its own. At
most `MAX_OPEN` shards are open, so that memory does not grow with the data set; the larger table of parameters is kept
while there is room, else it is read by the row.
With a cache, a shard staged there is read there; a staged copy that turns out damaged is set aside in `quarantine/`
and its shard read from the data set instead. So is one that is not there, or has been evicted: nobody waits for the
cache longer than `wait_s`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.errors import DamagedDataError, UsageError
from exitwave.ingest.extent_io import SHORT, read_extent
from exitwave.ingest.extents import Extent
from exitwave.ingest.files import byte_view, crc32c, open_to_read
from exitwave.ingest.records import PublishedShard
from exitwave.ingest.schema import TABLES

__all__ = ["MAX_OPEN", "OpenShard", "OpenShards", "StagedDamage", "TooManyFilesError"]

MAX_OPEN = 256  # a quarter of the usual limit of a process
_PARAMS_KEPT = 16 << 20
_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_WHAT_TO_DO = "`exitwave verify` lists all that is damaged; take such shards out or simulate them again."

Array = np.ndarray[Any, Any]


class _Descriptor:
    """A file descriptor that closes itself with its last user: a shard may be let go while it is being read."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)


@dataclass(frozen=True, kw_only=True)
class OpenShard:
    """A shard open in this process: descriptor, where it was found, extents by field, uids (n,) uint64.

    `sums`: field -> (n,) uint32, the checksums of the array fields and of "params". `params`: the table's rows as
    bytes (n, bytes of a row), where there was room to keep it.
    """

    file: _Descriptor
    path: Path
    staged: bool
    extents: dict[str, Extent]
    uids: Array
    sums: dict[str, Array]
    params: Array | None

    @property
    def fd(self) -> int:
        return self.file.fd


class StagedDamage(DamagedDataError):
    """A copy in the cache is damaged, or `evicted`: the data set itself is turned to."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(why)
        self.path = path
        self.evicted = False


class TooManyFilesError(UsageError):
    """No shard can be opened before another one is closed."""


class OpenShards:
    """The open shards of this process. Safe to pickle, to fork with, and to call from several threads.

    `staged`: the folder of whole copies, if there is a cache. `wait_s`: how long a shard that is not staged is waited
    for. `hits` and `misses` count how often a shard was turned to that was in the cache, or not; `waits` how often one
    was waited for.
    """

    def __init__(self, root: Path, *, staged: Path | None, wait_s: float = 0.0) -> None:
        self.root = root
        self.staged = staged
        self.wait_s = wait_s
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self.hits = self.misses = self.waits = 0
        self._lock = threading.RLock()  # anew: one inherited over a fork may be held for ever
        self._open: OrderedDict[str, OpenShard] = OrderedDict()
        self._shunned: set[str] = set()  # damaged copies that could not be set aside
        self._params_bytes = 0

    def _here(self) -> None:
        """A forked process drops what it inherited; the parent's descriptors stay open."""
        if self._pid != os.getpid():
            self._reset()

    def close(self) -> None:
        """Closes all files; reading opens them again."""
        self._reset()

    def read_table(self, record: PublishedShard, name: str) -> Array:
        """One of the small tables of a shard, whole: "uid" (n,), "params" (n,) compound, …"""
        self._here()
        while True:
            shard = self._get(record)
            try:
                return self._table(shard.fd, shard.path, shard.staged, record, shard.extents[name])
            except StagedDamage as damage:
                self._set_aside(record, shard, damage.path, str(damage))

    @staticmethod
    def _damage(path: Path, staged: bool, record: PublishedShard, why: str) -> DamagedDataError:
        if staged:
            return StagedDamage(path, f"shard {record.shard_id}, {why}, in the staged copy {path}")
        return DamagedDataError(f"shard {record.shard_id}, {why}, in {path}. {_WHAT_TO_DO}")

    def _set_aside(self, record: PublishedShard, shard: OpenShard | None, path: Path, why: str) -> None:
        with self._lock:
            if shard is not None:
                if self._open.get(record.shard_id) is not shard:
                    return  # another thread was faster
                self._let_go(record.shard_id)
                if _is_evicted(shard.fd):
                    return
            quarantine = path.parent.parent / "quarantine"
            what = f"set aside in {quarantine}"
            try:
                quarantine.mkdir(exist_ok=True)
                path.rename(quarantine / path.name)
            except FileNotFoundError:  # another process may have been faster
                pass
            except OSError as error:  # the cache is not ours to write: this process looks no further at that copy
                self._shunned.add(record.shard_id)
                what = f"it cannot be set aside ({error.strerror}), it is left"
            warnings.warn(f"{why}: {what}, reading the data set itself", stacklevel=4)

    def _count(self, shard: OpenShard) -> None:
        self.hits += shard.staged
        self.misses += not shard.staged and self.staged is not None

    def _is_staged(self, record: PublishedShard) -> bool:
        if self.staged is None or record.shard_id in self._shunned:
            return False
        return os.path.exists(f"{self.staged}/{record.shard_id}.h5")  # noqa: PTH110 (hot)

    def _wait_for(self, record: PublishedShard) -> None:
        """Gives a shard that is perhaps on its way into the cache up to `wait_s`."""
        deadline = time.monotonic() + self.wait_s
        self.waits += self.wait_s > 0 and not self._is_staged(record)
        while time.monotonic() < deadline and not self._is_staged(record):
            time.sleep(0.005)

    def _let_go(self, shard_id: str) -> None:
        shard = self._open.pop(shard_id)
        self._params_bytes -= 0 if shard.params is None else shard.params.nbytes

    def _get(self, record: PublishedShard) -> OpenShard:
        """The shard, opened now or before; the least recently used one is let go when too many are open."""
        with self._lock:
            if (opened := self._open.get(record.shard_id)) is not None:
                if opened.staged or self.staged is None or not self._is_staged(record):
                    self._open.move_to_end(record.shard_id)
                    self._count(opened)
                    return opened
                self._let_go(record.shard_id)  # it has come into the cache meanwhile
            while True:
                try:
                    shard = self._open_now(record)
                    break
                except StagedDamage as damage:
                    if not damage.evicted:
                        self._set_aside(record, None, damage.path, str(damage))
            self._count(shard)
            self._open[record.shard_id] = shard
            self._params_bytes += 0 if shard.params is None else shard.params.nbytes
            if len(self._open) > MAX_OPEN:
                self._let_go(next(iter(self._open)))
            return shard

    def _open_now(self, record: PublishedShard) -> OpenShard:
        path, staged = self.root / record.path, False
        fd = None
        if self.staged is not None and record.shard_id not in self._shunned:
            self._wait_for(record)
            with contextlib.suppress(OSError):  # then the data set itself has it
                fd = self._open_file(self.staged / f"{record.shard_id}.h5")
                path, staged = self.staged / f"{record.shard_id}.h5", True
        try:
            fd = self._open_file(path) if fd is None else fd
        except OSError as error:
            if error.errno in _TOO_MANY:
                raise TooManyFilesError(
                    f"{path}: too many files are open. Close other data sets, or allow more files (ulimit -n)."
                ) from error
            raise DamagedDataError(f"shard {record.shard_id}: {path}: {error.strerror}. {_WHAT_TO_DO}") from error
        file = _Descriptor(fd)
        extents = {extent.field: extent for extent in record.extents}
        names = ["uid", "crc32c", "params_crc32c"]
        # A table whose own checksum the manifest has speaks for its rows; the larger one is kept while it is cheap.
        keep = self._params_bytes + extents["params"].nbytes <= _PARAMS_KEPT
        keep = keep and "params" in record.stats.get("tables_crc32c", {})
        try:
            tables = {name: self._table(fd, path, staged, record, extents[name]) for name in names}
        except StagedDamage as damage:
            damage.evicted = _is_evicted(fd)
            raise
        params: Array | None = None
        if keep:
            with contextlib.suppress(DamagedDataError):  # then the checksum of each row tells which one it is
                params = self._table(fd, path, staged, record, extents["params"]).view(np.uint8)
                params = params.reshape(record.n, -1)
        fields = [extent.field for extent in record.extents if extent.field not in TABLES]
        sums = {name: tables["crc32c"][:, column] for column, name in enumerate(fields)}
        return OpenShard(
            file=file,
            path=path,
            staged=staged,
            extents=extents,
            uids=tables["uid"],
            sums={**sums, "params": tables["params_crc32c"]},
            params=params,
        )

    def _open_file(self, path: Path) -> int:
        """Opens a file; where the process may not open more, the shards that were used least recently are let go."""
        while True:
            try:
                return open_to_read(path)
            except OSError as error:
                if error.errno not in _TOO_MANY or not self._open:
                    raise
                for shard_id in list(self._open)[: -(-len(self._open) // 2)]:
                    self._let_go(shard_id)

    def _table(self, fd: int, path: Path, staged: bool, record: PublishedShard, extent: Extent) -> Array:
        table = np.empty(extent.shape, dtype=extent.numpy_dtype)
        data = byte_view(table, table.dtype)
        try:
            whole = read_extent(fd, data, extent.offset)
        except OSError as error:
            raise self._damage(path, staged, record, f"/{extent.field}: {error.strerror}") from error
        if not whole:
            raise self._damage(path, staged, record, f"/{extent.field}: {SHORT}")
        expected = record.stats.get("tables_crc32c", {}).get(extent.field)
        if expected is not None and crc32c(data) != expected:
            why = f"/{extent.field}: crc32c {crc32c(data):08x}, not {expected:08x}"
            raise self._damage(path, staged, record, why)
        return table


def _is_evicted(fd: int) -> bool:
    """Whether the stager has taken the file away: it is cut short then, but not damaged."""
    return os.fstat(fd).st_nlink == 0
