"""All that is shown of a campaign, folded from its events: one snapshot, read by everything that shows numbers.

The page on the dashboard, its JSON, the metrics, `exitwave status` and `status --watch` read the same snapshot, so
their numbers are the same by construction. Folding an event costs the same whether it is the tenth or the ten
millionth, and the memory is bounded: by the tasks that are in hand, and by the limits of the lists that are shown.

The events are those of `event_schema`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from exitwave.simulate.event_schema import (
    CacheProgress,
    CacheRead,
    CampaignFinished,
    CampaignInterrupted,
    CampaignStarted,
    Event,
    ShardCommitted,
    StageProgress,
    StructureRejected,
    TaskDropped,
    TaskFailed,
    TaskRejected,
    TaskRetried,
    TaskSplit,
    TaskSubmitted,
    TrainEnded,
    TrainEval,
    TrainStarted,
    TrainStep,
    WorkersChanged,
    parse,
)
from exitwave.simulate.tallies import Curve, Reasons, Recent, Slowest

__all__ = ["FAILURE_CLASSES", "SNAPSHOT_VERSION", "Counters", "fold", "recalled"]

SNAPSHOT_VERSION = 1
FAILURE_CLASSES = ("error", "memory", "timeout", "killed")
_SHOWN_FAILURES = 20
_SHOWN_REASONS = 12
_SHOWN_CHARACTERS = 300


def fold(events: Iterable[Mapping[str, Any]]) -> Counters:
    """The counters after all of these events."""
    counters = Counters()
    for event in events:
        counters.feed(event)
    return counters


def recalled(shown: Mapping[str, Any]) -> Counters:
    """Counters as they were when `shown` was made of them, as far as a snapshot tells: what was in hand is pending, and
    of the lists there is what was shown. KeyError, TypeError or ValueError where it is no whole snapshot."""
    counters = Counters()
    counters.recall(shown)
    return counters


class Counters:
    """The fold. `feed` takes events one by one, in order; `snapshot` may be asked for at any time.

    Not safe for threads: whoever shares it holds a lock.
    """

    def __init__(self) -> None:
        self._plan = CampaignStarted()
        self._state = "not started"
        self._why = ""
        self._committed = self._failed = self._rejected = 0  # shards of this run: committed ones include earlier runs'
        self._samples = dict.fromkeys(("committed", "failed", "rejected"), 0)
        self._bytes = 0
        self._attempts = 0
        self._shards = 0
        self._in_hand: dict[str, tuple[float, int]] = {}  # task -> since when, samples
        self._by_class = dict.fromkeys(FAILURE_CLASSES, 0)
        self._adopted = 0
        self._seconds = {"simulate": 0.0, "write": 0.0, "lost": 0.0}
        self._workers = 0
        self._recent = Recent()
        self._history = Curve(limit=120)
        self._reasons, self._rejections = Reasons(), Reasons()
        self._slowest = Slowest()
        self._failures: deque[dict[str, Any]] = deque(maxlen=_SHOWN_FAILURES)
        self._newest: dict[str, Any] | None = None
        self._stage: dict[str, Any] | None = None
        self._cache: dict[str, Any] | None = None
        self._trainer: dict[str, Any] | None = None
        self._loss = Curve(limit=160)
        self._ended: float | None = None
        self._last = 0.0
        self._on: dict[type[Event], Callable[[Any], None]] = {
            CampaignStarted: self._started,
            CampaignInterrupted: self._interrupted,
            CampaignFinished: self._finished,
            WorkersChanged: self._workers_changed,
            StructureRejected: lambda e: self._rejections.add(e.source[:_SHOWN_CHARACTERS], e.why),
            TaskSubmitted: self._submitted,
            ShardCommitted: self._commit,
            TaskFailed: self._fail,
            TaskDropped: self._drop,
            TaskSplit: self._split,
            TaskRetried: self._retry,
            TaskRejected: self._reject,
            StageProgress: self._staged,
            CacheProgress: self._cached,
            CacheRead: self._read,
            TrainStarted: self._train_started,
            TrainStep: self._train_step,
            TrainEval: self._train_eval,
            TrainEnded: self._train_ended,
        }

    def feed(self, line: Mapping[str, Any]) -> None:
        """Take in one event, as it stands in events.jsonl; what is not in the schema changes nothing."""
        event = parse(line)
        if event is not None:
            self._last = max(self._last, event.t)
            self._on[type(event)](event)

    def recall(self, shown: Mapping[str, Any]) -> None:
        """See `recalled`."""
        shards, samples = shown["shards"], shown["samples"]
        self._plan = CampaignStarted(
            t=float(shown["started"] or 0.0),
            name=str(shown["name"]),
            samples=int(samples["planned"]),
            bytes=int(shown["bytes"]["planned"]),
            cluster=str(shown["cluster"] or ""),
            dashboard=str(shown["dashboard"] or ""),
        )
        self._state, self._why, self._ended = str(shown["activity"]), str(shown["why"]), shown["ended"]
        self._shards = sum(int(count) for count in shards.values())
        self._committed, self._failed, self._rejected = (int(shards[s]) for s in ("committed", "failed", "rejected"))
        self._samples = {name: int(samples[name]) for name in self._samples}
        self._bytes, self._attempts = int(shown["bytes"]["committed"]), int(shown["attempts"])
        self._adopted, self._workers = int(shown["adopted"]), int(shown["workers"])
        self._by_class = {name: int(shown["failed_attempts"][name]) for name in self._by_class}
        self._seconds = {name: float(shown["seconds"][name]) for name in self._seconds}
        self._recent.start(self._plan.t)
        self._recent.total = float(shown["samples_of_run"])
        self._history.points = [(float(t), float(n)) for t, n in shown["history"]]
        for row in shown["reasons"]:
            self._reasons.counts[str(row["state"]), str(row["why"])[:200]] = int(row["count"])
        for row in shown["rejected"]:
            self._rejections.add(str(row["source"]), str(row["why"]))
        for row in shown["slowest"]:
            self._slowest.add(str(row["structure"]), float(row["seconds_per_sample"]))
        self._failures.extend(dict(row) for row in reversed(shown["failures"]))
        self._newest, self._stage, self._cache = shown["newest"], shown["stage"], shown["cache"]
        if shown["trainer"] is not None:
            self._trainer = {key: value for key, value in shown["trainer"].items() if key != "curve"}
            self._loss.points = [(float(step), float(loss)) for step, loss in shown["trainer"]["curve"]]
        self._last = float(shown["last"])

    @property
    def last(self) -> float:
        """When the last event came, seconds since 1970."""
        return self._last

    @property
    def newest(self) -> Mapping[str, Any] | None:
        """Of the shard that was committed last: shard_id, structures, t."""
        return self._newest

    # --- a run ------------------------------------------------------------------------------------------------------

    def _started(self, e: CampaignStarted) -> None:
        self._plan, self._state, self._why = e, "running", ""
        self._shards, self._workers = e.shards, e.workers
        self._committed, self._failed, self._rejected = e.committed, e.failed, 0
        self._samples = {
            "committed": e.committed_samples,
            "failed": e.failed_samples,
            "rejected": e.rejected_samples,
        }
        self._bytes = e.committed_bytes
        self._attempts = max(e.attempts, self._attempts)
        self._in_hand.clear()
        self._rejections = Reasons()  # the plan is told anew with each run
        self._ended = None
        self._recent.start(e.t)
        self._history = Curve(limit=120)
        self._history.add(e.t, e.committed_samples)

    def _interrupted(self, e: CampaignInterrupted) -> None:
        self._state, self._why, self._ended = "interrupted", e.why, e.t
        self._in_hand.clear()

    def _finished(self, e: CampaignFinished) -> None:
        self._state, self._ended = "finished", e.t
        self._in_hand.clear()

    def _workers_changed(self, e: WorkersChanged) -> None:
        self._workers = e.workers

    # --- tasks ------------------------------------------------------------------------------------------------------

    def _submitted(self, e: TaskSubmitted) -> None:
        self._attempts += 1
        self._in_hand[e.task] = (e.t, e.samples)

    def _commit(self, e: ShardCommitted) -> None:
        self._in_hand.pop(e.task, None)
        self._committed += 1
        self._samples["committed"] += e.n
        self._bytes += e.nbytes
        self._adopted += e.adopted
        self._recent.add(e.n, e.t)
        self._history.add(e.t, self._samples["committed"])
        self._newest = {"shard_id": e.shard_id, "structures": list(e.structures[:3]), "t": e.t}
        if not e.adopted:
            self._seconds["simulate"] += e.simulated_s
            self._seconds["write"] += max(0.0, e.seconds - e.simulated_s)
            if e.n:
                for name in e.structures[:3] or (e.task,):
                    self._slowest.add(name[:_SHOWN_CHARACTERS], e.seconds / e.n)

    def _fail(self, e: TaskFailed) -> None:
        _, samples = self._in_hand.pop(e.task, (0.0, e.samples))
        self._by_class[e.state if e.state in self._by_class else "error"] += 1
        self._seconds["lost"] += max(0.0, e.seconds)
        self._reasons.add(e.state, e.why)
        if e.final:
            self._failed += 1
            self._samples["failed"] += e.samples or samples
        self._failures.append(
            {
                "t": e.t,
                "task": e.task,
                "state": e.state,
                "why": _short(e.why),
                "host": e.host,
                "attempt": e.attempt,
                "seconds": round(e.seconds, 2),
                "structures": list(e.structures[:3]),
                "final": e.final,
            }
        )

    def _drop(self, e: TaskDropped) -> None:
        self._in_hand.pop(e.task, None)

    def _split(self, e: TaskSplit) -> None:
        self._in_hand.pop(e.task, None)
        self._shards += max(1, e.into) - 1

    def _retry(self, e: TaskRetried) -> None:
        self._failed = max(0, self._failed - 1)
        self._samples["failed"] = max(0, self._samples["failed"] - e.samples)

    def _reject(self, e: TaskRejected) -> None:
        _, samples = self._in_hand.pop(e.task, (0.0, e.samples))
        self._rejected += 1
        self._samples["rejected"] += e.samples or samples
        self._rejections.add(e.task[:_SHOWN_CHARACTERS], e.why)

    # --- the rest of a pipeline -------------------------------------------------------------------------------------

    def _staged(self, e: StageProgress) -> None:
        self._stage = {"bytes": e.bytes, "total": e.total}

    def _cached(self, e: CacheProgress) -> None:
        names = ("used", "capacity", "ready", "copied", "evicted", "from_source", "from_peers")
        self._cache = {**(self._cache or {}), **{name: getattr(e, name) for name in names}}

    def _read(self, e: CacheRead) -> None:
        self._cache = {**(self._cache or {}), "hits": e.hits, "misses": e.misses, "waits": e.waits}

    def _train_started(self, e: TrainStarted) -> None:
        known = self._trainer if e.step and self._trainer is not None else {}
        self._trainer = {**known, "state": "running", "step": e.step, "total_steps": e.total_steps}
        self._trainer["ranks"] = e.world_size
        if not e.step:
            self._loss = Curve(limit=160)

    def _train_step(self, e: TrainStep) -> None:
        told = {"step": e.step, "loss": _finite(e.loss), "samples_per_s": _finite(e.samples_per_s)}
        told["data_wait_s"] = _finite(e.data_wait_s)
        self._trainer = {"total_steps": 0, "ranks": 1, **(self._trainer or {}), "state": "running", **told}
        if math.isfinite(e.loss):
            self._loss.add(e.step, e.loss)

    def _train_eval(self, e: TrainEval) -> None:
        if self._trainer is not None:
            self._trainer["eval"] = {"step": e.step, "split": e.split, "loss": _finite(e.loss)}

    def _train_ended(self, e: TrainEnded) -> None:
        if self._trainer is not None:
            self._trainer.update(step=e.step, state="ended")

    # --- what is shown ----------------------------------------------------------------------------------------------

    def snapshot(self, now: float) -> dict[str, Any]:
        """Everything as plain JSON values, a few kB; `now` in seconds since 1970.

        `shards`: pending, running, committed, failed, rejected add up to the plan's. `samples`: planned, committed,
        failed, rejected. `rate_samples_per_s` is of the last minute while the campaign runs (`simulate/tallies.py`), of
        the whole run (`samples_of_run`) afterwards; `eta_s` is None where nobody can know. `bytes`: planned (an
        estimate) and committed.
        `seconds`: of all workers together, in the simulator, around it, and of attempts that failed.
        `failed_attempts` by class; `failures` the newest, `reasons` the most frequent; `slowest`: seconds a sample.
        `history`: (t, committed samples). `stage`, `cache` and `trainer` are None until a pipeline comes there.
        """
        shards = {
            "pending": max(0, self._shards - self._committed - self._failed - self._rejected - len(self._in_hand)),
            "running": len(self._in_hand),
            "committed": self._committed,
            "failed": self._failed,
            "rejected": self._rejected,
        }
        samples = {"planned": self._plan.samples, **self._samples}
        rate = self._rate(now)
        left = max(0, samples["planned"] - samples["committed"] - samples["failed"])
        oldest = min((since for since, _ in self._in_hand.values()), default=None)
        return {
            "version": SNAPSHOT_VERSION,
            "updated": round(now, 3),
            "name": self._plan.name,
            "activity": self._state,
            "why": _short(self._why),
            "started": self._plan.t or None,
            "ended": self._ended,
            "samples": samples,
            "shards": shards,
            "samples_of_run": self._recent.total,
            "last": self._last,
            "rate_samples_per_s": round(rate, 6),
            "eta_s": 0.0 if left == 0 or shards["pending"] + shards["running"] == 0 else left / rate if rate else None,
            "bytes": {"planned": self._plan.bytes, "committed": self._bytes},
            "attempts": self._attempts,
            "adopted": self._adopted,
            "failed_attempts": dict(self._by_class),
            "seconds": {name: round(value, 3) for name, value in self._seconds.items()},
            "workers": self._workers,
            "cluster": self._plan.cluster or None,
            "dashboard": self._plan.dashboard or None,
            "oldest_in_hand_s": round(max(0.0, now - oldest), 1) if oldest is not None else None,
            "failures": list(reversed(self._failures)),
            "reasons": [
                {"state": s, "why": _short(why), "count": count} for s, why, count in self._reasons.rows(_SHOWN_REASONS)
            ],
            "rejected": [{"source": s, "why": _short(why)} for s, why, _ in self._rejections.rows(_SHOWN_REASONS)],
            "slowest": [{"structure": n, "seconds_per_sample": round(v, 4)} for n, v in self._slowest.rows()],
            "history": [[round(t, 2), n] for t, n in self._curve()],
            "newest": self._newest,
            "stage": self._stage,
            "cache": self._cache,
            "trainer": {**self._trainer, "curve": [list(p) for p in self._loss.points]} if self._trainer else None,
        }

    def _rate(self, now: float) -> float:
        if self._ended is not None:
            took = self._ended - self._plan.t
            return self._recent.total / took if took > 0 else 0.0
        return self._recent.per_second(now)

    def _curve(self) -> list[tuple[float, float]]:
        """The history with its end, which the thinned curve may lack."""
        points = list(self._history.points)
        if points and self._newest is not None and self._newest["t"] > points[-1][0]:
            points.append((self._newest["t"], self._samples["committed"]))
        return points


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
