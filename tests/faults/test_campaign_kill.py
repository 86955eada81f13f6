"""A campaign that is killed, stopped or starved, with real processes and real signals, and then simply run again.

Whatever happened, the second run ends with exactly the samples of the plan, none twice, every byte verified, nothing
temporary left; and what the first run had committed is not simulated again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from sim_samples import campaign

from exitwave.ingest.dataset import open_dataset
from exitwave.ingest.manifest import load_manifest
from exitwave.ingest.verify import verify_dataset
from exitwave.simulate.campaign import run_campaign
from exitwave.simulate.cluster import make_cluster
from exitwave.simulate.plan import Plan, make_plan
from exitwave.simulate.spec import CampaignSpec
from exitwave.simulate.state import campaign_failures, campaign_status

CONTROLLER = Path(__file__).resolve().parent.parent / "support" / "sim_controller.py"
SMALL: dict[str, Any] = {"simulator": "weak-phase", "samples_per_structure": 12, "samples_per_shard": 1}


class Controller:
    """A running controller process, in a session of its own, and the events that it tells."""

    def __init__(self, folder: Path, spec: CampaignSpec, dataset: Path, workers: str) -> None:
        path = folder / "campaign.json"
        path.write_text(spec.model_dump_json())
        self.errors = (folder / "stderr").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, str(CONTROLLER), str(path), str(dataset), workers],
            stdout=subprocess.PIPE,
            stderr=self.errors,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def events(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield json.loads(line)

    def until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        for event in self.events():
            if wanted(event):
                return event
        raise AssertionError(f"the controller ended with {self.process.wait()} before that event")

    def workers(self) -> list[psutil.Process]:
        """The processes below the controller that run tasks (not multiprocessing's resource tracker)."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [c for c in children if "spawn_main" in " ".join(c.cmdline())]

    def finish(self) -> int:
        for _ in self.events():
            pass
        code = self.process.wait(timeout=120)
        self.errors.close()
        return code


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Controller]]:
    begun: list[Controller] = []

    def _start(dataset: Path, workers: str = "2", **changes: Any) -> Controller:
        begun.append(Controller(tmp_path, campaign(**(SMALL | changes)), dataset, workers))
        return begun[-1]

    yield _start
    for controller in begun:
        if controller.process.poll() is None:
            controller.process.kill()
            controller.process.wait()


def plan_of(tmp_path: Path, **changes: Any) -> Plan:
    return make_plan(campaign(**(SMALL | changes)), base_dir=tmp_path)


def finish_and_check(tmp_path: Path, dataset: Path, kept: dict[str, int], cluster: str = "inline") -> None:
    """Run the campaign again to its end, and look at every promise."""
    plan = plan_of(tmp_path)
    before = {s.shard_id: s.seq for s in load_manifest(dataset).shards} if dataset.exists() and kept else {}
    assert kept.items() <= before.items()
    result = run_campaign(plan, dataset, make_cluster(cluster))
    assert (result.committed, result.failed) == (len(plan.tasks), 0)
    manifest = load_manifest(dataset)
    assert {s.shard_id: s.seq for s in manifest.shards}.items() >= before.items()
    uids = open_dataset(dataset).uids.tolist()
    assert uids == [sample.uid for sample in plan.samples()] and len(set(uids)) == len(uids)
    report = verify_dataset(dataset)
    assert report.ok and report.samples == plan.n_samples
    assert sorted(p.name for p in dataset.rglob("*.h5")) == sorted(f"{t.shard_id}.h5" for t in plan.tasks)
    assert [p for p in dataset.rglob("*.part") if p.is_file()] == []
    status = campaign_status(dataset)
    assert status["samples"] == {"planned": 36, "committed": 36, "failed": 0, "rejected": 0}
    assert status["shards"] == {"pending": 0, "running": 0, "committed": 36, "failed": 0, "rejected": 0}
    assert campaign_failures(dataset) == []


def committed(dataset: Path) -> dict[str, int]:
    return {s.shard_id: s.seq for s in load_manifest(dataset).shards}


@pytest.mark.parametrize("commits", [1, pytest.param(9, marks=pytest.mark.long)])
def test_a_killed_controller_resumes_and_its_workers_do_not_outlive_it(
    tmp_path: Path, start: Callable[..., Controller], commits: int
) -> None:
    dataset = tmp_path / "data"
    controller = start(dataset)
    controller.until(lambda e: e.get("kind") == "shard_committed" and e["committed"] >= commits)
    workers = controller.workers()
    assert len(workers) == 2
    controller.process.kill()
    controller.process.wait()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert alive == []
    kept = committed(dataset)
    assert commits <= len(kept) < 36
    assert campaign_status(dataset)["shards"]["running"] == 0
    finish_and_check(tmp_path, dataset, kept)


def test_a_controller_killed_before_its_first_commit_leaves_shards_to_adopt(
    tmp_path: Path, start: Callable[..., Controller]
) -> None:
    """The moment between publishing and committing: a worker's shard is there, the manifest does not know it."""
    dataset = tmp_path / "data"
    plan = plan_of(tmp_path)
    controller = start(dataset)
    controller.until(lambda e: e.get("kind") == "shard_committed")
    os.kill(controller.process.pid, signal.SIGSTOP)  # workers go on, nobody commits
    until = time.monotonic() + 20
    while len(list(dataset.glob("shards/*/*.h5"))) <= len(committed(dataset)) and time.monotonic() < until:
        time.sleep(0.05)
    controller.process.kill()
    controller.process.wait()
    kept = committed(dataset)
    orphans = {p.stem: p.stat().st_mtime_ns for p in dataset.glob("shards/*/*.h5") if p.stem not in kept}
    assert orphans and set(orphans) <= {t.shard_id for t in plan.tasks}
    finish_and_check(tmp_path, dataset, kept)
    found = {p.stem: p.stat().st_mtime_ns for p in dataset.glob("shards/*/*.h5")}
    assert orphans.items() <= found.items()
    events = [json.loads(line) for line in (dataset / "events.jsonl").read_text().splitlines()]
    assert {e["shard_id"] for e in events if e.get("adopted")} >= set(orphans)


def test_a_killed_worker_is_replaced_and_its_task_run_again(tmp_path: Path, start: Callable[..., Controller]) -> None:
    dataset = tmp_path / "data"
    controller = start(dataset)
    controller.until(lambda e: e.get("kind") == "shard_committed" and e["committed"] >= 2)
    controller.workers()[0].kill()
    assert controller.finish() == 0
    finish_and_check(tmp_path, dataset, committed(dataset))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_request_to_stop_commits_what_runs_and_resumes(
    tmp_path: Path, start: Callable[..., Controller], number: signal.Signals
) -> None:
    """SIGINT goes to the whole process group, as the terminal sends it: workers must finish what they run."""
    dataset = tmp_path / "data"
    controller = start(dataset)
    controller.until(lambda e: e.get("kind") == "shard_committed" and e["committed"] >= 2)
    if number == signal.SIGINT:
        os.killpg(controller.process.pid, number)
    else:
        controller.process.send_signal(number)
    told = controller.until(lambda e: e.get("kind") == "refused")
    assert told["error"] == "InterruptedRunError" and "the same command resumes" in told["why"]
    assert controller.finish() == 75
    kept = committed(dataset)
    assert 2 <= len(kept) < 36
    assert [p for p in dataset.rglob("*.part") if p.is_file()] == []
    finish_and_check(tmp_path, dataset, kept)


def test_a_second_controller_is_refused_by_name(tmp_path: Path, start: Callable[..., Controller]) -> None:
    dataset = tmp_path / "data"
    first = start(dataset)
    first.until(lambda e: e.get("kind") == "campaign_started")
    second = start(dataset, "inline")
    told = second.until(lambda e: e.get("kind") == "refused")
    assert told["error"] == "UsageError" and f"pid {first.process.pid}" in told["why"] and "host " in told["why"]
    assert second.finish() == 2
    assert campaign_status(dataset)["running"]
    assert first.finish() == 0
    finish_and_check(tmp_path, dataset, committed(dataset))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that holds about half of the campaign."""
    path = tmp_path / "small"
    path.mkdir()
    size = plan_of(tmp_path).bytes // 2
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.parametrize("workers", ["inline", "2"])
def test_a_full_disk_interrupts_and_room_resumes(
    tmp_path: Path, small_disk: Path, start: Callable[..., Controller], workers: str
) -> None:
    dataset = small_disk / "data"
    controller = start(dataset, workers)
    told = controller.until(lambda e: e.get("kind") == "refused")
    assert told["error"] == "InterruptedRunError" and "free" in told["why"].lower()
    assert controller.finish() == 75
    kept = committed(dataset)
    assert 0 < len(kept) < 36
    assert [p for p in dataset.rglob("*.part") if p.is_file()] == []
    assert verify_dataset(dataset).ok
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    finish_and_check(tmp_path, dataset, kept)
