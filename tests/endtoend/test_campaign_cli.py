"""`failures` and `retry` as a person uses them, and what a running campaign is told by its command files."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from sim_samples import campaign, plan

from exitwave.ingest.errors import InterruptedRunError, UsageError
from exitwave.ingest.events import read_events
from exitwave.ingest.files import shard_path
from exitwave.ingest.manifest import load_manifest
from exitwave.simulate.campaign import run_campaign
from exitwave.simulate.cluster_inline import InlineCluster
from exitwave.simulate.commands import write_command
from exitwave.simulate.lease import lease_holder
from exitwave.simulate.plan import Plan, make_plan
from exitwave.simulate.state import campaign_failures
from exitwave.workflows.cli import run as exitwave

SPEC: dict[str, Any] = {"simulator": "weak-phase"}


def document(capfd: pytest.CaptureFixture[str], *words: object, code: int = 0) -> Any:
    capfd.readouterr()
    assert exitwave([str(word) for word in (*words, "--json")]) == code
    return json.loads(capfd.readouterr().out)


@pytest.fixture
def failed(tmp_path: Path) -> tuple[Path, Plan, Path]:
    """A finished campaign of which one shard failed, since a file without sense lies in its place."""
    made = plan(**SPEC)
    dataset = tmp_path / "d"
    path = dataset / shard_path(made.tasks[2].shard_id)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no HDF5")
    assert run_campaign(made, dataset, InlineCluster()).failed == 1
    return dataset, made, path


def test_failures_have_every_field_of_the_contract(
    failed: tuple[Path, Plan, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    dataset, made, _ = failed
    (row,) = document(capfd, "failures", dataset)
    assert set(row) == {"task", "state", "why", "host", "attempts", "seconds", "structures"}
    assert row["task"] == made.tasks[2].task_id and row["state"] == "error" and row["attempts"] == 2
    assert row["host"] and row["seconds"] >= 0 and row["structures"] == list(made.tasks[2].sources)
    assert document(capfd, "failures", dataset, "--state", "timeout") == []
    assert exitwave(["failures", str(dataset), "--state", "odd"]) == 2
    assert "one of error, memory, timeout, killed expected" in capfd.readouterr().err


def test_retry_runs_what_failed_and_nothing_else(
    failed: tuple[Path, Plan, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    dataset, made, path = failed
    before = {s.shard_id: s.seq for s in load_manifest(dataset).shards}
    assert document(capfd, "retry", dataset, "--state", "memory")["asked"] == []
    again = document(capfd, "retry", dataset, "--cluster", "inline", code=3)  # the cause is still there
    assert again["asked"] == [made.tasks[2].task_id] and again["failed"] == 1
    assert campaign_failures(dataset)[0]["attempts"] == 4
    path.unlink()
    assert document(capfd, "retry", dataset, "--cluster", "inline")["failed"] == 0
    assert campaign_failures(dataset) == []
    after = {s.shard_id: s.seq for s in load_manifest(dataset).shards}
    assert after == before | {made.tasks[2].shard_id: len(before)}
    assert document(capfd, "retry", dataset)["asked"] == []


def test_failed_tasks_stay_failed_over_an_interruption_and_are_tried_again_after_the_end(tmp_path: Path) -> None:
    """The first and the last shard fail; when the first has failed for good, the campaign is stopped."""
    made = plan(**SPEC)
    dataset = tmp_path / "d"
    for task in (made.tasks[0], made.tasks[-1]):
        path = dataset / shard_path(task.shard_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"no HDF5")
    stop = threading.Event()

    def once_failed(event: dict[str, Any]) -> None:
        if event["kind"] == "task_failed" and event["final"]:
            stop.set()

    def attempts() -> list[int]:
        return [failure["attempts"] for failure in campaign_failures(dataset)]

    with pytest.raises(InterruptedRunError):
        run_campaign(made, dataset, InlineCluster(), stop=stop, listeners=[once_failed])
    given_up = attempts()  # what ended in one pass is told together: the last may have failed for good as well
    assert given_up in ([2], [2, 2])
    assert run_campaign(made, dataset, InlineCluster()).failed == 2
    then = [2, 3] if given_up == [2] else [2, 2]  # what was given up stays so in this round; 3: it was taken back once
    assert attempts() == then
    assert run_campaign(made, dataset, InlineCluster()).failed == 2
    assert attempts() == [n + 2 for n in then]


@pytest.mark.parametrize("verb", ["drain", "cancel"])
def test_a_running_campaign_is_drained_or_cancelled_by_a_file(tmp_path: Path, verb: Any) -> None:
    made = make_plan(campaign(**SPEC, samples_per_structure=12, samples_per_shard=1), base_dir=tmp_path)
    dataset = tmp_path / "d"
    epochs: list[int] = []

    def ask(event: dict[str, Any]) -> None:
        if event["kind"] == "shard_committed" and event["committed"] == 2:
            holder = lease_holder(dataset)
            assert holder is not None
            epochs.append(holder["epoch"])
            write_command(dataset, verb, epoch=epochs[0])
            time.sleep(1.1)  # it looks once a second

    with pytest.raises(InterruptedRunError, match="stopped on request" if verb == "drain" else "cancelled on request"):
        run_campaign(made, dataset, InlineCluster(), listeners=[ask])
    done = len(load_manifest(dataset).shards)
    assert 2 <= done < 36 and list((dataset / "commands").iterdir()) == []
    write_command(dataset, verb, epoch=epochs[0])  # meant for a controller that is gone
    assert run_campaign(made, dataset, InlineCluster()).committed == 36
    assert list((dataset / "commands").iterdir()) == []


def test_a_running_campaign_tries_failed_shards_again_when_asked(tmp_path: Path) -> None:
    made = make_plan(campaign(**SPEC, samples_per_structure=12, samples_per_shard=1), base_dir=tmp_path)
    dataset = tmp_path / "d"
    path = dataset / shard_path(made.tasks[0].shard_id)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no HDF5")

    def mend(event: dict[str, Any]) -> None:
        if event["kind"] == "task_failed" and event["final"]:
            path.unlink()
            (dataset / "commands").mkdir(exist_ok=True)
            (dataset / "commands" / "0.json").write_text("nonsense")
            write_command(dataset, "retry", states=["error"])
            time.sleep(1.1)

    result = run_campaign(made, dataset, InlineCluster(), listeners=[mend])
    assert (result.committed, result.failed) == (36, 0)
    kinds = [e["kind"] for e in read_events(dataset / "events.jsonl")]
    assert kinds.count("task_retried") == 1 and kinds.count("command_refused") == 1
    assert list((dataset / "commands").iterdir()) == []


def test_plan_says_why_anything_would_run_again_and_what_is_lost_is_made_again(
    failed: tuple[Path, Plan, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dataset, made, path = failed
    path.unlink()
    spec = tmp_path / "c.yaml"
    spec.write_text(campaign(**SPEC).model_dump_json())
    shards = [dataset / shard_path(task.shard_id) for task in made.tasks]
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:-1])
    resume = document(capfd, "plan", spec, "--out", dataset)["resume"]
    assert (resume["committed"], resume["left"]) == (3, 3)
    assert [row["task"] for row in resume["again"]] == [task.task_id for task in made.tasks[:3]]
    whys = [row["why"] for row in resume["again"]]
    assert whys[0] == "its file is gone" and "expected" in whys[1] and "its last attempt failed (error)" in whys[2]
    assert exitwave(["plan", str(spec), "--out", str(dataset)]) == 0
    assert "3 shards are committed, 3 are left to run" in capfd.readouterr().out
    assert document(capfd, "simulate", spec, "--out", dataset, "--cluster", "inline")["failed"] == 0
    assert document(capfd, "verify", dataset)["ok"]
    assert [p.name for p in (dataset / "quarantine").iterdir()] == [shards[1].name]
    left = document(capfd, "plan", spec, "--out", dataset)["resume"]
    assert (left["committed"], left["left"], left["again"]) == (6, 0, [])
    assert exitwave(["plan", str(spec), "--out", str(dataset), "--set", "seed=4"]) == 2
    assert "seed: 3 -> 4" in capfd.readouterr().err


def test_a_folder_that_is_not_mounted_does_not_begin_from_nothing(tmp_path: Path) -> None:
    made = make_plan(campaign(**SPEC, samples_per_structure=12, samples_per_shard=1), base_dir=tmp_path)
    dataset = tmp_path / "d"
    run_campaign(made, dataset, InlineCluster())
    (dataset / "shards").rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"36 of 36 committed shards are not there.*not mounted"):
        run_campaign(made, dataset, InlineCluster())
    (dataset / "shards").exists() and (dataset / "shards").rmdir()
    (tmp_path / "elsewhere").rename(dataset / "shards")
    assert run_campaign(made, dataset, InlineCluster()).committed == 36
