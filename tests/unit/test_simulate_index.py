"""`state.db` says what plan, manifest and events say, however it is treated, and never more."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from sim_samples import plan

from exitwave.ingest.files import shard_path
from exitwave.simulate.campaign import run_campaign
from exitwave.simulate.cluster_inline import InlineCluster
from exitwave.simulate.state import campaign_failures, campaign_status
from exitwave.simulate.state_index import read_failed

SPEC: dict[str, Any] = {"simulator": "weak-phase"}


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Five shards are committed, one failed."""
    made = plan(**SPEC)
    root = tmp_path / "d"
    path = root / shard_path(made.tasks[2].shard_id)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no HDF5")
    assert run_campaign(made, root, InlineCluster()).failed == 1
    return root


def rows(dataset: Path) -> list[tuple[Any, ...]]:
    with sqlite3.connect(dataset / "state.db") as db:
        return db.execute("SELECT task, state, failure, attempts FROM tasks ORDER BY place").fetchall()


EXPECTED = [(f"task-{k:06d}", "failed" if k == 2 else "committed", "error" if k == 2 else "") for k in range(6)]


def test_it_holds_every_task_and_stands_elsewhere(dataset: Path) -> None:
    assert (dataset / "state.db").is_symlink() and dataset not in (dataset / "state.db").resolve().parents
    assert [row[:3] for row in rows(dataset)] == EXPECTED
    assert [row[3] for row in rows(dataset)] == [1, 1, 2, 1, 1, 1]
    found = read_failed(dataset)
    assert found is not None and [s.task for s in found] == ["task-000002"]


@pytest.mark.parametrize("harm", ["garbage", "missing", "dangling", "emptied", "no tables", "of another campaign"])
def test_whatever_happens_to_it_answers_stay_and_the_next_controller_makes_it_anew(dataset: Path, harm: str) -> None:
    before = campaign_failures(dataset)
    path = (dataset / "state.db").resolve()
    for beside in ("-wal", "-shm"):
        path.with_name(path.name + beside).unlink(missing_ok=True)
    if harm == "garbage":
        path.write_bytes(b"\xff" * 5000)
    elif harm == "missing":
        (dataset / "state.db").unlink()
    elif harm == "dangling":
        path.unlink()
    elif harm == "emptied":
        path.write_bytes(b"")
    else:
        with sqlite3.connect(path) as db:
            if harm == "no tables":
                db.execute("DROP TABLE tasks")
            else:
                db.execute("UPDATE meta SET value = 'other' WHERE key = 'campaign'")
                db.execute("UPDATE tasks SET state = 'committed'")
    assert read_failed(dataset) is None
    assert campaign_failures(dataset) == before and len(before) == 1
    assert campaign_status(dataset)["shards"]["failed"] == 1
    assert run_campaign(plan(**SPEC), dataset, InlineCluster()).failed == 1
    assert [row[:3] for row in rows(dataset)] == EXPECTED
    found = read_failed(dataset)
    assert found is not None and [s.attempts for s in found] == [4]


def test_events_after_the_index_are_added(dataset: Path) -> None:
    """As if the controller had been killed before it wrote its last second down."""
    events = dataset / "events.jsonl"
    with events.open("ab") as file:
        file.write(b'{"t":1,"kind":"task_failed","task":"task-000004","state":"timeout","why":"w","final":true}\n')
        file.write(b'{"t":1,"kind":"task_retried","task":"task-000002"}\n{"t":1,"kind":"tor')
    found = read_failed(dataset)
    assert found is not None and [(s.task, s.failure) for s in found] == [("task-000004", "timeout")]
    events.write_bytes(b"")  # a log that is shorter than what was read of it
    assert read_failed(dataset) is None


def test_a_data_set_that_was_moved_is_not_answered_from_the_old_index(dataset: Path) -> None:
    moved = dataset.rename(dataset.with_name("moved"))
    assert read_failed(moved) is None and len(campaign_failures(moved)) == 1
    assert run_campaign(plan(**SPEC), moved, InlineCluster()).failed == 1
    assert read_failed(moved) is not None


@pytest.mark.long
def test_a_database_that_somebody_locks_costs_no_data(tmp_path: Path) -> None:
    """From the first event to the end of the campaign: it goes on without, and everybody reads the files instead."""
    root, held = tmp_path / "d", []

    def lock(event: dict[str, Any]) -> None:
        if event["kind"] == "campaign_started":
            held.append(sqlite3.connect(root / "state.db", isolation_level=None, check_same_thread=False))
            held[0].execute("BEGIN EXCLUSIVE")

    try:
        assert run_campaign(plan(**SPEC), root, InlineCluster(), listeners=[lock]).committed == 6
        assert campaign_status(root)["shards"]["committed"] == 6 and campaign_failures(root) == []
    finally:
        held[0].close()
    assert run_campaign(plan(**SPEC), root, InlineCluster()).committed == 6
    assert [row[1] for row in rows(root)] == ["committed"] * 6
