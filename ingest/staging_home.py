"""The folders of a data set's cache on one node, and who may use them.

    CACHE/<dataset_id>/ready/<shard_id>.h5      verified: being here is the proof
                       part/                    copies under way; what a killed stager left is swept at start
                       quarantine/              local copies that were damaged; records of damaged sources
                       source.json              which data set this is: a second one of the same name is refused
                       stager.lock              one stager per node (a kernel lock, it dies with its process)

A reader pins a shard by a shared kernel lock on its file (`pin`), for as long as it reads; eviction takes the lock
alone, and leaves what it cannot have. The locks die with their processes, so that nothing is left over by a killed
one. Evicting takes the name away, then cuts the file to nothing: its space is free at once, also when a reader still
has it open.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pwd
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import disk_full_means_interrupted, fsync_dir, read_plain, write_atomic
from exitwave.ingest.records import Header

__all__ = ["CacheHome", "make_folder", "on_cache_disk", "pin", "unpin"]


def _identity(header: Header) -> dict[str, str]:
    """What two data sets of one name differ in; the same for a data set that was moved, copied or has grown."""
    digest = xxhash.xxh3_128_hexdigest(json.dumps(header.to_json(), sort_keys=True).encode())
    return {"dataset_id": header.dataset_id, "name": header.name, "created": header.created, "header_xxh3_128": digest}


class CacheHome:
    """The cache of one data set below the folder `cache`."""

    def __init__(self, cache: Path, header: Header) -> None:
        self.path = cache / header.dataset_id
        self.ready, self.part, self.quarantine = (self.path / name for name in ("ready", "part", "quarantine"))
        self.lock_path = self.path / "stager.lock"
        self._header = header

    def make(self) -> None:
        """Makes the folders. UsageError: not ours, not writable, or another data set's."""
        make_folder(self.path)
        with disk_full_means_interrupted(self.path):
            self._refuse_others()
        for folder in (self.ready, self.part, self.quarantine):
            make_folder(folder)

    def _refuse_others(self) -> None:
        owner = self.path.stat().st_uid
        if owner != os.geteuid():
            raise UsageError(
                f"{self.path}: this cache belongs to {_user(owner)}, and you are {_user(os.geteuid())}. Being in a "
                "cache means verified, so only its owner fills it: choose another --cache."
            )
        self.check()

    def check(self) -> None:
        """UsageError when the cache holds another data set of the same name."""
        expected = _identity(self._header)
        found = self._known()
        if found is not None and found.get("header_xxh3_128") != expected["header_xxh3_128"]:
            raise UsageError(
                f"{self.path}: holds shards of another data set of the same name, {found.get('name') or '?'} made "
                f"{found.get('created') or '?'}; this one is {expected['name'] or '?'} made "
                f"{expected['created'] or '?'}. Choose another --cache, or remove that folder."
            )

    def claim(self) -> None:
        """Writes down whose cache it is. Called under the lock."""
        self.check()
        if self._known() is None:
            write_atomic(self.path / "source.json", json.dumps(_identity(self._header), indent=1).encode())

    def _known(self) -> dict[str, Any] | None:
        try:
            data = json.loads(read_plain(self.path / "source.json"))
        except (OSError, ValueError):
            return None
        return data if isinstance(data, dict) else None

    def ready_path(self, shard_id: str) -> Path:
        return self.ready / f"{shard_id}.h5"

    def sweep(self) -> None:
        """Removes the copies that a killed stager left. Called under the lock: whoever wrote these is dead."""
        for leftover in self.part.iterdir():
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            else:
                leftover.unlink(missing_ok=True)

    def scan(self) -> dict[str, int]:
        """Shard id -> bytes of what is ready."""
        found: dict[str, int] = {}
        for path in self.ready.glob("*.h5"):
            with contextlib.suppress(FileNotFoundError):  # a reader has just set it aside
                if stat.S_ISREG((status := path.lstat()).st_mode):
                    found[path.stem] = status.st_size
        return found

    def publish(self, part: Path, shard_id: str) -> None:
        """A verified copy, already on disk, becomes ready."""
        part.rename(self.ready_path(shard_id))
        fsync_dir(self.ready)

    def evict(self, shard_id: str) -> bool:
        """Removes a ready shard and frees its space; False when a reader has it pinned."""
        path = self.ready_path(shard_id)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            path.unlink(missing_ok=True)  # first the name: a file that has one is whole
            os.ftruncate(fd, 0)
        finally:
            os.close(fd)
        return True

    def set_aside(self, shard_id: str) -> Path:
        """Moves a damaged copy out of the readers' way; one is kept for a look at it."""
        aside = self.quarantine / f"{shard_id}.h5"
        with contextlib.suppress(FileNotFoundError):
            self.ready_path(shard_id).rename(aside)
        return aside


@contextlib.contextmanager
def on_cache_disk(path: Path, needed: int | None = None) -> Iterator[None]:
    """Turns what goes wrong on the cache's own disk into an error for people.

    InterruptedRunError: it is full. UsageError: the folder was taken away, or the disk does not work.
    """
    try:
        with disk_full_means_interrupted(path, needed):
            yield
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise UsageError(
                f"{path}: the folder is gone; was the cache removed meanwhile? Run the same command again to make it "
                "anew."
            ) from error
        raise UsageError(
            f"{path}: cannot be written ({error.strerror or error}). The trouble is with the cache, not with the data "
            "set: choose another --cache."
        ) from error


def make_folder(path: Path) -> None:
    """Makes a folder of the cache. UsageError where none can be."""
    with disk_full_means_interrupted(path):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise UsageError(f"{path}: part of this path is a file, expected a folder for the cache") from None
        except FileNotFoundError:  # as /proc answers
            raise UsageError(f"{path}: no folder for the cache can be made there; choose another") from None


def pin(fd: int) -> bool:
    """Holds a ready shard that is open as `fd`, so that it is not evicted; False when it is gone already."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:  # it is being evicted
        return False
    if os.fstat(fd).st_nlink == 0:
        fcntl.flock(fd, fcntl.LOCK_UN)
        return False
    return True


def unpin(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
