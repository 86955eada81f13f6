"""What state each shard of a campaign is in: replayed from the plan, the manifest and the events. Pure but for reading.

The manifest alone says what is committed. Events tell of attempts and failures; a failure counts until the shard is
committed or a later run submits it again.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import UsageError
from exitwave.ingest.events import read_events
from exitwave.ingest.manifest import load_manifest
from exitwave.simulate.lease import lease_holder
from exitwave.simulate.state_index import read_failed
from exitwave.simulate.state_task import TaskState, apply

__all__ = ["TaskState", "campaign_failures", "campaign_status", "replay"]

PLAN_NAME = "plan.json"


def replay(
    tasks: Sequence[Mapping[str, Any]], committed: Iterable[str], events: Iterable[Mapping[str, Any]], *, alive: bool
) -> list[TaskState]:
    """The states of `tasks` ({task, shard_id, samples, structures}) in their order.

    `alive`: whether a controller is running; without one, what was running is pending again.
    """
    states = {
        str(t["task"]): TaskState(
            task=str(t["task"]),
            shard_id=str(t["shard_id"]),
            samples=int(t["samples"]),
            structures=[str(s) for s in t["structures"]],
        )
        for t in tasks
    }
    for event in events:
        apply(states, event)
    done = set(committed)
    for state in states.values():
        if state.shard_id in done:
            state.state = "committed"
        elif state.state == "committed" or (state.state == "running" and not alive):
            # A `committed` event without a line in the manifest counts for nothing: the manifest is the truth.
            state.state = "pending"
    return list(states.values())


def _load(dataset: Path) -> tuple[dict[str, Any], list[TaskState], list[dict[str, Any]], dict[str, Any] | None]:
    manifest = load_manifest(dataset)
    path = dataset / PLAN_NAME
    try:
        plan = json.loads(path.read_text())
        tasks = [
            {**t, "task": str(t["task"]), "shard_id": str(t["shard_id"]), "samples": int(t["samples"])}
            for t in plan["tasks"]
        ]
    except FileNotFoundError:
        raise UsageError(f"{path}: not found; {dataset} was not made by `exitwave simulate`") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(f"{path}: damaged ({error}); run `exitwave simulate` again, it writes it anew") from None
    events = read_events(dataset / "events.jsonl")
    holder = lease_holder(dataset)
    states = replay(tasks, (s.shard_id for s in manifest.shards), events, alive=holder is not None)
    return plan, states, events, holder


def campaign_status(dataset: Path) -> dict[str, Any]:
    """The contract's `status` of a data set. Raises UsageError where there is none."""
    plan, states, events, holder = _load(dataset)
    shards = dict.fromkeys(("pending", "running", "committed", "failed"), 0)
    samples = {"planned": 0, "committed": 0, "failed": 0, "rejected": int(plan.get("rejected_samples", 0))}
    for state in states:
        shards[state.state] += 1
        samples["planned"] += state.samples
        if state.state in ("committed", "failed"):
            samples[state.state] += state.samples
    started = next((e for e in reversed(events) if e["kind"] == "campaign_started"), None)
    rate = _rate(events, float(started["t"])) if started else 0.0
    open_samples = samples["planned"] - samples["committed"] - samples["failed"]
    return {
        "name": plan.get("name", ""),
        "samples": samples,
        "shards": shards,
        "rate_samples_per_s": rate,
        "eta_s": (open_samples / rate if rate > 0 else None) if open_samples else 0.0,
        "attempts": sum(state.attempts for state in states),
        "cluster": started.get("cluster") if started else None,
        "workers": started.get("workers") if started else None,
        "dashboard": started.get("dashboard") if started and holder else None,
        "running": holder is not None,
        "controller": holder,
        "rejected": plan.get("rejected", []),
    }


def _rate(events: Sequence[Mapping[str, Any]], since: float) -> float:
    """Samples per second of the last run, from its start to its last commit."""
    commits = [e for e in events if e["kind"] == "shard_committed" and float(e["t"]) >= since]
    if not commits:
        return 0.0
    took = float(commits[-1]["t"]) - since
    return sum(int(e["n"]) for e in commits) / took if took > 0 else 0.0


def campaign_failures(dataset: Path, *, states: Collection[str] = ()) -> list[dict[str, Any]]:
    """The contract's `failures`: every shard that failed for good, of the classes `states` or of all.

    Read from the index where there is one, else replayed. Raises UsageError where there is no data set.
    """
    found = read_failed(dataset)
    if found is None:
        found = [state for state in _load(dataset)[1] if state.state == "failed"]
    return [
        {
            "task": s.task,
            "state": s.failure,
            "why": s.why,
            "host": s.host,
            "attempts": s.attempts,
            "seconds": s.seconds,
            "structures": s.structures,
        }
        for s in found
        if not states or s.failure in states
    ]
