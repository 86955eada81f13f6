"""`exitwave train --nodes 2` as a job of the stand-in for Slurm, whose two nodes are network namespaces.

The training is `deterministic: any-ranks`: its losses are those of one process to the bit, whatever happened on the
way, so that any step that was lost, doubled or taken on other samples shows.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import line
import pytest
from namespaces import cluster
from slurm_stand_in import SlurmStandIn
from train_data import make_dataset

from exitwave.ingest.manifest import load_manifest
from exitwave.train.run import read_curve

STEPS = 40
TRAINING = """
train:
  model: { preset: tiny, growth: 4, stem: [16] }
  data: { detector_bin: 8 }
  batch: 6
  steps: STEPS
  seed: 11
  deterministic: any-ranks
  optimizer: { lr: 1.0e-4, warmup_steps: 5 }
  checkpoint: { every_steps: 10, keep: 2 }
  engine: { timeout_s: 60 }
  trackers: []
ranks: 2
launch:
  nodes: 2
  warning_s: 60
  slurm: { walltime: "00:10:00", memory_per_worker: 2GB }
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("shared") / "data")


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    folder = tmp_path_factory.mktemp("alone")
    train(write(folder), data, folder / "run", "--ranks", "1", "--set", "launch.nodes=null", env=dict(os.environ))
    return losses(folder / "run")


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[SlurmStandIn]:
    with cluster(2) as made:
        stand_in = SlurmStandIn(tmp_path / "slurm", nodes={f"node{k}": made.prefix(k) for k in range(2)})
        yield stand_in
        stand_in.close()


def write(folder: Path) -> Path:
    path = folder / "line.yaml"
    path.write_text(TRAINING.replace("STEPS", str(STEPS)))
    return path


def command(config: Path, data: Path, out: Path, *more: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "exitwave.workflows",
        "train",
        str(config),
        "--data",
        str(data),
        "--out",
        str(out),
        *more,
    ]


def train(config: Path, data: Path, out: Path, *more: str, env: dict[str, str]) -> None:
    done = subprocess.run(command(config, data, out, *more), env=env, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr


def losses(run: Path) -> list[float]:
    curve = read_curve(run)
    assert [event["step"] for event in curve] == list(range(1, STEPS + 1))
    return [event["loss"] for event in curve]


def environment(slurm: SlurmStandIn, folder: Path) -> dict[str, str]:
    return {**os.environ, **slurm.environment, "HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}


@dataclass
class Job:
    """A training that was submitted and is followed."""

    process: subprocess.Popen[str]
    run: Path
    slurm: SlurmStandIn

    def wait_for(self, true: Callable[[], bool], seconds: float = 90.0) -> None:
        until = time.monotonic() + seconds
        while not true():
            assert self.process.poll() is None and time.monotonic() < until, self.story()
            time.sleep(0.05)

    def at_step(self, step: int) -> Callable[[], bool]:
        return lambda: any(e["step"] >= step for e in (read_curve(self.run) if self.run.exists() else []))

    def end(self, code: int = 0) -> str:
        out, error = self.process.communicate(timeout=170)
        assert self.process.returncode == code, error + self.story()
        return out + error

    def story(self) -> str:
        files = [*self.run.glob(".slurm/*.out"), *self.run.glob(".slurm/*/verdict"), *self.run.glob("logs/*/*.log")]
        return "\n".join(f"--- {path}\n{path.read_text()[-3000:]}" for path in files)

    def attempts(self) -> list[Path]:
        return sorted(p for p in (self.run / ".slurm").glob("*-*") if p.is_dir())


def submit(slurm: SlurmStandIn, folder: Path, data: Path) -> Job:
    process = subprocess.Popen(
        command(write(folder), data, folder / "run"),
        env=environment(slurm, folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    return Job(process, folder / "run", slurm)


@pytest.mark.long
def test_two_nodes_train_as_one_process_and_read_shared_storage_once(
    slurm: SlurmStandIn, tmp_path: Path, data: Path, alone: list[float]
) -> None:
    job = submit(slurm, tmp_path, data)
    told = job.end()
    assert "Trained 40 steps" in told
    assert losses(job.run) == alone
    (row,) = slurm.jobs().values()
    assert (row["state"], row["runs"], row["allotted"]) == ("COMPLETED", 1, ["node0", "node1"])
    (attempt,) = job.attempts()
    staged = [json.loads(path.read_text()) for path in sorted(attempt.glob("node-*.staged"))]
    assert [entry["host"] for entry in staged] == ["node0", "node1"]
    nbytes = load_manifest(data).nbytes
    assert sum(entry["bytes_from_source"] for entry in staged) == nbytes
    assert all(entry["bytes_copied"] == nbytes for entry in staged)  # what one did not read came from the other
    caches = [list((slurm.folder / "tmp" / f"node{k}").glob("exitwave-*/*/ready/*.h5")) for k in range(2)]
    assert len(caches[0]) == len(caches[1]) == len(load_manifest(data).shards)
    assert (attempt / "secret").stat().st_mode & 0o077 == 0
    logs = {
        str(p.relative_to(job.run / "logs" / attempt.name)) for p in (job.run / "logs").glob("*/*/*/*/*/stderr.log")
    }
    assert len(logs) == 2  # one a rank


@pytest.mark.long
@pytest.mark.parametrize("warning_s", [20.0, 0.0], ids=["with a warning", "without"])
def test_preempted_in_mid_training_it_goes_on_after_the_queue(
    slurm: SlurmStandIn, tmp_path: Path, data: Path, alone: list[float], warning_s: float
) -> None:
    """Warned, it leaves a checkpoint of the step it was at; else it goes on from the last one."""
    job = submit(slurm, tmp_path, data)
    job.wait_for(job.at_step(12))
    (number,) = slurm.jobs()
    slurm.preempt(number, warning_s=warning_s)
    job.end()
    assert losses(job.run) == alone
    assert slurm.jobs()[number]["runs"] == 2 and len(slurm.jobs()) == 1 and len(job.attempts()) == 2
    resumed = [e["step"] for e in events(job.run) if e["kind"] == "train_resumed"]
    assert resumed == [10] if not warning_s else resumed[0] > 11
    if warning_s:
        assert (job.attempts()[0] / "ended").read_text().strip() == "75"


@pytest.mark.long
def test_at_the_walltime_it_leaves_a_checkpoint_and_is_queued_again(
    slurm: SlurmStandIn, tmp_path: Path, data: Path, alone: list[float]
) -> None:
    job = submit(slurm, tmp_path, data)
    job.wait_for(job.at_step(12))
    (number,) = slurm.jobs()
    slurm.shorten(number, 60)  # as long as the warning is
    job.end()
    assert losses(job.run) == alone
    assert slurm.jobs()[number]["state"] == "COMPLETED" and slurm.jobs()[number]["runs"] == 2
    assert (job.attempts()[0] / "ended").read_text().strip() == "75"
    assert next(e["step"] for e in events(job.run) if e["kind"] == "train_resumed") > 11


@pytest.mark.long
def test_a_node_that_dies_ends_the_other_which_names_it(
    slurm: SlurmStandIn, tmp_path: Path, data: Path, alone: list[float]
) -> None:
    job = submit(slurm, tmp_path, data)
    job.wait_for(job.at_step(15))
    slurm.end_node("node1")
    began = time.monotonic()
    job.wait_for(lambda: (job.attempts()[0] / "verdict").exists(), 30)
    assert time.monotonic() - began < 20
    verdict = (job.attempts()[0] / "verdict").read_text()
    assert verdict.startswith("75\nnode node1 is gone"), verdict
    job.end()
    assert losses(job.run) == alone
    (row,) = slurm.jobs().values()
    assert row["runs"] == 2


@pytest.mark.long
def test_plain_srun_makes_each_task_a_rank(slurm: SlurmStandIn, tmp_path: Path, data: Path, alone: list[float]) -> None:
    """A script of one's own, without --nodes: the ranks meet by a file, and talk by the nodes' own interfaces."""
    run = tmp_path / "run"
    words = shlex.join(command(write(tmp_path), data, run))
    script = f"""#!/usr/bin/env bash
#SBATCH --output={tmp_path}/%j.out
#SBATCH --nodes=2
srun --ntasks-per-node=1 {words}
"""
    done = subprocess.run(
        [slurm.bin / "sbatch", "--parsable"], input=script, env=environment(slurm, tmp_path), check=True, text=True,
        capture_output=True,
    )  # fmt: skip
    number = done.stdout.strip()
    until = time.monotonic() + 120
    while slurm.jobs("PENDING", "RUNNING", "COMPLETING") and time.monotonic() < until:
        time.sleep(0.1)
    assert slurm.jobs()[number]["state"] == "COMPLETED", (tmp_path / f"{number}.out").read_text()
    assert losses(run) == alone


@pytest.mark.long
def test_the_whole_line_in_jobs_and_a_killed_command_finds_its_job_again(tmp_path: Path) -> None:
    """The campaign on workers in jobs, the training in a job of two nodes, the rest where the command runs."""
    with cluster(2, host=True) as made:
        slurm = SlurmStandIn(tmp_path / "slurm", nodes={f"node{k}": made.prefix(k) for k in range(2)})
        try:
            pipeline = line.write_pipeline(
                tmp_path,
                ("{kind: local, workers: 2}", '{kind: slurm, workers: 2, slurm: {walltime: "00:10:00"}}'),
                ("ranks: 2", "ranks: 2\nlaunch: {nodes: 2, slurm: {memory_per_worker: 2GB}}"),
                ("steps: 12", "steps: 60"),
            )  # fmt: skip
            run = tmp_path / "run"
            words = [sys.executable, "-m", "exitwave.workflows", "run", str(pipeline), "--out", str(run)]
            env = environment(slurm, tmp_path)
            first = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            until = time.monotonic() + 150
            while not any((run / "train" / "checkpoints").glob("step-*")) and time.monotonic() < until:
                assert first.poll() is None, first.stdout and first.stdout.read()
                time.sleep(0.1)
            for node in ("node0", "node1"):
                slurm.signal_node(node, signal.SIGSTOP)  # else it may be over before the second command sees it
            first.kill()
            first.wait()
            log = tmp_path / "second.log"
            with log.open("w") as file:
                second = subprocess.Popen(words, env=env, stdout=file, stderr=file)
            until = time.monotonic() + 60
            while "is at it already; following it" not in log.read_text():
                assert second.poll() is None and time.monotonic() < until, log.read_text()
                time.sleep(0.1)
            for node in ("node0", "node1"):
                slurm.signal_node(node, signal.SIGCONT)
            assert second.wait(170) == 0, log.read_text()
            assert (run / "report.html").exists() and (run / "train" / "metrics-test.json").exists()
            jobs = slurm.jobs()
            assert sorted(row["nodes"] for row in jobs.values()) == [1, 1, 2]  # two of workers, one of the training
            assert jobs[max(jobs, key=int)]["runs"] == 1
            assert [e["step"] for e in read_curve(run / "train")] == list(range(1, 61))
            assert not (run / "cache").exists()
        finally:
            slurm.close()


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
