"""A campaign of very many tasks that do nothing: what the controller and the scheduler cost, and whether they grow.

The loop, the window, the cluster, the guarded process of each worker, the events (each synced), the index, the lease
and the live status are the real ones. A task returns a receipt without having written a shard, so nothing is committed
to the manifest. Scheduler and workers are processes of their own, so that each process' memory is its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from exitwave.ingest.errors import UsageError
from exitwave.ingest.events import EventLog
from exitwave.ingest.manifest import ManifestWriter
from exitwave.ingest.schema import PARAMS_DTYPE, FieldSpec
from exitwave.simulate.attempts import Patience
from exitwave.simulate.campaign_files import EVENTS_NAME, lay_out, make_folder
from exitwave.simulate.campaign_loop import CampaignLoop
from exitwave.simulate.cluster import make_cluster
from exitwave.simulate.lease import Lease
from exitwave.simulate.live import LiveStatus
from exitwave.simulate.state import campaign_status
from exitwave.simulate.work import CampaignTask
from exitwave.simulate.worker import run_guarded_call

__all__ = ["ManyTasks", "run_many"]

_PR_SET_PDEATHSIG = 1
_SAMPLES = 8
_BYTES = 1_000_000
_FIELD = FieldSpec(name="nothing", dtype="<f4", shape=(1,), axes=("x",), unit="", meaning="nothing")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    index: int

    @property
    def task_id(self) -> str:
        return f"task-{self.index:06d}"

    @property
    def shard_id(self) -> str:
        return hashlib.blake2b(str(self.index).encode(), digest_size=16).hexdigest()

    @property
    def campaign_hash(self) -> str:
        return "0" * 64

    @property
    def simulator(self) -> str:
        return "weak-phase"

    @property
    def split(self) -> str:
        return "train"

    @property
    def sample_indices(self) -> tuple[int, ...]:
        return tuple(range(_SAMPLES))

    @property
    def sources(self) -> tuple[str, ...]:
        return (f"structure-{self.index // 16:05d}.cif",)

    @property
    def fields(self) -> tuple[FieldSpec, ...]:
        return (_FIELD,)

    @property
    def params_dtype(self) -> np.dtype[Any]:
        return PARAMS_DTYPE

    @property
    def compression(self) -> str:
        return ""

    def uids(self) -> tuple[int, ...]:
        return ()

    def estimated_seconds(self) -> float:
        return 0.0

    def prepare(self, dataset: Path) -> dict[str, str]:
        return {}

    def simulate(self) -> Iterator[Any]:
        return iter(())

    def add_structures(self, writer: Any) -> None: ...


@dataclass(frozen=True, kw_only=True)
class _Plan:
    tasks: Sequence[CampaignTask]
    name: str = "many tasks that do nothing"
    campaign_hash: str = "0" * 64
    simulator: str = "weak-phase"
    fields: tuple[FieldSpec, ...] = (_FIELD,)
    rejected: tuple[Any, ...] = ()
    rejected_samples: int = 0

    @cached_property
    def n_samples(self) -> int:
        return _SAMPLES * len(self.tasks)

    @property
    def bytes(self) -> int:
        return _BYTES * len(self.tasks)

    def resolved(self) -> dict[str, Any]:
        return {"name": self.name}

    def prepare(self, dataset: Path) -> None: ...


def _nothing(task: _Task, folder: str) -> dict[str, Any]:
    """A receipt of the usual size."""
    producer = {"simulator": task.simulator, "host": socket.gethostname(), "pid": "0"}
    return {"split": task.split, "adopted": False, "seconds": 0.0, "simulated_s": 0.0, "producer": producer}


def _guarded_nothing(task: _Task, folder: str, limits: Any) -> dict[str, Any]:
    return run_guarded_call(_nothing, task, folder, limits)


class _Loop(CampaignLoop):
    """The real loop, but for what a task does and for the manifest."""

    def _hand_over(self, task: CampaignTask, folder: str) -> None:
        self.cluster.submit(task.task_id, _guarded_nothing, task, folder, self.limits)

    def _commit(self, task: CampaignTask, receipt: Mapping[str, Any]) -> None:
        self._note(task, receipt, shard_id=task.shard_id, n=_SAMPLES, nbytes=_BYTES)


@dataclass(frozen=True, kw_only=True)
class ManyTasks:
    """What was measured. Memory in bytes (resident set), each row: share done, controller, scheduler, status (s).

    `status_s`: the slowest look at the counters; `command_s`: each `exitwave status`, a process of its own.
    `cpu_ms_per_task`: of controller, scheduler, and all workers with the processes of their tasks.
    """

    tasks: int
    seconds: float
    ms_per_task: float
    controller_growth: int
    scheduler_growth: int
    status_s: float
    command_s: tuple[float, ...]
    cpu_ms_per_task: Mapping[str, float]
    rows: tuple[tuple[float, int, int, float], ...]


def run_many(folder: Path, *, tasks: int, workers: int, every_s: float = 5.0, commands: int = 6) -> ManyTasks:
    """Run `tasks` tasks on `workers` worker processes; `folder` must be new. Asks for the status every `every_s`
    seconds, by `commands` real commands among them.
    """
    file = folder / "scheduler.json"
    options = (
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--dashboard-address",
        "127.0.0.1:0",
        "--scheduler-file",
        str(file),
    )
    scheduler = _start(folder, "distributed.cli.dask_scheduler", *options)
    processes = [scheduler]
    try:
        address = _address(file, scheduler)
        joined = (address, "--nthreads", "1", "--no-dashboard", "--local-directory", str(folder))
        processes += [_start(folder, "distributed.cli.dask_worker", *joined) for _ in range(workers)]
        _await_workers(address, workers)
        return _measure(folder / "data", address, [process.pid for process in processes], tasks, every_s, commands)
    finally:
        for process in reversed(processes):
            _end(process)


def _measure(dataset: Path, address: str, pids: list[int], tasks: int, every_s: float, commands: int) -> ManyTasks:
    """`pids`: of the scheduler, then of the workers."""
    plan = _Plan(tasks=tuple(_Task(index=i) for i in range(tasks)))
    cluster = make_cluster(address)
    make_folder(dataset)
    rows: list[tuple[float, int, int, float]] = []
    command_s: list[float] = []
    ended = threading.Event()
    with Lease(dataset) as lease:
        lay_out(plan, dataset)
        log = EventLog(dataset / EVENTS_NAME)
        live = LiveStatus(dataset, epoch=lease.epoch, publish=cluster.publish)
        log.followers.append(live.follow)
        with ManifestWriter(dataset, epoch=lease.epoch) as manifest, live:
            loop = _Loop(plan, dataset, cluster, log, manifest, threading.Event(), Patience(), lease)
            watch = threading.Thread(
                target=_watch, args=(loop, tasks, pids[0], every_s, commands, ended, rows, command_s), daemon=True
            )
            watch.start()
            spent, began = _spent(pids), time.perf_counter()
            result = loop.execute()
            seconds = time.perf_counter() - began
            spent = {who: 1000 * (now - spent[who]) / tasks for who, now in _spent(pids).items()}
            ended.set()
            watch.join()
    assert result.committed == tasks, result
    late = [row for row in rows if row[0] >= 0.1]
    first = late[0] if late else rows[0]
    return ManyTasks(
        tasks=tasks,
        seconds=round(seconds, 1),
        ms_per_task=round(1000 * seconds / tasks, 3),
        controller_growth=max(row[1] for row in late or rows) - first[1],
        scheduler_growth=max(row[2] for row in late or rows) - first[2],
        status_s=round(max(row[3] for row in rows), 4),
        command_s=tuple(round(each, 3) for each in command_s),
        cpu_ms_per_task={who: round(value, 3) for who, value in spent.items()},
        rows=tuple(rows),
    )


def _watch(
    loop: CampaignLoop,
    tasks: int,
    scheduler: int,
    every_s: float,
    commands: int,
    ended: threading.Event,
    rows: list[tuple[float, int, int, float]],
    command_s: list[float],
) -> None:
    me, other = psutil.Process(), psutil.Process(scheduler)
    last = False
    while not last:
        last = ended.wait(every_s)
        share = len(loop.done) / tasks
        began = time.perf_counter()
        if not last:
            shown = campaign_status(loop.dataset)
            assert shown["samples"]["planned"] == _SAMPLES * tasks
        took = time.perf_counter() - began
        rows.append((round(share, 4), me.memory_info().rss, other.memory_info().rss, round(took, 4)))
        if not last and share * commands >= len(command_s):
            began = time.perf_counter()
            command = [sys.executable, "-m", "exitwave.workflows", "status", str(loop.dataset), "--json"]
            subprocess.run(command, check=True, capture_output=True)
            command_s.append(time.perf_counter() - began)


def _spent(pids: Sequence[int]) -> dict[str, float]:
    """Seconds of processor time so far."""
    seconds = {"controller": time.process_time(), "scheduler": 0.0, "workers": 0.0}
    for number, pid in enumerate(pids):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            used = each.cpu_times()
            seconds["workers" if number else "scheduler"] += used.user + used.system
    return seconds


def _start(folder: Path, *command: str) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *command], stdout=log, stderr=log, start_new_session=True, preexec_fn=_die_with_us
        )


def _die_with_us() -> None:
    """In the child: end when this process ends, however that happens, prctl(2)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _address(path: Path, process: subprocess.Popen[bytes]) -> str:
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        if path.exists():
            return str(json.loads(path.read_text())["address"])
        time.sleep(0.1)
    raise RuntimeError(f"no scheduler: {(path.parent / 'log.txt').read_text()[-2000:]}")


def _await_workers(address: str, workers: int) -> None:
    until = time.monotonic() + 120
    found = 0
    while found < workers:
        probe = make_cluster(address)
        try:
            probe.start("weak-phase")
            found = probe.n_workers
        except UsageError:  # none so far
            if time.monotonic() > until:
                raise
            time.sleep(0.5)
        finally:
            probe.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and its children, by their ids."""
    try:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        family = []
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait(timeout=30)
