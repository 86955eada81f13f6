"""`exitwave status STUDY`: the trials of a search, read from its folder alone, while it runs and after it died."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Group
from rich.table import Table
from rich.text import Text

from exitwave.ingest.errors import UsageError
from exitwave.ingest.events import read_events
from exitwave.ingest.files import FileLock
from exitwave.workflows.config import load_document
from exitwave.workflows.faults import faults_of
from exitwave.workflows.progress import human_seconds
from exitwave.workflows.tune_record import Study, Trial, best_trial, counts, fold
from exitwave.workflows.tune_spec import TuneSpec

__all__ = ["failed_trials", "is_study", "read_search", "search_eta_s", "study_line", "study_progress", "study_table"]


def is_study(folder: Path) -> bool:
    """Whether `folder` was made by `exitwave tune`."""
    return (folder / "tune.yaml").exists() and not (folder / "pipeline.yaml").exists()


def read_search(folder: Path) -> tuple[dict[str, Any], TuneSpec]:
    """STUDY/tune.yaml, all of it and its section `tune`. UsageError where it is damaged."""
    path = folder / "tune.yaml"
    data = load_document(path).data
    section = data.get("tune")
    if not isinstance(section, dict):
        raise UsageError(f"{path}: damaged: no `tune:` section in it. Give another --out for a new search.")
    try:
        return data, TuneSpec.model_validate(section)
    except ValidationError as error:
        told = "; ".join(fault.message for fault in faults_of(error, TuneSpec, section))
        raise UsageError(f"{path}: damaged, or of another version of exitwave: tune: {told}") from None


def study_progress(folder: Path) -> dict[str, Any]:
    """How many trials are in which state, the best one, and how long the others will take (s; None: nobody is at work,
    or nothing is known yet). `waiting`: trials that were begun, and go on from a checkpoint when somebody works again.
    """
    data, tune = read_search(folder)
    study = fold(read_events(folder / "events.jsonl"))
    best = best_trial(study.trials, maximize=tune.objective.maximize)
    lock = FileLock(folder / ".lock")
    running, found = lock.is_held(), counts(study)
    begun = found["running"]
    ended = len(study.trials) - begun
    found |= {"running": begun if running else 0, "waiting": 0 if running else begun}
    return {
        "study": str(data.get("name") or folder.name),
        "trials": {"planned": tune.trials, "done": ended, **found, "pending": max(tune.trials - len(study.trials), 0)},
        "metric": tune.objective.metric,
        "best": None if best is None else {"trial": best.number, "value": best.value, "values": dict(best.values)},
        "search_s": round(study.seconds, 3),
        "eta_s": search_eta_s(tune, study) if running else None,
        "running": running,
        "state": _state(tune, study, lock.holder() if running else ""),
    }


def search_eta_s(tune: TuneSpec, study: Study) -> float | None:
    """Seconds that the search still takes at its pace so far; of a trial that runs, its validations count as parts."""
    done = sum(_share(tune, trial) for trial in study.trials)
    if done <= 0 or study.seconds <= 0:
        return None
    left = study.seconds / done * max(tune.trials - done, 0.0)
    if tune.max_seconds is not None:
        left = min(left, max(tune.max_seconds - study.seconds, 0.0))
    return round(left, 1)


def _share(tune: TuneSpec, trial: Trial) -> float:
    return 1.0 if trial.ended else min(max(trial.reports, default=0) / tune.budget.validations, 1.0)


def _state(tune: TuneSpec, study: Study, holder: str) -> str:
    if holder:
        return f"running ({holder})" + ("" if study.trials else ": the first trial is still to come")
    if study.trials and len(study.trials) >= tune.trials and all(t.ended for t in study.trials):
        return "complete"
    if tune.max_seconds is not None and study.seconds >= tune.max_seconds:
        return "its time (tune.max_seconds) is over: the same `exitwave tune` with more goes on"
    return "stopped: nobody works on it; the same `exitwave tune` goes on"


def failed_trials(folder: Path) -> list[dict[str, Any]]:
    """The trials that failed, as rows of `exitwave failures`."""
    study = fold(read_events(folder / "events.jsonl"))
    return [
        {"task": f"trial {t.number}", "state": t.failure, "attempts": t.attempts, "host": None, "why": t.why}
        for t in study.trials
        if t.state == "failed"
    ]


def study_line(document: Mapping[str, Any]) -> str:
    """`5 of 20 trials, running, 2 pruned, best loss 0.031 (trial 3), about 4 min left`"""
    trials, best = document["trials"], document["best"]
    words = [f"{trials['done']} of {trials['planned']} trials", str(document["state"]).split(":")[0]]
    words += [f"{trials[name]} {name}" for name in ("pruned", "failed") if trials[name]]
    if best is not None:
        words.append(f"best {document['metric']} {best['value']:.4g} (trial {best['trial']})")
    if document["eta_s"]:
        words.append(f"about {human_seconds(document['eta_s'])} left")
    return ", ".join(words)


def study_table(document: Mapping[str, Any]) -> Group:
    """For a terminal."""
    trials, best = document["trials"], document["best"]
    shown = ", ".join(
        f"{trials[name]} {name}" for name in ("finished", "running", "waiting", "pruned", "failed", "pending")
    )
    rows = [
        ("state", str(document["state"])),
        ("trials", f"{trials['done']} of {trials['planned']} have ended: {shown}"),
        ("best", "none is finished yet"),
    ]
    if best is not None:
        rows[-1] = ("best", f"trial {best['trial']}, {document['metric']} {best['value']:.4g}, with")
        rows += [("", f"{key}: {value}") for key, value in best["values"].items()]
    rows.append(("searched", human_seconds(document["search_s"])))
    if document["eta_s"]:
        rows.append(("left", f"about {human_seconds(document['eta_s'])}"))
    if (samples := document["samples"])["planned"]:
        rows.append(("samples", f"{samples['committed']} of {samples['planned']} in its data set"))
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(name, style="dim"), Text(value))
    return Group(table)
