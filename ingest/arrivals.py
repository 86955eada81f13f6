"""The log of what a training knew at which step, so that one that ran while data arrived can be done again.

    {"kind":"header", …}                                   the settings that the order of samples follows from
    {"kind":"arrived","step":0,"seq":17,"samples":96,…}    from step 0 on it knew the manifest up to line 17
    {"kind":"arrived","step":41,"seq":18,…}                and from step 41 on up to line 18
    {"kind":"finished","step":400}

1. A line stands on the disk before any rank takes the step that it is about, so that a finished run says all that its
   order depended on. After a kill the training goes on from its last checkpoint with the lines that there are.
2. Lines are never rewritten; steps and lines of the manifest only rise. What lies between two lines is the first's.
3. How far a training may go, given what has arrived, is `steps_allowed`: before the end of a campaign no sample is used
   more often, on average, than the whole training would use it. Without that rule a fast training would have taken all
   its steps on the first samples before the last ones came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import DamagedDataError, UsageError
from exitwave.ingest.events import EventLog, read_events

__all__ = [
    "ARRIVALS_NAME",
    "ArrivalLog",
    "ReservoirSettings",
    "may_validate",
    "read_log",
    "refuse_difference",
    "steps_allowed",
]

ARRIVALS_NAME = "arrivals.jsonl"
_FORMAT = "exitwave-arrivals"
_MOST_STEPS = 2.0**53  # a max_reuse may be any number


@dataclass(frozen=True, kw_only=True)
class ReservoirSettings:
    """What the order of samples follows from, beside arrivals and seed. Samples are those of the training's split.

    planned: samples that the campaign will bring if nothing fails. watermark: samples before the first step. capacity:
    samples that are drawn from at a time. max_reuse: uses of a sample, on average, that those arrived are good for.

    Raises UsageError unless 1 <= watermark <= capacity <= planned and max_reuse > 0.
    """

    planned: int
    watermark: int
    capacity: int
    max_reuse: float

    def __post_init__(self) -> None:
        if not 1 <= self.watermark <= self.capacity <= self.planned or not self.max_reuse > 0:
            raise UsageError(
                f"online: watermark_samples {self.watermark}, capacity_samples {self.capacity}, {self.planned} planned "
                f"training samples, max_reuse {self.max_reuse:g}; expected 1 <= watermark <= capacity <= planned and a "
                "max_reuse above 0"
            )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ReservoirSettings:
        """DamagedDataError where a number is not there, or is none."""
        try:
            planned, watermark, capacity = (int(data[name]) for name in ("planned", "watermark", "capacity"))
            return cls(planned=planned, watermark=watermark, capacity=capacity, max_reuse=float(data["max_reuse"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DamagedDataError(
                f"settings of a reservoir expected, one is not there or no number ({error})"
            ) from None


def steps_allowed(settings: ReservoirSettings, *, batch: int, arrived: int, ended: bool) -> int | None:
    """How many steps of `batch` samples may have been taken when `arrived` samples are there; None: as many as asked.

    `ended`: no more will come. The first one waits for the watermark.
    """
    if ended or arrived >= settings.planned:
        return None
    return max(1, int(min(settings.max_reuse * arrived / batch + 1e-9, _MOST_STEPS)))


def may_validate(*, val: int, val_planned: int, ended: bool) -> bool:
    """Whether a loss over the `val` samples of validation that are there can be compared with later ones: all that were
    planned have come, or no more will. Where every shard of it failed for good, there is none.

    How many training samples are there says nothing of it: workers overtake each other, a shard may hold several
    watermarks, and a shard of validation may need several attempts.
    """
    return val >= val_planned or (ended and val > 0)


class ArrivalLog:
    """The log at `path`, opened for a training: `entries` (step, seq), rising in both.

    `header`: what this training's order follows from. UsageError where the log is of another one.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self._log = EventLog(path)
        found = read_events(path)
        self.entries: list[list[int]] = []
        self.finished: int | None = None
        if not found:
            self._log.emit("header", format=_FORMAT, version=1, **header)
            return
        kept = read_log(path)
        refuse_difference(path, kept["header"], header)
        self.entries, self.finished = kept["entries"], kept["finished"]

    def append(self, step: int, seq: int, **facts: Any) -> None:
        """From `step` on the training knows the manifest up to line `seq`; on the disk when this returns."""
        self._log.emit("arrived", step=step, seq=seq, **facts)
        self.entries.append([step, seq])

    def finish(self, step: int) -> None:
        if self.finished is None:
            self._log.emit("finished", step=step)
            self.finished = step


def read_log(path: Path) -> dict[str, Any]:
    """`header`, `arrived` (the lines), `entries` (step, seq) of them, and `finished` (the last step, or None).

    Raises:
        UsageError: there is none.
        DamagedDataError: it is none, or its lines contradict each other.
    """
    events = read_events(path) if path.is_file() else []
    if not events:
        raise UsageError(f"{path}: no log of arrivals is there; only a training of `exitwave run --online` has one")
    if events[0].get("format") != _FORMAT or events[0].get("version") != 1:
        raise DamagedDataError(f"{path}: expected a log of arrivals, version 1, got {str(events[0])[:80]}")
    try:
        entries = [[int(e["step"]), int(e["seq"])] for e in events if e["kind"] == "arrived"]
        finished = next((int(e["step"]) for e in events if e["kind"] == "finished"), None)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedDataError(f"{path}: a line lacks its numbers ({error})") from None
    if finished is not None and not entries:
        raise DamagedDataError(f"{path}: tells of the last step, and of no sample that was there for it")
    if not _rising(entries):
        raise DamagedDataError(f"{path}: steps or lines of the manifest do not rise from entry to entry")
    arrived = [event for event in events if event["kind"] == "arrived"]
    return {"header": events[0], "entries": entries, "arrived": arrived, "finished": finished}


def refuse_difference(path: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """UsageError naming what would make another order of samples than the log at `path` says."""
    wrong = [f"{key} {then.get(key)!r} then, {value!r} now" for key, value in now.items() if then.get(key) != value]
    if wrong:
        raise UsageError(f"{path}: is of another training: {'; '.join(wrong)}")


def _rising(entries: Sequence[Sequence[int]]) -> bool:
    rising = all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(entries))
    return rising and (not entries or entries[0][0] == 0)
