"""`exitwave status STUDY`: trials by state, the best, the time left; also of a search that died, or is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exitwave.ingest.errors import UsageError
from exitwave.ingest.events import EventLog
from exitwave.ingest.files import FileLock
from exitwave.workflows.report_tune import gather_study
from exitwave.workflows.retrying import retry_failures
from exitwave.workflows.status import failures_of, status_document
from exitwave.workflows.watching import plain_line, watch_view

TUNE = "tune: {trials: 6, space: {train.batch: {int_uniform: [1, 4]}}, budget: {steps: 10}}\n"


def study(folder: Path, lines: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    (folder / "tune.yaml").write_text("name: gold\n" + TUNE)
    log = EventLog(folder / "events.jsonl")
    with log.path.open("a") as file:
        file.writelines(json.dumps({"t": 100.0 + n, **line}) + "\n" for n, line in enumerate(lines))
    return folder


LINES: list[dict[str, Any]] = [
    {"kind": "study_started", "trials": 6, "dataset_id": "d"},
    *({"kind": "trial_asked", "n": n, "values": {"train.batch": n + 1}} for n in range(4)),
    {"kind": "trial_finished", "n": 0, "step": 10, "value": 0.25, "seconds": 3.0},
    {"kind": "trial_pruned", "n": 1, "rung": 3, "value": 0.5, "why": "worse"},
    {"kind": "trial_failed", "n": 2, "state": "diverged", "why": "not finite"},
    {"kind": "trial_reported", "n": 3, "rung": 5, "step": 5, "value": 0.3},
]


def test_the_trials_are_what_a_status_shows(tmp_path: Path) -> None:
    folder = study(tmp_path / "s", LINES)
    with FileLock(folder / ".lock"):
        told = status_document(folder)
        line, shown = plain_line(told), watch_view(told)
    assert told["trials"] == {
        "planned": 6, "done": 3, "finished": 1, "running": 1, "waiting": 0, "pruned": 1, "failed": 1, "pending": 2,
    }  # fmt: skip
    assert told["best"] == {"trial": 0, "value": 0.25, "values": {"train.batch": 1}}
    assert told["running"] and told["state"].startswith("running (")
    assert told["eta_s"] == pytest.approx(8 / 3.5 * 2.5, abs=0.1)  # 3.5 of 6 trials took 8 s
    assert line.startswith("3 of 6 trials, running (") and "best loss 0.25 (trial 0)" in line
    assert shown is not None
    assert failures_of(folder) == [
        {"task": "trial 2", "state": "diverged", "attempts": 0, "host": None, "why": "not finite"}
    ]
    assert failures_of(folder, states=["memory"]) == []


def test_a_search_that_nobody_works_on_says_so(tmp_path: Path) -> None:
    told = status_document(study(tmp_path / "s", LINES))
    assert (told["trials"]["running"], told["trials"]["waiting"]) == (0, 1)
    assert not told["running"] and told["eta_s"] is None and told["state"].startswith("stopped")
    told = status_document(study(tmp_path / "empty", []))
    assert told["trials"]["done"] == 0 and told["best"] is None and "0 of 6 trials, stopped" in plain_line(told)
    with pytest.raises(UsageError, match="are not tried again"):
        retry_failures(None, tmp_path / "s", states=(), cluster=None, workers=None, patience=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["name: x\n", "tune: null\n", "tune: {trials: 6}\n", "tune: [1]\n", "", "{"])
def test_a_damaged_file_is_told(tmp_path: Path, text: str) -> None:
    folder = study(tmp_path / "s", LINES)
    (folder / "tune.yaml").write_text(text)
    for read in (status_document, gather_study):
        with pytest.raises(UsageError, match=r"tune\.yaml"):
            read(folder)
