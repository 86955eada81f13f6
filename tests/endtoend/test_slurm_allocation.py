"""`--cluster slurm-allocation`: one job, whose srun starts scheduler, controller and workers, on the stand-in."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slurm_stand_in import SlurmStandIn

from exitwave.ingest.dataset import open_dataset
from exitwave.ingest.events import read_events
from exitwave.ingest.verify import verify_dataset

CAMPAIGN = """
campaign:
  name: crystals
  structures: [{ library: [Si, Au] }]
  samples_per_structure: SAMPLES
  samples_per_shard: 1
  grid: { sampling_A: 0.2, max_gpts: 256 }
  detector: { shape: [32, 32], max_q_per_A: 1.2 }
cluster:
  kind: slurm-allocation
  workers: 2
  slurm: { walltime: "00:10:00", interface: lo, memory_per_worker: 2GB }
"""


def submit(slurm: SlurmStandIn, folder: Path, *, samples: int) -> str:
    """The script that `exitwave plan` prints, given to sbatch; the job's number."""
    path = folder / "crystals.yaml"
    path.write_text(CAMPAIGN.replace("SAMPLES", str(samples // 2)))
    environment = {**os.environ, **slurm.environment, "HOME": str(folder / "home")}
    command = [sys.executable, "-m", "exitwave.workflows"]
    planned = subprocess.run(
        [*command, "plan", str(path), "--out", str(folder / "data"), "--json"],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    script = json.loads(planned.stdout)["slurm_script"]
    assert "srun" in script and "exitwave simulate CAMPAIGN.yaml" in script
    script = script.replace("exitwave simulate CAMPAIGN.yaml", f"{shlex.join(command)} simulate {path}")
    done = subprocess.run(
        [slurm.bin / "sbatch", "--parsable"],
        input=script, capture_output=True, text=True, check=True, env=environment, cwd=folder,
    )  # fmt: skip
    return done.stdout.strip()


def wait_for(slurm: SlurmStandIn, job: str, folder: Path, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while slurm.jobs("PENDING", "RUNNING", "COMPLETING") and time.monotonic() < until:
        time.sleep(0.2)
    log = "".join(p.read_text() for p in folder.glob("*.out"))
    assert slurm.jobs()[job]["state"] == "COMPLETED", log


@pytest.mark.long
def test_a_campaign_in_one_allocation(tmp_path: Path) -> None:
    """All is made, encrypted, and the job ends by itself: scheduler and workers leave with the controller."""
    slurm = SlurmStandIn(tmp_path / "slurm")
    try:
        job = submit(slurm, tmp_path, samples=8)
        wait_for(slurm, job, tmp_path)
        assert slurm.jobs()[job]["runs"] == 1
    finally:
        slurm.close()
    report = verify_dataset(tmp_path / "data")
    assert report.ok and report.samples == len(open_dataset(tmp_path / "data")) == 8
    started = [e for e in read_events(tmp_path / "data" / "events.jsonl") if e["kind"] == "campaign_started"]
    assert len(started) == 1 and started[0]["cluster"].startswith("tls://127.0.0.1:")


@pytest.mark.long
@pytest.mark.parametrize("warning_s", [15.0, 0.0], ids=["with a warning", "without"])
def test_preempted_it_is_queued_again_and_ends(tmp_path: Path, warning_s: float) -> None:
    """With a warning (the walltime's is the same) it commits what it has and asks for the queue by itself."""
    slurm = SlurmStandIn(tmp_path / "slurm")
    try:
        job = submit(slurm, tmp_path, samples=24)
        data = tmp_path / "data"
        until = time.monotonic() + 120
        while len(list(data.glob("shards/*/*.h5"))) < 3 and time.monotonic() < until:
            time.sleep(0.1)
        slurm.preempt(job, warning_s=warning_s)
        wait_for(slurm, job, tmp_path, 200.0)
        assert slurm.jobs()[job]["runs"] == 2
    finally:
        slurm.close()
    report = verify_dataset(data)
    assert report.ok and report.samples == 24 and len(set(open_dataset(data).uids.tolist())) == 24
    events = read_events(data / "events.jsonl")
    assert len([e for e in events if e["kind"] == "campaign_started"]) == 2
    committed = [e["shard_id"] for e in events if e["kind"] == "shard_committed"]
    assert len(committed) == len(set(committed)) == 24  # nothing twice
    assert len([e for e in events if e["kind"] == "campaign_interrupted"]) == (1 if warning_s else 0)
