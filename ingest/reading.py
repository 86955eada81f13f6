"""Reading samples by their extents: one `preadv` each, no HDF5 library, and a checksum on what came.

Files are opened per process and never across a fork: a worker process drops what it inherited and opens its own. At
most `MAX_OPEN` shards are open, with their uids and checksums, so that memory does not grow with the data set; the
larger table of parameters is read by the row.
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
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.codecs import decompress
from exitwave.ingest.errors import DamagedDataError, UsageError
from exitwave.ingest.files import byte_view, crc32c, crc32c_more, open_to_read
from exitwave.ingest.records import Extent, PublishedShard
from exitwave.ingest.schema import TABLES

__all__ = ["MAX_OPEN", "ShardFiles", "read_extent", "read_sample"]

MAX_OPEN = 256  # a quarter of the usual limit of a process
MAX_THREADS = 4
_BYTES_A_THREAD = 1 << 20  # less than this is read before a thread has woken up
_PARAMS_KEPT = 16 << 20
_PIECE = 512 << 10  # fits a second-level cache; smaller ones cost two threads more in handing over to each other
_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_SHORT = "the file is short"
_WHAT_TO_DO = "`exitwave verify` lists all that is damaged; take such shards out or simulate them again."

Array = np.ndarray[Any, Any]
Item = tuple[PublishedShard, int, int]  # shard, row in it, place in the batch


def read_extent(fd: int, out: Array, offset: int) -> bool:
    """Fills `out` (bytes) from `offset`; whether the file had enough."""
    done = os.preadv(fd, [out.data], offset)
    while done < out.nbytes:
        count = os.preadv(fd, [out[done:].data], offset + done)
        if count == 0:
            return False
        done += count
    return True


def read_sample(fd: int, extent: Extent, row: int, out: Array) -> str:
    """Fills `out` with the stored bytes of sample `row`, decompressed; says what is wrong, "" where nothing is."""
    offset, length = extent.place(row)
    if not extent.compression:
        return "" if read_extent(fd, out, offset) else _SHORT
    chunk = np.empty(length, np.uint8)
    if not read_extent(fd, chunk, offset):
        return _SHORT
    if extent.chunk_sums and (found := crc32c(chunk)) != extent.chunk_sums[row]:
        return f"crc32c {found:08x} of the compressed bytes, expected {extent.chunk_sums[row]:08x}"
    try:
        decompress(extent.compression, chunk, out, extent.numpy_dtype.itemsize)
    except ValueError as error:
        return f"cannot be decompressed ({error})"
    return ""


class _Descriptor:
    """A file descriptor that closes itself with its last user: a shard may be let go while it is being read."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)


@dataclass(frozen=True, kw_only=True)
class _OpenShard:
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


class ShardFiles:
    """The open shards of this process. Safe to pickle, to fork with, and to call from several threads.

    `threads`: how many read at once, with the caller's; by default up to four, as there are processors. `wait_s`: how
    long a shard that is not staged is waited for. `hits` and `misses` count how often a shard was turned to that was
    in the cache, or not; `waits` how often one was waited for.
    """

    def __init__(
        self, root: Path, *, staged: Path | None, verify: bool, threads: int | None = None, wait_s: float = 0.0
    ) -> None:
        self.root = root
        self.wait_s = wait_s
        self.staged = staged
        self.verify = verify
        self.threads = min(MAX_THREADS, len(os.sched_getaffinity(0))) if threads is None else max(1, threads)
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self.hits = self.misses = self.waits = 0
        self._lock = threading.RLock()  # anew: one inherited over a fork may be held for ever
        self._open: OrderedDict[str, _OpenShard] = OrderedDict()
        self._shunned: set[str] = set()  # damaged copies that could not be set aside
        self._params_bytes = 0
        self._helpers: ThreadPoolExecutor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {
            "root": self.root,
            "staged": self.staged,
            "verify": self.verify,
            "threads": self.threads,
            "wait_s": self.wait_s,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def close(self) -> None:
        """Closes all files; reading opens them again."""
        helpers, pid = self._helpers, self._pid
        self._reset()
        if helpers is not None and pid == os.getpid():
            helpers.shutdown(wait=False)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def read_rows(self, items: Sequence[Item], arrays: dict[str, Array], uids: Array) -> None:
        """Reads samples: for each (shard, row, k) of `items` fills `arrays[field][k]` and `uids[k]`.

        `arrays`: field or "params" -> (n, stored bytes of a sample) uint8, C-contiguous. Several threads share the
        work where it is large. DamagedDataError naming shard, uid and field when a checksum is wrong or bytes are
        missing.
        """
        if self._pid != os.getpid():
            self._reset()  # a forked process drops what it inherited; the parent's descriptors stay open
        todo = deque(items)
        nbytes = sum(array.shape[1] for array in arrays.values()) * len(items)
        helpers = min(self.threads - 1, nbytes // _BYTES_A_THREAD, len(items) - 1)
        if helpers < 1:
            self._work(todo, arrays, uids)
            return
        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(self.threads - 1, thread_name_prefix="exitwave-read")
        others = [self._helpers.submit(self._work, todo, arrays, uids) for _ in range(helpers)]
        try:
            self._work(todo, arrays, uids)
        finally:
            todo.clear()
            wait(others)
        for other in others:
            other.result()

    def _work(self, todo: deque[Item], arrays: dict[str, Array], uids: Array) -> None:
        """Reads what is left to do, until nothing is, or something is wrong: then nobody goes on."""
        try:
            views = [(field, array, array.shape[1], array.reshape(-1).data) for field, array in arrays.items()]
            last: PublishedShard | None = None
            while True:
                try:
                    record, row, k = todo.popleft()
                except IndexError:
                    return
                if record is not last:
                    shard, last = self._get(record), record
                for field, array, size, view in views:
                    if field == "params" and shard.params is not None:
                        array[k] = shard.params[row]
                    elif not self._read_quickly(shard, field, row, view[k * size : (k + 1) * size]):
                        self._read_carefully(record, row, field, array[k])
                uids[k] = shard.uids[row]
        except BaseException:
            todo.clear()
            raise

    def _read_quickly(self, shard: _OpenShard, field: str, row: int, out: memoryview) -> bool:
        """Fills `out` with a sample's bytes; whether all is well, by its checksum too. Nothing is said of why not.

        A large sample goes in pieces, each summed while it is still in the processor's cache.
        """
        extent = shard.extents[field]
        if extent.compression:
            return False
        fd, offset, found = shard.file.fd, extent.offset + row * extent.stride, 0
        for start in range(0, len(out), _PIECE):
            piece = out[start : start + _PIECE]
            try:
                if os.preadv(fd, [piece], offset + start) != len(piece):
                    return False
            except OSError:
                return False
            if self.verify:
                found = crc32c_more(piece, found)
        return not self.verify or found == shard.sums[field][row]

    def _read_carefully(self, record: PublishedShard, row: int, field: str, out: Array) -> None:
        """Fills `out` with a sample's bytes by all means there are, or says what is wrong with them."""
        while True:
            shard = self._get(record)
            try:
                self._read_field(shard, record, row, field, out)
                return
            except _StagedDamage as damage:
                self._set_aside(record, shard, damage.path, str(damage))

    def read_part(
        self, record: PublishedShard, row: int, field: str, pieces: Sequence[tuple[int, int]], out: Array
    ) -> np.uint64:
        """Fills `out` (bytes) with `pieces` (offset, length) of the stored bytes of one field; returns the uid.

        Only these bytes are read, so that no checksum of the sample can be looked at: they are covered by the file's
        hash, which staging and `verify` check. DamagedDataError when they are missing.
        """
        if self._pid != os.getpid():
            self._reset()
        while True:
            shard = self._get(record)
            start, at = shard.extents[field].place(row)[0], 0
            try:
                for offset, length in pieces:
                    if not read_extent(shard.fd, out[at : at + length], start + offset):
                        raise self._damage(shard, record, f"{self._sample(shard, row)}{field}: the file is short")
                    at += length
                uid: np.uint64 = shard.uids[row]
                return uid
            except _StagedDamage as damage:
                self._set_aside(record, shard, damage.path, str(damage))
            except OSError as error:
                raise self._damage(shard, record, f"{self._sample(shard, row)}{field}: {error}") from error

    def read_table(self, record: PublishedShard, name: str) -> Array:
        """One of the small tables of a shard, whole: "uid" (n,), "params" (n,) compound, …"""
        if self._pid != os.getpid():
            self._reset()
        while True:
            shard = self._get(record)
            try:
                return self._table(shard.fd, shard.path, shard.staged, record, shard.extents[name])
            except _StagedDamage as damage:
                self._set_aside(record, shard, damage.path, str(damage))

    def _read_field(self, shard: _OpenShard, record: PublishedShard, row: int, field: str, out: Array) -> None:
        if field == "params" and shard.params is not None:
            out[:] = shard.params[row]
            return
        try:
            wrong = read_sample(shard.fd, shard.extents[field], row, out)
        except OSError as error:
            raise self._damage(shard, record, f"{self._sample(shard, row)}{field}: {error}") from error
        if wrong:
            raise self._damage(shard, record, f"{self._sample(shard, row)}{field}: {wrong}")
        if self.verify and (found := crc32c(out)) != (expected := int(shard.sums[field][row])):
            why = f"{self._sample(shard, row)}{field}: crc32c {found:08x}, expected {expected:08x}"
            raise self._damage(shard, record, why)

    @staticmethod
    def _sample(shard: _OpenShard, row: int) -> str:
        return f"sample {row} (uid {int(shard.uids[row]):#018x}), "

    @classmethod
    def _damage(cls, shard: _OpenShard, record: PublishedShard, why: str) -> DamagedDataError:
        return cls._damage_at(shard.path, shard.staged, record, why)

    @staticmethod
    def _damage_at(path: Path, staged: bool, record: PublishedShard, why: str) -> DamagedDataError:
        if staged:
            return _StagedDamage(path, f"shard {record.shard_id}, {why}, in the staged copy {path}")
        return DamagedDataError(f"shard {record.shard_id}, {why}, in {path}. {_WHAT_TO_DO}")

    def _set_aside(self, record: PublishedShard, shard: _OpenShard | None, path: Path, why: str) -> None:
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

    def _count(self, shard: _OpenShard) -> None:
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

    def _get(self, record: PublishedShard) -> _OpenShard:
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
                except _StagedDamage as damage:
                    if not damage.evicted:
                        self._set_aside(record, None, damage.path, str(damage))
            self._count(shard)
            self._open[record.shard_id] = shard
            self._params_bytes += 0 if shard.params is None else shard.params.nbytes
            if len(self._open) > MAX_OPEN:
                self._let_go(next(iter(self._open)))
            return shard

    def _open_now(self, record: PublishedShard) -> _OpenShard:
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
                raise UsageError(
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
        except _StagedDamage as damage:
            damage.evicted = _is_evicted(fd)
            raise
        params: Array | None = None
        if keep:
            with contextlib.suppress(DamagedDataError):  # then the checksum of each row tells which one it is
                params = self._table(fd, path, staged, record, extents["params"]).view(np.uint8)
                params = params.reshape(record.n, -1)
        fields = [extent.field for extent in record.extents if extent.field not in TABLES]
        sums = {name: tables["crc32c"][:, column] for column, name in enumerate(fields)}
        return _OpenShard(
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
            raise self._damage_at(path, staged, record, f"/{extent.field}: {error.strerror}") from error
        if not whole:
            raise self._damage_at(path, staged, record, f"/{extent.field}: the file is short")
        expected = record.stats.get("tables_crc32c", {}).get(extent.field)
        if expected is not None and crc32c(data) != expected:
            why = f"/{extent.field}: crc32c {crc32c(data):08x}, not {expected:08x}"
            raise self._damage_at(path, staged, record, why)
        return table


class _StagedDamage(DamagedDataError):
    def __init__(self, path: Path, why: str) -> None:
        super().__init__(why)
        self.path = path
        self.evicted = False


def _is_evicted(fd: int) -> bool:
    """Whether the stager has taken the file away: it is cut short then, but not damaged."""
    return os.fstat(fd).st_nlink == 0
