"""The loop of a search: ask, hand out, watch, tell; the only writer of STUDY/events.jsonl.

1. A trial's number and values are written down before anything of it runs; from then on they are settled. What was
   running when a controller died is handed out again first, under its number, and goes on from its checkpoint.
2. Experiments first: a worker has one trial. Where fewer trials are left than this machine has workers, each gets
   several ranks (on clusters of other machines it stays one: ranks of one trial would have to be on one machine).
3. A thread reads what the trainings write, five times a second: each validation is told, and where the pruner gives a
   trial up, that is written down first, and then a file `stop` in the trial's folder ends it at a checkpoint. The
   same thread passes on a Ctrl-C, and the end of the search's time.
4. A trial ends once: finished, pruned or failed with its reason. A death (of its process or its worker) is no failure:
   it goes on, unless it died `_DEATHS` times without a new checkpoint in between.
5. All trials train on the same data: `same_data` is asked before each begins, and when one failed. Where the data is
   gone, no trial has failed by that; the search ends, and goes on when the data is back. So it ends when `_IN_A_ROW`
   trials failed for a reason that no value explains, instead of wearing out all others.

The lock is held for every look at the record and every change of it; never while the cluster is waited for.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from exitwave.ingest.errors import DamagedDataError, InterruptedRunError
from exitwave.ingest.events import EventLog, EventTail, read_events
from exitwave.ingest.files import disk_full_means_interrupted
from exitwave.simulate.cluster import Cluster, Outcome
from exitwave.simulate.worker import run_guarded_call
from exitwave.simulate.worker_guard import Limits
from exitwave.train.checkpoints import last_step
from exitwave.train.spec import TrainSpec
from exitwave.workflows.tune_record import Folding, Study, best_trial, counts
from exitwave.workflows.tune_sampler import gives_up, next_values
from exitwave.workflows.tune_space import misfit, trial_spec
from exitwave.workflows.tune_spec import TuneSpec
from exitwave.workflows.tune_trial import SIMULATOR, STOP_NAME, TrialTask, run_trial

__all__ = ["StudyLoop", "ranks_for", "rung_of"]

_DEATHS = 5
_IN_A_ROW = 5
_NO_ANSWER = ("error", "damaged data")  # failures that lie in the machine or the data, not in the values
_LOOK_EVERY_S = 0.2
_DRAIN_S = 600.0


def rung_of(tune: TuneSpec, event: Mapping[str, Any]) -> int:
    """Which of the budget's validations a `train_eval` event is, from 1; 0 for one before the first is due."""
    budget = tune.budget
    if budget.steps is not None:
        return int(event["step"]) * budget.validations // budget.steps
    assert budget.seconds is not None
    part = float(event.get("clock_s", 0.0)) / budget.seconds
    return min(int(part * budget.validations), budget.validations)


def ranks_for(*, workers: int, left: int, batch: int) -> int:
    """Ranks of a trial that begins while `left` trials, this one included, are not ended."""
    return max(1, min(workers // max(left, 1), batch))


class StudyLoop:
    """One run of the loop over the study in `folder`, whose events it goes on with."""

    def __init__(
        self,
        folder: Path,
        tune: TuneSpec,
        train: TrainSpec,
        dataset: Path,
        cluster: Cluster,
        log: EventLog,
        *,
        stop: threading.Event,
        one_machine: bool,
        feed: Callable[[Mapping[str, Any]], None],
        same_data: Callable[[], None] = lambda: None,
    ) -> None:
        self.same_data, self.unexplained = same_data, 0
        self.folder, self.tune, self.train, self.dataset = folder, tune, train, dataset
        self.cluster, self.log, self.stop, self.one_machine, self.feed = cluster, log, stop, one_machine, feed
        self.lock = threading.RLock()
        self._folding = Folding()
        for event in read_events(log.path):
            self._folding.add(event)
        self.study: Study = self._folding.study
        self.running: dict[int, EventTail] = {}
        self.stopping = ""  # "", "drain" or "time"
        self.error: BaseException | None = None
        self.began, self.before = time.monotonic(), self.study.seconds
        log.listeners.append(self._learn)

    def _learn(self, event: dict[str, Any]) -> None:
        self._folding.add(event)
        self.study = self._folding.study

    # --- from start to end

    def execute(self) -> Study:
        """Until every trial has ended, or the time is over. InterruptedRunError after a drain."""
        if not self.due():
            return self.study
        for trial in self.study.trials:
            if trial.state == "pruned":  # a kill may have come before it was told, and on other machines it goes on
                self._stop(trial.number, "pruned")
        self.cluster.start(SIMULATOR)
        done = threading.Event()
        watching = threading.Thread(target=self._watch, args=(done,), name="exitwave-tune-watch", daemon=True)
        watching.start()
        try:
            self._loop()
        finally:
            done.set()
            watching.join(60)
            self.cluster.close()
        if self.stopping == "drain":
            raise InterruptedRunError(self._left())
        return self.study

    def _loop(self) -> None:
        drain_until = math.inf
        while True:
            with self.lock:
                if self.error is not None:
                    raise self.error
                self._look_at_the_clock()
                if self.stopping:
                    for key in self.cluster.cancel():
                        self.running.pop(int(key), None)
                    drain_until = min(drain_until, time.monotonic() + _DRAIN_S)
                else:
                    self._hand_out()
                if not self.running:
                    return
            if time.monotonic() > drain_until:
                self.cluster.cancel(begun=True)
                raise InterruptedRunError(f"{self._left()} (what ran did not stop within {_DRAIN_S:.0f} s)")
            for outcome in self.cluster.wait(0.25):
                with self.lock:
                    self._take(outcome)

    def due(self) -> bool:
        return len(self.study.trials) < self.tune.trials or any(not t.ended for t in self.study.trials)

    def _left(self) -> str:
        found = counts(self.study)
        ended = len(self.study.trials) - found["running"]
        at_checkpoint = found["running"]
        return f"{self.folder}: stopped; {ended} of {self.tune.trials} trials have ended, {at_checkpoint} wait to go on"

    def _look_at_the_clock(self) -> None:
        spent = self.before + time.monotonic() - self.began
        if self.stop.is_set():
            self.stopping = "drain"
        elif self.tune.max_seconds is not None and spent >= self.tune.max_seconds and not self.stopping:
            self.stopping = "time"

    # --- handing out

    def _hand_out(self) -> None:
        """One trial a worker: those that were begun before, then new ones."""
        while len(self.running) < self.cluster.n_workers:
            self._look_at_the_clock()  # trials that fail at once are many in a moment
            if self.stopping:
                return
            waiting = [t.number for t in self.study.trials if not t.ended and t.number not in self.running]
            if waiting:
                number = waiting[0]
            elif len(self.study.trials) < self.tune.trials:
                number = len(self.study.trials)
                self.log.emit("trial_asked", n=number, values=next_values(self.tune, self.study.trials, number))
            else:
                return
            self._begin(number)

    def _begin(self, number: int) -> None:
        trial = self.study.trial(number)
        if why := misfit(self.tune, self.train, trial.values):
            self.log.emit("trial_failed", n=number, state="configuration", why=why)
            self._tell()
            return
        spec = trial_spec(self.tune, self.train, trial.values)
        out = self.folder / "trials" / str(number)
        (out / STOP_NAME).unlink(missing_ok=True)
        ended = sum(t.ended for t in self.study.trials)
        ranks = self._ranks(left=self.tune.trials - ended, batch=spec.batch)
        self.same_data()
        self.log.emit("trial_begun", n=number, ranks=ranks)
        self.running[number] = EventTail(out / "events.jsonl", from_end=False)
        task = TrialTask(
            number=number, folder=str(out.absolute()), spec=spec.canonical(), ranks=ranks,
            metric=self.tune.objective.metric,
        )  # fmt: skip
        self.cluster.submit(
            str(number), run_guarded_call, run_trial, cast(Any, task), str(self.dataset.absolute()), Limits()
        )
        self._tell()

    def _ranks(self, *, left: int, batch: int) -> int:
        return ranks_for(workers=self.cluster.n_workers, left=left, batch=batch) if self.one_machine else 1

    # --- what comes back

    def _take(self, outcome: Outcome) -> None:
        number = int(outcome.key)
        if number not in self.running:
            return
        self._read(number)
        del self.running[number]
        result = outcome.result if outcome.kind == "ok" else None
        if self.study.trial(number).ended:  # given up: however it then ended
            seconds = outcome.seconds if outcome.kind == "ok" else 0.0
            step = last_step(self.folder / "trials" / str(number))
            self.log.emit("trial_stopped", n=number, step=step, seconds=round(seconds, 3))
            self._tell()
            return
        report = result.get("failed") if isinstance(result, dict) else None
        if result is None:
            self._lost(number, kind=outcome.kind, why=outcome.error, seconds=outcome.seconds)
        elif report:
            self._lost(number, kind=str(report["state"]), why=str(report["why"]), seconds=float(report["seconds"]))
        elif result["ended"] == "finished":
            self.unexplained = 0
            self._emit("trial_finished", number, result, "value", "step", "seconds", "host")
        elif result["ended"] == "stopped":
            self._emit("trial_stopped", number, result, "step", "seconds", "host")
        else:
            self._failed(number, result)
        self._tell()

    def _failed(self, number: int, result: Mapping[str, Any]) -> None:
        if result["state"] != "diverged":
            self.same_data()
        self._emit("trial_failed", number, result, "state", "why", "seconds", "host")
        self._count(str(result["state"]), str(result["why"]))

    def _count(self, state: str, why: str) -> None:
        """DamagedDataError where one trial after the other failed for no reason of its own."""
        self.unexplained = self.unexplained + 1 if state in _NO_ANSWER else 0
        if self.unexplained >= _IN_A_ROW:
            left = self.tune.trials - sum(t.ended for t in self.study.trials)
            raise DamagedDataError(
                f"{self.folder}: {_IN_A_ROW} trials failed one after the other, the last one so: {why}. The search "
                f"stopped, so that the {left} others do not; mend the cause, then the same command goes on with them."
            )

    def _emit(self, kind: str, number: int, result: Mapping[str, Any], *names: str) -> None:
        self.log.emit(kind, n=number, **{name: result[name] for name in names})

    def _lost(self, number: int, *, kind: str, why: str, seconds: float) -> None:
        """It did not report for itself."""
        if kind == "disk-full":
            raise InterruptedRunError(f"{self.folder}: no room on the disk ({why}). Make room, and it goes on")
        if kind in ("memory", "error"):
            self.same_data()
            self.log.emit("trial_failed", n=number, state=kind, why=why, seconds=seconds)
            self._count(kind, why)
            return
        step = last_step(self.folder / "trials" / str(number))
        self.log.emit("trial_lost", n=number, step=step, why=why, seconds=seconds)
        if kind != "lost" and self.study.trial(number).losses >= _DEATHS:
            told = f"died {_DEATHS} times without a new checkpoint in between (out of memory, or by somebody): {why}"
            self.log.emit("trial_failed", n=number, state="killed", why=told)

    # --- the thread that watches

    def _watch(self, done: threading.Event) -> None:
        while not done.wait(_LOOK_EVERY_S):
            try:
                with self.lock:
                    self._look_at_the_clock()
                    for number in list(self.running):
                        self._read(number)
                        if self.stopping:
                            self._stop(number, self.stopping)
            except BaseException as error:  # a full disk: told by the loop
                self.error = error
                return

    def _read(self, number: int) -> None:
        """The trial's validations since the last look; what they mean for it is settled here."""
        for event in self.running[number].read():
            if event.get("kind") != "train_eval":
                continue
            trial, rung = self.study.trial(number), rung_of(self.tune, event)
            if trial.ended or rung < 1 or rung in trial.reports:
                continue
            loss = float(event["loss"])
            shown = loss if math.isfinite(loss) else None
            self.log.emit("trial_reported", n=number, rung=rung, step=event["step"], value=shown)
            if rung < self.tune.budget.validations and gives_up(self.tune, self.study.trials, number, rung):
                why = f"worse at step {event['step']} than {self.tune.pruner.percentile:g} % of the finished trials"
                self.log.emit("trial_pruned", n=number, rung=rung, step=event["step"], value=shown, why=why)
                self._stop(number, "pruned")
                self._tell()

    def _stop(self, number: int, why: str) -> None:
        path = self.folder / "trials" / str(number) / STOP_NAME
        if path.parent.is_dir() and not path.exists():
            with disk_full_means_interrupted(path):
                path.write_text(f"{why}\n")

    def _tell(self) -> None:
        """For the progress bar."""
        found = counts(self.study)
        best = best_trial(self.study.trials, maximize=self.tune.objective.maximize)
        self.feed(
            {
                "kind": "tune_progress",
                "total": self.tune.trials,
                "done": len(self.study.trials) - found["running"],
                **found,
                "best": None if best is None else best.value,
                "best_trial": None if best is None else best.number,
                "metric": self.tune.objective.metric,
            }
        )
