"""Kill the service, the controller or both at any moment, again and again: the same truth, and nothing twice.

Twenty kills in one command, a few minutes:

    python -m pytest -m long tests/faults/test_service_kill.py -k twenty
"""

from __future__ import annotations

import os
import random
import signal
import time
import uuid
from pathlib import Path
from typing import Any

import line
import psutil
import pytest

pytest.importorskip("fastapi")
from service import Service

from exitwave.ingest import open_dataset
from exitwave.ingest.manifest import load_manifest

MARK = "EXITWAVE_SERVICE_KILL_TEST"
STEPS = 80
TEXT = line.PIPELINE.replace("samples_per_structure: 6", "samples_per_structure: 60").replace(
    "steps: 12", f"steps: {STEPS}"
)
BUSY = ("starting", "running", "waiting")
WHOM = ("service", "controller", "both")


class Kills:
    """One service and the runs that it is asked for, one after another, until enough was killed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng, self.seed = random.Random(seed), seed
        self.service = Service(folder / "root").start()
        self.told: list[str] = []
        self.most_committed = 0

    def tell(self, text: str) -> None:
        self.told.append(text)
        print(text, flush=True)

    def controllers(self, id: str) -> list[int]:
        return line.processes_naming(self.service.root / ".exitwave" / "jobs" / id)

    def kill_one(self, id: str, whom: str, share: float) -> bool:
        """Kill a while after `share` of the work is done; False where the run had ended before."""
        service = self.service
        line.wait_until(lambda: share_done(service.root / id) >= share, timeout=200)
        time.sleep(self.rng.uniform(0, 2.0))
        while True:
            before = service.get(f"/api/runs/{id}")
            if before["state"] == "finished":
                return False
            assert before["state"] in BUSY, self.words(id)
            running = self.controllers(id)
            assert len(running) <= 1, f"{len(running)} controllers at once"
            if running or whom == "service":
                break
            time.sleep(0.1)
        self.same_truth(id, before)
        if whom != "service":
            for pid in running:
                os.kill(pid, signal.SIGKILL)
        if whom != "controller":
            service.kill()
            time.sleep(self.rng.uniform(0, 1.5))
            service.start()
            after = service.get(f"/api/runs/{id}")
            assert after["state"] in (*BUSY, "finished"), self.words(id)
            self.same_truth(id, after)
            if whom == "service" and running and after["state"] == "running":
                assert self.controllers(id) == running, "what ran was not adopted"
        self.tell(f"{whom} killed at {self.most_committed} samples, {steps_of(service.root / id)} steps")
        return True

    def same_truth(self, id: str, run: dict[str, Any]) -> None:
        """What was committed once stays so, whoever tells it; what is told is on disk."""
        dataset = self.service.root / id / "dataset"
        committed = run["status"].get("samples", {}).get("committed", 0)
        assert committed >= self.most_committed, f"{committed} after {self.most_committed} samples: {self.told}"
        on_disk = load_manifest(dataset).n_samples if (dataset / "manifest.jsonl").exists() else 0
        assert committed <= on_disk, self.told
        self.most_committed = committed

    def words(self, id: str) -> str:
        log = self.service.call("GET", f"/api/runs/{id}/log").text[-3000:]
        return f"seed {self.seed}: {self.told}\n{self.service.get(f'/api/runs/{id}')['why']}\n{log}"


def steps_of(run: Path) -> int:
    steps = [e["step"] for e in line.events(run / "train" / "events.jsonl") if e["kind"] == "train_step"]
    return steps[-1] if steps else 0


def share_done(run: Path) -> float:
    """Of all that a run does, roughly: half for its 240 samples, half for its steps; more than 1 where it has ended."""
    path = run / "dataset" / "manifest.jsonl"
    samples = load_manifest(path.parent).n_samples if path.exists() else 0
    return 0.5 * samples / 240 + 0.5 * steps_of(run) / STEPS + (run / "report.html").exists()


def nothing_twice(root: Path, id: str) -> None:
    """The plan's samples, each once, with the bytes that a run without any kill makes; one whole training."""
    dataset = root / id / "dataset"
    shards = [shard.shard_id for shard in load_manifest(dataset).shards]
    assert len(set(shards)) == len(shards)
    assert sorted(line.uids_of(dataset)) == sorted(line.planned_uids(root / f"{id}.yaml"))
    committed = [e["shard_id"] for e in line.events(dataset / "events.jsonl") if e["kind"] == "shard_committed"]
    assert len(set(committed)) == len(committed), "a shard was committed twice"
    straight = root.parent / f"straight-{id}"
    made = line.exitwave("simulate", root / f"{id}.yaml", "--out", straight, "--cluster", "inline")
    assert made.returncode == 0, made.stderr
    found, wanted = open_dataset(dataset), open_dataset(straight)
    for field in ("cbed", "potential"):
        ours = dict(zip(found.uids.tolist(), found.checksums(field).tolist(), strict=True))
        assert ours == dict(zip(wanted.uids.tolist(), wanted.checksums(field).tolist(), strict=True)), field
    assert steps_of(root / id) == STEPS
    assert (root / id / "train" / "model.pt").exists() and (root / id / "report.html").exists()


def left_alive(mark: str, apart: int) -> list[str]:
    """Processes of this test that live still, the service apart."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process.pid, " ".join(process.cmdline())[:200]))
        except (psutil.Error, OSError):
            continue
    return [words for pid, words in found if pid not in (apart, os.getpid())]


def kill_at_random(folder: Path, kills: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kills` times: let it work for a while, then SIGKILL the service, the controller, or both."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    chaos = Kills(folder, seed)
    service = chaos.service
    try:
        done, runs = 0, 0
        while done < kills:
            id, runs = f"run-{runs}", runs + 1
            chaos.most_committed = 0
            assert service.submit(id, TEXT).status_code == 201
            for share in sorted(chaos.rng.uniform(-0.2, 0.95) for _ in range(kills - done)):
                done += chaos.kill_one(id, chaos.rng.choice(WHOM), share)
            run = service.wait(id, "finished", seconds=600)
            assert run["status"]["samples"]["committed"] == run["status"]["samples"]["planned"]
            nothing_twice(service.root, id)
        assert service.process is not None
        pid = service.process.pid
        line.wait_until(lambda: left_alive(mark, pid) == [], timeout=40)
    finally:
        service.end()


@pytest.mark.long
def test_a_few_kills(tmp_path, monkeypatch):
    kill_at_random(tmp_path, kills=3, seed=random.randrange(10**6), monkeypatch=monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(4))
def test_twenty_kills_five_in_each_part(tmp_path, monkeypatch, part):
    kill_at_random(tmp_path, kills=5, seed=random.randrange(10**6), monkeypatch=monkeypatch)
