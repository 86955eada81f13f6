"""Files appear under their final name only whole: temporary name, fsync, link or rename, fsync of the folder.

A temporary name carries host, process and that process's start time (`.<name>.<host>.<pid>-<start>.part`), so that
what a killed process left behind can be told from what a living one is writing, and swept.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import xxhash

from exitwave.ingest.errors import DamagedDataError, InterruptedRunError, UsageError

try:  # the extra `fast`: twice as fast where the processor multiplies 512 bits without carry
    from awscrt.checksums import crc32c as _crc32c
except ImportError:
    from crc32c import crc32c as _crc32c

__all__ = [
    "FileLock",
    "LockHeldError",
    "NotAPlainFileError",
    "byte_view",
    "crc32c",
    "crc32c_more",
    "disk_full_means_interrupted",
    "fsync_dir",
    "hash_file",
    "open_to_read",
    "part_path",
    "publish",
    "read_object",
    "read_plain",
    "read_plain_text",
    "shard_path",
    "sweep_parts",
    "write_atomic",
]

_CHUNK = 4 << 20

# CRC-32C of bytes (uint8) that follow those of which the second argument is the checksum; 0 for none before.
crc32c_more: Callable[[memoryview, int], int] = _crc32c


def shard_path(shard_id: str) -> str:
    """Where a shard lies, relative to its data set: `shards/<first two characters>/<shard_id>.h5`."""
    return f"shards/{shard_id[:2]}/{shard_id}.h5"


def hash_file(path: Path) -> str:
    """xxh3_128 of the file's bytes, in hexadecimal."""
    digest = xxhash.xxh3_128()
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    with os.fdopen(open_to_read(path), "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


class NotAPlainFileError(OSError):
    """A pipe, a socket or a device stands where a file is expected."""


def open_to_read(path: Path) -> int:
    """A descriptor of the plain file at `path`. NotAPlainFileError for a pipe, which would be waited for without end,
    a socket or a device; IsADirectoryError for a folder.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENODEV):  # a socket, a device without a driver
            raise NotAPlainFileError(errno.EINVAL, _NOT_PLAIN, str(path)) from None
        raise
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "a folder, not a plain file", str(path))
        raise NotAPlainFileError(errno.EINVAL, _NOT_PLAIN, str(path))
    return fd


_NOT_PLAIN = "a pipe, a socket or a device, not a plain file"


def read_plain(path: Path) -> bytes:
    """The bytes of the plain file at `path`. Raises as `open_to_read` does."""
    with os.fdopen(open_to_read(path), "rb") as file:
        return file.read()


def read_plain_text(path: Path, *, errors: str = "strict") -> str:
    """The text, in UTF-8, of the plain file at `path`. Raises as `open_to_read` does, and UnicodeDecodeError."""
    with os.fdopen(open_to_read(path), encoding="utf-8", errors=errors) as file:
        return file.read()


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is none that can be read: for what is only to be shown or asked."""
    try:
        found = json.loads(read_plain(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def byte_view(array: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """The bytes (uint8, one axis) of `array` as `dtype` in C order; a view where no conversion is needed."""
    return np.ascontiguousarray(array, dtype=dtype).reshape(-1).view(np.uint8)


def crc32c(array: np.ndarray[Any, Any]) -> int:
    """CRC-32C of a C-contiguous array's bytes, without a copy; other threads run meanwhile where it is large."""
    plain = array if array.dtype == np.uint8 else array.reshape(-1).view(np.uint8)
    return int(_crc32c(plain.data))


def fsync_dir(folder: Path) -> None:
    """Makes names just created in, or removed from, `folder` survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _start_time(pid: int) -> str | None:
    """Start of process `pid` in clock ticks since boot, None when there is no such process (proc(5), field 22)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    after_name = stat.rpartition(")")[2].split()  # the name may hold spaces; state is the first field after it
    return None if after_name[0] == "Z" else after_name[19]


def _host() -> str:
    return socket.gethostname().replace(".", "_") or "localhost"


def part_path(folder: Path, name: str) -> Path:
    """A temporary name in `folder` that says whose it is. One process writes one `name` at a time."""
    return folder / f".{name}.{_host()}.{os.getpid()}-{_start_time(os.getpid())}.part"


def sweep_parts(folder: Path) -> list[Path]:
    """Removes temporary files below `folder` left by dead processes of this host; returns what it removed.

    Those of living processes and of other hosts stay: the latter's processes cannot be seen from here.
    """
    removed = []
    for path in sorted(folder.rglob(".*.part")):
        pieces = path.name.split(".")
        pid, _, start = pieces[-2].partition("-")
        if len(pieces) < 5 or pieces[-3] != _host() or not pid.isdigit() or _start_time(int(pid)) == start:
            continue
        path.unlink(missing_ok=True)
        removed.append(path)
    return removed


@contextlib.contextmanager
def disk_full_means_interrupted(path: Path, needed: int | None = None) -> Iterator[None]:
    """Turns "no space left" and "quota exceeded" into InterruptedRunError, and "may not write here" into UsageError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) or "errno = 28" in str(error):
            size = "" if needed is None else f" {needed} bytes were needed."
            raise InterruptedRunError(
                f"{path}: no space left on the device.{size} Free some space, then run the same command again: "
                "it continues where it stopped."
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UsageError(
                f"{path}: cannot be written ({os.strerror(error.errno)}). Choose a folder that you may write to, "
                "or change its permissions."
            ) from error
        raise


def write_atomic(path: Path, data: bytes) -> None:
    """Writes a small file so that `path` holds either its old content or all of `data`, even after a power cut."""
    with disk_full_means_interrupted(path, len(data)):
        part = part_path(path.parent, path.name)
        try:
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.rename(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        fsync_dir(path.parent)


def publish(tmp: Path, final: Path) -> bool:
    """Gives the whole, verified file `tmp` its final name, never replacing what is there. False: it was there already.

    Steps: (1) fsync the file; (2) link it to `final`; (3) if that name is taken, the file there must have the very
    same bytes, and is adopted; (4) remove the temporary name; (5) fsync the folder. A crash between any two leaves
    either no final file or a whole one.
    """
    fd = os.open(tmp, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    new = True
    try:
        os.link(tmp, final)
    except FileExistsError:
        new = False
        expected, found = hash_file(tmp), hash_file(final)
        if expected != found:
            raise DamagedDataError(
                f"{final}: is there already with other bytes (xxh3_128 {found}, the same task now made {expected}). "
                "If the manifest does not list it, move it away and run again; else `exitwave verify` tells which is "
                "damaged."
            ) from None
    tmp.unlink()
    fsync_dir(final.parent)
    return new


class LockHeldError(UsageError):
    """Another process holds the lock."""


class FileLock:
    """An exclusive kernel lock (flock) on `path`, as a context manager. It dies with its process, so none is stale.

    `blocking=False`: entering raises LockHeldError, naming the holder, when another process has it. The lock file
    itself stays; only the lock on it counts. Not for NFS, where flock may be emulated or missing.
    """

    def __init__(self, path: Path, *, blocking: bool = False) -> None:
        self.path = path
        self.blocking = blocking
        self._fd: int | None = None

    def acquire(self) -> bool:
        """Tries to take the lock (waits for it if `blocking`); whether this process now holds it."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not self._flock(fd):
                os.close(fd)
                return False
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        with contextlib.suppress(OSError):  # the name of the holder is a courtesy: a full disk must not matter
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{_host()} pid {os.getpid()}\n".encode(), 0)
        return True

    def _flock(self, fd: int) -> bool:
        for wait_s in (0.01, 0.02, 0.0):  # somebody may only be looking whether it is held
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | (0 if self.blocking else fcntl.LOCK_NB))
            except BlockingIOError:
                time.sleep(wait_s)
            else:
                return True
        return False

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def is_held(self) -> bool:
        """Whether anybody holds it now. Takes a shared lock for a moment, which writes nothing."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def holder(self) -> str:
        """Host and process of the last holder, as it wrote them; "unknown" when it did not."""
        with contextlib.suppress(OSError):
            return read_plain_text(self.path, errors="replace").strip() or "unknown"
        return "unknown"

    def __enter__(self) -> FileLock:
        if not self.acquire():
            raise LockHeldError(f"{self.path}: held by another process ({self.holder()}). Wait for it, or stop it.")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
