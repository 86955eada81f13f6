"""Somebody kills what a task runs in, by a signal: the campaign counts an accident of the machine, not a crash."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from dask_processes import DaskProcesses

from exitwave.simulate.attempts import is_own
from exitwave.simulate.cluster import make_cluster
from exitwave.simulate.worker import run_guarded_call
from exitwave.simulate.worker_guard import Limits

sys.path.insert(0, str(Path(__file__).parent))  # workers import the functions below by the name of this module

DEEDS = [("task", signal.SIGKILL), ("worker", signal.SIGTERM), ("worker", signal.SIGKILL), ("nanny", signal.SIGKILL)]


def sit(marker: str, dataset: str) -> dict[str, Any]:
    part = Path(dataset, f"{marker}.part")
    part.write_text(str(os.getpid()))
    part.rename(marker)
    time.sleep(100)
    return {}


@pytest.fixture
def others(tmp_path: Path) -> Iterator[DaskProcesses]:
    made = DaskProcesses(tmp_path / "dask")
    made.start_scheduler()
    made.start_worker()
    made.wait_for_workers(1)
    yield made
    made.close()


def test_whatever_is_killed_is_no_crash_of_the_task(others: DaskProcesses, tmp_path: Path) -> None:
    cluster = make_cluster(others.address)
    cluster.start("weak-phase")
    try:
        for who, number in DEEDS:
            marker = tmp_path / f"{who}-{number.name}"
            cluster.submit(marker.name, run_guarded_call, sit, str(marker), str(tmp_path), Limits())
            until, found = time.monotonic() + 90, []
            while not marker.exists() and not found and time.monotonic() < until:
                found = cluster.wait(0.1)
            assert marker.exists(), found
            task = psutil.Process(int(marker.read_text()))
            worker = task.parent()
            assert worker is not None
            chosen = {"task": task, "worker": worker, "nanny": worker.parent()}[who]
            chosen.send_signal(number)
            until = time.monotonic() + 60
            while not found and time.monotonic() < until:
                found = cluster.wait(0.1)
            assert found, marker.name
            (outcome,) = found
            print(outcome)
            told = outcome.result["failed"] if outcome.kind == "ok" else {"state": outcome.kind}
            assert told["state"] in ("killed", "lost"), outcome
            if outcome.kind == "ok":
                assert not is_own(told["state"], told["signal"]), outcome
    finally:
        cluster.close()
