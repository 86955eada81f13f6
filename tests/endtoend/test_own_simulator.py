"""A simulator of one's own from its script to batches: planned, simulated here and by workers, killed, resumed, read.

The example that ships (heat in a plate) is the simulator, the command line the way to run it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exitwave.ingest import GlobalSampler, ShardDataset
from exitwave.ingest.dataset import open_dataset
from exitwave.ingest.events import read_events
from exitwave.ingest.manifest import load_manifest
from exitwave.ingest.staging import stage
from exitwave.ingest.verify import verify_dataset
from exitwave.simulate.state import campaign_status

HEAT = Path(__file__).resolve().parents[2] / "examples" / "heat"
SMALL = ("--set", "samples=48", "--set", "samples_per_shard=4")


def exitwave(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "exitwave.workflows", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def document(*arguments: str, cwd: Path, code: int = 0) -> dict[str, Any]:
    done = exitwave(*arguments, "--json", cwd=cwd)
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def hashes(dataset: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in dataset.glob("shards/*/*.h5")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example in a folder of its own, and its data set, simulated in one process."""
    made = tmp_path_factory.mktemp("heat")
    shutil.copytree(HEAT, made, dirs_exist_ok=True)
    document("simulate", "heat.yaml", "--out", "inline", "--cluster", "inline", *SMALL, cwd=made)
    return made


def test_plan_tells_fields_splits_size_and_time(folder: Path) -> None:
    plan = document("plan", "heat.yaml", *SMALL, cwd=folder)
    assert (plan["samples"], plan["shards"], plan["splits"]) == (48, 13, {"train": 43, "test": 5})
    assert plan["fields"] == [["later", "<f4", [32, 32], "K"], ["initial", "<f4", [32, 32], "K"]]
    assert plan["calibrated"] and plan["core_hours"] > 0
    written = sum(p.stat().st_size for p in (folder / "inline").glob("shards/*/*.h5"))
    assert 0.5 * plan["bytes"] < written < plan["bytes"]


@pytest.mark.long
def test_workers_make_the_same_bytes_and_every_one_is_verified(folder: Path) -> None:
    document("simulate", "heat.yaml", "--out", "workers", "--workers", "2", *SMALL, cwd=folder)
    assert hashes(folder / "workers") == hashes(folder / "inline") and len(hashes(folder / "inline")) == 13
    assert document("verify", "workers", cwd=folder)["ok"]
    assert document("status", "workers", cwd=folder)["samples"]["committed"] == 48
    again = document("simulate", "heat.yaml", "--out", "workers", "--workers", "2", *SMALL, cwd=folder)
    assert again["committed"] == 13 and again["seconds"] < 1


def test_samples_are_what_the_simulator_says_of_their_parameters(folder: Path) -> None:
    data = open_dataset(folder / "inline")
    assert len(data) == 48 and len(set(data.uids.tolist())) == 48
    params = data.params
    assert set(np.unique(params["spots"])) <= {1, 2, 3, 4, 5, 6}
    assert ((params["time_s"] >= 1) & (params["time_s"] <= 3)).all() and len(np.unique(params["time_s"])) == 48
    assert sorted(params["sample_index"].tolist()) == list(range(48))
    field = data.fields[0]
    assert (field.axes, field.unit) == (("y", "x"), "K")
    namespace: dict[str, Any] = {"__name__": "heat"}
    exec((HEAT / "heat.py").read_text(), namespace)
    for i in (0, 17, 47):
        sample = data[i]
        values = {n: sample["params"][n].item() for n in params.dtype.names if n not in ("sample_index", "split")}
        made = namespace["simulate"](values)
        assert all(np.array_equal(sample[name], made[name]) for name in ("later", "initial"))
        # heat is conserved: the mean of the plate stays what it was, but for the camera's noise
        assert abs(sample["later"].mean() - sample["initial"].mean()) < 5 * 0.02 / 32


@pytest.mark.long
def test_killed_campaign_goes_on_where_it_was(folder: Path) -> None:
    dataset = folder / "killed"
    slow = (HEAT / "heat.py").read_text().replace("    edge_mm", "    time.sleep(0.05)\n    edge_mm")
    (folder / "slow.py").write_text("import time\n" + slow)
    use = ("--set", "simulator.use=slow:simulate")
    command = [sys.executable, "-m", "exitwave.workflows", "simulate", "heat.yaml", "--out", str(dataset), "--workers"]
    with subprocess.Popen(
        [*command, "2", *SMALL, *use], cwd=folder, start_new_session=True, stderr=subprocess.DEVNULL
    ) as child:
        while child.poll() is None and len(committed(dataset)) < 3:
            time.sleep(0.02)
        os.killpg(child.pid, signal.SIGKILL)
    first = committed(dataset)
    assert 3 <= len(first) < 13
    document("simulate", "heat.yaml", "--out", "killed", "--workers", "2", *SMALL, *use, cwd=folder)
    assert set(first) < set(committed(dataset)) and len(committed(dataset)) == 13
    begun = [event["task"] for event in read_events(dataset / "events.jsonl") if event["kind"] == "shard_committed"]
    assert len(begun) == len(set(begun)), "a committed shard was simulated again"
    assert verify_dataset(dataset).ok and not list(dataset.glob("shards/.part/*"))
    assert campaign_status(dataset)["samples"]["committed"] == 48
    ours, theirs = open_dataset(dataset), open_dataset(folder / "inline")
    assert np.array_equal(ours[7]["later"], theirs[7]["later"])


def committed(dataset: Path) -> list[str]:
    manifest = dataset / "manifest.jsonl"
    return [s.shard_id for s in load_manifest(dataset).shards] if manifest.exists() else []


def test_ranks_share_each_epoch(folder: Path, tmp_path: Path) -> None:
    stage(folder / "inline", tmp_path / "cache")
    data = ShardDataset(folder / "inline", fields=("later", "initial"), split="train", cache=tmp_path / "cache")
    samplers = [GlobalSampler(data, rank=r, world_size=2, global_batch=8, seed=3) for r in range(2)]
    taken = [[data[i] for batch in sampler for i in batch] for sampler in samplers]
    uids = [int(sample["uid"]) for part in taken for sample in part]
    assert len(taken[0]) == len(taken[1]) == 20 and len(set(uids)) == 40
    assert taken[0][0]["later"].shape == (32, 32)


@pytest.mark.long
def test_the_example_learns_on_two_ranks(folder: Path) -> None:
    document("simulate", "heat.yaml", "--out", "all", "--cluster", "inline", cwd=folder)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "train.py",
        "all",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    learnt, untouched = (float(word) for word in done.stdout.splitlines()[-1].split() if word[0].isdigit())
    assert learnt < 0.75 * untouched
