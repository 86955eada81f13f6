"""`state.db`: what is known of each task, in SQLite, for whoever asks by state, class or structure.

It is an index and never the truth. It is made from plan, manifest and events, stands on the controller's own disk (a
database on a network file system is one that will be damaged) and is linked from the data set. It says up to which byte
of events.jsonl it has read; a reader adds what follows. Where it is missing, damaged, of another campaign or on another
machine, the next controller makes it anew, and readers replay the files themselves.

Only the controller writes, about once a second and in one transaction.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from exitwave.ingest.events import read_events_from
from exitwave.ingest.files import open_to_read, read_plain_text
from exitwave.simulate.state_task import TaskState, apply

__all__ = ["STATE_DB_NAME", "StateIndex", "read_failed"]

STATE_DB_NAME = "state.db"
_EVENTS_NAME = "events.jsonl"
_VERSION = "1"
_COLUMNS = "task, shard_id, samples, state, attempts, failure, why, host, seconds, structures"
_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE tasks (
    place INTEGER PRIMARY KEY, task TEXT UNIQUE NOT NULL, shard_id TEXT NOT NULL, samples INTEGER NOT NULL,
    state TEXT NOT NULL, attempts INTEGER NOT NULL, failure TEXT NOT NULL, why TEXT NOT NULL, host TEXT NOT NULL,
    seconds REAL NOT NULL, structures TEXT NOT NULL
);
CREATE INDEX tasks_by_state ON tasks (state, failure);
"""


class StateIndex:
    """The controller's hand on it. Whatever goes wrong here must not stop a campaign: it then goes on without."""

    def __init__(self, dataset: Path, campaign_hash: str, states: Iterable[TaskState]) -> None:
        self._events = dataset / _EVENTS_NAME
        self._changed: dict[str, TaskState] = {}
        self._db: sqlite3.Connection | None = None
        with contextlib.suppress(OSError, sqlite3.Error):
            path = _place(dataset)
            if path is not None:
                self._db = _made(path, campaign_hash, states, _size(self._events))
                _link(dataset / STATE_DB_NAME, path)

    def feed(self, event: Mapping[str, Any]) -> None:
        """Take in one event that stands in the log already; kept in memory until `flush`."""
        task = str(event.get("task", ""))
        if self._db is None or not task:
            return
        with contextlib.suppress(sqlite3.Error):
            if task not in self._changed:
                rows = self._db.execute(f"SELECT {_COLUMNS} FROM tasks WHERE task = ?", (task,)).fetchall()
                self._changed |= {state.task: state for state in map(_state, rows)}
            apply(self._changed, event)

    def flush(self, *, ended: bool = False) -> None:
        """Write what has changed. `ended`: the run is over, what was running is pending."""
        if self._db is None:
            return
        rows = [(*_row(state)[1:], state.task) for state in self._changed.values()]
        sets = ", ".join(f"{name} = ?" for name in _COLUMNS.split(", ")[1:])
        try:
            with self._db:
                self._db.executemany(f"UPDATE tasks SET {sets} WHERE task = ?", rows)
                if ended:
                    self._db.execute("UPDATE tasks SET state = 'pending' WHERE state = 'running'")
                self._db.execute("UPDATE meta SET value = ? WHERE key = 'read'", (str(_size(self._events)),))
            self._changed.clear()
        except sqlite3.Error:  # a full disk, or somebody damaged it: readers do without
            self._db.close()
            self._db = None

    def close(self) -> None:
        self.flush(ended=True)
        if self._db is not None:
            self._db.close()
            self._db = None


def read_failed(dataset: Path) -> list[TaskState] | None:
    """The tasks that have failed, by index and by the events after it; None where there is no index to go by."""
    path = dataset / STATE_DB_NAME
    if not path.exists():
        return None
    try:
        with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=2.0)) as db:
            meta = dict(db.execute("SELECT key, value FROM meta"))
            plan = _campaign_hash(dataset)
            if (meta.get("version"), meta.get("campaign"), meta.get("dataset")) != (_VERSION, plan, _name(dataset)):
                return None
            if int(meta["read"]) > _size(dataset / _EVENTS_NAME):
                return None  # of a log that was longer
            later = read_events_from(dataset / _EVENTS_NAME, int(meta["read"]))
            named = sorted({str(event.get("task", "")) for event in later} - {""})
            marks = ",".join("?" * len(named))
            rows = db.execute(
                f"SELECT {_COLUMNS} FROM tasks WHERE state = 'failed' OR task IN ({marks}) ORDER BY place", named
            )
            states = {state.task: state for state in map(_state, rows)}
    except (OSError, ValueError, KeyError, TypeError, sqlite3.Error):
        return None
    for event in later:
        apply(states, event)
    return [state for state in states.values() if state.state == "failed"]


def _made(path: Path, campaign_hash: str, states: Iterable[TaskState], read: int) -> sqlite3.Connection:
    """A database of all tasks under `path`, made beside it and put in its place."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(new)) as db, db:
        db.executescript(_TABLES)
        meta = {"version": _VERSION, "campaign": campaign_hash, "dataset": path.parent.name, "read": str(read)}
        db.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        db.executemany(
            f"INSERT INTO tasks ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (_row(s) for s in states)
        )
    for beside in ("-wal", "-shm"):
        path.with_name(path.name + beside).unlink(missing_ok=True)
    new.rename(path)
    db = sqlite3.connect(path, timeout=5.0, check_same_thread=False)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")  # it is made anew where a power cut took the end of it
    return db


def _place(dataset: Path) -> Path | None:
    """Where the index of this data set stands on this machine: below a folder that is ours alone, or nowhere."""
    root = Path(tempfile.gettempdir()) / f"exitwave-state-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.is_symlink() or root.stat().st_uid != os.getuid():
        return None
    _sweep(root)
    folder = root / _name(dataset)
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "dataset").write_text(str(dataset.absolute()))
    return folder / STATE_DB_NAME


def _sweep(root: Path) -> None:
    """Remove the indices of data sets that are gone."""
    for folder in root.iterdir():
        with contextlib.suppress(OSError):
            if not Path(read_plain_text(folder / "dataset")).exists():
                shutil.rmtree(folder)


def _name(dataset: Path) -> str:
    return hashlib.blake2b(os.fsencode(dataset.resolve()), digest_size=12).hexdigest()


def _link(link: Path, path: Path) -> None:
    """`link` leads to `path`, whatever stood there before."""
    if link.is_symlink() and link.readlink() == path:
        return
    new = link.with_name(f".{link.name}.{os.getpid()}.link")
    new.unlink(missing_ok=True)
    new.symlink_to(path)
    new.rename(link)


def _campaign_hash(dataset: Path) -> str:
    """Of the plan, whose first bytes say it: the plan of a large campaign has many megabytes."""
    with os.fdopen(open_to_read(dataset / "plan.json"), "rb") as file:
        head = file.read(4096).decode(errors="replace")
    return head.split('"campaign_hash":"')[1].split('"')[0] if '"campaign_hash":"' in head else ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _row(state: TaskState) -> tuple[Any, ...]:
    values = [getattr(state, name) for name in _COLUMNS.split(", ")[:-1]]
    return (*values, json.dumps(state.structures, ensure_ascii=False))


def _state(row: tuple[Any, ...]) -> TaskState:
    values = dict(zip(_COLUMNS.split(", "), row, strict=True))
    return TaskState(**{**values, "structures": json.loads(values["structures"])})
