"""Slurm: the scheduler in this process, the workers in jobs of their own, and a loop that keeps as many as are wanted.

1. `workers` are cut into jobs of `workers_per_job`. Each job is one script (`cluster_spec.worker_script`), handed to
   `sbatch`; the workers in it join this process's scheduler, encrypted unless that was switched off.
2. Every few seconds `squeue` says what became of the jobs, and `decide` (a pure function) what is to be done: a job
   that has ended, by its walltime, a preemption or a failing node, is asked for again. One that Slurm requeued is left
   to it.
3. A task whose worker died with its job is `lost` and not to blame. The same task lost with three jobs is `killed`: a
   job can also end because the task took all memory of its node.
4. Jobs that end one after the other within seconds, without a worker that ever came, stop the campaign with the last
   lines of the job's log: asking again would not help.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dask.config
import distributed

from exitwave.ingest.errors import InterruptedRunError, UsageError
from exitwave.ingest.files import read_plain_text
from exitwave.simulate.cluster_local import LocalCluster, scheduler_habits, scratch_folder
from exitwave.simulate.cluster_outcome import Outcome
from exitwave.simulate.cluster_spec import SlurmSpec, jobs_for, walltime_seconds, worker_script
from exitwave.simulate.cluster_tls import security, worker_options

__all__ = ["Decision", "Job", "SlurmCluster", "decide", "site_defaults"]

# Of a job that holds or will hold workers; COMPLETING is on its way out.
_ALIVE = frozenset(
    ["PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT",
     "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "RESV_DEL_HOLD"]
)  # fmt: skip
_GRACE_S = 10.0  # squeue may not know a job yet that sbatch has just accepted
_AT_ONCE_S = 30.0
_FAILURES = 3
_LOSSES = 3


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job of ours as last seen; `state` is Slurm's. `began`: when it was first seen to run (monotonic seconds);
    `worked`: a worker of it has come at some time."""

    job_id: str
    submitted: float
    state: str = "PENDING"
    began: float | None = None
    worked: bool = False


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do: how many jobs to submit, which to cancel, and the jobs as they are now. `hopeless`: none of it."""

    submit: int
    cancel: tuple[str, ...]
    jobs: tuple[Job, ...]
    ended: tuple[Job, ...] = ()
    failures: int = 0

    @property
    def hopeless(self) -> bool:
        return self.failures >= _FAILURES


def decide(
    wanted: int,
    jobs: tuple[Job, ...],
    seen: Mapping[str, str] | None,
    workers_of: Mapping[str, int],
    now: float,
    failures: int = 0,
) -> Decision:
    """From what `squeue` says (`seen`, job -> state; None: it did not answer) to what is to be done.

    `workers_of` counts the workers of each job that are there; `failures` the jobs in a row that ended at once without
    any. Where squeue does not answer nothing is done: jobs that cannot be seen must not be asked for twice.
    """
    if seen is None:
        return Decision(submit=0, cancel=(), jobs=jobs, failures=failures)
    alive: list[Job] = []
    ended: list[Job] = []
    for job in jobs:
        worked = job.worked or workers_of.get(job.job_id, 0) > 0
        state = seen.get(job.job_id) or ("PENDING" if now - job.submitted < _GRACE_S and not worked else "ENDED")
        began = now if job.began is None and state == "RUNNING" else job.began
        job = Job(job_id=job.job_id, submitted=job.submitted, state=state, began=began, worked=worked)
        (alive if state in _ALIVE else ended).append(job)
    for job in ended:
        at_once = not job.worked and (job.began is None or now - job.began < _AT_ONCE_S)
        failures = failures + 1 if at_once else 0
    if any(job.worked for job in alive):
        failures = 0
    missing = max(0, wanted - len(alive))
    # More than are wanted: those that wait go first, the youngest of them before the others.
    surplus = sorted(alive, key=lambda job: (job.state == "RUNNING", -job.submitted))[: max(0, len(alive) - wanted)]
    cancel = tuple(job.job_id for job in surplus)
    kept = tuple(job for job in alive if job.job_id not in cancel)
    submit = 0 if failures >= _FAILURES else missing
    return Decision(submit=submit, cancel=cancel, jobs=kept, ended=tuple(ended), failures=failures)


def site_defaults() -> dict[str, Any]:
    """The section `jobqueue.slurm` of the user's Dask configuration, where there is one."""
    found = dask.config.get("jobqueue.slurm", None)
    return dict(found) if isinstance(found, dict) else {}


@dataclass(kw_only=True)
class _Queue:
    """What the loop's thread and the campaign's both look at, under one lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    jobs: tuple[Job, ...] = ()
    failures: int = 0
    trouble: str = ""


class SlurmCluster(LocalCluster):
    """`workers` worker processes in jobs. `poll_s`: how often squeue is asked; `log_folder`: of the jobs' output."""

    name = "slurm"
    own_group = False

    def __init__(
        self,
        workers: int,
        spec: SlurmSpec,
        *,
        tls: bool = True,
        poll_s: float = 5.0,
        log_folder: Path | None = None,
    ) -> None:
        super().__init__(workers, tls=tls)
        self.spec = spec.filled(site_defaults())
        self.wanted = jobs_for(workers, self.spec)
        self._poll_s = poll_s
        self._log_folder = log_folder or Path("slurm-logs")
        self._queue = _Queue()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._losses: dict[str, int] = {}
        self.margin_s = min(300.0, 0.1 * walltime_seconds(self.spec.walltime))
        self._job_name = ""

    @property
    def n_workers(self) -> int:
        return self.wanted * self.spec.workers_per_job

    @property
    def queued(self) -> bool:
        return not any(job.state == "RUNNING" for job in self._queue.jobs)

    def _launch(self) -> None:
        missing = [tool for tool in ("sbatch", "squeue", "scancel") if shutil.which(tool) is None]
        if missing:
            raise UsageError(
                f"--cluster slurm: {', '.join(missing)} not found on PATH: run it on a node of the cluster"
            )
        scheduler_habits()
        where = {"interface": self.spec.interface} if self.spec.interface else {"host": _own_address()}
        self._cluster = distributed.LocalCluster(
            n_workers=0,
            protocol="tls" if self._tls else "tcp",
            security=security() if self._tls else None,
            dashboard_address="127.0.0.1:0",
            local_directory=scratch_folder(),
            silence_logs="CRITICAL",
            **where,
        )
        address = self._cluster.scheduler_address
        self._job_name = f"exitwave-{address.rpartition(':')[2]}"
        self._log_folder.mkdir(parents=True, exist_ok=True)
        self._script = worker_script(
            self.spec,
            scheduler=address,
            name=self._job_name,
            log=str(self._log_folder.absolute() / "%j.out"),
            python=sys.executable,
            tls=worker_options() if self._tls else (),
        )
        try:
            for _ in range(self.wanted):
                self._submit_job()
        except InterruptedRunError:
            self.close()
            raise
        self._thread = threading.Thread(target=self._keep, name="exitwave-slurm", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> list[Outcome]:
        if self._queue.trouble:
            raise InterruptedRunError(self._queue.trouble)
        if not self._futures:
            time.sleep(min(timeout_s, 0.05))
        return [self._weigh(outcome) for outcome in super().wait(timeout_s)]

    def _weigh(self, outcome: Outcome) -> Outcome:
        """A task that goes down with one job after the other is probably why they go down."""
        if outcome.kind != "lost":
            self._losses.pop(outcome.key, None)
            return outcome
        self._losses[outcome.key] = self._losses.get(outcome.key, 0) + 1
        if self._losses[outcome.key] < _LOSSES:
            return outcome
        why = f"{_LOSSES} jobs in a row ended while it ran: {outcome.error}"
        return Outcome(key=outcome.key, kind="killed", error=why, host=outcome.host, seconds=outcome.seconds)

    def lost_worker(self, name: str) -> bool:
        """Whether the job of `exitwave-JOB` or `exitwave-JOB-K` runs no more. Slurm learns of it a moment later."""
        job_id = name.split("-")[1] if name.count("-") else name
        for _ in range(4):
            seen = self._squeue()
            if seen is not None and seen.get(job_id) != "RUNNING":
                return True
            time.sleep(0.5)
        return False

    def close(self, *, page: bool = False) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=60)
            self._thread = None
        with self._queue.lock:
            jobs, self._queue.jobs = self._queue.jobs, ()
        if jobs:
            self._run("scancel", *(job.job_id for job in jobs))
        super().close(page=page)

    # --- the loop

    def _keep(self) -> None:
        while not self._stop.wait(self._poll_s):
            with contextlib.suppress(InterruptedRunError):  # sbatch refuses now; the next round tries again
                self._reconcile()

    def _reconcile(self) -> None:
        seen = self._squeue()
        with self._queue.lock:
            if self._stop.is_set():
                return
            decision = decide(
                self.wanted, self._queue.jobs, seen, self._workers_of(), time.monotonic(), self._queue.failures
            )
            self._queue.jobs, self._queue.failures = decision.jobs, decision.failures
        if decision.hopeless:
            self._queue.trouble = self._why_hopeless(decision.ended)
            return
        if decision.cancel:
            self._run("scancel", *decision.cancel)
        for _ in range(decision.submit):
            self._submit_job()

    def _workers_of(self) -> dict[str, int]:
        """The workers of each job that the scheduler, which lives in this process, knows."""
        counts: dict[str, int] = {}
        for state in list(self._cluster.scheduler.workers.values()):
            parts = str(state.name).split("-")
            if len(parts) > 1:
                counts[parts[1]] = counts.get(parts[1], 0) + 1
        return counts

    def _submit_job(self) -> None:
        done = self._run("sbatch", "--parsable", input_=self._script)
        if done.returncode != 0:
            told = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            raise InterruptedRunError(f"--cluster slurm: sbatch refuses the job of a worker: {told}")
        job_id = done.stdout.strip().split(";")[0]
        with self._queue.lock:
            self._queue.jobs = (*self._queue.jobs, Job(job_id=job_id, submitted=time.monotonic()))

    def _squeue(self) -> dict[str, str] | None:
        """job -> state of the jobs of this campaign; None where squeue does not answer."""
        done = self._run("squeue", "--noheader", f"--name={self._job_name}", "--format=%i %T")
        if done.returncode != 0:
            return None
        rows = [line.split() for line in done.stdout.splitlines()]
        return {row[0]: row[1] for row in rows if len(row) == 2}

    def _run(self, *command: str, input_: str = "") -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(command, input=input_, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            return subprocess.CompletedProcess(command, 1, "", str(error))

    def _why_hopeless(self, ended: tuple[Job, ...]) -> str:
        log = self._log_folder.absolute() / f"{ended[-1].job_id}.out" if ended else self._log_folder.absolute()
        last = ""
        with contextlib.suppress(OSError):
            last = " ".join(read_plain_text(log, errors="replace").split())[-300:]
        return (
            f"--cluster slurm: {_FAILURES} jobs in a row ended before any worker came. {log}: "
            f"{last or 'it is empty or missing'}. Mend it, then give the same command again; it resumes"
        )


def _own_address() -> str:
    """The address by which other nodes reach this one."""
    address: str = distributed.utils.get_ip()
    return address
