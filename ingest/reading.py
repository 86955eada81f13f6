"""Reading samples by their extents: one `preadv` each, no HDF5 library, and a checksum on what came.

What is to be read is written down first: for a batch, where each sample lies and what its checksum must be. Several
threads then take one sample after the other from that list; between two of them a thread does next to nothing while it
holds the interpreter's lock, since the others wait for it meanwhile. Whatever is not as expected is read once more,
with care, to say what is wrong.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.errors import DamagedDataError
from exitwave.ingest.extent_io import SHORT, read_extent, read_sample
from exitwave.ingest.files import crc32c, crc32c_more
from exitwave.ingest.open_shards import OpenShard, OpenShards, StagedDamage, TooManyFilesError
from exitwave.ingest.records import PublishedShard

__all__ = ["ShardFiles"]

MAX_THREADS = 4
_BYTES_A_THREAD = 1 << 20  # less than this is read before a thread has woken up
_SHARDS_AT_ONCE = 64  # of one batch: they stay open while it is read
_PIECE = 512 << 10  # fits a second-level cache; smaller ones cost two threads more in handing over to each other
_WITH_CARE = -1  # no descriptor: what is compressed

Array = np.ndarray[Any, Any]
Item = tuple[PublishedShard, int, int]  # shard, row in it, place in the batch
Whose = tuple[OpenShard, PublishedShard, int, str, Array, int]  # shard, row in it, field, array, place in it
Read = tuple[int, int, memoryview, int, Whose]  # descriptor (open while its shard stands in `whose`), offset, out, sum


class ShardFiles(OpenShards):
    """Reads samples of the shards of a data set. Safe to pickle, to fork with, and to call from several threads.

    `threads`: how many read at once, with the caller's; by default up to four, as there are processors. `verify`:
    check the checksum of every sample.
    """

    def __init__(
        self, root: Path, *, staged: Path | None, verify: bool, threads: int | None = None, wait_s: float = 0.0
    ) -> None:
        self.verify = verify
        self.threads = min(MAX_THREADS, len(os.sched_getaffinity(0))) if threads is None else max(1, threads)
        super().__init__(root, staged=staged, wait_s=wait_s)

    def _reset(self) -> None:
        super()._reset()
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
        super().close()
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
        self._here()
        for reads in self._plan(items, arrays, uids):
            self._read_all(reads)

    def _plan(self, items: Sequence[Item], arrays: dict[str, Array], uids: Array) -> Iterator[deque[Read]]:
        """What is to be read, in stretches of few shards, which are open until all of a stretch is read.

        Where the process may not open as many, a stretch ends earlier. What is at hand is filled in at once.
        """
        views = [(field, array, array.reshape(-1).data) for field, array in arrays.items()]
        reads: deque[Read] = deque()
        shards = 0
        last: PublishedShard | None = None
        for record, row, k in items:
            if record is not last:
                if shards == _SHARDS_AT_ONCE:
                    yield reads
                    reads, shards = deque(), 0
                try:
                    shard = self._get(record)
                except TooManyFilesError:
                    if not shards:
                        raise
                    yield reads
                    reads, shards = deque(), 0
                    del shard  # the last one open of that stretch
                    shard = self._get(record)
                last, shards = record, shards + 1
                kept, shard_uids = shard.params, shard.uids
                places = [
                    (
                        _WITH_CARE if extent.compression else shard.fd,
                        extent.offset,
                        extent.stride,
                        shard.sums[field],
                        field,
                        array,
                        view,
                    )
                    for field, array, view in views
                    if (extent := shard.extents[field]) and not (field == "params" and kept is not None)
                ]
            uids[k] = shard_uids[row]
            if kept is not None and "params" in arrays:
                arrays["params"][k] = kept[row]
            for fd, offset, size, sums, field, array, view in places:
                out = view[k * size : (k + 1) * size]
                reads.append((fd, offset + row * size, out, int(sums[row]), (shard, record, row, field, array, k)))
        yield reads

    def _read_all(self, reads: deque[Read]) -> None:
        """Reads what is written down, by several threads where it is much."""
        nbytes = sum(len(read[2]) for read in reads)
        helpers = min(self.threads - 1, nbytes // _BYTES_A_THREAD, len(reads) - 1)
        if helpers < 1:
            self._work(reads)
            return
        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(self.threads - 1, thread_name_prefix="exitwave-read")
        others = [self._helpers.submit(self._work, reads) for _ in range(helpers)]
        try:
            self._work(reads)
        finally:
            reads.clear()
            wait(others)
        for other in others:
            other.result()

    def _work(self, reads: deque[Read]) -> None:
        """Reads what is left to do, until nothing is, or something is wrong: then nobody goes on."""
        verify = self.verify
        try:
            while True:
                try:
                    fd, offset, out, expected, whose = reads.popleft()
                except IndexError:
                    return
                if fd == _WITH_CARE or not _is_read(fd, offset, out, expected if verify else None):
                    self._read_carefully(*whose)
        except BaseException:
            reads.clear()
            raise

    def _read_carefully(
        self, shard: OpenShard, record: PublishedShard, row: int, field: str, array: Array, k: int
    ) -> None:
        """Fills `array[k]` with a sample's bytes by all means there are, or says what is wrong with them."""
        while True:
            try:
                self._read_field(shard, record, row, field, array[k])
                return
            except StagedDamage as damage:
                self._set_aside(record, shard, damage.path, str(damage))
            shard = self._get(record)

    def _read_field(self, shard: OpenShard, record: PublishedShard, row: int, field: str, out: Array) -> None:
        if field == "params" and shard.params is not None:
            out[:] = shard.params[row]
            return
        try:
            wrong = read_sample(shard.fd, shard.extents[field], row, out)
        except OSError as error:
            raise self._damaged(shard, record, row, f"{field}: {error}") from error
        if wrong:
            raise self._damaged(shard, record, row, f"{field}: {wrong}")
        if self.verify and (found := crc32c(out)) != (expected := int(shard.sums[field][row])):
            raise self._damaged(shard, record, row, f"{field}: crc32c {found:08x}, expected {expected:08x}")

    def read_part(
        self, record: PublishedShard, row: int, field: str, pieces: Sequence[tuple[int, int]], out: Array
    ) -> np.uint64:
        """Fills `out` (bytes) with `pieces` (offset, length) of the stored bytes of one field; returns the uid.

        Only these bytes are read, so that no checksum of the sample can be looked at: they are covered by the file's
        hash, which staging and `verify` check. DamagedDataError when they are missing.
        """
        self._here()
        while True:
            shard = self._get(record)
            start, at = shard.extents[field].place(row)[0], 0
            try:
                for offset, length in pieces:
                    if not read_extent(shard.fd, out[at : at + length], start + offset):
                        raise self._damaged(shard, record, row, f"{field}: {SHORT}")
                    at += length
                uid: np.uint64 = shard.uids[row]
                return uid
            except StagedDamage as damage:
                self._set_aside(record, shard, damage.path, str(damage))
            except OSError as error:
                raise self._damaged(shard, record, row, f"{field}: {error}") from error

    def _damaged(self, shard: OpenShard, record: PublishedShard, row: int, why: str) -> DamagedDataError:
        sample = f"sample {row} (uid {int(shard.uids[row]):#018x}), "
        return self._damage(shard.path, shard.staged, record, sample + why)


def _is_read(fd: int, offset: int, out: memoryview, expected: int | None) -> bool:
    """Fills `out` with a sample's bytes; whether all is well, by its checksum too. Nothing is said of why not.

    A large sample goes in pieces, each summed while it is still in the processor's cache.
    """
    size, found = len(out), 0
    try:
        if size <= _PIECE:
            return os.preadv(fd, (out,), offset) == size and (expected is None or crc32c_more(out, 0) == expected)
        for start in range(0, size, _PIECE):
            piece = out[start : start + _PIECE]
            if os.preadv(fd, (piece,), offset + start) != len(piece):
                return False
            if expected is not None:
                found = crc32c_more(piece, found)
    except OSError:
        return False
    return expected is None or found == expected
