"""A trainer holds a campaign back: no new task is handed out, and it can still be stopped."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from line import uids_of, write_pipeline

from exitwave.ingest.errors import InterruptedRunError
from exitwave.ingest.events import read_events
from exitwave.ingest.files import shard_path
from exitwave.ingest.growing import BACKPRESSURE_NAME
from exitwave.simulate import campaign_loop
from exitwave.simulate.campaign import run_campaign
from exitwave.simulate.cluster import make_cluster
from exitwave.workflows.campaigns import Planned, read_campaign


def hold_at_start(root: Path) -> Callable[[dict[str, Any]], None]:
    """A listener: the trainer holds back before the first task is handed out."""

    def listen(event: dict[str, Any]) -> None:
        if event["kind"] == "campaign_started":
            word = {"hold": True, "why": "12 samples wait", "time": time.time()}
            (root / BACKPRESSURE_NAME).write_text(json.dumps(word))

    return listen


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    return read_campaign(write_pipeline(tmp_path_factory.mktemp("hold")), ["campaign.samples_per_structure=3"])


def test_it_waits_until_it_is_let_go_and_loses_nothing(tmp_path: Path, planned: Planned) -> None:
    root = tmp_path / "d"
    campaign = threading.Thread(
        target=run_campaign,
        args=(planned.plan, root, make_cluster("inline")),
        kwargs={"listeners": [hold_at_start(root)]},
    )
    campaign.start()
    until = time.monotonic() + 20
    while not any(e["kind"] == "campaign_held" for e in read_events(root / "events.jsonl")):
        assert time.monotonic() < until
        time.sleep(0.05)
    time.sleep(0.5)
    assert not uids_of(root)
    (root / BACKPRESSURE_NAME).unlink()
    campaign.join(60)
    assert len(uids_of(root)) == planned.plan.n_samples
    told = [e for e in read_events(root / "events.jsonl") if e["kind"] in ("campaign_held", "campaign_released")]
    assert [e["kind"] for e in told] == ["campaign_held", "campaign_released"]
    assert told[0]["why"] == "12 samples wait"
    assert told[1]["seconds"] > 0.4


def test_it_can_be_stopped_while_it_is_held_back(tmp_path: Path, planned: Planned) -> None:
    root, stop = tmp_path / "d", threading.Event()
    threading.Timer(1.0, stop.set).start()
    with pytest.raises(InterruptedRunError, match="0 of 4 shards are committed"):
        run_campaign(planned.plan, root, make_cluster("inline"), stop=stop, listeners=[hold_at_start(root)])


def test_tasks_come_in_the_order_that_is_asked_for(tmp_path: Path, planned: Planned) -> None:
    place = {"val": 0, "train": 1}
    run_campaign(
        planned.plan, tmp_path / "d", make_cluster("inline"), order=lambda task: (place.get(task.split, 2), -task.index)
    )
    by_task = {task.task_id: task.split for task in planned.plan.tasks}
    events = read_events(tmp_path / "d" / "events.jsonl")
    assert [by_task[e["task"]] for e in events if e["kind"] == "task_submitted"] == ["val", "train", "train", "test"]


def test_a_task_that_failed_once_keeps_its_place(
    tmp_path: Path, planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody waits for what comes first: a second attempt is not made after all others."""
    monkeypatch.setattr(campaign_loop, "window", lambda per_second: 1)  # nothing is handed out ahead
    root, place = tmp_path / "d", {"val": 0, "train": 1}
    by_task = {task.task_id: task for task in planned.plan.tasks}
    first = next(task for task in planned.plan.tasks if task.split == "val")
    in_its_way = root / shard_path(first.shard_id) / "folder"

    def listen(event: dict[str, Any]) -> None:
        if event["kind"] == "campaign_started":
            in_its_way.mkdir(parents=True)
        elif event["kind"] == "task_failed":
            shutil.rmtree(in_its_way.parent)

    run_campaign(
        planned.plan, root, make_cluster("inline"), listeners=[listen],
        order=lambda task: (place.get(task.split, 2), -task.index),
    )  # fmt: skip
    events = read_events(root / "events.jsonl")
    submitted = [by_task[e["task"]].split for e in events if e["kind"] == "task_submitted"]
    assert submitted == ["val", "val", "train", "train", "test"]
    assert len(uids_of(root)) == planned.plan.n_samples
