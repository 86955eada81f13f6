"""What a campaign tells of itself: one record for each kind of event, with its fields, units and meaning.

`EventLog.emit(kind, **fields)` writes them into events.jsonl, each line with `t`, seconds since 1970 (UTC). Records
are made from lines by `parse`, which forgives: a field that is absent or of the wrong type has its default, an unknown
field is ignored, an unknown kind is no record. So old logs can be read, and new fields cost nothing.

The life of a task, in events; what it means for the counts stands in brackets:

    task_submitted   handed to the cluster                                    [pending -> running]
    shard_committed  its shard stands in the manifest                         [running -> committed]
    task_failed      this attempt failed; `final`: no other follows           [running -> failed, or -> pending]
    task_dropped     taken back from the cluster before it ended              [running -> pending]
    task_split       replaced by several smaller tasks                        [running or failed -> pending, n tasks]
    task_retried     a failed task is to run again, somebody asked for it     [failed -> pending]
    task_rejected    a task that will never run, and why                      [pending or running -> rejected]

`campaign_started` sets all counts, those of earlier runs included. `campaign_interrupted` and
`campaign_finished` end a run: what was running is pending.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

__all__ = [
    "CacheProgress",
    "CacheRead",
    "CampaignFinished",
    "CampaignInterrupted",
    "CampaignStarted",
    "Event",
    "ShardCommitted",
    "StageProgress",
    "StructureRejected",
    "TaskDropped",
    "TaskFailed",
    "TaskRejected",
    "TaskRetried",
    "TaskSplit",
    "TaskSubmitted",
    "TrainEnded",
    "TrainEval",
    "TrainStarted",
    "TrainStep",
    "WorkersChanged",
    "parse",
]


@dataclass(frozen=True, kw_only=True)
class Event:
    """What every event has: the time, seconds since 1970."""

    kinds: ClassVar[tuple[str, ...]] = ()
    t: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CampaignStarted(Event):
    """A controller begins or goes on. `samples` and `shards` are the plan's, `committed*` what the manifest held.

    `failed*`: what failed for good in earlier runs; `attempts` counts theirs too; `bytes` is what the whole plan is
    expected to take on disk.
    """

    kinds = ("campaign_started",)
    name: str = ""
    samples: int = 0
    shards: int = 0
    bytes: int = 0
    committed: int = 0
    committed_samples: int = 0
    committed_bytes: int = 0
    failed: int = 0
    failed_samples: int = 0
    attempts: int = 0
    rejected_samples: int = 0
    workers: int = 0
    cluster: str = ""
    dashboard: str = ""


@dataclass(frozen=True, kw_only=True)
class WorkersChanged(Event):
    """The cluster grew, shrank or came back: `workers` threads that take tasks."""

    kinds = ("workers_changed",)
    workers: int = 0


@dataclass(frozen=True, kw_only=True)
class StructureRejected(Event):
    """A structure, or some samples of it, that the plan left out."""

    kinds = ("structure_rejected",)
    source: str = ""
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class TaskSubmitted(Event):
    """Attempt number `attempt` (1 is the first, over all runs) at a task of `samples` samples."""

    kinds = ("task_submitted",)
    task: str = ""
    attempt: int = 1
    samples: int = 0


@dataclass(frozen=True, kw_only=True)
class ShardCommitted(Event):
    """`seconds` in the worker, of which `simulated_s` in the simulator; `adopted`: found whole, not computed again."""

    kinds = ("shard_committed",)
    task: str = ""
    shard_id: str = ""
    n: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    simulated_s: float = 0.0
    host: str = ""
    attempt: int = 1
    adopted: bool = False
    structures: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TaskFailed(Event):
    """`state` is the class: error, memory, timeout or killed. `final`: the task counts as failed from now on."""

    kinds = ("task_failed",)
    task: str = ""
    state: str = "error"
    why: str = ""
    host: str = ""
    attempt: int = 1
    seconds: float = 0.0
    structures: tuple[str, ...] = ()
    samples: int = 0
    final: bool = True


@dataclass(frozen=True, kw_only=True)
class TaskDropped(Event):
    """The cluster gave the task back: nothing was there to run it, or its scheduler or its worker's job was lost. Only
    in the second case the event has `ran`: whether a worker had it then. See `attempts.History.losses`."""

    kinds = ("task_dropped",)
    task: str = ""


@dataclass(frozen=True, kw_only=True)
class TaskSplit(Event):
    """One task of several structures becomes `into` tasks; together they hold the same samples."""

    kinds = ("task_split",)
    task: str = ""
    into: int = 1


@dataclass(frozen=True, kw_only=True)
class TaskRetried(Event):
    """A task of `samples` samples that had failed is tried again on request."""

    kinds = ("task_retried",)
    task: str = ""
    samples: int = 0


@dataclass(frozen=True, kw_only=True)
class TaskRejected(Event):
    """A task of `samples` samples that will not run, in this run or any other."""

    kinds = ("task_rejected",)
    task: str = ""
    why: str = ""
    samples: int = 0


@dataclass(frozen=True, kw_only=True)
class CampaignInterrupted(Event):
    """The run stopped early and can be resumed."""

    kinds = ("campaign_interrupted",)
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class CampaignFinished(Event):
    """Nothing is left to do, or nothing that could be done."""

    kinds = ("campaign_finished",)
    failed: int = 0


@dataclass(frozen=True, kw_only=True)
class StageProgress(Event):
    """Copies into a node-local cache: `bytes` of `total` are there."""

    kinds = ("stage_started", "stage_progress")
    bytes: int = 0
    total: int = 0


@dataclass(frozen=True, kw_only=True)
class CacheProgress(Event):
    """A cache that is smaller than the data set, while training goes on. `used` and `capacity` in bytes."""

    kinds = ("cache_progress",)
    used: int = 0
    capacity: int = 0
    ready: int = 0
    copied: int = 0
    evicted: int = 0
    from_source: int = 0
    from_peers: int = 0


@dataclass(frozen=True, kw_only=True)
class CacheRead(Event):
    """How often readers turned to a shard that was in the cache (`hits`), was not, or was waited for."""

    kinds = ("cache_read",)
    hits: int = 0
    misses: int = 0
    waits: int = 0


@dataclass(frozen=True, kw_only=True)
class TrainStarted(Event):
    """A training begins, or resumes at `step`. `total_steps` is 0 where only time ends it."""

    kinds = ("train_started", "train_resumed")
    step: int = 0
    total_steps: int = 0
    world_size: int = 1


@dataclass(frozen=True, kw_only=True)
class TrainStep(Event):
    """One step of the optimizer: `loss` in the loss's own unit, `data_wait_s` spent waiting for the batch."""

    kinds = ("train_step",)
    step: int = 0
    loss: float = math.nan
    samples_per_s: float = 0.0
    data_wait_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TrainEval(Event):
    """The loss over a held-out split."""

    kinds = ("train_eval",)
    step: int = 0
    split: str = ""
    loss: float = math.nan


@dataclass(frozen=True, kw_only=True)
class TrainEnded(Event):
    """Training is done (`train_finished`) or stopped with a checkpoint (`train_interrupted`)."""

    kinds = ("train_finished", "train_interrupted")
    step: int = 0


_Reader = tuple[type[Event], tuple[tuple[str, Callable[[Any], Any]], ...]]


@cache
def _by_kind() -> dict[str, _Reader]:
    """For each kind its record, and each field's name with the function that makes its value."""
    return {kind: (record, _readers(record)) for record in Event.__subclasses__() for kind in record.kinds}


def _readers(record: type[Event]) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    """The annotations are strings here."""
    make: dict[str, Any] = {"int": _whole, "float": _number, "str": str, "bool": bool, "tuple[str, ...]": _strings}
    return tuple((f.name, make[str(f.type)]) for f in dataclasses.fields(record))


def _whole(value: Any) -> int:
    number = float(value)
    return int(number) if math.isfinite(number) else 0


def _number(value: Any) -> float:
    return float(value)


def _strings(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(str(item) for item in value)


def parse(line: Mapping[str, Any]) -> Event | None:
    """The record of one line of events.jsonl, or None where its kind is none of those above."""
    found = _by_kind().get(str(line.get("kind")))
    if found is None:
        return None
    record, readers = found
    values: dict[str, Any] = {}
    for name, make in readers:
        if line.get(name) is None:
            continue
        try:
            values[name] = make(line[name])
        except (TypeError, ValueError):
            continue
    return record(**values)
