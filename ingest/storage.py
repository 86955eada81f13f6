"""Where the shards of a data set lie: a folder of this machine or of a shared file system, or a URL that fsspec opens.

Staging reads a source front to back, in a few streams at once. Whatever is wrong with it is an OSError to the caller:
a file may be missing only for now.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, Protocol

from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import open_to_read, read_plain

__all__ = ["FsspecStorage", "PosixStorage", "Reader", "Storage", "holds", "is_url", "open_storage"]


class Reader(Protocol):
    """An open file, read by one thread."""

    def readinto(self, view: memoryview, offset: int) -> int:
        """Fills `view`, or less of it, from `offset` on; how many bytes, 0 at the end. OSError."""
        ...

    def close(self) -> None: ...


class Storage(Protocol):
    """The files of one data set by their path below its root. Calls may come from several threads."""

    def open(self, path: str) -> Reader: ...
    def size(self, path: str) -> int: ...
    def read(self, path: str) -> bytes: ...
    def describe(self, path: str) -> str:
        """The path or URL, for messages."""
        ...


def is_url(root: str | Path) -> bool:
    """Whether `root` names a file system of fsspec (`s3://bucket/data`) rather than a folder."""
    return "://" in str(root)


def open_storage(root: str | Path) -> Storage:
    """The storage of a data set; UsageError for a URL that no installed file system opens."""
    return FsspecStorage(str(root)) if is_url(root) else PosixStorage(Path(root))


def holds(storage: Storage, path: str, nbytes: int) -> bool:
    """Whether the file is there, in its size. False as well when that cannot be found out now."""
    try:
        return storage.size(path) == nbytes
    except OSError:
        return False


class PosixStorage:
    """A folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def open(self, path: str) -> Reader:
        return _PosixReader(open_to_read(self.root / path))

    def size(self, path: str) -> int:
        return (self.root / path).stat().st_size

    def read(self, path: str) -> bytes:
        return read_plain(self.root / path)

    def describe(self, path: str) -> str:
        return str(self.root / path)


class _PosixReader:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def readinto(self, view: memoryview, offset: int) -> int:
        return os.preadv(self._fd, [view], offset)

    def close(self) -> None:
        os.close(self._fd)


class FsspecStorage:
    """A folder of any file system that fsspec knows: `file://`, `memory://`, `http://`, and object stores."""

    def __init__(self, url: str) -> None:
        import fsspec

        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UsageError(
                f"{url}: {error}. Install the package that opens such addresses, or give a folder."
            ) from None
        self.url = url.rstrip("/")
        self._root = self._root.rstrip("/")

    def _asked(self, call: Any, path: str, *args: Any, **options: Any) -> Any:
        try:
            return call(f"{self._root}/{path}", *args, **options)
        except OSError:
            raise
        except Exception as error:  # each file system has errors of its own
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", self.describe(path)) from error

    def open(self, path: str) -> Reader:
        return _FsspecReader(self._asked(self._fs.open, path, "rb", block_size=8 << 20, cache_type="readahead"))

    def size(self, path: str) -> int:
        return int(self._asked(self._fs.size, path) or 0)

    def read(self, path: str) -> bytes:
        return bytes(self._asked(self._fs.cat_file, path))

    def describe(self, path: str) -> str:
        return f"{self.url}/{path}"


class _FsspecReader:
    def __init__(self, file: Any) -> None:
        self._file = file

    def readinto(self, view: memoryview, offset: int) -> int:
        try:
            if self._file.tell() != offset:
                self._file.seek(offset)
            return int(self._file.readinto(view))
        except OSError:
            raise
        except Exception as error:
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        self._file.close()
