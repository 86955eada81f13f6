"""The process beside each worker: what a task does to it is told by class, and costs nobody else anything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import guard_tasks
import psutil
import pytest

from exitwave.simulate.worker_guard import Guard, Limits, memory_of_machine


@pytest.fixture(scope="module")
def guard() -> Iterator[Guard]:
    made = Guard(simulator="weak-phase")
    made.start()
    yield made
    made.close()


def failed(guard: Guard, function: Any, *args: Any, **limits: Any) -> dict[str, Any]:
    report = guard.call(function, args, Limits(**limits))["failed"]
    assert report["host"] == os.uname().nodename and report["pid"] != os.getpid() and report["seconds"] >= 0
    return dict(report)


def test_tasks_share_one_process_that_is_not_this_one(guard: Guard) -> None:
    first, second = (guard.call(guard_tasks.double, (k,), Limits()) for k in (3, 4))
    assert (first["value"], second["value"]) == (6, 8)
    assert first["pid"] == second["pid"] != os.getpid()


@pytest.mark.parametrize(
    ("what", "state", "why"),
    [
        ("other", "error", "ValueError: cannot: other"),
        ("memory", "memory", "MemoryError: no room for 3 GB"),
        ("disk", "disk-full", "No space left"),
    ],
)
def test_what_is_raised_comes_back_as_a_report(guard: Guard, what: str, state: str, why: str) -> None:
    report = failed(guard, guard_tasks.fail, what)
    assert report["state"] == state and why in report["why"]
    assert guard.call(guard_tasks.double, (1,), Limits())["value"] == 2


def test_a_result_that_cannot_travel_is_an_error(guard: Guard) -> None:
    assert failed(guard, guard_tasks.unpicklable)["state"] == "error"


@pytest.mark.parametrize(
    ("function", "argument", "why"),
    [
        (guard_tasks.die, signal.SIGSEGV, "died of SIGSEGV"),
        (guard_tasks.die, signal.SIGTERM, "died of SIGTERM"),
        (guard_tasks.leave, 3, "ended with exit code 3"),
    ],
)
def test_a_crash_is_killed_and_the_next_task_gets_a_new_process(
    guard: Guard, function: Any, argument: int, why: str
) -> None:
    report = failed(guard, function, int(argument))
    assert report["state"] == "killed" and why in report["why"] and report["why"].endswith(report["signal"])
    assert guard.call(guard_tasks.double, (1,), Limits())["pid"] != report["pid"]


def test_a_guard_that_is_closed_while_a_task_runs_tells_that_it_was_ended(tmp_path: Path) -> None:
    made = Guard(simulator="weak-phase")
    marker = tmp_path / "pids"

    def close() -> None:
        until = time.monotonic() + 60
        while not (marker.exists() and len(marker.read_text().split()) == 2) and time.monotonic() < until:
            time.sleep(0.05)
        made.close()

    closing = threading.Thread(target=close)
    closing.start()
    report = failed(made, guard_tasks.hang, str(marker))
    closing.join()
    assert (report["state"], report["signal"]) == ("killed", "SIGKILL")


def test_a_task_that_hangs_is_killed_with_what_it_started(guard: Guard, tmp_path: Path) -> None:
    began = time.monotonic()
    report = failed(guard, guard_tasks.hang, str(tmp_path / "pids"), seconds=1.0)
    assert report["state"] == "timeout" and "its limit is 1 s" in report["why"] and 1.0 <= report["seconds"] < 10
    assert time.monotonic() - began < 30
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    gone = [p for p in pids if not psutil.pid_exists(p) or psutil.Process(p).status() == psutil.STATUS_ZOMBIE]
    assert gone == pids


def test_a_task_that_takes_too_much_memory_is_stopped_while_it_grows(guard: Guard) -> None:
    guard.call(guard_tasks.double, (1,), Limits())
    report = failed(guard, guard_tasks.swallow, 4000, seconds=60.0, memory_bytes=600_000_000)
    assert report["state"] == "memory" and "its limit is 600 MB" in report["why"] and report["seconds"] < 30


def test_the_worker_s_own_limit_counts_where_the_task_has_none() -> None:
    guard = Guard(simulator="weak-phase", memory_bytes=600_000_000)
    try:
        report = failed(guard, guard_tasks.swallow, 4000, seconds=60.0)
        assert report["state"] == "memory" and "its limit is 570 MB" in report["why"]
    finally:
        guard.close()
    assert 10**8 < memory_of_machine() <= psutil.virtual_memory().total


def test_the_process_dies_with_its_worker(tmp_path: Path) -> None:
    """The worker is killed while its task hangs."""
    marker = tmp_path / "pids"
    code = (
        "import guard_tasks; from exitwave.simulate.worker_guard import Guard, Limits; "
        f"Guard(simulator='weak-phase').call(guard_tasks.hang, ({str(marker)!r},), Limits())"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    worker = subprocess.Popen([sys.executable, "-c", code], env=environment)
    until = time.monotonic() + 60
    while not (marker.exists() and len(marker.read_text().split()) == 2) and time.monotonic() < until:
        time.sleep(0.05)
    child, grandchild = (int(pid) for pid in marker.read_text().split())
    worker.kill()
    worker.wait()
    try:
        gone, alive = psutil.wait_procs([psutil.Process(child)], timeout=10)
        assert gone and not alive
    except psutil.NoSuchProcess:
        pass
    finally:
        os.kill(grandchild, signal.SIGKILL)
