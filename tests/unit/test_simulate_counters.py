"""The fold of events into what is shown: right in every order of events, cheap, and bounded."""

from __future__ import annotations

import json
import math
import random
import time
import tracemalloc
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from exitwave.simulate.counters import Counters, fold
from exitwave.simulate.event_schema import Event, ShardCommitted, parse
from exitwave.simulate.tallies import Curve, Reasons, Recent, Slowest


def started(**more: Any) -> dict[str, Any]:
    return {"t": 100.0, "kind": "campaign_started", "name": "c", "samples": 40, "shards": 10, "workers": 2, **more}


def committed(task: str, t: float, *, n: int = 4, **more: Any) -> dict[str, Any]:
    base = {"t": t, "kind": "shard_committed", "task": task, "shard_id": f"s{task}", "n": n, "nbytes": 100}
    return {**base, "seconds": 2.0, "simulated_s": 1.5, "structures": [f"crystal {task}"], **more}


def submitted(task: str, t: float, attempt: int = 1) -> dict[str, Any]:
    return {"t": t, "kind": "task_submitted", "task": task, "attempt": attempt, "samples": 4}


def failed(task: str, t: float, *, final: bool, state: str = "error", why: str = "it broke") -> dict[str, Any]:
    return {"t": t, "kind": "task_failed", "task": task, "state": state, "why": why, "final": final, "seconds": 1.0}


def test_the_life_of_tasks() -> None:
    counters = fold([started(), submitted("a", 101), submitted("b", 101), submitted("c", 101)])
    shards = counters.snapshot(102.0)["shards"]
    assert shards == {"pending": 7, "running": 3, "committed": 0, "failed": 0, "rejected": 0}
    for event in (committed("a", 103), failed("b", 103, final=False), failed("c", 103, final=True)):
        counters.feed(event)
    shown = counters.snapshot(103.0)
    assert shown["shards"] == {"pending": 8, "running": 0, "committed": 1, "failed": 1, "rejected": 0}
    assert shown["samples"] == {"planned": 40, "committed": 4, "failed": 4, "rejected": 0}
    assert (shown["attempts"], shown["failed_attempts"]["error"], shown["bytes"]["committed"]) == (3, 2, 100)
    assert shown["reasons"] == [{"state": "error", "why": "it broke", "count": 2}]
    assert [row["task"] for row in shown["failures"]] == ["c", "b"]  # the newest first
    assert shown["slowest"] == [{"structure": "crystal a", "seconds_per_sample": 0.5}]
    assert shown["seconds"] == {"simulate": 1.5, "write": 0.5, "lost": 2.0}
    assert math.isclose(shown["rate_samples_per_s"], 4 / 3, rel_tol=1e-6)
    assert math.isclose(shown["eta_s"], 32 / (4 / 3))
    counters.feed({"t": 104, "kind": "task_retried", "task": "c", "samples": 4})
    counters.feed({"t": 104, "kind": "task_split", "task": "b", "into": 3})
    counters.feed({"t": 104, "kind": "task_rejected", "task": "d", "why": "too large", "samples": 4})
    shown = counters.snapshot(104.0)
    assert shown["shards"] == {"pending": 10, "running": 0, "committed": 1, "failed": 0, "rejected": 1}
    assert shown["samples"]["failed"] == 0 and shown["samples"]["rejected"] == 4


def test_a_run_that_ends_leaves_nothing_running_and_the_next_begins_anew() -> None:
    counters = fold([started(), submitted("a", 101), committed("a", 110), submitted("b", 111)])
    counters.feed({"t": 120.0, "kind": "campaign_interrupted", "why": "asked to"})
    shown = counters.snapshot(500.0)
    assert (shown["activity"], shown["why"], shown["shards"]["running"]) == ("interrupted", "asked to", 0)
    assert shown["rate_samples_per_s"] == 0.2  # 4 samples in 20 s, whenever it is asked
    counters.feed(started(t=600.0, committed=1, committed_samples=4, committed_bytes=100, attempts=2))
    shown = counters.snapshot(601.0)
    assert (shown["activity"], shown["attempts"], shown["rate_samples_per_s"]) == ("running", 2, 0.0)
    assert shown["eta_s"] is None
    assert (shown["shards"]["pending"], shown["shards"]["committed"], shown["bytes"]["committed"]) == (9, 1, 100)


def test_the_rest_of_a_pipeline() -> None:
    counters = fold(
        [
            started(),
            {"t": 1, "kind": "stage_progress", "bytes": 5, "total": 10},
            {"t": 2, "kind": "cache_progress", "used": 7, "capacity": 9, "ready": 2, "copied": 3, "evicted": 1},
            {"t": 3, "kind": "train_started", "step": 0, "total_steps": 300, "world_size": 2},
            *({"t": 4 + i, "kind": "train_step", "step": i, "loss": 1 / i, "data_wait_s": 0.01} for i in range(1, 301)),
            {"t": 400, "kind": "train_step", "step": 301, "loss": None},
            {"t": 401, "kind": "train_eval", "step": 301, "split": "val", "loss": 0.5},
        ]
    )
    shown = counters.snapshot(402.0)
    assert shown["stage"] == {"bytes": 5, "total": 10}
    assert (shown["cache"]["used"], shown["cache"]["evicted"]) == (7, 1)
    trainer = shown["trainer"]
    assert (trainer["step"], trainer["total_steps"], trainer["ranks"], trainer["loss"]) == (301, 300, 2, None)
    assert trainer["eval"] == {"step": 301, "split": "val", "loss": 0.5}
    assert 80 <= len(trainer["curve"]) <= 160 and trainer["curve"][0] == [1, 1.0]
    json.dumps(shown, allow_nan=False)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), shards=st.integers(1, 12))
def test_counts_agree_with_a_replay_of_every_task(seed: int, shards: int) -> None:
    """Whatever happens to tasks, the counts are those of a table of all of them."""
    rng = random.Random(seed)
    states = dict.fromkeys((f"t{i}" for i in range(shards)), "pending")
    counters = fold([started(shards=shards, samples=4 * shards)])
    for step in range(60):
        task, now = rng.choice(list(states)), 100.0 + step
        state = states[task]
        if state == "pending":
            counters.feed(submitted(task, now))
            states[task] = "running"
        elif state == "running":
            outcome = rng.choice(("committed", "failed", "again", "dropped"))
            states[task] = {"again": "pending", "dropped": "pending"}.get(outcome, outcome)
            if outcome == "committed":
                counters.feed(committed(task, now))
            elif outcome == "dropped":
                counters.feed({"t": now, "kind": "task_dropped", "task": task})
            else:
                counters.feed(failed(task, now, final=outcome == "failed"))
        elif state == "failed":
            counters.feed({"t": now, "kind": "task_retried", "task": task, "samples": 4})
            states[task] = "pending"
        shown = counters.snapshot(now)
        for name in ("pending", "running", "committed", "failed"):
            assert shown["shards"][name] == sum(s == name for s in states.values()), (name, step)
        assert shown["samples"]["committed"] == 4 * shown["shards"]["committed"]
        assert shown["samples"]["failed"] == 4 * shown["shards"]["failed"]


def test_memory_does_not_grow_and_a_snapshot_stays_small() -> None:
    """8,000 tasks with names, reasons and structures of their own: what is kept after 4,000 is all there ever is."""
    counters = fold([started(shards=8_000, samples=32_000)])
    sizes: dict[int, int] = {}
    tracemalloc.start()
    began = time.perf_counter()
    for i in range(8_000):
        task = f"task-{i:06d}"
        counters.feed(submitted(task, 100 + i / 5))
        if i % 10:
            counters.feed(committed(task, 100 + i / 5, structures=[f"structure {i} " + "x" * 400]))
        else:
            counters.feed(failed(task, 100 + i / 5, final=True, why=f"reason {i} " + "y" * 2000))
            counters.feed({"t": 1, "kind": "structure_rejected", "source": f"file {i}", "why": f"because of {i}"})
        if i + 1 in (4_000, 8_000):
            sizes[i + 1] = tracemalloc.get_traced_memory()[0]
    took = time.perf_counter() - began
    tracemalloc.stop()
    assert sizes[8_000] - sizes[4_000] < 50_000, sizes
    assert len(json.dumps(counters.snapshot(1800.0))) < 40_000
    assert took < 20.0  # tracing memory makes it slow; without, it is some 10 µs an event


def test_what_is_odd_is_forgiven() -> None:
    counters = Counters()
    assert counters.snapshot(5.0)["shards"]["pending"] == 0
    for line in (
        {},
        {"kind": "what"},
        {"kind": "task_failed", "t": "soon", "task": None, "seconds": "x", "structures": 5, "final": None},
        {"kind": "campaign_started", "samples": "40", "shards": 3.0, "workers": None, "t": 7},
        {"kind": "shard_committed", "task": "never submitted", "n": math.inf, "t": 8},
        {"kind": "train_step", "loss": "NaN", "step": 1},
    ):
        counters.feed(line)
    shown = counters.snapshot(9.0)
    assert (shown["samples"]["planned"], shown["shards"]["committed"]) == (40, 1)
    json.dumps(shown, allow_nan=False)
    assert parse({"kind": "shard_committed", "structures": "Au"}) == ShardCommitted(structures=("Au",))
    kinds = [kind for record in Event.__subclasses__() for kind in record.kinds]
    assert len(kinds) == len(set(kinds))


def test_tallies() -> None:
    recent = Recent(window_s=60)
    recent.start(0.0)
    for second in range(1, 601):
        recent.add(2.0 if second <= 300 else 5.0, float(second))
    assert math.isclose(recent.per_second(600.0), 5.0, rel_tol=0.02)
    assert recent.per_second(900.0) < 1.5  # nothing came for five minutes
    assert len(recent.points) <= 160
    curve = Curve(limit=16)
    for x in range(1000):
        curve.add(x, -x)
    assert curve.points[0] == (0, 0) and 8 <= len(curve.points) <= 16
    steps = {b[0] - a[0] for a, b in zip(curve.points, curve.points[1:], strict=False)}
    assert len(steps) == 1  # evenly spaced
    slowest = Slowest(limit=3)
    for name, value in (("a", 1.0), ("b", 5.0), ("c", 2.0), ("a", 4.0), ("d", 3.0), ("e", 0.5), ("b", 1.0)):
        slowest.add(name, value)
    assert slowest.rows() == [("b", 5.0), ("a", 4.0), ("d", 3.0)]
    reasons = Reasons(limit=2)
    for state, why in (("error", "a"), ("error", "b"), ("memory", "c"), ("killed", "d"), ("error", "a")):
        reasons.add(state, why)
    assert reasons.rows(5) == [("", "other reasons", 2), ("error", "a", 2), ("error", "b", 1)]


def test_the_status_follows_the_cluster() -> None:
    """Workers that come and go are seen, also when none is left."""
    told = [started(workers=4), {"t": 101.0, "kind": "workers_changed", "workers": 1}]
    assert fold(told).snapshot(102.0)["workers"] == 1
    assert fold([*told, {"t": 103.0, "kind": "workers_changed", "workers": 0}]).snapshot(104.0)["workers"] == 0
