"""What has several trainings or rounds in it, as one table of a page: the trials of a search, the rounds of an adaptive
campaign. `{title, columns, rows, done, planned}`; rows hold text, numbers, or null where there is nothing yet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import UsageError
from exitwave.ingest.events import read_events

__all__ = ["rounds_table", "study_status", "trials_table"]

_MOST_ROWS = 200


def trials_table(study: Path) -> dict[str, Any]:
    """The trials of `exitwave tune`, the newest first; how many have ended of how many."""
    from exitwave.workflows.tune_record import fold

    events = read_events(study / "events.jsonl")
    found = fold(events)
    names = sorted({key for trial in found.trials for key in trial.values})
    rows = []
    for trial in reversed(found.trials[-_MOST_ROWS:]):
        latest = trial.value if trial.value is not None else trial.reports.get(max(trial.reports, default=0))
        told = [trial.failure or trial.state, latest, trial.seconds or None]
        rows.append([trial.number, *(_cell(trial.values.get(name)) for name in names), *told])
    return {
        "title": "Trials",
        "columns": ["trial", *(name.removeprefix("train.") for name in names), "state", "objective", "seconds"],
        "rows": rows,
        "done": sum(trial.ended for trial in found.trials),
        "planned": max(found.planned, len(found.trials)),
        "ended": bool(events) and events[-1]["kind"] == "study_finished",
    }


def rounds_table(adaptive: Mapping[str, Any]) -> dict[str, Any]:
    """The rounds of an adaptive campaign, as its status tells them."""
    rows = [[made["round"], made["samples"], made["core_s"], made["error"]] for made in adaptive["by_round"]]
    return {
        "title": "Rounds",
        "columns": ["round", "samples", "core seconds", "error before it"],
        "rows": rows[-_MOST_ROWS:],
        "done": adaptive["decided"],
        "planned": adaptive["rounds"],
    }


def study_status(study: Path) -> dict[str, Any]:
    """The status of the search's own data set; empty before it has one, and where it was given one."""
    from exitwave.workflows.status import status_document

    try:
        return status_document(study / "dataset")
    except UsageError:
        return {}


def _cell(value: Any) -> Any:
    return (
        value if value is None or (isinstance(value, int | float | str) and not isinstance(value, bool)) else str(value)
    )
