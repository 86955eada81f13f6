"""A line interrupted in every part, by Ctrl-C and by SIGKILL, and given again: it goes on, nothing is done twice.

Real processes and real signals. After each blow: the exit code, no process left behind, no file under a final name
that is not whole; at the end: exit 0, and the committed sample ids are exactly the plan's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from line import end, events, exitwave, planned_uids, processes_naming, start, uids_of, wait_until, write_pipeline

PARTS = ("simulate", "stage", "train", "evaluate")


def in_part(run: Path, part: str, since: int) -> Callable[[], bool]:
    """Whether the present attempt (events from `since` on) is in the middle of `part`."""

    def there() -> bool:
        kinds = [e["kind"] for e in events(run / "events.jsonl")[since:] if e.get("part") == part]
        if kinds[-1:] != ["part_started"]:
            return bool(kinds) and kinds[-1] in ("part_finished", "part_skipped")  # too quick to be caught
        if part == "simulate":
            return any(e["kind"] == "shard_committed" for e in events(run / "dataset" / "events.jsonl"))
        if part == "train":
            return any(e["kind"] == "train_checkpoint" for e in events(run / "train" / "events.jsonl"))
        return True

    return there


def gone(run: Path) -> bool:
    return processes_naming(run / "dataset") == [] and processes_naming(run / "train") == []


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_interrupted_in_each_part_the_line_goes_on(number: signal.Signals, tmp_path: Path) -> None:
    path, run, log = write_pipeline(tmp_path, ("steps: 12", "steps: 40")), tmp_path / "run", tmp_path / "log"
    steps: list[int] = []
    for part in PARTS:
        since = len(events(run / "events.jsonl"))
        process = start("run", path, "--out", run, log=log)
        try:
            wait_until(in_part(run, part, since), process)
            process.send_signal(number)
            code = process.wait(60)
        finally:
            end(process)
        assert code == (-9 if number == signal.SIGKILL else 75), (part, log.read_text())
        wait_until(lambda: gone(run), timeout=20)
        steps = [e["step"] for e in events(run / "train" / "events.jsonl") if e["kind"] == "train_step"]
    done = exitwave("run", path, "--out", run)
    assert done.returncode == 0, done.stderr
    assert sorted(uids_of(run / "dataset")) == sorted(planned_uids(path))
    assert exitwave("verify", run / "dataset").returncode == 0
    assert max(steps) == 40
    resumed = [e["step"] for e in events(run / "train" / "events.jsonl") if e["kind"] == "train_resumed"]
    assert resumed and min(resumed) >= 4  # it went on from a checkpoint, not from the start
    assert [p for p in run.rglob("*") if p.is_file() and p.name.endswith((".part", ".old"))] == []
    assert (run / "report.html").exists()
    if number == signal.SIGINT:
        assert log.read_text().count("Ctrl-C: ") == len(PARTS)
        assert f"exitwave run {path} --out {run}" in log.read_text()
        assert "Traceback" not in log.read_text()


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    path, run, log = write_pipeline(tmp_path), tmp_path / "run", tmp_path / "log"
    process = start("run", path, "--out", run, "--set", "train.steps=4000", log=log)
    try:
        wait_until(in_part(run, "train", 0), process)
        ranks = [pid for pid in processes_naming(run / "train")]
        assert ranks
        # to the whole group at once, as a terminal does; the ranks are in a session of their own
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        began = time.monotonic()
        assert process.wait(20) == 130
        assert time.monotonic() - began < 5
    finally:
        end(process)
    wait_until(lambda: gone(run), timeout=20)
    assert "Stopped at once" in log.read_text()


@pytest.mark.long
def test_a_killed_rank_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    path, run, log = write_pipeline(tmp_path), tmp_path / "run", tmp_path / "log"
    process = start("run", path, "--out", run, "--set", "train.steps=60", log=log)
    try:
        wait_until(in_part(run, "train", 0), process)
        ranks = [pid for pid in processes_naming(run / "train") if b"exitwave.workflows\0train" in cmdline(pid)]
        os.kill(max(ranks), signal.SIGKILL)
        assert process.wait(90) == 1
    finally:
        end(process)
    text = log.read_text()
    assert "was killed by SIGKILL" in text and "goes on from the last checkpoint" in text and "Traceback" not in text
    assert exitwave("run", path, "--out", run, "--set", "train.steps=60").returncode == 0


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.long
def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    path, run, log = write_pipeline(tmp_path), tmp_path / "run", tmp_path / "log"
    process = start("run", path, "--out", run, log=log)
    try:
        wait_until(lambda: (run / "events.jsonl").exists(), process)
        second = exitwave("run", path, "--out", run)
        assert second.returncode == 2 and "another exitwave command is working in this folder" in second.stderr
        status = exitwave("status", run)
        assert status.returncode == 0, status.stderr
        assert process.wait(120) == 0
    finally:
        end(process)


def test_status_says_when_the_controller_died(tmp_path: Path) -> None:
    path, data, log = write_pipeline(tmp_path), tmp_path / "data", tmp_path / "log"
    process = start("simulate", path, "--out", data, "--set", "samples_per_structure=60", log=log)
    try:
        wait_until(lambda: any(e["kind"] == "shard_committed" for e in events(data / "events.jsonl")), process)
        alive = exitwave("status", data)
        process.kill()
        process.wait()
    finally:
        end(process)
    assert "running" in alive.stdout
    dead = exitwave("status", data)
    assert dead.returncode == 0 and "no controller holds the lease" in dead.stdout
    wait_until(lambda: workers_of(process) == [], timeout=20)


def workers_of(process: subprocess.Popen[bytes]) -> list[int]:
    """Processes of the session that `start` opened."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z" and int(fields[3]) == process.pid:
                found.append(int(folder.name))
    return found
