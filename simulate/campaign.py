"""Runs a plan on a cluster until the manifest holds all of it, through failures, interruptions and restarts.

1. This process takes the data set's lease; nobody else commits while it lives.
2. The manifest is the queue: what it lacks of the plan is to be done. What an earlier controller left half-written is
   swept; what it left published but uncommitted is adopted by the worker that meets it.
3. A bounded window of tasks is handed to the cluster and refilled as tasks end. Results are receipts; this process
   commits each one: it is the only writer of the manifest.
4. A failed task is submitted again as often as its kind of failure deserves; then it counts as failed, alone.
5. A request to stop ends the refilling; what runs is awaited for a bounded time and committed. A full disk stops too.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import InterruptedRunError, UsageError
from exitwave.ingest.events import EventLog, read_events
from exitwave.ingest.files import disk_full_means_interrupted, sweep_parts, write_atomic
from exitwave.ingest.manifest import MANIFEST_NAME, ManifestWriter, create_dataset, load_manifest
from exitwave.ingest.records import Header, PublishedShard
from exitwave.simulate.cluster import Cluster, Outcome
from exitwave.simulate.lease import Lease
from exitwave.simulate.state import PLAN_NAME
from exitwave.simulate.wisdom import FOLDER as WISDOM_FOLDER
from exitwave.simulate.work import CampaignPlan, CampaignTask
from exitwave.simulate.worker import run_task

__all__ = ["CampaignResult", "disk_shortage", "run_campaign"]

CAMPAIGN_NAME = "campaign.yaml"
EVENTS_NAME = "events.jsonl"

# How often a task is tried within one run. An exception of a simulation is nearly always the same the next time; a
# killed worker is nearly always an accident, and a lost one no fault of the task.
MAX_ATTEMPTS: Mapping[str, int] = {"error": 2, "memory": 2, "timeout": 2, "killed": 3, "lost": 10}

Listener = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class CampaignResult:
    """How a campaign ended. Counts are shards, but for `samples` (committed), `failed_samples` and `rejected` rows."""

    committed: int
    failed: int
    rejected: int
    samples: int
    failed_samples: int
    seconds: float


def disk_shortage(plan: CampaignPlan, dataset: Path) -> str | None:
    """What to say where what is left of the data set does not fit on its disk, else None."""
    folder = next(p for p in (dataset, *dataset.absolute().parents) if p.exists())
    free = shutil.disk_usage(folder).free
    there = 0
    if (dataset / MANIFEST_NAME).exists():
        found = load_manifest(dataset)
        if found.header.campaign_hash == plan.campaign_hash:
            there = sum(shard.nbytes for shard in found.shards)
    needed = max(0, plan.bytes - there)
    return f"{_size(needed)} needed in {folder}, the disk has {_size(free)} free" if needed > free else None


def run_campaign(
    plan: CampaignPlan,
    dataset: Path,
    cluster: Cluster,
    *,
    listeners: Sequence[Listener] = (),
    stop: threading.Event | None = None,
    drain_s: float = 30.0,
    stall_s: float | None = None,
) -> CampaignResult:
    """Simulate what `dataset` lacks of `plan`. `cluster` is started and closed here.

    Raises UsageError (another campaign's data set, another controller at work, a file in the way), InterruptedRunError
    (`stop` was set, or the disk is full; the same call resumes). Failed tasks do not raise: see the result.
    """
    _make_folder(dataset)
    _refuse_other_campaign(plan, dataset)
    with Lease(dataset) as lease:
        fresh = not (dataset / MANIFEST_NAME).exists()
        _lay_out(plan, dataset)
        log = EventLog(dataset / EVENTS_NAME)
        log.listeners.extend(listeners)
        with ManifestWriter(dataset, epoch=lease.epoch) as manifest:
            run = _Run(plan, dataset, cluster, log, manifest, stop or threading.Event(), drain_s, stall_s)
            try:
                return run.execute()
            except UsageError:  # no cluster there: nothing began
                if fresh and not run.done:
                    _take_back(dataset)
                raise
            finally:
                sweep_parts(dataset)
                with contextlib.suppress(OSError):  # not empty: a writer on another host may live
                    (dataset / "shards" / ".part").rmdir()


def _version() -> str:
    try:
        return version("exitwave")
    except PackageNotFoundError:
        return "unknown"


def _make_folder(dataset: Path) -> None:
    """The folder of the data set; a file in the way and a folder of other things are refused."""
    try:
        with disk_full_means_interrupted(dataset):
            dataset.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"{dataset}: there is a file in the way; a folder for the data set expected") from None
    if not (dataset / MANIFEST_NAME).exists():
        ours = {CAMPAIGN_NAME, EVENTS_NAME, PLAN_NAME, "shards", "lease", WISDOM_FOLDER}
        foreign = sorted(p.name for p in dataset.iterdir() if p.name not in ours and not p.name.startswith("."))
        if foreign:
            raise UsageError(
                f"{dataset} is not empty and no data set (it holds {', '.join(foreign[:3])}): give a new folder"
            )


def _lay_out(plan: CampaignPlan, dataset: Path) -> None:
    """The files of a data set besides its shards; a data set that exists is left as it is."""
    sweep_parts(dataset)
    if not (dataset / MANIFEST_NAME).exists():
        header = Header(
            dataset_id=f"{plan.campaign_hash[:24]}",
            campaign_hash=plan.campaign_hash,
            fields=plan.fields,
            name=plan.name,
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            exitwave_version=_version(),
        )
        # The campaign first: a data set is one as soon as it has a manifest.
        write_atomic(dataset / CAMPAIGN_NAME, _resolved(plan))
        create_dataset(dataset, header)
    rows = [
        {
            "task": task.task_id,
            "shard_id": task.shard_id,
            "samples": len(task.sample_indices),
            "split": task.split,
            "structures": list(task.sources),
        }
        for task in plan.tasks
    ]
    content = {
        "name": plan.name,
        "campaign_hash": plan.campaign_hash,
        "rejected": [{"source": r.source, "why": r.why} for r in plan.rejected],
        "rejected_samples": plan.rejected_samples,
        "tasks": rows,
    }
    write_atomic(dataset / PLAN_NAME, json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode() + b"\n")


def _take_back(dataset: Path) -> None:
    """What `_lay_out` made of a folder that was no data set; the manifest first, so that it is none again."""
    for name in (MANIFEST_NAME, CAMPAIGN_NAME, PLAN_NAME, EVENTS_NAME):
        (dataset / name).unlink(missing_ok=True)
    for folder in (dataset / "shards" / ".part", dataset / "shards"):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _resolved(plan: CampaignPlan) -> bytes:
    """The campaign with every default written out, as JSON, which is YAML too."""
    return json.dumps(plan.resolved(), indent=2, ensure_ascii=False).encode() + b"\n"


def _refuse_other_campaign(plan: CampaignPlan, dataset: Path) -> None:
    if not (dataset / MANIFEST_NAME).exists():
        return
    found = load_manifest(dataset).header.campaign_hash
    if found == plan.campaign_hash:
        return
    try:
        there = json.loads((dataset / CAMPAIGN_NAME).read_text())
        differences = list(_differences(there, json.loads(_resolved(plan))))
    except (OSError, ValueError):
        differences = [f"its {CAMPAIGN_NAME} cannot be read"]
    told = "; ".join(differences[:8]) or "the content of a structure's file or of a simulator has changed"
    raise UsageError(
        f"{dataset} holds another campaign ({found[:12]}, this one is {plan.campaign_hash[:12]}): {told}. "
        "Choose another folder, or give back the old configuration."
    )


def _differences(there: Any, here: Any, key: str = "") -> list[str]:
    """`key: old -> new` of every place where two configurations differ."""
    if isinstance(there, dict) and isinstance(here, dict):
        rows: list[str] = []
        for name in sorted({*there, *here}):
            rows += _differences(there.get(name), here.get(name), f"{key}.{name}" if key else name)
        return rows
    if there == here or key == "name":
        return []
    return [f"{key}: {_short(there)} -> {_short(here)}"]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


class _Run:
    """One run of the loop; its attributes are the loop's state."""

    def __init__(
        self,
        plan: CampaignPlan,
        dataset: Path,
        cluster: Cluster,
        log: EventLog,
        manifest: ManifestWriter,
        stop: threading.Event,
        drain_s: float,
        stall_s: float | None,
    ) -> None:
        self.plan, self.dataset, self.cluster = plan, dataset, cluster
        self.log, self.manifest, self.stop, self.drain_s = log, manifest, stop, drain_s
        committed = {shard.shard_id for shard in load_manifest(dataset).shards}
        self.todo: deque[CampaignTask] = deque(t for t in plan.tasks if t.shard_id not in committed)
        self.done = [t for t in plan.tasks if t.shard_id in committed]
        self.failed: list[CampaignTask] = []
        self.running: dict[str, tuple[CampaignTask, float]] = {}
        self.tries: dict[str, int] = {}
        self.earlier = _earlier_attempts(dataset)
        self.stall_s = stall_s if stall_s is not None else self._patience()

    def _patience(self) -> float:
        """Without any outcome for so long, the workers hang: far more than the longest task should need."""
        longest = max((task.estimated_seconds() for task in list(self.todo)[:64]), default=0.0)
        return max(600.0, 30.0 * longest)

    def execute(self) -> CampaignResult:
        began = time.monotonic()
        if not self.todo:
            return self._result(began)
        try:
            self.plan.prepare(self.dataset)
            self.cluster.start(self.plan.simulator)
            self._announce()
            self._loop()
        except InterruptedRunError as error:
            with contextlib.suppress(InterruptedRunError):  # a full disk also refuses this line
                self.log.emit("campaign_interrupted", why=str(error), committed=len(self.done))
            raise
        finally:
            self.cluster.close()
        result = self._result(began)
        self.log.emit("campaign_finished", committed=result.committed, failed=result.failed, samples=result.samples)
        return result

    def _announce(self) -> None:
        self.log.emit(
            "campaign_started",
            samples=self.plan.n_samples,
            shards=len(self.plan.tasks),
            committed=len(self.done),
            workers=self.cluster.n_workers,
            cluster=self.cluster.name,
            dashboard=self.cluster.dashboard_link,
        )
        for row in self.plan.rejected:
            self.log.emit("structure_rejected", source=row.source, why=row.why)

    def _loop(self) -> None:
        window = 4 * self.cluster.n_workers
        heard = time.monotonic()
        while self.todo or self.running:
            if self.stop.is_set():
                self._drain()
            while self.todo and len(self.running) < window:
                self._submit(self.todo.popleft())
            outcomes = self.cluster.wait(0.25)
            if outcomes:
                heard = time.monotonic()
            elif time.monotonic() - heard > self.stall_s:
                outcomes = self._give_up_waiting()
                heard = time.monotonic()
            for outcome in outcomes:
                self._take(outcome)

    def _submit(self, task: CampaignTask) -> None:
        self.tries[task.task_id] = self.tries.get(task.task_id, 0) + 1
        self.log.emit("task_submitted", task=task.task_id, attempt=self._attempt(task))
        self.running[task.task_id] = (task, time.monotonic())
        self.cluster.submit(task.task_id, run_task, task, str(self.dataset.absolute()))

    def _attempt(self, task: CampaignTask) -> int:
        return self.earlier.get(task.task_id, 0) + self.tries.get(task.task_id, 0)

    def _take(self, outcome: Outcome) -> None:
        if outcome.key not in self.running:
            return
        task, since = self.running.pop(outcome.key)
        if outcome.kind == "ok":
            self._commit(task, outcome.result)
        elif outcome.kind == "disk-full":
            self._stop_for_room(outcome.error)
        else:
            self._failed(task, outcome, outcome.seconds or time.monotonic() - since)

    def _commit(self, task: CampaignTask, receipt: Mapping[str, Any]) -> None:
        published = PublishedShard.from_json(receipt["published"])
        self.manifest.commit(published, split=task.split, producer=receipt["producer"])
        self.done.append(task)
        self.log.emit(
            "shard_committed",
            task=task.task_id,
            shard_id=published.shard_id,
            n=published.n,
            nbytes=published.nbytes,
            seconds=receipt["seconds"],
            simulated_s=receipt.get("simulated_s", 0.0),
            host=receipt["producer"].get("host", ""),
            attempt=self._attempt(task),
            adopted=receipt["adopted"],
            committed=len(self.done),
        )

    def _failed(self, task: CampaignTask, outcome: Outcome, seconds: float) -> None:
        final = self.tries[task.task_id] >= MAX_ATTEMPTS.get(outcome.kind, 1) and outcome.kind != "lost"
        self.log.emit(
            "task_failed",
            task=task.task_id,
            state=outcome.kind,
            why=outcome.error,
            host=outcome.host,
            attempt=self._attempt(task),
            seconds=round(seconds, 3),
            structures=list(task.sources),
            final=final,
        )
        if final:
            self.failed.append(task)
        else:
            self.todo.append(task)

    def _give_up_waiting(self) -> list[Outcome]:
        """The watchdog: nothing was heard for too long. The workers start anew, and what they held has timed out."""
        why = f"no task ended for {self.stall_s:.0f} s"
        outcomes = [Outcome(key=key, kind="timeout", error=why) for key in self.running]
        self.cluster.cancel(begun=True)
        return outcomes

    def _drain(self) -> None:
        """Stop: forget what has not begun, await what has for a bounded time, commit it, and raise."""
        for key in self.cluster.cancel():
            self.running.pop(key, None)
        until = time.monotonic() + self.drain_s
        while self.running and time.monotonic() < until:
            for outcome in self.cluster.wait(0.25):
                self._take(outcome)
        left = len(self.plan.tasks) - len(self.done)
        raise InterruptedRunError(
            f"stopped on request: {len(self.done)} of {len(self.plan.tasks)} shards are committed, {left} are left; "
            "the same command resumes"
        )

    def _stop_for_room(self, why: str) -> None:
        left = len(self.plan.tasks) - len(self.done)
        needed = self.plan.bytes * left // len(self.plan.tasks)
        free = shutil.disk_usage(self.dataset).free
        self.cluster.cancel()
        raise InterruptedRunError(
            f"the disk of {self.dataset} is full ({why}): {left} shards are left and need about {_size(needed)}, "
            f"{_size(free)} are free. Make room and give the same command again; it resumes"
        )

    def _result(self, began: float) -> CampaignResult:
        return CampaignResult(
            committed=len(self.done),
            failed=len(self.failed),
            rejected=len(self.plan.rejected),
            samples=sum(len(t.sample_indices) for t in self.done),
            failed_samples=sum(len(t.sample_indices) for t in self.failed),
            seconds=time.monotonic() - began,
        )


def _earlier_attempts(dataset: Path) -> dict[str, int]:
    """Attempts per task over all earlier runs."""
    counts: dict[str, int] = {}
    for event in read_events(dataset / EVENTS_NAME):
        if event["kind"] == "task_submitted":
            counts[event["task"]] = counts.get(event["task"], 0) + 1
    return counts
