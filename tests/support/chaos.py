"""Chaos, reproducible: who is killed when is drawn from a seed, and told by `Chaos.told` when a test fails."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
from dask_processes import DaskProcesses, end_tree

CONTROLLER = Path(__file__).resolve().parent / "chaos_controller.py"
MARK = "EXITWAVE_CHAOS_TEST"


class Chaos:
    """A scheduler, `workers` workers under nannies and a controller, kept alive by hand and killed at random."""

    def __init__(self, folder: Path, dataset: Path, content: dict[str, Any], *, workers: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder, self.dataset = folder, dataset
        self.mark = uuid.uuid4().hex
        self.dask = DaskProcesses(folder / "dask")
        self.n_workers = workers
        self.file = folder / "chaos.json"
        self.file.write_text(json.dumps(content))
        self.controller: subprocess.Popen[bytes] | None = None
        self.code: int | None = None  # of the controller that came to the campaign's end
        self.kills: dict[str, int] = {}
        self.told: list[str] = []
        self.began = time.monotonic()
        self.ballast: Path | None = None

    def tell(self, text: str) -> None:
        self.told.append(f"{time.monotonic() - self.began:7.2f} {text}")
        print(self.told[-1], flush=True)

    # --- keeping alive

    def keep_alive(self) -> None:
        """Start what is not there: what a batch system, or a person, would do."""
        if self.dask.scheduler is None or self.dask.scheduler.poll() is not None:
            self.tell("start the scheduler")
            self.dask.start_scheduler()
        alive = [w for w in self.dask.workers if w.poll() is None]
        self.dask.workers[:] = alive
        for _ in range(self.n_workers - len(alive)):
            self.tell("start a worker")
            self.dask.start_worker("--death-timeout", "20", environment={MARK: self.mark, "OMP_NUM_THREADS": "1"})
        if self.controller is not None and (code := self.controller.poll()) is not None:
            self.tell(f"the controller ended with {code}")
            if code in (0, 3):
                self.code = code
                return
            if code not in (75, 2, -signal.SIGKILL, -signal.SIGTERM):
                raise AssertionError(f"the controller ended with {code}:\n{self.words()}")
            self.controller = None
        if self.controller is None:
            self.tell("start a controller")
            with (self.folder / "controller.txt").open("ab") as log:
                self.controller = subprocess.Popen(
                    [sys.executable, str(CONTROLLER), str(self.file), str(self.dataset), self.dask.address],
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1", MARK: self.mark},
                )

    # --- killing

    def kill(self, what: str) -> bool:
        """Kill one process of the kind `what` by SIGKILL or SIGTERM; False where there is none just now."""
        chosen = self._choose(what)
        if chosen is None:
            return False
        number = self.random.choice([signal.SIGKILL, signal.SIGTERM])
        self.tell(f"{number.name} to {what} {chosen.pid}")
        try:
            chosen.send_signal(number)
        except psutil.NoSuchProcess:
            return False
        self.kills[what] = self.kills.get(what, 0) + 1
        return True

    def _choose(self, what: str) -> psutil.Process | None:
        if what == "controller":
            alive = self.controller is not None and self.controller.poll() is None
            return psutil.Process(self.controller.pid) if alive and self.controller else None
        if what == "scheduler":
            alive = self.dask.scheduler is not None and self.dask.scheduler.poll() is None
            return psutil.Process(self.dask.scheduler.pid) if alive and self.dask.scheduler else None
        nannies = [w for w in self.dask.workers if w.poll() is None]
        if not nannies:
            return None
        nanny = self.random.choice(nannies)
        if what == "nanny":
            return psutil.Process(nanny.pid)
        try:
            below = psutil.Process(nanny.pid).children(recursive=True)
            tasks = [p for p in below if "worker_child" in " ".join(p.cmdline())]
            workers = [p for p in below if "spawn_main" in " ".join(p.cmdline())]
        except psutil.Error:
            return None
        found = tasks if what == "task" else workers
        return self.random.choice(found) if found else None

    def fill_disk(self) -> None:
        """Leave no room on the data set's file system."""
        self.ballast = self.dataset.parent / "ballast"
        self.tell("fill the disk")
        try:
            with self.ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(b"\0" * 65536)
        except OSError:
            pass
        self.kills["disk"] = self.kills.get("disk", 0) + 1

    def free_disk(self) -> None:
        if self.ballast is not None:
            self.tell("free the disk")
            self.ballast.unlink(missing_ok=True)
            self.ballast = None

    # --- the end

    def wait_for_end(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self.code is None:
            if time.monotonic() > until:
                raise AssertionError(f"no end within {seconds:.0f} s:\n{self.words()}")
            self.keep_alive()
            time.sleep(0.2)

    def words(self) -> str:
        log = self.folder / "controller.txt"
        text = log.read_text(errors="replace")[-6000:] if log.exists() else ""
        return "\n".join(self.told[-60:]) + "\n--- controllers:\n" + text

    def close(self) -> None:
        if self.controller is not None and self.controller.poll() is None:
            end_tree(self.controller)
        self.dask.close()

    def left_alive(self, seconds: float = 15.0) -> list[str]:
        """Processes of this chaos that live still, after some time to die."""
        until = time.monotonic() + seconds
        while (alive := self._marked()) and time.monotonic() < until:
            time.sleep(0.2)
        return alive

    def _marked(self) -> list[str]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
            except (psutil.Error, OSError):
                continue
        return found
