"""Random SIGKILLs of a search: its controller, a worker, a trial's process. Nothing is lost, doubled or another."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from dask_processes import DaskProcesses
from line import end, events, exitwave, start, wait_until, write_pipeline
from train_data import make_dataset

TUNE = """\
tune:
  trials: 6
  space:
    train.optimizer.lr: {log_uniform: [1.0e-3, 1.0e-2]}
    train.model.growth: {int_uniform: [2, 6]}
  sampler: {name: random, seed: 3}
  pruner: {name: none}
  budget: {steps: 24, validations: 4}
"""
KILLS = ["trial", "worker", "controller"] * 4
SMALL = (("train:\n", f"{TUNE}train:\n"), ("tiny}", "tiny, layers: [1, 1, 1]}"))


def victims(controller: subprocess.Popen[bytes]) -> dict[str, list[int]]:
    """Who can be killed now, by what they are."""
    found: dict[str, list[int]] = {"controller": [controller.pid], "worker": [], "trial": []}
    for process in psutil.Process(controller.pid).children(recursive=True):
        try:
            words = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "exitwave.simulate.worker_child" in words:
            found["trial"].append(process.pid)
        elif "spawn_main" in words:
            found["worker"].append(process.pid)
    return {name: pids for name, pids in found.items() if pids}


def settled(study: Path) -> dict[int, tuple[str, object]]:
    """How each trial ended: the one line that says so."""
    ends = [
        e for e in events(study / "events.jsonl") if e["kind"] in ("trial_finished", "trial_failed", "trial_pruned")
    ]
    assert max(Counter(e["n"] for e in ends).values(), default=1) == 1
    return {e["n"]: (e["kind"], e.get("value")) for e in ends}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_search_that_is_killed_again_and_again_finds_what_a_calm_one_finds(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "data", train=2, val=1, test=1, per_material=4)
    pipeline = write_pipeline(tmp_path, *SMALL)
    calm, study = tmp_path / "calm", tmp_path / "study"
    run = exitwave("tune", pipeline, "--data", data, "--out", calm, "--cluster", "inline", "--quiet", timeout=600)
    assert run.returncode == 0, run.stderr

    command = ("tune", pipeline, "--data", data, "--out", study, "--workers", 2)
    draw, log = random.Random(11), tmp_path / "log.txt"
    kills = draw.sample(KILLS, len(KILLS))
    controller = start(*command, log=log)
    killed: Counter[str] = Counter()
    try:
        until = time.monotonic() + 1500
        while time.monotonic() < until:
            time.sleep(draw.uniform(0.5, 4.0))
            if controller.poll() is not None:
                if controller.returncode == 0:
                    break
                # 75: a worker was killed before its first word, and the command says so; the same command goes on
                assert controller.returncode in (-signal.SIGKILL, 75), log.read_text()[-2000:]
                controller = start(*command, log=log)
                continue
            there = victims(controller).get(kills[0], []) if kills else []
            if there:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(draw.choice(there), signal.SIGKILL)
                    killed[kills.pop(0)] += 1
        assert controller.wait(timeout=5) == 0, log.read_text()[-2000:]
    finally:
        end(controller)
    print(f"killed: {dict(killed)}")
    assert len(killed) == 3 and sum(killed.values()) >= 6

    asked = [e for e in events(study / "events.jsonl") if e["kind"] == "trial_asked"]
    assert [e["n"] for e in asked] == list(range(6))
    assert {e["n"]: e["values"] for e in asked} == {
        e["n"]: e["values"] for e in events(calm / "events.jsonl") if e["kind"] == "trial_asked"
    }
    assert settled(study) == settled(calm)  # the same bits, whatever was trained again after a kill
    for n in range(6):
        ends = [
            i for i, e in enumerate(events(study / "events.jsonl")) if e["kind"] == "trial_finished" and e["n"] == n
        ]
        begins = [i for i, e in enumerate(events(study / "events.jsonl")) if e["kind"] == "trial_begun" and e["n"] == n]
        assert max(begins) < ends[0]  # nothing that had ended was begun again
        assert (study / "trials" / str(n) / "model.pt").exists()
    assert sorted(p.name for p in (study / "trials").iterdir()) == [str(n) for n in range(6)]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_ctrl_c_drains_and_a_second_command_is_refused(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "data", train=2, val=1, test=1, per_material=4)
    pipeline = write_pipeline(tmp_path, *SMALL)
    study = tmp_path / "study"
    command = ("tune", pipeline, "--data", data, "--out", study, "--workers", 2, "--set", "tune.budget.steps=400")
    controller = start(*command, log=tmp_path / "log.txt")
    try:
        wait_until(lambda: len(list(study.glob("trials/*/checkpoints/step-*"))) >= 2, controller)
        second = exitwave(*command)
        assert second.returncode == 2 and "another exitwave command" in second.stderr
        controller.send_signal(signal.SIGINT)
        assert controller.wait(timeout=120) == 75, (tmp_path / "log.txt").read_text()
    finally:
        end(controller)
    log = events(study / "events.jsonl")
    stopped = {e["n"]: e["step"] for e in log if e["kind"] == "trial_stopped"}
    assert set(stopped) == {0, 1}
    for n, step in stopped.items():
        assert step > 0 and (study / "trials" / str(n) / "checkpoints" / f"step-{step:08d}").is_dir()
    assert log[-1]["kind"] == "study_interrupted"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_workers_that_outlive_their_controller_are_waited_for(tmp_path: Path) -> None:
    """On a scheduler that runs already a trial goes on without its controller; the next one waits for it."""
    data = make_dataset(tmp_path / "data", train=2, val=1, test=1, per_material=4)
    pipeline = write_pipeline(tmp_path, *SMALL)
    study, log = tmp_path / "study", tmp_path / "log.txt"
    others = DaskProcesses(tmp_path / "dask")
    changes = ("--set", "tune.trials=3", "--set", "tune.budget.steps=120", "--cluster", others.address)
    command = ("tune", pipeline, "--data", data, "--out", study, *changes)
    try:
        others.start_scheduler()
        for _ in range(2):
            others.start_worker()
        others.wait_for_workers(2)
        controller = start(*command, log=log)
        try:
            wait_until(lambda: len(list(study.glob("trials/*/checkpoints/step-*"))) >= 2, controller)
        finally:
            end(controller)  # SIGKILL
        run = exitwave(*command, timeout=600)
        assert run.returncode == 0, run.stderr + log.read_text()
    finally:
        others.close()
    assert set(settled(study)) == {0, 1, 2}
    for n in range(3):
        steps = [e["step"] for e in events(study / "trials" / str(n) / "events.jsonl") if e["kind"] == "train_step"]
        resumed = [
            e["step"] for e in events(study / "trials" / str(n) / "events.jsonl") if e["kind"] == "train_resumed"
        ]
        again = len(steps) - len(set(steps))
        assert sorted(set(steps)) == list(range(1, 121))
        assert again == 0 or resumed  # no step was trained twice but those behind a checkpoint that was gone back to
        assert again <= 4 * len(resumed)
