"""The loop of a campaign: fill the window, commit what comes back, decide on what failed, obey, watch, stop in order.

Every decision on a task is one of `attempts`; every change of its state is an event. The loop itself keeps nothing that
grows with what was done: tasks that wait, those in the window, and the few that failed.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import DamagedDataError, InterruptedRunError
from exitwave.ingest.events import EventLog, read_events
from exitwave.ingest.manifest import ManifestWriter
from exitwave.ingest.records import PublishedShard
from exitwave.simulate.attempts import CLASSES, Failure, History, Patience, is_own, overdue_s, replay_histories
from exitwave.simulate.campaign_files import EVENTS_NAME, plan_rows, size, with_parts, write_plan
from exitwave.simulate.campaign_hold import Hold
from exitwave.simulate.campaign_resume import take_out_lost
from exitwave.simulate.cluster import Cluster, Outcome
from exitwave.simulate.commands import Command, read_commands
from exitwave.simulate.lease import Lease
from exitwave.simulate.state import replay
from exitwave.simulate.state_index import StateIndex
from exitwave.simulate.work import CampaignPlan, CampaignTask
from exitwave.simulate.worker import run_guarded, run_task
from exitwave.simulate.worker_guard import Limits

__all__ = ["CampaignLoop", "CampaignResult", "Listener", "window"]

Listener = Callable[[dict[str, Any]], None]

_LOOK_EVERY_S = 1.0  # for commands and for stalled tasks
_CHECK_EVERY_S = 0.05  # the lease
_SILENCES = 36
_LEAST, _MOST = 4, 32
_HELD_S = 0.25  # of work that a worker has before it, where its tasks are very short
_GATHER_S = 0.02


@dataclass(frozen=True, kw_only=True)
class CampaignResult:
    """How a campaign ended. Counts are shards, but for `samples` (committed), `failed_samples` and `rejected` rows."""

    committed: int
    failed: int
    rejected: int
    samples: int
    failed_samples: int
    seconds: float


class CampaignLoop:
    """One run of the loop; its attributes are the loop's state."""

    def __init__(
        self,
        plan: CampaignPlan,
        dataset: Path,
        cluster: Cluster,
        log: EventLog,
        manifest: ManifestWriter,
        stop: threading.Event,
        patience: Patience,
        lease: Lease,
        *,
        keep_page: bool = False,
        order: Callable[[CampaignTask], Any] | None = None,
    ) -> None:
        self.plan, self.dataset, self.cluster, self.log, self.manifest = plan, dataset, cluster, log, manifest
        self.stop, self.patience, self.lease, self.keep_page = stop, patience, lease, keep_page
        self.lost = take_out_lost(dataset, manifest)
        committed = {shard.shard_id: shard.nbytes for shard in manifest.manifest.shards}
        self.done = [t for t in plan.tasks if t.shard_id in committed]
        self.bytes = sum(committed.get(t.shard_id, 0) for t in self.done)
        events = read_events(dataset / EVENTS_NAME)
        histories = replay_histories(events)
        self.index = StateIndex(dataset, plan.campaign_hash, replay(plan_rows(plan), committed, events, alive=False))
        log.listeners.append(lambda event: self.index.feed(event))
        self.attempts = sum(h.attempts for h in histories.values())
        left = [t for t in plan.tasks if t.shard_id not in committed]
        self.histories = {t.task_id: histories[t.task_id] for t in left if t.task_id in histories}
        self.failed = [t for t in left if self._history(t).failed is not None]
        todo = [t for t in left if self._history(t).failed is None]
        self._order = order
        self.todo: deque[CampaignTask] = deque(todo if order is None else sorted(todo, key=order))
        self.hold = Hold(dataset, log)
        self.running: dict[str, CampaignTask] = {}
        self.heard = self.looked = self.checked = 0.0
        self.silences = self.workers = self.ended = 0
        self.window = window(0.0)  # tasks for each worker
        self.changed = False  # the plan: a task fell apart
        self.limits = Limits(seconds=self._task_seconds(), memory_bytes=patience.task_memory_bytes)

    def _history(self, task: CampaignTask) -> History:
        return self.histories.get(task.task_id, History())

    def _task_seconds(self) -> float:
        if self.patience.task_s is not None:
            return self.patience.task_s
        longest = max((task.estimated_seconds() for task in list(self.todo)[:64]), default=0.0)
        return max(600.0, 30.0 * longest)

    # --- from start to end

    def execute(self) -> CampaignResult:
        began = time.monotonic()
        self._obey(read_commands(self.dataset), at_start=True)
        if not self.todo and not self.failed:
            return self._result(began)
        try:
            if self.todo:
                self.plan.prepare(self.dataset)
                self.cluster.start(self.plan.simulator)
            self._announce()
            self._loop()
            result = self._result(began)
            told = {"committed": result.committed, "failed": result.failed, "samples": result.samples}
            self.log.emit("campaign_finished", **told)
            self._sweep()
            return result
        except InterruptedRunError as error:
            with contextlib.suppress(InterruptedRunError):  # a full disk also refuses this line
                self.log.emit("campaign_interrupted", why=str(error), committed=len(self.done))
            raise
        finally:
            if self.changed:
                with contextlib.suppress(OSError, InterruptedRunError):
                    self._write_down()
            self.index.close()
            self.cluster.close(page=self.keep_page)

    def _announce(self) -> None:
        self.workers = self.cluster.n_workers
        self.log.emit(
            "campaign_started",
            name=self.plan.name,
            samples=self.plan.n_samples,
            shards=len(self.plan.tasks),
            bytes=self.plan.bytes,
            committed=len(self.done),
            committed_samples=_samples(self.done),
            committed_bytes=self.bytes,
            failed=len(self.failed),
            failed_samples=_samples(self.failed),
            attempts=self.attempts,
            rejected_samples=self.plan.rejected_samples,
            workers=self.workers,
            cluster=self.cluster.name,
            dashboard=self.cluster.dashboard_link,
            epoch=self.lease.epoch,
            host=socket.gethostname(),
        )
        for shard_id, why in self.lost:
            self.log.emit("shard_lost", shard_id=shard_id, why=why)
        for row in self.plan.rejected:
            self.log.emit("structure_rejected", source=row.source, why=row.why)

    def _loop(self) -> None:
        self.heard = self.looked = time.monotonic()
        outcomes: list[Outcome] = []
        while self.todo or self.running:
            # What ended and what takes its place is told by one sync; nobody gets a task that was not told of.
            stopping = self.stop.is_set()
            with self.log.together():
                for outcome in outcomes:
                    self._take(outcome)
                begun = [] if stopping or self.hold.asks() else self._begin()
            if stopping:
                self._drain()
            for task in begun:
                self._hand_over(task, str(self.dataset.absolute()))
            if (passed := time.monotonic() - self.looked) >= _LOOK_EVERY_S:
                self.looked = time.monotonic()
                self.window, self.ended = window(self.ended / passed / self.cluster.n_workers), 0
                self._obey(read_commands(self.dataset))
                self._watch()
                if self.cluster.n_workers != self.workers:
                    self.workers = self.cluster.n_workers
                    self.log.emit("workers_changed", workers=self.workers)
                self.index.flush()
                if self.changed:
                    self._write_down()
            if self.hold.asks():
                self.heard = time.monotonic()  # that nothing runs is nobody's silence
                if not self.running:
                    self.stop.wait(0.1)  # there is nothing that the cluster could wait for
            if self.window > _LEAST:  # short tasks, and enough of them with the workers: several for one sync
                time.sleep(_GATHER_S)
            outcomes = self.cluster.wait(0.25)
            self.ended += len(outcomes)
            if outcomes:
                self.heard, self.silences = time.monotonic(), 0

    def _result(self, began: float) -> CampaignResult:
        return CampaignResult(
            committed=len(self.done),
            failed=len(self.failed),
            rejected=len(self.plan.rejected),
            samples=_samples(self.done),
            failed_samples=_samples(self.failed),
            seconds=time.monotonic() - began,
        )

    def _sweep(self) -> None:
        """At the end nobody needs what is half-written, on whatever host that was: its shard is there or has failed."""
        for path in (self.dataset / "shards" / ".part").glob(".*.part"):
            path.unlink(missing_ok=True)

    # --- one task

    def _begin(self) -> list[CampaignTask]:
        """Tasks for the room in the window. Workers come and go: the window follows them."""
        begun = []
        while self.todo and len(self.running) < self.window * self.cluster.n_workers:
            task = self.todo.popleft()
            history = self._history(task).begun()
            self.histories[task.task_id] = history
            self.running[task.task_id] = task
            samples = len(task.sample_indices)
            self.log.emit("task_submitted", task=task.task_id, attempt=history.attempts, samples=samples)
            begun.append(task)
        return begun

    def _hand_over(self, task: CampaignTask, folder: str) -> None:
        if self.cluster.name == "inline":
            self.cluster.submit(task.task_id, run_task, task, folder)
        else:
            self.cluster.submit(task.task_id, run_guarded, task, folder, self.limits)

    def _take(self, outcome: Outcome) -> None:
        task = self.running.pop(outcome.key, None)
        if task is None:
            return
        if time.monotonic() - self.checked > _CHECK_EVERY_S:  # and each line of the manifest is fenced by itself
            self.lease.check()
            self.checked = time.monotonic()
        if outcome.kind == "ok" and "failed" not in outcome.result:
            self._commit(task, outcome.result)
            return
        if outcome.kind == "ok":
            told = outcome.result["failed"]
            state, certain = told["state"], is_own(told["state"], told.get("signal", ""))
            why, host, seconds = told["why"], told["host"], told["seconds"]
        else:
            state, certain = outcome.kind, outcome.kind != "killed"
            why, host, seconds = outcome.error, outcome.host, outcome.seconds
        if state == "disk-full":
            self._stop_for_room(why)
        elif state in CLASSES:
            self._fail(task, Failure(state=state, why=why, host=host, seconds=seconds, certain=certain))
        else:
            self._lose(task, why, seconds)

    def _commit(self, task: CampaignTask, receipt: Mapping[str, Any]) -> None:
        published = PublishedShard.from_json(receipt["published"])
        producer = receipt["producer"]
        try:
            self.manifest.commit(published, split=task.split, producer=producer)
        except DamagedDataError as error:  # it is not there, or not as long, as the worker said
            why = f"{error} (its worker had just published it)"
            self._fail(task, Failure(state="error", why=why, host=producer["host"], seconds=receipt["seconds"]))
            return
        self._note(task, receipt, shard_id=published.shard_id, n=published.n, nbytes=published.nbytes)

    def _note(self, task: CampaignTask, receipt: Mapping[str, Any], *, shard_id: str, n: int, nbytes: int) -> None:
        """It is committed: it counts, and is told."""
        self.done.append(task)
        history = self.histories.pop(task.task_id, History())
        self.log.emit(
            "shard_committed",
            task=task.task_id,
            shard_id=shard_id,
            n=n,
            nbytes=nbytes,
            seconds=receipt["seconds"],
            simulated_s=receipt.get("simulated_s", 0.0),
            host=receipt["producer"].get("host", ""),
            attempt=history.attempts,
            adopted=receipt["adopted"],
            committed=len(self.done),
            structures=list(task.sources),
        )

    def _fail(self, task: CampaignTask, failure: Failure) -> None:
        history = self._history(task).after(failure)
        parts = getattr(task, "parts", ())
        apart = bool(parts) and (failure.certain or history.failed is not None)
        self.histories[task.task_id] = history
        self.log.emit(
            "task_failed",
            task=task.task_id,
            state=failure.state,
            why=failure.why,
            host=failure.host,
            attempt=history.attempts,
            seconds=round(failure.seconds, 3),
            certain=failure.certain,
            structures=list(task.sources),
            samples=len(task.sample_indices),
            final=history.failed is not None and not apart,
        )
        if apart:
            self._fall_apart(task, parts)
            return
        if history.failed is None:
            self._again(task)
        else:
            self.failed.append(task)

    def _again(self, *tasks: CampaignTask) -> None:
        """Behind all that wait; where the campaign has an order, at their places in it: somebody waits for them."""
        self.todo.extend(tasks)
        if self._order is not None:
            self.todo = deque(sorted(self.todo, key=self._order))

    def _fall_apart(self, task: CampaignTask, parts: Sequence[CampaignTask]) -> None:
        """Of several structures, only the one to blame is to fail."""
        self.log.emit("task_split", task=task.task_id, into=len(parts), samples=len(task.sample_indices))
        self.histories.pop(task.task_id, None)
        self.plan = with_parts(self.plan, {task.task_id})
        self._again(*parts)
        self.changed = True

    def _write_down(self) -> None:
        """The plan as it is now, and the index of its tasks."""
        self.changed = False
        write_plan(self.plan, self.dataset)
        self.index.close()
        committed = {task.shard_id for task in self.done}
        states = replay(plan_rows(self.plan), committed, read_events(self.dataset / EVENTS_NAME), alive=True)
        self.index = StateIndex(self.dataset, self.plan.campaign_hash, states)

    def _drop(self, task: CampaignTask, why: str) -> None:
        """Taken back from the cluster; nothing counts against it."""
        self.log.emit("task_dropped", task=task.task_id, why=why)
        self._again(task)

    def _lose(self, task: CampaignTask, why: str, seconds: float) -> None:
        """Lost with its scheduler or its worker's job: done again, but not for ever. Those that waited are next, the
        last of them first: where one takes the others along each time, it is now behind them."""
        history = self._history(task).lost(ran=seconds > 0)
        self.histories[task.task_id] = history
        if history.lost_too_often:
            told = f"lost again and again, in {history.attempts} attempts; it may be why: {why}"
            self._fail(task, Failure(state="killed", why=told, seconds=seconds, certain=False))
        else:
            self.log.emit("task_dropped", task=task.task_id, why=why, ran=seconds > 0)
            (self.todo.append if seconds > 0 else self.todo.appendleft)(task)

    # --- what others ask for, and what does not happen

    def _obey(self, commands: list[Command], *, at_start: bool = False) -> None:
        for command in commands:
            if command.verb == "retry":
                self._retry(command.states)
            elif command.verb is None:
                self.log.emit("command_refused", why=f"{command.path.name}: {command.why}")
            elif not at_start and command.epoch in (0, self.lease.epoch):
                command.done()
                if command.verb == "drain":
                    self._drain()
                self._cancel()
            command.done()

    def _retry(self, states: tuple[str, ...]) -> None:
        chosen = [t for t in self.failed if not states or (f := self._history(t).failed) is None or f.state in states]
        for task in chosen:
            self.failed.remove(task)
            self.histories[task.task_id] = self._history(task).forgiven()
            self.log.emit("task_retried", task=task.task_id, samples=len(task.sample_indices))
            self._again(task)

    def _watch(self) -> None:
        """A worker keeps the limits of its task itself; here, those are found that cannot even do that."""
        limit = overdue_s(self.limits.seconds)
        running = dict(self.cluster.running)
        for key, seconds in running.items():
            if seconds > limit and key in self.running:
                self.cluster.cancel([key], begun=True)
                why = f"its worker has said nothing for {seconds:.0f} s; the limit is {self.limits.seconds:g} s"
                task = self.running.pop(key)
                self._fail(task, Failure(state="timeout", why=why, seconds=seconds, certain=False))
        if self.cluster.queued:
            self.heard = time.monotonic()
        elif not running and time.monotonic() - self.heard > self.patience.silence_s:
            self._hand_out_anew()

    def _hand_out_anew(self) -> None:
        """Tasks wait, and nothing runs: workers are paused, or none has come. No fault of any task."""
        self.heard = time.monotonic()
        self.silences += 1
        why = f"no worker has taken a task for {self.patience.silence_s:.0f} s"
        self.cluster.cancel(begun=True)
        for task in self.running.values():
            self._drop(task, why)
        self.running.clear()
        if self.silences >= _SILENCES:
            raise InterruptedRunError(
                f"{why}, {self.silences} times in a row: the workers of {self.cluster.name} are paused or away. The "
                "same command resumes"
            )

    # --- the end before the end

    def _drain(self) -> None:
        """Stop: forget what has not begun, await what has for a bounded time, commit it, and raise."""
        self._forget(self.cluster.cancel())
        until = time.monotonic() + self.patience.drain_s
        while self.running and time.monotonic() < until:
            for outcome in self.cluster.wait(0.25):
                self._take(outcome)
        raise InterruptedRunError(f"stopped on request: {self._left()}")

    def _cancel(self) -> None:
        self._forget(self.cluster.cancel(begun=True))
        raise InterruptedRunError(f"cancelled on request: {self._left()}")

    def _forget(self, keys: list[str]) -> None:
        for key in keys:
            self.running.pop(key, None)

    def _left(self) -> str:
        done, planned = len(self.done), len(self.plan.tasks)
        return f"{done} of {planned} shards are committed, {planned - done} are left; the same command resumes"

    def _stop_for_room(self, why: str) -> None:
        left = len(self.plan.tasks) - len(self.done)
        needed = self.plan.bytes * left // len(self.plan.tasks)
        free = shutil.disk_usage(self.dataset).free
        self.cluster.cancel()
        raise InterruptedRunError(
            f"the disk of {self.dataset} is full ({why}): {left} shards are left and need about {size(needed)}, "
            f"{size(free)} are free. Make room and give the same command again; it resumes"
        )


def window(per_second: float) -> int:
    """How many tasks for each worker are handed out at a time, where one of them ends so many a second.

    Four, so that none waits for the controller; more where tasks are so short that four of them end before it is back.
    """
    return max(_LEAST, min(_MOST, math.ceil(_HELD_S * per_second)))


def _samples(tasks: list[CampaignTask]) -> int:
    return sum(len(task.sample_indices) for task in tasks)
