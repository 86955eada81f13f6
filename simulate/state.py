"""What state each shard of a campaign is in: replayed from the plan, the manifest and the events. Pure but for reading.

The manifest alone says what is committed. Events tell of attempts and failures; a failure counts until the shard is
committed or a later run submits it again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import UsageError
from exitwave.ingest.events import read_events
from exitwave.ingest.files import read_plain_text
from exitwave.ingest.manifest import load_header, load_manifest
from exitwave.simulate.counters import Counters, fold
from exitwave.simulate.lease import lease_holder
from exitwave.simulate.live import read_live, read_on
from exitwave.simulate.state_index import read_failed
from exitwave.simulate.state_task import TaskState, apply

__all__ = ["TaskState", "campaign_failures", "campaign_status", "replay"]

PLAN_NAME = "plan.json"
STEERING_NAME = "steering"  # the rounds of a steered campaign (steer_rounds.py)


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
        plan = json.loads(read_plain_text(path))
        tasks = [
            {
                "task": str(t["task"]),
                "shard_id": str(t["shard_id"]),
                "samples": int(t["samples"]),
                "structures": [str(source) for source in t["structures"]],
            }
            for t in plan["tasks"]
        ]
        plan["rejected_samples"] = int(plan.get("rejected_samples", 0))
        plan["rejected"] = [{"source": str(r["source"]), "why": str(r["why"])} for r in plan.get("rejected", [])]
    except FileNotFoundError:
        raise UsageError(f"{path}: not found; {dataset} was not made by `exitwave simulate`") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(f"{path}: damaged ({error}); run `exitwave simulate` again, it writes it anew") from None
    events = read_events(dataset / "events.jsonl")
    holder = lease_holder(dataset)
    states = replay(tasks, (s.shard_id for s in manifest.shards), events, alive=holder is not None)
    return plan, states, events, holder


def campaign_status(dataset: Path) -> dict[str, Any]:
    """The contract's `status` of a data set: the snapshot of `counters`. Raises UsageError where there is none.

    Where a controller is at work, or one ended in order, its own last snapshot is shown, which costs the same however
    large the campaign is. After one that was killed, that snapshot and what log and manifest tell since. Where that is
    not sure, everything is read: what the manifest says counts.
    """
    load_header(dataset)  # a data set of another version is not this one's to speak of
    holder = lease_holder(dataset)
    shown = read_live(dataset, holder) or _read_on(dataset, holder) or _read_all(dataset)
    return {
        **shown,
        "dashboard": shown["dashboard"] if holder is not None else None,
        "running": holder is not None,
        "controller": holder,
    }


def _read_on(dataset: Path, holder: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The snapshot of a controller that was killed, with what came after it."""
    counters = read_on(dataset)
    if counters is None:
        return None
    shown = counters.snapshot(time.time())
    if shown["activity"] == "running" and holder is None:
        shown = _died(counters)
    return {**shown, "dataset": str(dataset.absolute())}


def _died(counters: Counters) -> dict[str, Any]:
    """The snapshot of a controller that runs no more: what ran is pending, and its rate is that of its life."""
    counters.feed({"kind": "campaign_interrupted", "t": counters.last, "why": "its controller died"})
    return counters.snapshot(time.time())


def _read_all(dataset: Path) -> dict[str, Any]:
    """The snapshot from plan, manifest and events."""
    plan, states, events, _ = _load(dataset)
    shards = dict.fromkeys(("pending", "running", "committed", "failed", "rejected"), 0)
    samples = {"planned": 0, "committed": 0, "failed": 0, "rejected": plan["rejected_samples"]}
    for state in states:
        shards[state.state] = shards.get(state.state, 0) + 1
        samples["planned"] += state.samples
        if state.state in ("committed", "failed"):
            samples[state.state] += state.samples
    counters = fold(events)
    shown = counters.snapshot(time.time())
    if shown["activity"] == "running" and lease_holder(dataset) is None:
        shown = _died(counters)
    rate = shown["rate_samples_per_s"]
    left = samples["planned"] - samples["committed"] - samples["failed"]
    return {
        **shown,
        "name": plan.get("name", ""),
        "samples": samples,
        "shards": shards,
        "eta_s": (left / rate if rate > 0 else None) if left else 0.0,
        "attempts": sum(state.attempts for state in states),
        "rejected": plan["rejected"],
        "dataset": str(dataset.absolute()),
    }


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
