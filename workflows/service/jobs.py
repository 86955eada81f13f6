"""Which processes should run, which do, and what follows: the service's jobs, in ROOT/.exitwave/jobs/<id>/.

job.json says what is wanted and is written by the service alone; the lock says whether the process lives; exit.json
says how it ended. `judge` is the whole policy, a pure function of these. The service looks every second, so that it
makes no difference whether it, the job or both were killed in between.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from exitwave.ingest.files import FileLock, open_to_read, read_plain_text, write_atomic
from exitwave.workflows.service.job import EXIT, JOB, LOCK, STOP

__all__ = ["Job", "JobState", "Jobs", "Verdict", "judge"]

JobState = Literal["starting", "running", "stopping", "waiting", "stopped", "finished", "failed"]

_SPAWN_S = 30.0  # within which a started process has taken its lock
_DEATHS = 8  # without a word, before it is left alone
_BACKOFF_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is wanted of one run."""

    id: str
    arguments: tuple[str, ...]
    wanted: Literal["run", "drain", "cancel"] = "run"
    started: float = 0.0  # last time, UTC s
    starts: int = 0  # since a person last asked, or since it last came further
    mark: str = ""  # how far it was at the last start


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a job is, in a word and a sentence, and whether to start a process for it now."""

    state: JobState
    why: str
    start: bool = False


def judge(job: Job, *, alive: bool, code: int | None, now: float) -> Verdict:
    """`code`: of exit.json, None while there is none (it runs, or it was killed)."""
    if alive:
        if job.wanted == "run":
            return Verdict(state="running", why="")
        return Verdict(state="stopping", why="finishing what is in hand" if job.wanted == "drain" else "ending")
    if code == 0:
        return Verdict(state="finished", why="")
    if code == 3:
        return Verdict(state="finished", why="with failed parts: see failures")
    if code in (1, 2):
        return Verdict(state="failed", why="see the log" if code == 1 else "refused: see the log")
    if job.wanted != "run":
        return Verdict(state="stopped", why="on request; resume goes on")
    since = abs(now - job.started)  # a clock that was set back must not keep it waiting
    if code is None and job.starts and since < _SPAWN_S / 10:
        return Verdict(state="starting", why="")
    if job.starts > _DEATHS:
        return Verdict(state="failed", why=f"it ended {_DEATHS} times without finishing; resume tries again")
    wait = _BACKOFF_S * 2 ** (job.starts - 1) if job.starts else 0.0
    if since < wait:
        how = "was killed" if code is None else f"was interrupted (exit {code})"
        return Verdict(state="waiting", why=f"it {how}; it goes on in {wait - since:.0f} s")
    return Verdict(state="starting", why="", start=True)


class Jobs:
    """The jobs below one root. `how_far(id)` changes whenever the run has come further (manifest, checkpoints)."""

    def __init__(self, root: Path, how_far: Callable[[str], str]) -> None:
        self.root = root
        self._how_far = how_far
        self._folder = root / ".exitwave" / "jobs"
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._children: list[subprocess.Popen[bytes]] = []

    def all(self) -> dict[str, Job]:
        """By id. A job that cannot be read (none is ever half-written) is as if it were not."""
        found = {}
        for folder in sorted(self._folder.iterdir()):
            job = self._read(folder)
            if job is not None and job.id == folder.name:
                found[job.id] = job
        return found

    def get(self, id: str) -> Job | None:
        """The job of a run, None where the service never started it. `id` is one of `catalogue`."""
        return self._read(self._folder / id)

    def want(self, id: str, arguments: Sequence[str]) -> Job:
        """It shall run (from now on, also after a restart of the service)."""
        folder = self._folder / id
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not FileLock(folder / LOCK).is_held():
            (folder / EXIT).unlink(missing_ok=True)
        (folder / STOP).unlink(missing_ok=True)
        job = Job(id=id, arguments=tuple(arguments))
        self._write(job)
        return job

    def stop(self, id: str, how: Literal["drain", "cancel"]) -> None:
        """It shall end, and stay so until `want`."""
        folder = self._folder / id
        job = self._read(folder)
        if job is not None:
            self._write(replace(job, wanted=how))
            write_atomic(folder / STOP, how.encode())

    def verdict(self, job: Job, now: float | None = None) -> Verdict:
        """See `judge`."""
        folder = self._folder / job.id
        alive = FileLock(folder / LOCK).is_held()  # before the exit: it is written while the lock is held
        return judge(job, alive=alive, code=_code(folder), now=time.time() if now is None else now)

    def reconcile(self) -> dict[str, Verdict]:
        """Start what should run and does not. Returns all verdicts."""
        self._children = [child for child in self._children if child.poll() is None]
        verdicts = {}
        for job in self.all().values():
            verdict = verdicts[job.id] = self.verdict(job)
            if verdict.start:
                mark = self._how_far(job.id)
                starts = job.starts if mark == job.mark else 0
                self._write(replace(job, started=time.time(), starts=starts + 1, mark=mark))
                self._spawn(self._folder / job.id)
        return verdicts

    def log(self, id: str, most: int = 64 * 1024) -> str:
        """The end of what its processes printed."""
        try:
            with os.fdopen(open_to_read(self._folder / id / "log"), "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - most))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def _spawn(self, folder: Path) -> None:
        """In a session of its own: neither the service's end nor its signals reach it."""
        with (folder / "log").open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "exitwave.workflows.service.job", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.root,
                start_new_session=True,
                close_fds=True,
            )
        self._children.append(child)

    def _read(self, folder: Path) -> Job | None:
        try:
            data: dict[str, Any] = json.loads(read_plain_text(folder / JOB))
            return Job(**{**data, "arguments": tuple(data["arguments"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def _write(self, job: Job) -> None:
        write_atomic(self._folder / job.id / JOB, json.dumps(asdict(job)).encode())


def _code(folder: Path) -> int | None:
    try:
        return int(json.loads(read_plain_text(folder / EXIT))["code"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
