"""Two controllers, real processes, on one host and on two: one works, the other is refused or takes over, none doubles.

The other host is a UTS namespace of its own: the same kernel under another name.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sim_samples import campaign

from exitwave.ingest.dataset import open_dataset
from exitwave.ingest.events import read_events
from exitwave.ingest.manifest import load_manifest
from exitwave.ingest.verify import verify_dataset
from exitwave.simulate.plan import make_plan
from exitwave.simulate.state import campaign_status

CONTROLLER = Path(__file__).resolve().parent.parent / "support" / "chaos_controller.py"
SPEC = campaign(simulator="weak-phase", samples_per_structure=10, samples_per_shard=1)
N = 30

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    begun: list[subprocess.Popen[str]] = []

    def _start(*options: str, host: str = "", pause_s: float = 0.0) -> subprocess.Popen[str]:
        """A controller with an inline cluster; `host`: the name of the host that it is on."""
        content = {
            "campaign": SPEC.model_dump(mode="json"), "deeds": {}, "pause_s": pause_s, "task_s": 60.0,
            "task_memory_bytes": 0,
        }  # fmt: skip
        path = tmp_path / f"{len(begun)}.json"
        path.write_text(json.dumps(content))
        command = [sys.executable, str(CONTROLLER), str(path), str(tmp_path / "data"), "inline", *options]
        if host:
            command = ["unshare", "--uts", "sh", "-c", f'hostname {host} && exec "$@"', "sh", *command]
        begun.append(
            subprocess.Popen(
                command, stderr=subprocess.PIPE, text=True, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        )  # fmt: skip
        return begun[-1]

    yield _start
    for process in begun:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.fixture
def other_host() -> str:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode:
        pytest.skip("no UTS namespace can be made here")
    return "elsewhere"


def commits(dataset: Path) -> int:
    return len(load_manifest(dataset).shards) if (dataset / "manifest.jsonl").exists() else 0


def until(true: Callable[[], Any], process: subprocess.Popen[str], seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)


def check(tmp_path: Path, epochs: list[int]) -> None:
    """All of the plan, once, in lines of these epochs, in their order."""
    dataset = tmp_path / "data"
    plan = make_plan(SPEC, base_dir=tmp_path)
    uids = open_dataset(dataset).uids.tolist()
    assert sorted(uids) == sorted(sample.uid for sample in plan.samples()) and len(set(uids)) == N
    assert verify_dataset(dataset).ok
    lines = [json.loads(line) for line in (dataset / "manifest.jsonl").read_text().splitlines()[1:]]
    found = [line["epoch"] for line in lines]
    assert found == sorted(found) and sorted(set(found)) == epochs and len(lines) == N
    assert campaign_status(dataset)["samples"]["committed"] == N


def test_a_controller_is_killed_and_another_host_goes_on(tmp_path: Path, start: Start, other_host: str) -> None:
    dataset = tmp_path / "data"
    first = start(pause_s=0.2)
    until(lambda: commits(dataset) >= 3, first)
    first.kill()
    first.communicate()
    kept = commits(dataset)
    left = dataset / "shards" / ".part" / f".{'0' * 32}.{os.uname().nodename}.{first.pid}-1.part"
    left.write_bytes(b"half of a shard")  # what it may have left, which no process of another host can be asked about
    second = start(host=other_host)
    _, told = second.communicate(timeout=120)
    assert second.returncode == 0, told
    check(tmp_path, [1, 2])
    assert list(dataset.rglob(".*.part")) == []
    lines = [json.loads(line) for line in (dataset / "manifest.jsonl").read_text().splitlines()[1:]]
    assert [line["epoch"] for line in lines].count(1) == kept >= 3
    assert lines[-1]["producer"]["host"] == other_host
    hosts = [e["host"] for e in read_events(dataset / "events.jsonl") if e["kind"] == "campaign_started"]
    assert hosts == [os.uname().nodename, other_host]


@pytest.mark.long
def test_two_hosts_without_common_locks(tmp_path: Path, start: Start, other_host: str) -> None:
    """Where locks do not reach, the beat of the lease refuses a second controller, and the epoch stops a stale one."""
    dataset = tmp_path / "data"
    first = start("no-locks", pause_s=1.0)
    until(lambda: commits(dataset) >= 2, first)
    second = start("no-locks", host=other_host)
    _, told = second.communicate(timeout=60)
    assert second.returncode == 2 and f"pid {first.pid}" in told and "another controller is running" in told
    os.kill(first.pid, signal.SIGSTOP)  # a machine that is suspended: it does not know that time passes
    kept = commits(dataset)
    assert kept < N - 2
    third = start("no-locks", host=other_host)
    _, told = third.communicate(timeout=120)
    assert third.returncode == 0, told
    check(tmp_path, [1, 2])
    os.kill(first.pid, signal.SIGCONT)
    _, told = first.communicate(timeout=60)
    assert first.returncode == 75 and "another controller" in told
    check(tmp_path, [1, 2])
    assert commits(dataset) == N and list(dataset.rglob(".*.part")) == []


@pytest.mark.long
def test_a_sleeper_wakes_while_its_successor_works(tmp_path: Path, start: Start, other_host: str) -> None:
    dataset = tmp_path / "data"
    first = start("no-locks", pause_s=0.5)
    until(lambda: commits(dataset) >= 2, first)
    os.kill(first.pid, signal.SIGSTOP)
    second = start("no-locks", host=other_host, pause_s=0.3)
    until(lambda: json.loads((dataset / "lease").read_text())["epoch"] == 2, second)
    os.kill(first.pid, signal.SIGCONT)
    _, told = first.communicate(timeout=60)
    assert first.returncode == 75 and "another controller took over" in told
    assert second.wait(timeout=120) == 0
    check(tmp_path, [1, 2])
