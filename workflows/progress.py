"""Progress, fed by events only.

Every part of exitwave reports what it does as events: dictionaries with a `kind` (`shard_committed`, `stage_progress`,
`train_step`, …). `ProgressState` folds them into a few bars (pure); a view shows the bars: rich bars with rate and time
left on a terminal, at most one plain line every five seconds in a pipe, nothing with `--quiet`.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

__all__ = ["Bar", "ProgressState", "human_bytes", "human_seconds", "progress_view"]

Event = Mapping[str, Any]
_LINE_EVERY_S = 5.0
_RATE_WINDOW_S = 30.0
_RATE_POINTS = 9  # at least: tasks of a cluster end in bursts, and two of them make no rate


@dataclass
class Bar:
    """One thing that goes on: `done` of `total` in `unit`."""

    label: str
    unit: str
    total: float | None = None
    done: float = 0.0
    detail: str = ""
    finished: bool = False
    history: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=512))

    def advance_to(self, done: float, now: float) -> None:
        """Note that `done` units are done at time `now` (seconds)."""
        self.done = done
        self.history.append((now, done))
        while len(self.history) > _RATE_POINTS and self.history[0][0] < now - _RATE_WINDOW_S:
            self.history.popleft()

    @property
    def rate(self) -> float | None:
        """Units a second over the last half minute, or over the last few advances where they took longer."""
        if len(self.history) < 2:
            return None
        (t0, d0), (t1, d1) = self.history[0], self.history[-1]
        return (d1 - d0) / (t1 - t0) if t1 > t0 and d1 > d0 else None

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the present rate."""
        rate = self.rate
        if rate is None or self.total is None:
            return None
        return max(self.total - self.done, 0.0) / rate

    def line(self) -> str:
        """The bar as a plain line."""
        text = f"{self.label}: {_amounts(self)}"
        if self.total:
            text += f" ({100 * self.done / self.total:.0f} %)"
        rate, eta = self.rate, self.eta_s
        if rate is not None and not self.finished:
            text += f", {_rate(rate, self.unit)}"
        if eta is not None and not self.finished and eta > 0:
            text += f", {human_seconds(eta)} left"
        return text + (f", {self.detail}" if self.detail else "")


class ProgressState:
    """The bars, folded from events. Unknown kinds change nothing."""

    def __init__(self) -> None:
        self.bars: dict[str, Bar] = {}
        self._failed = 0

    def feed(self, event: Event) -> Bar | None:
        """Take one event in; returns the bar that it changed."""
        handler: Callable[[Event, float], Bar | None] | None = getattr(self, f"_on_{event.get('kind')}", None)
        if handler is None:
            return None
        now = float(event["t"]) if event.get("t") is not None else time.time()
        return handler(event, now)

    def _bar(self, key: str, label: str, unit: str) -> Bar:
        return self.bars.setdefault(key, Bar(label=label, unit=unit))

    def _on_plan_structures(self, event: Event, now: float) -> Bar:
        bar = self._bar("plan_structures", "read", "structures")
        bar.advance_to(float(event.get("done") or 0), now)
        bar.detail = f"{event['rejected']} rejected" if event.get("rejected") else ""
        return bar

    def _on_plan_samples(self, event: Event, now: float) -> Bar:
        bar = self._bar("plan_samples", "plan", "samples")
        bar.total = float(event.get("total") or 0) or None
        bar.advance_to(float(event.get("done") or 0), now)
        return bar

    def _on_campaign_started(self, event: Event, now: float) -> Bar:
        self.bars["simulate"] = bar = Bar(
            label="simulate", unit="samples", total=float(event.get("samples") or 0) or None
        )
        bar.advance_to(float(event.get("committed_samples") or 0), now)
        return bar

    def _on_shard_committed(self, event: Event, now: float) -> Bar:
        bar = self._bar("simulate", "simulate", "samples")
        bar.advance_to(bar.done + float(event.get("n") or 0), now)
        bar.finished = bar.total is not None and bar.done >= bar.total
        return bar

    def _on_task_failed(self, event: Event, now: float) -> Bar:
        bar = self._bar("simulate", "simulate", "samples")
        self._failed += 1
        bar.detail = f"{self._failed} attempt{'s' * (self._failed > 1)} failed"
        return bar

    def _on_campaign_held(self, event: Event, now: float) -> Bar:
        bar = self._bar("simulate", "simulate", "samples")
        bar.detail = "waits for the trainer"
        return bar

    def _on_campaign_released(self, event: Event, now: float) -> Bar:
        bar = self._bar("simulate", "simulate", "samples")
        bar.detail = ""
        return bar

    def _on_campaign_finished(self, event: Event, now: float) -> Bar:
        bar = self._bar("simulate", "simulate", "samples")
        bar.finished = True
        return bar

    def _on_stage_progress(self, event: Event, now: float) -> Bar:
        bar = self._bar("stage", "stage", "bytes")
        bar.total = float(event.get("total") or 0) or bar.total
        bar.advance_to(float(event.get("bytes") or 0), now)
        bar.finished = bar.total is not None and bar.done >= bar.total
        return bar

    def _on_train_waiting(self, event: Event, now: float) -> Bar:
        bar = self._bar("train", "train", "steps")
        bar.detail = f"waits for the first {event.get('samples', '?')} samples"
        return bar

    def _on_train_started(self, event: Event, now: float) -> Bar:
        total = float(event.get("total_steps") or 0) or None
        self.bars["train"] = bar = Bar(label="train", unit="steps", total=total)
        bar.advance_to(float(event.get("step") or 0), now)
        return bar

    _on_train_resumed = _on_train_started

    def _on_train_step(self, event: Event, now: float) -> Bar:
        bar = self._bar("train", "train", "steps")
        bar.advance_to(float(event.get("step") or 0), now)
        bar.detail = _training_detail(event) or bar.detail
        return bar

    def _on_train_finished(self, event: Event, now: float) -> Bar:
        bar = self._bar("train", "train", "steps")
        bar.finished = True
        return bar

    def _on_evaluate_progress(self, event: Event, now: float) -> Bar:
        bar = self._bar("evaluate", "evaluate", "samples")
        bar.total = float(event.get("total") or 0) or bar.total
        bar.advance_to(float(event.get("done") or 0), now)
        bar.finished = bar.total is not None and bar.done >= bar.total
        return bar

    def _on_tune_progress(self, event: Event, now: float) -> Bar:
        bar = self._bar("tune", "tune", "trials")
        bar.total = float(event.get("total") or 0) or None
        bar.advance_to(float(event.get("done") or 0), now)
        parts = [f"{event[state]} {state}" for state in ("running", "pruned", "failed") if event.get(state)]
        if event.get("best") is not None:
            parts.append(f"best {event['metric']} {float(event['best']):.4g} (trial {event['best_trial']})")
        bar.detail = ", ".join(parts)
        bar.finished = bar.total is not None and bar.done >= bar.total
        return bar

    def _on_work_progress(self, event: Event, now: float) -> Bar:
        label = str(event.get("label") or "work")
        bar = self._bar(label, label, str(event.get("unit") or "samples"))
        bar.total = float(event.get("total") or 0) or bar.total
        bar.advance_to(float(event.get("done") or 0), now)
        bar.finished = bar.total is not None and bar.done >= bar.total
        if event.get("bytes_a_unit") and bar.rate is not None:
            bar.detail = f"{human_bytes(bar.rate * float(event['bytes_a_unit']))}/s"
        return bar


def _training_detail(event: Event) -> str:
    """`loss 0.12, 85 samples/s, MFU 31 %, waits for data 0.2 %, for ranks 4 %, cache hits 98 %`, as far as told."""
    parts = [f"loss {float(event['loss']):.4g}"] if event.get("loss") is not None else []
    if event.get("samples_per_s") is not None:
        parts.append(f"{float(event['samples_per_s']):.3g} samples/s")
    step_s = float(event.get("step_s") or 0)
    shares = [("MFU", event.get("mfu")), ("cache hits", event.get("cache_hit_rate"))]
    if step_s > 0:
        for name, key in (("waits for data", "data_wait_s"), ("for ranks", "exposed_comm_s")):
            shares.insert(-1, (name, None if event.get(key) is None else float(event[key]) / step_s))
    parts += [f"{name} {100 * float(share):.2g} %" for name, share in shares if share is not None]
    if event.get("skipped"):
        parts.append(f"{event['skipped']} skipped by overflow")
    return ", ".join(parts)


@contextmanager
def progress_view(*, quiet: bool, stream: TextIO | None = None) -> Iterator[Callable[[Event], None]]:
    """Yields the function to feed events to. `stream` is stderr unless given (stdout is for results)."""
    stream = stream or sys.stderr
    if quiet:
        yield lambda event: None
    elif stream.isatty():
        with _rich_view(stream) as feed:
            yield feed
    else:
        yield _LineView(stream).feed


class _LineView:
    """Plain lines: the first and the last of a bar, and at most one every five seconds between."""

    def __init__(self, stream: TextIO, every_s: float = _LINE_EVERY_S) -> None:
        self._state = ProgressState()
        self._stream = stream
        self._every_s = every_s
        self._last: dict[str, float] = {}
        self._ended: set[str] = set()

    def feed(self, event: Event) -> None:
        bar = self._state.feed(event)
        if bar is None or bar.label in self._ended:
            return
        now = time.monotonic()
        if bar.finished or now - self._last.get(bar.label, -1e9) >= self._every_s:
            self._last[bar.label] = now
            if bar.finished:
                self._ended.add(bar.label)
            print(bar.line(), file=self._stream, flush=True)


@contextmanager
def _rich_view(stream: TextIO) -> Iterator[Callable[[Event], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn

    columns = (
        TextColumn("{task.description:<9}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[amount]}"),
        TextColumn("[dim]{task.fields[rate]}"),
        TextColumn("{task.fields[left]}"),
        TextColumn("[dim]{task.fields[detail]}"),
    )
    state = ProgressState()
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(file=stream), expand=True) as progress:

        def feed(event: Event) -> None:
            bar = state.feed(event)
            if bar is None:
                return
            rate, eta = bar.rate, bar.eta_s
            fields: dict[str, Any] = {
                "amount": _amounts(bar),
                "rate": _rate(rate, bar.unit) if rate is not None else "",
                "left": "done" if bar.finished else (f"{human_seconds(eta)} left" if eta is not None else ""),
                "detail": bar.detail,
            }
            if bar.label not in tasks:
                tasks[bar.label] = progress.add_task(bar.label, total=bar.total, **fields)
            progress.update(tasks[bar.label], completed=bar.done, total=bar.total, **fields)

        yield feed


def _amounts(bar: Bar) -> str:
    """`12 of 24 samples`, `1.2 MB of 3 MB`."""
    if not bar.total:
        return _amount(bar.done, bar.unit)
    done = _amount(bar.done, bar.unit)
    return f"{done if bar.unit == 'bytes' else done.removesuffix(' ' + bar.unit)} of {_amount(bar.total, bar.unit)}"


def _amount(value: float, unit: str) -> str:
    return human_bytes(value) if unit == "bytes" else f"{value:,.0f} {unit}".replace(",", " ")


def _rate(rate: float, unit: str) -> str:
    return f"{human_bytes(rate)}/s" if unit == "bytes" else f"{rate:.3g} {unit}/s"


def human_bytes(value: float) -> str:
    """`1.5 GB` (powers of ten, as disks are sold)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 1000 or unit == "TB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def human_seconds(value: float | None) -> str:
    """`2 h 05 min`, `3 min 20 s`, `12 s`."""
    if value is None:
        return "?"
    if value < 10 and value != int(value):
        return f"{value:.1f} s"
    seconds = round(value)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    if seconds < 48 * 3600:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
    return f"{seconds / 86400:.1f} days"
