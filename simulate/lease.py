"""One controller at a time: a lease on the data set, held by a kernel lock, renewed by a beat, numbered by an epoch.

1. The kernel lock decides on one machine, and on network file systems whose locks reach other machines. It dies with
   its process, so that no lease is stale there.
2. Where locks do not reach, the beat decides: the holder writes the lease anew every two seconds. Who gets the lock but
   finds the lease of another machine that was not given back watches it for ten seconds: if it beats, its holder lives;
   if not, the lease is taken over. Clocks of two machines are never compared.
3. The epoch, one higher at each start, stands in every line of the manifest that this controller writes. A holder that
   was only asleep finds other lines than its own in the manifest, or its own lines are ignored: it cannot commit.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from exitwave.ingest.errors import ExitwaveError, InterruptedRunError, UsageError
from exitwave.ingest.files import FileLock, read_object, write_atomic
from exitwave.ingest.manifest import MANIFEST_NAME, load_manifest

__all__ = ["Lease", "kept_out", "lease_holder", "told_epoch"]

LEASE_NAME = "lease"
_LOCK_NAME = ".lease.lock"
_BEAT_S = 2.0
_WATCH_S = 10.0


class Lease:
    """A context manager; inside it this process is the only controller of `root`, with number `epoch`.

    Raises UsageError naming host and pid where another controller holds the data set.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.epoch = 0
        self._lock = FileLock(root / _LOCK_NAME)
        self._content: dict[str, Any] = {}
        self._given_back = threading.Event()
        self._beating: threading.Thread | None = None

    def __enter__(self) -> Lease:
        if not self._lock.acquire():
            raise _refused(self.root)
        try:
            _watch(self.root)
            self.epoch = max(told_epoch(self.root), _manifest_epoch(self.root)) + 1
            self._content = {
                "epoch": self.epoch,
                "host": socket.gethostname(),
                "boot": _boot(),
                "pid": os.getpid(),
                "since": time.time(),
                "beat": 0,
            }
            self._write()
        except BaseException:
            self._lock.release()
            raise
        self._beating = threading.Thread(target=self._beat, name="exitwave-lease", daemon=True)
        self._beating.start()
        return self

    def _write(self) -> None:
        write_atomic(self.root / LEASE_NAME, json.dumps(self._content).encode() + b"\n")

    def _beat(self) -> None:
        while not self._given_back.wait(_BEAT_S):
            if told_epoch(self.root) > self.epoch:
                return  # taken over; the manifest will say so
            self._content["beat"] += 1
            with contextlib.suppress(OSError, ExitwaveError):  # a full disk
                self._write()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._given_back.set()
        if self._beating is not None:
            self._beating.join(timeout=10)
        if told_epoch(self.root) == self.epoch:
            self._content["given_back"] = True
            with contextlib.suppress(OSError, ExitwaveError):
                self._write()
        self._lock.release()

    def check(self) -> None:
        """InterruptedRunError where a later controller has taken the lease over: nothing may be committed then."""
        if (told := told_epoch(self.root)) > self.epoch:
            raise InterruptedRunError(
                f"{self.root}: another controller took over while this one (epoch {self.epoch}) was not heard of: "
                f"epoch {told}, host {_read(self.root).get('host', 'unknown')}. This one stops; nothing is lost."
            )


def _refused(root: Path) -> UsageError:
    holder = _read(root)
    return UsageError(
        f"{root}: another controller is running this campaign: host {holder.get('host', 'unknown')}, "
        f"pid {holder.get('pid', 'unknown')}. Wait for it, or stop it; nothing was started."
    )


def _boot() -> str:
    """Which machine this is, since when: names of machines are given twice, in containers above all."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _watch(root: Path) -> None:
    """UsageError where the lease of another machine still beats. The lock is ours already."""
    lease = _read(root)
    here = (socket.gethostname(), _boot())
    if not lease or lease.get("given_back") or "beat" not in lease or (lease.get("host"), lease.get("boot")) == here:
        return
    until = time.monotonic() + _WATCH_S
    while time.monotonic() < until:
        time.sleep(0.2)
        now = _read(root)
        if now.get("given_back"):
            return
        if now and (now.get("epoch"), now.get("beat")) != (lease.get("epoch"), lease.get("beat")):
            raise _refused(root)


def _read(root: Path) -> dict[str, Any]:
    return read_object(root / LEASE_NAME)


def told_epoch(root: Path) -> int:
    """The epoch of the last controller that had the lease; 0 where none ever had, or its file is lost."""
    epoch = _read(root).get("epoch")
    return epoch if isinstance(epoch, int) else 0


def _manifest_epoch(root: Path) -> int:
    """The last epoch that was written with: a lease that was lost or damaged must not set the count back."""
    return load_manifest(root).epoch if (root / MANIFEST_NAME).exists() else 0


@contextlib.contextmanager
def kept_out(root: Path) -> Iterator[None]:
    """No controller begins in `root` meanwhile, whatever state its files are in: for one who removes them.

    Raises UsageError naming host and pid where one is at work there.
    """
    lock = FileLock(root / _LOCK_NAME)
    if not lock.acquire():
        raise _refused(root)
    try:
        _watch(root)
        yield
    finally:
        lock.release()


def lease_holder(root: Path) -> dict[str, Any] | None:
    """Who controls the data set now ({epoch, host, pid, since}), or None where nobody does."""
    if not FileLock(root / _LOCK_NAME).is_held():
        return None
    return {key: value for key, value in _read(root).items() if key in ("epoch", "host", "pid", "since")} or None
