"""Chaos: a campaign while workers, nannies, tasks, scheduler and controller are killed at random, the disk fills and
frees again, one structure always crashes its worker, one hangs and one takes too much memory.

It ends in bounded time with exactly the plan's samples but those of the three structures, each of which stands in
`failures` under its class; no sample is there twice, no file and no process is left over.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos import Chaos
from sim_samples import campaign

from exitwave.ingest.dataset import open_dataset
from exitwave.ingest.verify import verify_dataset
from exitwave.simulate.plan import make_plan
from exitwave.simulate.spec import CampaignSpec
from exitwave.simulate.state import campaign_failures, campaign_status

DEEDS = {2: "crash", 5: "hang", 8: "swallow"}
CLASSES = {"crash": "killed", "hang": "timeout", "swallow": "memory"}


def crystals(structures: int, shards_each: int) -> CampaignSpec:
    """Rock salt with one lattice constant after the other."""
    cells = [
        {"prototype": "rocksalt", "elements": ["Mg", "O"], "a_A": round(4.0 + 0.01 * k, 3)} for k in range(structures)
    ]
    return campaign(
        simulator="weak-phase",
        structures=cells,
        split={"by": "structure"},
        samples_per_structure=shards_each,
        samples_per_shard=1,
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that can be filled."""
    path = tmp_path / "disk"
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(path)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def run_chaos(
    tmp_path: Path, disk: Path, spec: CampaignSpec, order: list[str], *, workers: int, seed: int, every_s: float,
    pause_s: float, seconds: float,
) -> None:  # fmt: skip
    plan = make_plan(spec, base_dir=tmp_path)
    dataset = disk / "data"
    content: dict[str, Any] = {
        "campaign": spec.model_dump(mode="json"),
        "deeds": DEEDS,
        "pause_s": pause_s,
        "task_s": 6.0,
        "task_memory_bytes": 700_000_000,
    }
    chaos = Chaos(tmp_path, dataset, content, workers=workers, seed=seed)
    until = time.monotonic() + seconds
    try:
        for what in order:
            upto = time.monotonic() + every_s * chaos.random.uniform(0.5, 1.5)
            while chaos.code is None and time.monotonic() < upto:
                chaos.keep_alive()
                time.sleep(0.05)
            if what == "disk" and dataset.exists():
                chaos.fill_disk()
                time.sleep(1.0)
                chaos.free_disk()
                continue
            while chaos.code is None and not chaos.kill(what):
                chaos.keep_alive()
                time.sleep(0.1)
                assert time.monotonic() < until, chaos.words()
            if chaos.code is not None:
                break
        chaos.wait_for_end(until - time.monotonic())
        assert chaos.code == 3
    finally:
        chaos.free_disk()
        chaos.close()
    assert chaos.left_alive() == []
    assert sum(chaos.kills.values()) == len(order), (chaos.kills, len(order))
    bad = {task.task_id: DEEDS[task.structure.index] for task in plan.tasks if task.structure.index in DEEDS}
    failures = campaign_failures(dataset)
    print(*failures, sep="\n")
    data = open_dataset(dataset)
    wanted = [sample.uid for task in plan.tasks if task.task_id not in bad for sample in task.samples()]
    uids = data.uids.tolist()
    assert sorted(uids) == sorted(wanted) and len(set(uids)) == len(uids)
    report = verify_dataset(dataset)
    assert report.ok and report.samples == len(wanted)
    assert {row["task"]: row["state"] for row in failures} == {task: CLASSES[deed] for task, deed in bad.items()}
    sources = {task.task_id: list(task.sources) for task in plan.tasks}
    for row in failures:
        assert row["why"] and row["host"] and row["attempts"] >= 2 and row["structures"] == sources[row["task"]], row
    good = {task.shard_id for task in plan.tasks if task.task_id not in bad}
    assert {p.stem for p in dataset.rglob("*.h5")} == good
    assert [p for p in dataset.rglob(".*.part") if p.is_file()] == []
    shards = campaign_status(dataset)["shards"]
    assert shards == {"pending": 0, "running": 0, "committed": len(good), "failed": len(bad), "rejected": 0}


@pytest.mark.long
def test_twenty_kills(tmp_path: Path, small_disk: Path) -> None:
    order = ["worker", "task", "controller", "worker", "task", "nanny", "task", "disk", "worker", "scheduler"]
    run_chaos(
        tmp_path, small_disk, crystals(30, 1), order + ["task", "worker"] * 4 + ["controller", "task"],
        workers=2, seed=1, every_s=0.8, pause_s=0.1, seconds=180.0,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", [1, 2])
def test_two_hundred_shards_and_everything_killed(tmp_path: Path, small_disk: Path, seed: int) -> None:
    order = ["worker", "task", "controller", "nanny", "worker", "scheduler", "task", "worker", "disk", "task"] * 6
    run_chaos(
        tmp_path, small_disk, crystals(70, 3), order, workers=4, seed=seed, every_s=3.0, pause_s=0.3, seconds=1200.0
    )  # fmt: skip
