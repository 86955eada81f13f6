"""Rates and provenance for the report, from events and from the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.dataset import Dataset
from exitwave.workflows.progress import human_bytes, human_seconds
from exitwave.workflows.provenance import git_commit, host_facts, versions

__all__ = ["last", "provenance", "simulation_rates", "speed", "stages", "staging_rates", "training_rates"]

Events = Sequence[Mapping[str, Any]]


def last(events: Events, kinds: Iterable[str]) -> Mapping[str, Any]:
    wanted = set(kinds)
    return next((e for e in reversed(events) if e["kind"] in wanted), {})


# --- rates ----------------------------------------------------------------------------------------------------------


def stages(events: Events) -> list[tuple[str, float]]:
    """Seconds of each part, over all attempts."""
    seconds: dict[str, float] = {}
    for event in events:
        if event["kind"] in ("part_finished", "part_interrupted", "part_failed"):
            seconds[str(event["part"])] = seconds.get(str(event["part"]), 0.0) + float(event["seconds"])
    return list(seconds.items())


def simulation_rates(events: Events) -> list[tuple[str, str, str]]:
    started = last(events, ("campaign_started",))
    commits = [e for e in events if e["kind"] == "shard_committed" and isinstance(e.get("n"), int)]
    if not commits:
        return []
    begun = [e for e in events if e["kind"] == "campaign_started" and e["t"] <= commits[-1]["t"]]
    since = float(begun[-1]["t"]) if begun else float(commits[0]["t"])
    recent = [e for e in commits if float(e["t"]) >= since]
    took = float(recent[-1]["t"]) - since
    workers = started.get("workers")
    samples = sum(int(e["n"]) for e in commits)
    busy = sum(float(e.get("seconds") or 0) for e in commits)
    rows = []
    if took > 0:
        note = f"{workers} worker{'s' * (workers != 1)}, cluster {started.get('cluster')}" if workers else ""
        rows.append(("Simulation", f"{sum(int(e['n']) for e in recent) / took:.3g} samples/s", note))
    if samples and busy:
        rows.append(("One sample", human_seconds(busy / samples), "on one core, on average, writing included"))
    attempts = sum(e["kind"] == "task_failed" for e in events)
    if attempts:
        rows.append(("Failed attempts", str(attempts), "of simulation tasks, retried"))
    return rows


def staging_rates(events: Events) -> list[tuple[str, str, str]]:
    staged = [e for e in events if e["kind"] == "staged" and e.get("bytes_copied")]
    if not staged or not staged[-1].get("seconds"):
        return []
    latest = staged[-1]
    rate = float(latest["bytes_copied"]) / float(latest["seconds"])
    return [
        (
            "Staging",
            f"{human_bytes(rate)}/s",
            f"{human_bytes(float(latest['bytes_copied']))}, copied, verified and synced",
        )
    ]


def training_rates(events: Events) -> list[tuple[str, str, str]]:
    steps = [e for e in events if e["kind"] == "train_step"]
    if not steps:
        return []
    start = last(events, ("train_started", "train_resumed"))
    batch = float(start.get("batch") or 0)
    rate = float(np.median([float(e["samples_per_s"]) for e in steps]))
    rows = [("Training", f"{rate:.3g} samples/s", f"median of {len(steps)} steps, {start.get('world_size', 1)} ranks")]
    if batch and rate:
        step_s = batch / rate
        for key, name, note in (
            ("data_wait_s", "Waiting for data", "part of a step"),
            ("exposed_comm_s", "Exposed communication", "part of a step that gradients were waited for"),
        ):
            values = [float(e[key]) for e in steps if e.get(key) is not None]
            if values:
                rows.append((name, f"{100 * float(np.median(values)) / step_s:.2g} %", note))
    if start.get("parameters"):
        rows.append(("Network", f"{int(start['parameters']):,} parameters".replace(",", " "), ""))
    return rows


def speed(evaluation: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    ms = evaluation.get("ms_per_sample")
    return [("Inference", f"{float(ms):.3g} ms a sample", "the network on held-out samples")] if ms else []


# --- provenance -----------------------------------------------------------------------------------------------------


def provenance(
    folder: Path, data: Dataset | None, simulated: Events, trained: Events, configuration: str
) -> list[tuple[str, str]]:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    facts = host_facts()
    rows = [
        ("Written", now),
        ("Folder", str(folder.absolute())),
        ("Versions", ", ".join(f"{k} {v}" for k, v in versions().items())),
        ("Commit", git_commit() or "not run from a git checkout"),
        ("Host", f"{facts['host']}, {facts['cores']} cores, {facts['system']}"),
    ]
    seeds = [line.strip() for line in configuration.splitlines() if line.strip().startswith("seed:")]
    if seeds:
        rows.append(
            (
                "Seeds",
                ", ".join(s.partition(":")[2].strip() for s in seeds) + " (campaign, training)"[: 21 * len(seeds)],
            )
        )
    if data is not None:
        header = data.manifest.header
        rows.append(("Data set", f"{header.dataset_id}, campaign {header.campaign_hash[:16]}, made {header.created}"))
        producers = sorted({f"{s.producer.get('host', '?')}" for s in data.manifest.shards})
        simulators = sorted(
            {
                f"{s.producer.get('simulator', '?')} {s.producer.get('simulator_version', '')}".strip()
                for s in data.manifest.shards
            }
        )
        rows.append(("Simulated by", f"{', '.join(simulators)} on {', '.join(producers[:5])}"))
    resumed = sum(e["kind"] == "train_resumed" for e in trained) + max(
        0, sum(e["kind"] == "campaign_started" for e in simulated) - 1
    )
    if resumed:
        rows.append(("Resumed", f"{resumed} time{'s' * (resumed != 1)}"))
    return rows
