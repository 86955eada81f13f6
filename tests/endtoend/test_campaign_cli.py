"""`failures` and `retry` as a person uses them, and what a running campaign is told by its command files."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from sim_samples import campaign, plan

from exitwave.ingest.errors import InterruptedRunError
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
    made = plan(**SPEC)
    dataset = tmp_path / "d"
    path = dataset / shard_path(made.tasks[0].shard_id)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no HDF5")
    stop = threading.Event()

    def once_failed(event: dict[str, Any]) -> None:
        if event["kind"] == "task_failed" and event["final"]:
            stop.set()

    with pytest.raises(InterruptedRunError):
        run_campaign(made, dataset, Slow(), stop=stop, listeners=[once_failed])
    assert [f["attempts"] for f in campaign_failures(dataset)] == [2]
    assert run_campaign(made, dataset, InlineCluster()).failed == 1
    assert [f["attempts"] for f in campaign_failures(dataset)] == [2]  # given up already: not run again in this round
    assert run_campaign(made, dataset, InlineCluster()).failed == 1
    assert [f["attempts"] for f in campaign_failures(dataset)] == [4]


class Slow(InlineCluster):
    """What failed comes first again, so that it has failed for good before the rest is done."""

    n_workers = 0

    def wait(self, timeout_s: float) -> list[Any]:
        return super().wait(timeout_s)


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
