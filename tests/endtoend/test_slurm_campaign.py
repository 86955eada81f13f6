"""`exitwave simulate --cluster slurm` against a stand-in for Slurm that ends jobs at a walltime and preempts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_stand_in import SlurmStandIn

from exitwave.ingest.dataset import open_dataset
from exitwave.ingest.errors import InterruptedRunError
from exitwave.ingest.events import read_events
from exitwave.ingest.verify import verify_dataset
from exitwave.simulate.cluster_slurm import SlurmCluster
from exitwave.simulate.cluster_spec import SlurmSpec

SLOW = """
import time
import numpy as np
from exitwave.simulate import FieldSpec, own_simulator

@own_simulator(version="1", fields=[FieldSpec(name="u", dtype="<f4", shape=(4,), axes=("x",), unit="K")])
def simulate(parameters):
    time.sleep({seconds})
    return {{"u": np.full(4, parameters["a"], np.float32)}}
"""
CAMPAIGN = """
name: slow
simulator: {{ use: "slow:simulate", check: false }}
parameters: {{ a: {{ uniform: [0, 1] }} }}
samples: {samples}
samples_per_shard: 1
"""
SITE = """
jobqueue:
  slurm:
    queue: cpu
    walltime: "{walltime}"
    interface: lo
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[SlurmStandIn]:
    made = SlurmStandIn(tmp_path / "slurm")
    yield made
    made.close()


def campaign(folder: Path, *, samples: int, seconds: float) -> Path:
    (folder / "slow.py").write_text(SLOW.format(seconds=seconds))
    path = folder / "slow.yaml"
    path.write_text(CAMPAIGN.format(samples=samples))
    return path


def environment(folder: Path, slurm: SlurmStandIn, walltime: str) -> dict[str, str]:
    """A home of its own, where a site's settings for Slurm stand; certificates are made there, too."""
    config = folder / "home" / ".config" / "dask"
    config.mkdir(parents=True, exist_ok=True)
    (config / "jobqueue.yaml").write_text(SITE.format(walltime=walltime))
    return {**os.environ, **slurm.environment, "HOME": str(folder / "home"), "DASK_CONFIG": str(config)}


def exitwave(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "exitwave.workflows", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.long
def test_a_campaign_in_jobs_that_end_and_are_preempted(slurm: SlurmStandIn, tmp_path: Path) -> None:
    """Two jobs of two workers; one is preempted while it works (Slurm queues it again), one is taken away for good."""
    path = campaign(tmp_path, samples=24, seconds=0.6)
    data = tmp_path / "data"
    process = exitwave(
        "simulate", path, "--out", data, "--cluster", "slurm", "--workers", 2, "--json",
        env=environment(tmp_path, slurm, "00:10:00"),
    )  # fmt: skip
    until = time.monotonic() + 120
    while len(read_events(data / "events.jsonl") if data.exists() else []) < 10 and time.monotonic() < until:
        time.sleep(0.2)
    first, second = sorted(slurm.jobs("RUNNING"))[:2]
    slurm.preempt(first)
    subprocess.run([slurm.bin / "scancel", second], check=True)  # an administrator
    out, error = process.communicate(timeout=200)
    assert process.returncode == 0, error
    assert json.loads(out)["samples"] == 24
    report = verify_dataset(data)
    assert report.ok and report.samples == 24 and len(set(open_dataset(data).uids.tolist())) == 24
    jobs = slurm.jobs()
    assert len(jobs) == 3  # the one that was taken away was asked for again, the preempted one was left to Slurm
    assert jobs[first]["runs"] == 2 and not slurm.jobs("PENDING", "RUNNING")
    failed = [e for e in read_events(data / "events.jsonl") if e["kind"] == "task_failed"]
    assert {e["state"] for e in failed} <= {"lost"} and not any(e["final"] for e in failed)
    key = tmp_path / "home" / ".config" / "exitwave" / "tls" / "key.pem"
    assert key.stat().st_mode & 0o077 == 0  # encrypted by default
    script = (slurm.folder / "jobs" / f"{first}.sh").read_text()
    assert "#SBATCH --partition=cpu" in script and "tls://127.0.0.1:" in script


@pytest.mark.long
def test_jobs_that_reach_their_walltime_lose_no_task(slurm: SlurmStandIn, tmp_path: Path) -> None:
    """Workers know when their job ends, take nothing that could not end before, and leave; the next job goes on."""
    path = campaign(tmp_path, samples=40, seconds=1.5)
    data = tmp_path / "data"
    process = exitwave(
        "simulate", path, "--out", data, "--cluster", "slurm", "--workers", 2,
        env=environment(tmp_path, slurm, "00:00:40"),
    )  # fmt: skip
    _, error = process.communicate(timeout=280)
    assert process.returncode == 0, error
    assert verify_dataset(data).ok and len(open_dataset(data)) == 40
    assert len(slurm.jobs()) >= 3
    assert [e for e in read_events(data / "events.jsonl") if e["kind"] == "task_failed"] == []


@pytest.mark.long
def test_ctrl_c_cancels_the_jobs_and_the_same_command_resumes(slurm: SlurmStandIn, tmp_path: Path) -> None:
    path = campaign(tmp_path, samples=12, seconds=1.0)
    data = tmp_path / "data"
    command = ["simulate", path, "--out", data, "--cluster", "slurm", "--workers", 1]
    env = environment(tmp_path, slurm, "00:10:00")
    process = exitwave(*command, env=env)
    until = time.monotonic() + 90
    while not any(data.glob("shards/*/*.h5")) and time.monotonic() < until:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 75 and "resumes" in error, error
    until = time.monotonic() + 20
    while slurm.jobs("PENDING", "RUNNING", "COMPLETING") and time.monotonic() < until:
        time.sleep(0.1)
    assert {row["state"] for row in slurm.jobs().values()} == {"CANCELLED"}
    assert 0 < len(open_dataset(data)) < 12


def test_jobs_that_never_bring_a_worker_stop_it_with_their_log(
    slurm: SlurmStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", slurm.environment["PATH"])
    spec = SlurmSpec(interface="lo", prologue=("echo 'module: no such thing'; exit 3",))
    cluster = SlurmCluster(1, spec, tls=False, poll_s=0.3, log_folder=tmp_path / "logs")
    monkeypatch.setattr("exitwave.simulate.cluster_slurm._GRACE_S", 0.5)
    cluster.start("weak-phase")
    try:
        cluster.submit("k", len, "abc")
        until = time.monotonic() + 60
        with pytest.raises(InterruptedRunError, match=r"3 jobs in a row ended.*\.out: module: no such thing.*resumes"):
            while time.monotonic() < until:
                cluster.wait(0.1)
    finally:
        cluster.close()
    assert len(slurm.jobs()) == 3


def test_a_refusing_sbatch_is_told(slurm: SlurmStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", slurm.environment["PATH"])
    (slurm.folder / "refuse").write_text("Batch job submission failed: Invalid account")
    cluster = SlurmCluster(1, SlurmSpec(interface="lo"), tls=False, log_folder=tmp_path / "logs")
    with pytest.raises(InterruptedRunError, match=r"sbatch refuses.*Invalid account"):
        cluster.start("weak-phase")
