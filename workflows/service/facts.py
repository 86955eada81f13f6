"""What the service says about one run: read from disk by the same functions as the verbs, so that they never differ.

`short` is for lists and costs a few stats where nothing has changed; `whole` is for one run's page.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import ExitwaveError
from exitwave.ingest.files import FileLock, read_object
from exitwave.workflows.service.catalogue import Place
from exitwave.workflows.service.jobs import Job, Verdict
from exitwave.workflows.service.rounds import rounds_table, study_status, trials_table
from exitwave.workflows.training_seen import FollowedTraining, TrainingSeen

__all__ = ["Facts", "how_far"]

_TRUTHS = ("manifest.jsonl", "events.jsonl", "status.json", "train.json", "model.pt", "metrics.json", "report.html")
_FRESH_S = 0.5
_STILL_S = 2.0
_MOST_KEPT = 20_000
_MOST_FOLLOWED = 64


def how_far(place: Place | None) -> str:
    """A text that differs whenever something was committed, trained or reported."""
    if place is None:
        return ""
    names = ("checkpoints", "model.pt", "metrics.json")
    inner = [
        p for part in ("trials", "rounds") for name in names for p in sorted((place.path / part).glob(f"**/{name}"))
    ]
    return repr((_signature(place, ("manifest.jsonl", *names)), [_stat(path) for path in inner]))


def _signature(place: Place, names: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    found = []
    for folder in {place.path, place.dataset or place.path, place.training or place.path}:
        for name in names:
            found.append(_stat(folder / name))
    return tuple(sorted(found))


def _stat(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


class Facts:
    """Remembers answers until what they were read from changes, or (a lock says who runs) half a second is over.

    Thread-safe. Events of a training are folded as they come, each once, however many ask.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Any, float, dict[str, Any]]] = {}
        self._followed: OrderedDict[str, FollowedTraining] = OrderedDict()
        self._reading = threading.Lock()

    def short(self, place: Place, job: Job | None, verdict: Verdict | None) -> dict[str, Any]:
        """For a row of a list."""
        return self._cached(place, verdict) | _who(place, job, verdict)

    def whole(self, place: Place, job: Job | None, verdict: Verdict | None) -> dict[str, Any]:
        """For the page of one run: with parts, loss curve, metrics."""
        facts = self._cached(place, verdict) | _who(place, job, verdict)
        if place.training is not None:
            facts["metrics"] = read_object(place.training / "metrics.json").get("metrics", {})
            if "training" in facts:
                with self._reading:
                    seen = self._follow(place)
                    facts["training"] = _training(seen) | {"curve": seen.curve, "validation": seen.validation}
        return facts

    def _cached(self, place: Place, verdict: Verdict | None) -> dict[str, Any]:
        with self._reading:
            signature, now = (_signature(place, _TRUTHS), verdict), time.monotonic()
            kept = self._kept.get(place.id)
            still = kept is not None and kept[0] == signature
            if kept is not None and now - kept[1] < (_STILL_S if still else _FRESH_S):
                return dict(kept[2])
            facts = _read(place, self._follow(place))
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[place.id] = (signature, now, facts)
            return dict(facts)

    def _follow(self, place: Place) -> TrainingSeen:
        if place.training is None:
            return TrainingSeen()
        followed = self._followed.pop(place.id, None) or FollowedTraining(place.training)
        self._followed[place.id] = followed
        if len(self._followed) > _MOST_FOLLOWED:
            self._followed.popitem(last=False)
        return followed.look()


def _who(place: Place, job: Job | None, verdict: Verdict | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"id": place.id, "name": place.path.name, "kind": place.kind, "ours": job is not None}
    if verdict is not None:
        facts |= {"state": verdict.state, "why": verdict.why}
    return facts


def _read(place: Place, seen: TrainingSeen) -> dict[str, Any]:
    from exitwave.workflows.status import status_document

    facts: dict[str, Any] = {"updated": _updated(place), "report": (place.path / "report.html").is_file()}
    try:
        if place.kind == "study":
            status, facts["trials"] = study_status(place.path), trials_table(place.path)
        else:
            status = status_document(place.path, training=seen) if place.kind != "training" else {}
            if status.get("adaptive"):
                facts["trials"] = rounds_table(status["adaptive"])
        facts["status"] = status
        facts["state"], facts["why"] = _state(place, facts)
    except (ExitwaveError, OSError) as error:
        return facts | {"state": "unreadable", "why": (str(error).splitlines() or [""])[0], "status": {}}
    except Exception as error:  # what no writer of ours wrote must not take the other runs off the list
        why = f"a file of it does not hold what it should ({type(error).__name__}: {str(error)[:200]})"
        return facts | {"state": "unreadable", "why": why, "status": {}}
    facts["mode"] = "online" if place.is_online else "adaptive" if status.get("adaptive") else ""
    if seen.any:
        facts["training"] = _training(seen)
    return facts


def _training(seen: TrainingSeen) -> dict[str, Any]:
    step, loss = seen.last or (0, None)
    return {"total_steps": seen.total_steps, "step": step, "loss": loss}


def _state(place: Place, facts: Mapping[str, Any]) -> tuple[str, str]:
    """Of a run that the service did not start, in its words."""
    status: Mapping[str, Any] = facts["status"]
    if status.get("running") or FileLock(place.path / ".lock").is_held():
        return "running", "started from a command line"
    if place.kind == "training":
        done = (place.path / "model.pt").exists()
        return ("finished", "") if done else ("stopped", "`exitwave train` goes on with it")
    if place.kind == "study":
        return ("finished", "") if facts["trials"]["ended"] else ("stopped", "resume goes on")
    stages = status.get("stages")
    whole = status["samples"]["committed"] + status["samples"]["failed"] >= status["samples"]["planned"] > 0
    done = stages["report"] != "not yet" if stages is not None else whole
    if done:
        return "finished", "with failed parts: see failures" if status["shards"]["failed"] else ""
    return "stopped", "resume goes on"


def _updated(place: Place) -> float:
    return max((mtime for mtime, _ in _signature(place, _TRUTHS)), default=0) / 1e9
