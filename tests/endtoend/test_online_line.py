"""`exitwave run --online` as real processes: it trains while it simulates, resumes, and is done again to the bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from line import end, events, exitwave, planned_uids, processes_naming, start, uids_of, wait_until, write_pipeline

from exitwave.ingest.arrivals import ARRIVALS_NAME, read_log
from exitwave.train.run import load_model
from exitwave.workflows.status import status_document

LONGER = (
    ("ranks: 2", "ranks: 1"),
    ("workers: 2", "workers: 1"),
    ("samples_per_structure: 6", "samples_per_structure: 30"),
    ("samples_per_shard: 3", "samples_per_shard: 4"),
    ("steps: 12", "steps: 30\n  eval_every_steps: 20"),
    ("every_steps: 4", "every_steps: 5"),
)


def same_weights(a: Path, b: Path) -> bool:
    left, right = (load_model(path).module.state_dict() for path in (a, b))
    return all(torch.equal(left[name], right[name]) for name in left)


def test_trained_beside_the_campaign_and_done_again_to_the_bit(tmp_path: Path) -> None:
    path, out, again = write_pipeline(tmp_path, *LONGER), tmp_path / "run", tmp_path / "again"
    done = exitwave("run", path, "--out", out, "--online")
    assert done.returncode == 0, done.stderr
    assert "waits for the first 8 samples" in done.stderr
    assert "simulate: 120 of 120 samples" in done.stderr
    assert "train: 30 of 30 steps" in done.stderr
    assert "train: samples were used" in done.stderr
    assert sorted(uids_of(out / "dataset")) == sorted(planned_uids(path))
    committed = [e["t"] for e in events(out / "dataset" / "events.jsonl") if e["kind"] == "shard_committed"]
    first_step = next(e["t"] for e in events(out / "train" / "events.jsonl") if e["kind"] == "train_step")
    assert first_step < max(committed), "it trained before all was simulated"
    log = read_log(out / "train" / ARRIVALS_NAME)
    assert len(log["entries"]) > 1
    assert log["arrived"][-1]["samples"] == 60
    status = status_document(out)
    assert (status["stages"]["train"], status["stages"]["stage"]) == ("done", "not needed")
    replayed = exitwave("train", path, "--data", out, "--out", again, "--replay", out)
    assert replayed.returncode == 0, replayed.stderr
    assert same_weights(out / "train", again)


@pytest.mark.long
@pytest.mark.parametrize("whom", ["ranks", "all", "interrupt"])
def test_killed_or_stopped_in_the_middle_it_goes_on(tmp_path: Path, whom: str) -> None:
    path, out, log = write_pipeline(tmp_path, *LONGER), tmp_path / "run", tmp_path / "log"
    process = start("run", path, "--out", out, "--online", log=log)
    try:
        steps = out / "train" / "events.jsonl"
        wait_until(lambda: any(e["kind"] == "train_checkpoint" for e in events(steps)), process)
        if whom == "ranks":
            rank = next(pid for pid in processes_naming(out / "train" / "train.yaml") if pid != process.pid)
            os.kill(rank, signal.SIGKILL)
            assert process.wait(120) == 1
            assert "The campaign goes on to its end" in log.read_text()
            assert sorted(uids_of(out / "dataset")) == sorted(planned_uids(path))
        elif whom == "all":
            process.send_signal(signal.SIGKILL)
            process.wait(20)
            wait_until(lambda: not processes_naming(out))
            other = exitwave("run", path, "--out", out)
            assert other.returncode == 2
            assert "began with --online" in other.stderr
        else:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 75
            assert not processes_naming(out)
    finally:
        end(process)
    done = exitwave("run", path, "--out", out, "--online")
    assert done.returncode == 0, done.stderr
    assert sorted(uids_of(out / "dataset")) == sorted(planned_uids(path))
    resumed = [e["step"] for e in events(steps) if e["kind"] == "train_resumed"]
    assert resumed
    assert resumed[-1] >= 5
    again = exitwave("train", path, "--data", out, "--out", tmp_path / "again", "--replay", out)
    assert again.returncode == 0, again.stderr
    assert same_weights(out / "train", tmp_path / "again"), "as if nothing had happened"
    assert "Traceback" not in log.read_text()
