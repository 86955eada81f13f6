"""How far a training is, from its events: each is read and folded once, however often anybody asks.

A service and `status --watch` look every second at logs of a line a step; reading all of it each time would cost a long
training's whole log each second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exitwave.ingest.events import EventTail

__all__ = ["FollowedTraining", "TrainingSeen"]

Point = tuple[int, float]
_MOST_POINTS = 400


class TrainingSeen:
    """Step, loss and curves of a training, folded event by event. At most 800 points of each curve are kept."""

    def __init__(self) -> None:
        self.any = False
        self.total_steps: int | None = None
        self.last: Point | None = None
        self._loss: list[Point] = []
        self._every, self._since = 1, 0  # every how many steps a point is kept; steps since the last one
        self._validation: list[Point] = []

    def feed(self, event: Mapping[str, Any]) -> None:
        """Take in one event. What is trained again after a kill counts as trained the last time."""
        self.any = True
        if event.get("total_steps"):
            self.total_steps = int(event["total_steps"])
        kind = event["kind"]
        if kind == "train_step" and "loss" in event:
            self.last = (int(event.get("step", 0)), float(event["loss"]))
            self._since += 1
            if self._since >= self._every:
                self._since = 0
                self._loss.append(self.last)
            if len(self._loss) > 2 * _MOST_POINTS:
                self._loss, self._every = self._loss[::2], 2 * self._every
        elif kind == "train_eval" and "loss" in event:
            self._validation.append((int(event["step"]), float(event["loss"])))
            if len(self._validation) > 2 * _MOST_POINTS:
                self._validation = self._validation[::2]
        elif kind in ("train_started", "train_resumed") and "step" in event:
            step = int(event["step"])
            self._loss = [point for point in self._loss if point[0] <= step]
            self._validation = [point for point in self._validation if point[0] <= step]
            if self.last is not None and self.last[0] > step:
                self.last = self._loss[-1] if self._loss else None

    @property
    def curve(self) -> list[Point]:
        """Loss by step; the last one is always there."""
        return [*self._loss, *([self.last] if self.last is not None and self.last not in self._loss[-1:] else [])]

    @property
    def validation(self) -> list[Point]:
        return list(self._validation)

    def words(self) -> str:
        """Of one that has not ended: `step 7 of 60, loss 0.5`."""
        if not self.any:
            return "not yet"
        if self.last is None:
            return "started"
        step, loss = self.last
        return f"step {step}" + (f" of {self.total_steps}" if self.total_steps else "") + f", loss {loss:.4g}"


class FollowedTraining:
    """The log of one training, read on from where it was read last. Not to be shared by threads."""

    def __init__(self, train: Path) -> None:
        self._tail = EventTail(train / "events.jsonl", from_end=False)
        self._seen = TrainingSeen()

    def look(self) -> TrainingSeen:
        """What there is to see now. A log that is another file, or shorter than it was, is read from its beginning."""
        events = self._tail.read()
        if self._tail.renewed:
            self._seen = TrainingSeen()
        for event in events:
            with contextlib.suppress(KeyError, TypeError, ValueError):  # not one of ours
                self._seen.feed(event)
        return self._seen
