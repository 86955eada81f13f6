"""One try of one copy, in a thread of its own: read, hashed and written piece by piece, then synced.

What fails is told apart by whose fault it is: the source's (another try, perhaps from elsewhere), the peer's that has
not got the shard (yet), or that of the cache's own disk, which no other source would mend.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from exitwave.ingest.peers import PeerBusyError, PeerLacksError
from exitwave.ingest.records import ShardRecord
from exitwave.ingest.staging_sources import Source
from exitwave.ingest.storage import Reader

__all__ = ["Copy", "run_copy"]

CHUNK = 1 << 20  # stays in the processor's cache between reading, hashing and writing


class _DiskError(Exception):
    """The cache's disk could not be written."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(kw_only=True)
class Copy:
    """One try. The copying thread writes all from `done` to `opened`, the stager's thread what follows.

    `digest`: the hash of what was read, None when it did not come to the end; then `error` says why, and `disk_error`,
    `busy` or `lacked` whose fault it is, if not the source's.
    """

    shard: ShardRecord
    source: Source
    part: Path
    fd: int
    done: int = 0
    digest: str | None = None
    error: str = ""
    disk_error: OSError | None = None
    busy: bool = False
    lacked: bool = False
    opened: bool = False
    given_up: bool = False
    watched_at: float = field(default_factory=time.monotonic)
    watched_done: int = 0


def run_copy(copy: Copy, ended: Callable[[Copy], None], stopped: Callable[[], bool]) -> None:
    """Copies to the end, or until `stopped()`, which is asked between two pieces; `ended` is called in any case."""
    try:
        reader = copy.source.open(copy.shard)
        copy.watched_at = time.monotonic()
        copy.opened = True
        try:
            copy.digest = _pour(reader, copy, stopped)
        finally:
            reader.close()
    except _DiskError as error:
        copy.disk_error = error.error
    except PeerLacksError as error:
        copy.lacked, copy.error = True, str(error)
    except PeerBusyError:
        copy.busy, copy.error = True, f"{copy.source.name} has not got it yet"
    except OSError as error:
        where = error.filename or (copy.shard.path if copy.source.shared else copy.source.name)
        copy.error = f"{where}: {error.strerror or error}"
    except Exception as error:
        copy.error = f"{type(error).__name__}: {error}"
    finally:
        os.close(copy.fd)
        ended(copy)


def _pour(reader: Reader, copy: Copy, stopped: Callable[[], bool]) -> str | None:
    """Reads, hashes and writes to the end, then syncs; the hash of what was read, None when it was stopped."""
    nbytes, digest, offset = copy.shard.nbytes, xxhash.xxh3_128(), 0
    buffer = memoryview(bytearray(min(CHUNK, max(nbytes, 1))))
    while offset < nbytes:
        if copy.given_up or stopped():
            return None
        count = reader.readinto(buffer[: nbytes - offset], offset)
        if count == 0:
            raise OSError(errno.ENODATA, f"{offset} bytes, expected {nbytes}", copy.shard.path)
        digest.update(buffer[:count])
        try:
            _write(copy.fd, buffer[:count], offset)
        except OSError as error:
            raise _DiskError(error) from error
        offset = copy.done = offset + count
    try:
        os.fdatasync(copy.fd)
    except OSError as error:
        raise _DiskError(error) from error
    return digest.hexdigest()


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
