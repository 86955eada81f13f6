"""The service, the controller, or both killed at any moment: the same truth afterwards, and nothing twice."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import line
import pytest

pytest.importorskip("fastapi")
from service import Service

from exitwave.ingest.manifest import load_manifest


def controllers(service: Service, id: str) -> list[int]:
    return line.processes_naming(service.root / ".exitwave" / "jobs" / id)


def kill_at_random(folder: Path, kills: int, seed: int) -> None:
    """`kills` times: let it work for a while, then SIGKILL the service, the controller, or both."""
    rng = random.Random(seed)
    service = Service(folder / "root").start()
    text = line.PIPELINE.replace("samples_per_structure: 6", "samples_per_structure: 60").replace(
        "steps: 12", "steps: 80"
    )
    try:
        assert service.submit("run", text).status_code == 201
        done = 0
        told = []
        while done < kills:
            time.sleep(rng.uniform(0.2, 6.0))
            state = service.get("/api/runs/run")["state"]
            if state == "finished":
                break
            assert state in ("starting", "running", "waiting"), service.call("GET", "/api/runs/run/log").text[-3000:]
            whom = rng.choice(("service", "controller", "both"))
            running = controllers(service, "run")
            assert len(running) <= 1, f"{len(running)} controllers at once"
            if whom != "service":
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
            if whom != "controller":
                service.kill()
                time.sleep(rng.uniform(0, 1.5))
                service.start()
            told.append((whom, state, bool(running)))
            done += 1
        run = service.wait("run", "finished", seconds=600)
        assert run["status"]["samples"]["committed"] == run["status"]["samples"]["planned"]
        shards = [shard.shard_id for shard in load_manifest(service.root / "run" / "dataset").shards]
        assert len(set(shards)) == len(shards)
        uids = line.uids_of(service.root / "run" / "dataset")
        assert sorted(uids) == sorted(line.planned_uids(service.root / "run.yaml")), told
        events = line.events(service.root / "run" / "dataset" / "events.jsonl")
        committed = [e["shard_id"] for e in events if e["kind"] == "shard_committed"]
        assert len(set(committed)) == len(committed), "a shard was committed twice"
        steps = [
            e["step"] for e in line.events(service.root / "run" / "train" / "events.jsonl") if e["kind"] == "train_step"
        ]
        assert steps[-1] == 80
        assert done >= min(kills, 3), told
        line.wait_until(lambda: controllers(service, "run") == [], timeout=20)
    finally:
        service.end()


@pytest.mark.long
def test_a_few_kills(tmp_path):
    kill_at_random(tmp_path, kills=3, seed=random.randrange(10**6))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_twenty_kills(tmp_path):
    kill_at_random(tmp_path, kills=20, seed=random.randrange(10**6))
