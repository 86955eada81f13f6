"""What is known of a search: folded from STUDY/events.jsonl, which the one controller writes (pure).

    study_started    name, trials, dataset_id, samples, data, cluster
    trial_asked      n, values              before anything of the trial runs: its number and values are settled by this
    trial_begun      n, ranks               handed to a worker, for the first time or again
    trial_reported   n, rung, step, value   a validation; rung: 1 … validations, the part of the budget that is behind
    trial_pruned     n, rung, value, why
    trial_stopped    n, step                at a checkpoint, to go on later; a pruned one, for good
    trial_lost       n, step, why           its process or its worker died; it goes on from the checkpoint at `step`
    trial_finished   n, step, value, seconds
    trial_failed     n, state, why          state: diverged, configuration, memory, killed, error
    study_interrupted, study_finished

A state is never left again once it is finished, pruned or failed: whatever a later line says of such a trial is
ignored. So a line that a kill made stand twice does no harm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Folding", "Study", "Trial", "best_so_far", "best_trial", "counts", "fold"]

State = Literal["running", "finished", "pruned", "failed"]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One trial. `reports`: validation loss by rung. `losses`: deaths since its last new checkpoint, at `step`."""

    number: int
    values: Mapping[str, Any]
    state: State = "running"
    reports: Mapping[int, float] = field(default_factory=dict)
    value: float | None = None
    step: int = 0
    losses: int = 0
    failure: str = ""
    why: str = ""
    seconds: float = 0.0
    ranks: int = 1
    attempts: int = 0

    @property
    def ended(self) -> bool:
        return self.state != "running"


@dataclass(frozen=True, kw_only=True)
class Study:
    """All trials by number, and for how long anybody has worked on them (s)."""

    trials: tuple[Trial, ...] = ()
    seconds: float = 0.0
    planned: int = 0
    dataset_id: str = ""
    samples: int = 0  # of the data set; 0: not told
    importance: Mapping[str, float] = field(default_factory=dict)

    def trial(self, number: int) -> Trial:
        return self.trials[number]


class Folding:
    """The study after the events that were added, in the order written."""

    def __init__(self) -> None:
        self._trials: list[Trial] = []
        self._head = Study()
        self._before = 0.0
        self._began: float | None = None
        self._last = 0.0

    def add(self, event: Mapping[str, Any]) -> None:
        """Take in one event; one that does not say what its kind says changes nothing."""
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            self._take(event)

    def _take(self, event: Mapping[str, Any]) -> None:
        kind, t = str(event["kind"]), float(event.get("t", 0.0))
        if kind.startswith("study_") and self._began is not None:
            self._before += max(
                0.0, (self._last if kind == "study_started" else t) - self._began
            )  # clocks are set back
            self._began = None
        if kind == "study_started":
            self._began = t
            planned, dataset_id = int(event.get("trials", 0)), str(event.get("dataset_id", ""))
            samples = int(event.get("samples", 0))
            self._head = dataclasses.replace(self._head, planned=planned, dataset_id=dataset_id, samples=samples)
        elif kind == "study_finished":
            self._head = dataclasses.replace(self._head, importance=dict(event.get("importance") or {}))
        elif kind == "trial_asked" and int(event["n"]) == len(self._trials):  # numbers are given without gaps
            self._trials.append(Trial(number=int(event["n"]), values=dict(event["values"])))
        elif kind.startswith("trial_") and int(event["n"]) < len(self._trials):
            number = int(event["n"])
            self._trials[number] = _after(self._trials[number], kind, event)
        elif not kind.startswith("study_"):
            return
        self._last = t

    @property
    def study(self) -> Study:
        spent = 0.0 if self._began is None else max(0.0, self._last - self._began)
        return dataclasses.replace(self._head, trials=tuple(self._trials), seconds=self._before + spent)


def fold(events: Iterable[Mapping[str, Any]]) -> Study:
    """The study after these events; other kinds of events change nothing."""
    folding = Folding()
    for event in events:
        folding.add(event)
    return folding.study


def _after(trial: Trial, kind: str, event: Mapping[str, Any]) -> Trial:
    change: dict[str, Any] = {}
    if trial.ended:
        if trial.state == "pruned" and kind == "trial_stopped":  # the checkpoint that it ended at
            seconds = trial.seconds + float(event.get("seconds", 0.0))
            return dataclasses.replace(trial, step=int(event["step"]), seconds=seconds)
        return trial
    if kind == "trial_begun":
        change = {"ranks": int(event.get("ranks", 1)), "attempts": trial.attempts + 1}
    elif kind == "trial_reported":
        rung = int(event["rung"])
        if rung not in trial.reports:
            change = {"reports": {**trial.reports, rung: number_of(event["value"])}}
    elif kind == "trial_pruned":
        change = {"state": "pruned", "why": str(event.get("why", ""))}
    elif kind == "trial_stopped":
        change = {"step": int(event["step"]), "losses": 0}
    elif kind == "trial_lost":
        step = int(event["step"])
        change = {"step": step, "losses": trial.losses + 1 if step <= trial.step else 1, "why": str(event["why"])}
    elif kind == "trial_finished":
        change = {"state": "finished", "value": number_of(event["value"]), "step": int(event["step"]), "why": ""}
    elif kind == "trial_failed":
        change = {"state": "failed", "failure": str(event["state"]), "why": str(event["why"])}
    if "seconds" in event:
        change["seconds"] = trial.seconds + float(event["seconds"])
    return dataclasses.replace(trial, **change)


def number_of(value: Any) -> float:
    """A logged figure; what was not finite is logged as null."""
    return math.nan if value is None else float(value)


def counts(study: Study) -> dict[str, int]:
    """How many trials are in each state."""
    found = {"finished": 0, "running": 0, "pruned": 0, "failed": 0}
    for trial in study.trials:
        found[trial.state] += 1
    return found


def best_trial(trials: Sequence[Trial], *, maximize: bool) -> Trial | None:
    """The finished trial with the best value, the earliest of equals; None where none is finished."""
    done = [t for t in trials if t.state == "finished" and t.value is not None and math.isfinite(t.value)]
    sign = -1.0 if maximize else 1.0
    return min(done, key=lambda t: (sign * float(t.value or 0.0), t.number), default=None)


def best_so_far(trials: Sequence[Trial], *, maximize: bool) -> list[tuple[int, float]]:
    """(number, best value up to it) wherever a finished trial was better than all before it."""
    steps: list[tuple[int, float]] = []
    best: Trial | None = None
    for trial in trials:
        now = best_trial([trial] if best is None else [best, trial], maximize=maximize)
        if now is not None and now is not best and now.value is not None:
            best = now
            steps.append((now.number, now.value))
    return steps
