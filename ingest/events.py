"""The event log: what happened, one JSON object a line, each with its time `t` (seconds since 1970, UTC) and `kind`.

A line is one write to a file opened for appending, so that several processes may share a log, and it is synced before
`emit` returns, or with others at the end of `together`. After a crash the last line may be torn; readers skip what is
no whole line.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import disk_full_means_interrupted, open_to_read

__all__ = ["EventLog", "EventTail", "read_events", "read_events_from", "read_new_events"]


class EventLog:
    """Appends events to `path` and shows each to the `listeners` (progress bars, plain lines, a service).

    `followers` are given what was written at once, and the size of the log with it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listeners: list[Callable[[dict[str, Any]], None]] = []
        self.followers: list[Callable[[list[dict[str, Any]], int], None]] = []
        self._size = 0
        self._held: list[dict[str, Any]] | None = None
        with disk_full_means_interrupted(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):  # it would be written to until somebody reads
                raise UsageError(f"{path}: expected a log of events, found no plain file; remove it.")
            size = os.fstat(fd).st_size
            # A line torn by a crash must not swallow the next event: begin on a fresh line.
            self._torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        finally:
            os.close(fd)

    def emit(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Writes and syncs one event, then calls the listeners; InterruptedRunError when the disk is full."""
        event = {"t": round(time.time(), 6), "kind": kind, **fields}
        if self._held is not None:
            self._held.append(event)
        else:
            self._write([event])
        return event

    @contextmanager
    def together(self) -> Iterator[None]:
        """What one thread emits inside is written and synced at once at the end, also after an error: a sync a group
        instead of a sync an event. Not to be nested.
        """
        self._held = []
        try:
            yield
        finally:
            held, self._held = self._held, None
            if held:
                self._write(held)

    def _write(self, events: list[dict[str, Any]]) -> None:
        lines = b"".join(
            json.dumps(event, ensure_ascii=False, separators=(",", ":"), default=str).encode() + b"\n"
            for event in events
        )
        try:
            with disk_full_means_interrupted(self.path, len(lines)):
                self._append(lines)
        finally:
            for event in events:
                for listener in self.listeners:
                    listener(event)
            for follower in self.followers:
                follower(events, self._size)

    def _append(self, lines: bytes) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        try:
            data = b"\n" + lines if self._torn else lines
            self._torn = True
            while data:
                data = data[os.write(fd, data) :]
            os.fsync(fd)
            self._torn = False
            self._size = os.lseek(fd, 0, os.SEEK_CUR)
        finally:
            os.close(fd)


def read_events(path: Path) -> list[dict[str, Any]]:
    """All whole events of a log in the order written; an absent log has none. Torn lines are skipped."""
    return read_events_from(path, 0)


def read_events_from(path: Path, offset: int) -> list[dict[str, Any]]:
    """The whole events that begin at or after byte `offset`, which is the end of some earlier one."""
    return read_new_events(path, offset)[0]


def read_new_events(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """As `read_events_from`, and the byte at which the next event will begin: for one who comes again."""
    if not path.exists():
        return [], 0
    with os.fdopen(open_to_read(path), "rb") as file:
        file.seek(offset)
        data = file.read()
    return _whole_events(data), offset + data.rfind(b"\n") + 1


class EventTail:
    """The new whole events of a growing log, each once. A log that is another file by now, or shorter than it was, is
    read from its beginning, and so is one that was gone; `renewed` says whether that was so at the last `read`.
    """

    def __init__(self, path: Path, *, from_end: bool) -> None:
        self.path = path
        self.renewed = False
        self._offset = path.stat().st_size if from_end and path.exists() else 0
        self._inode = path.stat().st_ino if path.exists() else None

    def read(self) -> list[dict[str, Any]]:
        try:
            with os.fdopen(open_to_read(self.path), "rb") as file:
                info = os.fstat(file.fileno())
                self.renewed = info.st_ino != self._inode or info.st_size < self._offset
                if self.renewed:
                    self._offset, self._inode = 0, info.st_ino
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            self._inode, self.renewed = None, True
            return []
        except OSError:  # for a moment: what was read stays read
            self.renewed = False
            return []
        self._offset += data.rfind(b"\n") + 1
        return _whole_events(data)


def _whole_events(data: bytes) -> list[dict[str, Any]]:
    events = []
    for line in data.split(b"\n")[:-1]:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if (
            isinstance(event, dict)
            and isinstance(event.get("kind"), str)
            and isinstance(event.get("t", 0), int | float)
        ):
            events.append(event)
    return events
