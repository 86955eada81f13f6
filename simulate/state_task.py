"""One task of a campaign as its events tell of it: the record, and what each event changes in it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["TaskState", "apply"]


@dataclass(kw_only=True)
class TaskState:
    """One shard: `state` is pending, running, committed or failed; `failure` the class of its last failure."""

    task: str
    shard_id: str
    samples: int
    state: str = "pending"
    attempts: int = 0
    failure: str = ""
    why: str = ""
    host: str = ""
    seconds: float = 0.0
    structures: list[str] = field(default_factory=list)


def apply(states: Mapping[str, TaskState], event: Mapping[str, Any]) -> None:
    """What one event changes: nothing, where it does not say what its kind says."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        _apply(states, event)


def _apply(states: Mapping[str, TaskState], event: Mapping[str, Any]) -> None:
    kind = event.get("kind")
    if kind in ("campaign_started", "campaign_interrupted", "campaign_finished"):
        for each in states.values():
            if each.state == "running":
                each.state = "pending"
        return
    if kind == "campaign_extended":  # numbers of tasks may mean others from now on
        for each in states.values():
            each.state, each.failure, each.why, each.attempts = "pending", "", "", 0
        return
    state = states.get(str(event.get("task", "")))
    if state is None:
        return
    if kind == "task_submitted":
        state.state = "running"
        state.attempts = int(event.get("attempt", state.attempts + 1))
    elif kind == "task_failed":
        state.state = "failed" if event.get("final", True) else "pending"
        state.failure = str(event.get("state", "error"))
        state.why = str(event.get("why", ""))
        state.host = str(event.get("host", ""))
        state.seconds = float(event.get("seconds", 0.0))
        state.attempts = int(event.get("attempt", state.attempts))
    elif kind in ("task_dropped", "task_retried"):
        state.state = "pending"
    elif kind == "shard_committed":
        state.state = "committed"
        state.host = str(event.get("host", ""))
        state.seconds = float(event.get("seconds", 0.0))
