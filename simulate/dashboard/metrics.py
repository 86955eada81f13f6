"""The snapshots as Prometheus metrics, on the scheduler's `/metrics` beside Dask's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from exitwave.simulate.dashboard.board import campaigns

__all__ = ["collect_from"]

# name, what it says, whether it only grows, labels beside `campaign`, rows: (label values, value) of a snapshot
_Rows = Callable[[Any], list[tuple[list[str], Any]]]
_METRICS: tuple[tuple[str, str, bool, tuple[str, ...], _Rows], ...] = (
    ("exitwave_shards", "Shards by state", False, ("state",), lambda s: _by_key(s["shards"])),
    (
        "exitwave_samples",
        "Samples: planned, committed, failed, rejected",
        False,
        ("state",),
        lambda s: _by_key(s["samples"]),
    ),
    ("exitwave_committed_bytes", "Bytes of committed shards", False, (), lambda s: [([], s["bytes"]["committed"])]),
    (
        "exitwave_planned_bytes",
        "Bytes that the whole plan is expected to take",
        False,
        (),
        lambda s: [([], s["bytes"]["planned"])],
    ),
    ("exitwave_attempts", "Tasks handed to workers, over all runs", True, (), lambda s: [([], s["attempts"])]),
    (
        "exitwave_failed_attempts",
        "Attempts that failed in this run, by class",
        True,
        ("class",),
        lambda s: _by_key(s["failed_attempts"]),
    ),
    (
        "exitwave_stage_seconds",
        "Seconds of all workers together, by stage",
        True,
        ("stage",),
        lambda s: _by_key(s["seconds"]),
    ),
    (
        "exitwave_samples_per_second",
        "Samples committed a second of late",
        False,
        (),
        lambda s: [([], s["rate_samples_per_s"])],
    ),
    ("exitwave_eta_seconds", "Seconds left at the present rate", False, (), lambda s: [([], s["eta_s"])]),
    ("exitwave_workers", "Threads of workers that take tasks", False, (), lambda s: [([], s["workers"])]),
    (
        "exitwave_snapshot_age_seconds",
        "Seconds since the controller was heard",
        False,
        (),
        lambda s: [([], max(0.0, time.time() - s["updated"]))],
    ),
    ("exitwave_train_step", "Step of the training", False, (), lambda s: _of(s, "trainer", "step")),
    ("exitwave_train_loss", "Loss of the last step", False, (), lambda s: _of(s, "trainer", "loss")),
    (
        "exitwave_train_data_wait_seconds",
        "Seconds the last step waited for data",
        False,
        (),
        lambda s: _of(s, "trainer", "data_wait_s"),
    ),
    ("exitwave_cache_used_bytes", "Bytes in the node-local cache", False, (), lambda s: _of(s, "cache", "used")),
)


def _by_key(values: dict[str, Any]) -> list[tuple[list[str], Any]]:
    return [([key], value) for key, value in values.items()]


def _of(snapshot: Any, part: str, key: str) -> list[tuple[list[str], Any]]:
    """One value of a part that may not have begun."""
    return [([], (snapshot.get(part) or {}).get(key))]


class _Campaigns(Collector):
    """Reads the metadata of one scheduler whenever it is scraped."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        shown = campaigns(self.metadata)
        for name, meaning, grows, labels, rows in _METRICS:
            kind = CounterMetricFamily if grows else GaugeMetricFamily
            family = kind(name, meaning, labels=["campaign", "dataset", *labels])
            for snapshot in shown:
                of = [str(snapshot.get("name", "")), str(snapshot.get("dataset", ""))]
                for values, value in rows(snapshot):
                    if value is not None:
                        family.add_metric([*of, *values], value)
            yield family


_collector: _Campaigns | None = None


def collect_from(scheduler: Any) -> None:
    """From now on `/metrics` of this process also tells of the campaigns of `scheduler`: the last one, if several."""
    global _collector
    if _collector is None:
        _collector = _Campaigns()
        _collector.metadata = scheduler.task_metadata
        prometheus_client.REGISTRY.register(_collector)
    _collector.metadata = scheduler.task_metadata
