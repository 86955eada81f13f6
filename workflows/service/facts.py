"""What the service says about one run: read from disk by the same functions as the verbs, so that they never differ.

`short` is for lists and costs a few stats where nothing has changed; `whole` is for one run's page.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import ExitwaveError
from exitwave.ingest.events import read_events
from exitwave.workflows.service.catalogue import Place
from exitwave.workflows.service.jobs import Job, Verdict

__all__ = ["Facts", "how_far"]

_TRUTHS = ("manifest.jsonl", "events.jsonl", "status.json", "train.json", "model.pt", "metrics.json", "report.html")
_FRESH_S = 0.5
_CURVE = 400  # points of a loss curve that is sent


def how_far(place: Place | None) -> str:
    """A text that differs whenever something was committed, trained or reported."""
    return (
        "" if place is None else repr(_signature(place, ("manifest.jsonl", "checkpoints", "model.pt", "metrics.json")))
    )


def _signature(place: Place, names: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    found = []
    for folder in {place.path, place.dataset or place.path, place.training or place.path}:
        for name in names:
            try:
                status = (folder / name).stat()
                found.append((status.st_mtime_ns, status.st_size))
            except OSError:
                found.append((0, 0))
    return tuple(sorted(found))


class Facts:
    """Remembers answers until what they were read from changes, or (a lock says who runs) half a second is over."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, bool], tuple[Any, float, dict[str, Any]]] = {}

    def short(self, place: Place, job: Job | None, verdict: Verdict | None) -> dict[str, Any]:
        """For a row of a list."""
        return self._cached(place, verdict, whole=False) | _who(place, job, verdict)

    def whole(self, place: Place, job: Job | None, verdict: Verdict | None) -> dict[str, Any]:
        """For the page of one run: with parts, loss curve, metrics."""
        return self._cached(place, verdict, whole=True) | _who(place, job, verdict)

    def _cached(self, place: Place, verdict: Verdict | None, *, whole: bool) -> dict[str, Any]:
        key, signature, now = (place.id, whole), (_signature(place, _TRUTHS), verdict), time.monotonic()
        kept = self._kept.get(key)
        still = kept is not None and kept[0] == signature
        if kept is not None and now - kept[1] < (2.0 if still else _FRESH_S):
            return dict(kept[2])
        facts = _read(place, whole=whole)
        self._kept[key] = (signature, now, facts)
        return dict(facts)


def _who(place: Place, job: Job | None, verdict: Verdict | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"id": place.id, "name": place.path.name, "kind": place.kind, "ours": job is not None}
    if verdict is not None:
        facts |= {"state": verdict.state, "why": verdict.why}
    return facts


def _read(place: Place, *, whole: bool) -> dict[str, Any]:
    from exitwave.workflows.status import status_document

    facts: dict[str, Any] = {"updated": _updated(place), "report": (place.path / "report.html").is_file()}
    try:
        status = status_document(place.path) if place.kind != "training" else {}
    except (ExitwaveError, OSError) as error:
        facts |= {"state": "unreadable", "why": str(error).splitlines()[0], "status": {}}
        return facts
    facts["status"] = status
    facts["state"], facts["why"] = _state(place, status)
    if place.training is not None and (place.training / "events.jsonl").exists():
        facts["training"] = _training(place.training, curve=whole)
    if whole and place.training is not None:
        facts["metrics"] = _json(place.training / "metrics.json").get("metrics", {})
    return facts


def _state(place: Place, status: Mapping[str, Any]) -> tuple[str, str]:
    """Of a run that the service did not start, in its words."""
    if place.kind == "training":
        done = (place.path / "model.pt").exists()
        return ("finished", "") if done else ("stopped", "not finished, as far as the files say")
    if status.get("running"):
        return "running", "started from a command line"
    stages = status.get("stages")
    whole = status["samples"]["committed"] + status["samples"]["failed"] >= status["samples"]["planned"] > 0
    done = stages["report"] != "not yet" if stages is not None else whole
    if done:
        return "finished", "with failed parts: see failures" if status["shards"]["failed"] else ""
    return "stopped", "resume goes on"


def _updated(place: Place) -> float:
    return max((mtime for mtime, _ in _signature(place, _TRUTHS)), default=0) / 1e9


def _training(folder: Path, *, curve: bool) -> dict[str, Any]:
    events = read_events(folder / "events.jsonl")
    steps = [e for e in events if e["kind"] == "train_step" and "loss" in e]
    total = next((e["total_steps"] for e in reversed(events) if e.get("total_steps")), None)
    facts: dict[str, Any] = {"total_steps": total, "step": steps[-1].get("step", 0) if steps else 0}
    facts["loss"] = steps[-1]["loss"] if steps else None
    if curve:
        every = max(1, len(steps) // _CURVE)
        facts["curve"] = [[e.get("step", 0), e["loss"]] for e in [*steps[:-1:every], *steps[-1:]]]
        facts["validation"] = [[e["step"], e["loss"]] for e in events if e["kind"] == "train_eval" and "loss" in e]
    return facts


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
