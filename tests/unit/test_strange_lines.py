"""What no writer of ours wrote, in a folder of runs: it is skipped or named, and hides no other run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exitwave.ingest.events import EventLog, read_events
from exitwave.simulate.state import replay
from exitwave.workflows.service.runs import Runs
from exitwave.workflows.tune_record import fold

STRANGE = [3, {"kind": 7}, {"kind": "a", "t": "noon"}, {"t": 1.0}, [], {"kind": None}]


def test_an_event_has_a_kind_and_a_time(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in [*STRANGE, {"kind": "good", "t": 1}]) + "\n")
    assert read_events(path) == [{"kind": "good", "t": 1}]


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "trial_reported", "n": 0, "rung": [], "value": 1.0},
        {"kind": "trial_reported", "n": None, "rung": 1, "value": 1.0},
        {"kind": "trial_finished", "n": 0, "value": {}, "step": 1},
        {"kind": "study_started", "trials": "many"},
        {"kind": "trial_asked", "n": 1, "values": 3},
    ],
)
def test_an_event_of_a_search_that_says_something_else_changes_nothing(line: dict[str, Any]) -> None:
    asked = [{"kind": "trial_asked", "n": 0, "values": {"a": 1}}, {"kind": "trial_begun", "n": 0}]
    assert fold([*asked, line]).trials == fold(asked).trials


def test_an_event_of_a_task_that_says_something_else_changes_nothing() -> None:
    tasks = [{"task": "t", "shard_id": "s", "samples": 1, "structures": []}]
    strange = {"kind": "task_failed", "task": "t", "seconds": [], "attempt": {}}
    assert replay(tasks, ["s"], [strange], alive=False)[0].state == "committed"


def test_a_run_that_cannot_be_read_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("good", "odd"):
        EventLog(tmp_path / name / "events.jsonl").emit("study_finished")
        (tmp_path / name / "tune.yaml").write_text("name: a\n")
    from exitwave.workflows.service import facts

    right = facts.trials_table

    def odd(study: Path) -> dict[str, Any]:
        return right(study) if study.name == "good" else {}["rows"]

    monkeypatch.setattr(facts, "trials_table", odd)
    rows = {row["id"]: row for row in Runs(tmp_path).listed(0, 10)["runs"]}
    assert rows["good"]["state"] == "finished"
    assert rows["odd"]["state"] == "unreadable" and "KeyError" in rows["odd"]["why"]
