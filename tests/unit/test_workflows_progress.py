"""Progress: events become bars, bars become lines."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import pytest

from exitwave.workflows.progress import Bar, ProgressState, _LineView, human_bytes, human_seconds, progress_view


def test_a_campaign_that_resumes_starts_where_it_was() -> None:
    state = ProgressState()
    state.feed({"kind": "campaign_started", "t": 0, "samples": 100, "committed": 4, "committed_samples": 40})
    for second in range(1, 4):
        bar = state.feed({"kind": "shard_committed", "t": second, "n": 10})
    assert bar is not None and (bar.done, bar.total, bar.finished) == (70, 100, False)
    assert bar.rate == pytest.approx(10)
    assert bar.eta_s == pytest.approx(3)
    state.feed({"kind": "task_failed", "t": 4, "state": "error"})
    bar = state.feed({"kind": "shard_committed", "t": 5, "n": 30})
    assert bar is not None and bar.finished and "1 attempt failed" in bar.line()


def test_a_training_that_resumes_starts_at_its_step() -> None:
    state = ProgressState()
    state.feed({"kind": "train_resumed", "t": 0, "step": 50, "total_steps": 100})
    bar = state.feed({"kind": "train_step", "t": 10, "step": 60, "loss": 0.5})
    assert bar is not None
    assert bar.line() == "train: 60 of 100 steps (60 %), 1 steps/s, 40 s left, loss 0.5"


def test_work_on_samples_tells_bytes_and_time_left() -> None:
    state = ProgressState()
    for second in range(4):
        event = {"kind": "work_progress", "label": "export", "unit": "samples", "done": 10 * second, "total": 100}
        bar = state.feed({**event, "t": second, "bytes_a_unit": 500_000})
    assert bar is not None and bar.eta_s == pytest.approx(7)
    assert bar.line() == "export: 30 of 100 samples (30 %), 10 samples/s, 7 s left, 5 MB/s"
    bar = state.feed({"kind": "work_progress", "label": "export", "unit": "samples", "done": 100, "total": 100, "t": 4})
    assert bar is not None and bar.finished


def test_unknown_events_change_nothing() -> None:
    state = ProgressState()
    assert state.feed({"kind": "something_new", "t": 1}) is None
    assert state.feed({}) is None
    assert state.bars == {}


def test_the_rate_forgets_what_was_long_ago() -> None:
    bar = Bar(label="x", unit="samples", total=1000)
    for second in range(200):
        bar.advance_to(second if second < 100 else 100 + 5 * (second - 100), float(second))
    assert bar.rate == pytest.approx(5, rel=0.05)


def test_tasks_that_end_in_bursts_make_a_steady_rate() -> None:
    """Two workers, tasks of 40 s, 9 samples each, ending a second apart: 18 samples in 40 s."""
    bar = Bar(label="x", unit="samples", total=1000)
    rates = []
    for pair in range(8):
        for late in (0.0, 1.0):
            bar.advance_to(bar.done + 9, 40.0 * pair + late)
            rates.append(bar.rate)
    assert all(rate == pytest.approx(0.45, rel=0.25) for rate in rates[8:])


def test_lines_come_seldom_and_the_last_always() -> None:
    out = io.StringIO()
    view = _LineView(out, every_s=1000)
    view.feed({"kind": "stage_progress", "bytes": 0, "total": 2000})
    for i in range(1, 2000, 10):
        view.feed({"kind": "stage_progress", "bytes": i, "total": 2000})
    view.feed({"kind": "stage_progress", "bytes": 2000, "total": 2000})
    view.feed({"kind": "stage_progress", "bytes": 2000, "total": 2000})
    assert out.getvalue().splitlines() == ["stage: 0 B of 2 kB (0 %)", "stage: 2 kB of 2 kB (100 %)"]


def test_quiet_says_nothing() -> None:
    out = io.StringIO()
    with progress_view(quiet=True, stream=out) as feed:
        feed({"kind": "stage_progress", "bytes": 1, "total": 2})
    assert out.getvalue() == ""


def test_a_terminal_gets_bars() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    with progress_view(quiet=False, stream=out) as feed:
        feed({"kind": "train_started", "t": 0, "step": 0, "total_steps": 4})
        feed({"kind": "train_step", "t": 2, "step": 4, "loss": 0.25})
    assert "4 of 4 steps" in out.getvalue() and "loss 0.25" in out.getvalue()


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e9, "2.5 GB"), (7e15, "7e+03 TB")]
)
def test_bytes_for_people(value: float, text: str) -> None:
    assert human_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "?"), (0.25, "0.2 s"), (59, "59 s"), (200, "3 min 20 s"), (7500, "2 h 05 min"), (3e5, "3.5 days")],
)
def test_seconds_for_people(value: float | None, text: str) -> None:
    assert human_seconds(value) == text


def test_a_plan_that_takes_long_says_how_far_it_is() -> None:
    from sim_samples import DATA, campaign

    from exitwave.simulate.plan import make_plan

    events: list[Mapping[str, Any]] = []
    make_plan(
        campaign(structures=[{"library": ["Si", "Al"]}, {"cif": "partial_occupancy.cif"}], split={}),
        base_dir=DATA,
        feed=events.append,
    )
    assert [e["done"] for e in events if e["kind"] == "plan_structures"] == [0, 1, 2]
    assert [(e["done"], e["total"]) for e in events if e["kind"] == "plan_samples"] == [(0, 8), (4, 8)]
    state = ProgressState()
    bar = state.feed({"kind": "plan_structures", "done": 1200, "rejected": 3})
    assert bar is not None and bar.line() == "read: 1 200 structures, 3 rejected"
    bar = state.feed({"kind": "plan_samples", "done": 4, "total": 8})
    assert bar is not None and bar.line() == "plan: 4 of 8 samples (50 %)"
