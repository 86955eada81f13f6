"""One controller at a time: a lease on the data set, held by a kernel lock, numbered by a fencing epoch.

The lock dies with its process, so no lease is ever stale on one machine. The epoch, one higher at each start, stands in
every line of the manifest that this controller writes: whatever an older controller might still write is ignored.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import FileLock, write_atomic
from exitwave.ingest.manifest import MANIFEST_NAME, load_manifest

__all__ = ["Lease", "lease_holder"]

LEASE_NAME = "lease"
_LOCK_NAME = ".lease.lock"


class Lease:
    """A context manager; inside it this process is the only controller of `root`, with number `epoch`.

    Raises UsageError naming host and pid where another controller holds the data set.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.epoch = 0
        self._lock = FileLock(root / _LOCK_NAME)

    def __enter__(self) -> Lease:
        if not self._lock.acquire():
            holder = _read(self.root)
            raise UsageError(
                f"{self.root}: another controller is running this campaign: host {holder.get('host', 'unknown')}, "
                f"pid {holder.get('pid', 'unknown')}. Wait for it, or stop it; nothing was started."
            )
        try:
            self.epoch = max(_told_epoch(self.root), _manifest_epoch(self.root)) + 1
            content = {
                "epoch": self.epoch,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "since": time.time(),
            }
            write_atomic(self.root / LEASE_NAME, json.dumps(content).encode() + b"\n")
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


def _read(root: Path) -> dict[str, Any]:
    try:
        content = json.loads((root / LEASE_NAME).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _told_epoch(root: Path) -> int:
    epoch = _read(root).get("epoch")
    return epoch if isinstance(epoch, int) else 0


def _manifest_epoch(root: Path) -> int:
    """The last epoch that was written with: a lease that was lost or damaged must not set the count back."""
    return load_manifest(root).epoch if (root / MANIFEST_NAME).exists() else 0


def lease_holder(root: Path) -> dict[str, Any] | None:
    """Who controls the data set now ({epoch, host, pid, since}), or None where nobody does."""
    if not (root / _LOCK_NAME).exists():
        return None
    if _is_free(root / _LOCK_NAME):
        return None
    return _read(root) or None


def _is_free(path: Path) -> bool:
    """Whether nobody holds the exclusive lock. Takes a shared one for a moment, which writes nothing."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
