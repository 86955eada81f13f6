"""A whole line in small: a pipeline file of a few quick samples, and the command line as a real process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PIPELINE = """\
name: small
ranks: 2
cluster: {kind: local, workers: 2}
campaign:
  name: small
  seed: 5
  simulator: weak-phase
  structures:
    - library: [Au, Si]
      split: train
    - {prototype: rocksalt, elements: [Mg, O], a_A: 4.212, split: val}
    - {prototype: cesiumchloride, elements: [Cs, Cl], a_A: 4.123, split: test}
  samples_per_structure: 6
  samples_per_shard: 3
  cell: {min_extent_A: 16}
  sampling:
    energy_keV: 200
    semiangle_mrad: 15
    thickness_A: {uniform: [8, 16]}
  scan: {shape: [4, 4], step_A: 0.6}
  grid: {sampling_A: 0.25, max_gpts: 128}
  detector: {shape: [16, 16], max_angle_mrad: 30}
  label: {shape: [16, 16], blur_A: 0.4}
train:
  model: {preset: tiny}
  data: {detector_bin: 8}
  batch: 4
  steps: 12
  optimizer: {warmup_steps: 2}
  checkpoint: {every_steps: 4}
"""


def write_pipeline(folder: Path, *replace: tuple[str, str]) -> Path:
    """The pipeline in `folder`; each pair replaces a text of it."""
    text = PIPELINE
    for before, after in replace:
        assert before in text, before
        text = text.replace(before, after)
    path = folder / "pipeline.yaml"
    path.write_text(text)
    return path


def environment() -> dict[str, str]:
    """One thread a process; no place among ranks that a launcher of the tests may have given."""
    taken = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {k: v for k, v in os.environ.items() if k not in taken} | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def exitwave(*arguments: object, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "exitwave.workflows", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(),
    )


def start(*arguments: object, log: Path) -> subprocess.Popen[bytes]:
    """Start the command in a session of its own; what it prints goes to `log`."""
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "exitwave.workflows", *map(str, arguments)],
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=environment(),
        )


def events(path: Path) -> list[dict[str, Any]]:
    """Whole events of a log, or none."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1] if line]


def wait_until(true: Callable[[], bool], process: subprocess.Popen[bytes] | None = None, timeout: float = 120) -> None:
    """Wait for a condition; fails when the process ends before it, or too much time passes."""
    until = time.monotonic() + timeout
    while not true():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"the process ended with {process.returncode} before the awaited state")
        if time.monotonic() > until:
            raise AssertionError("the awaited state did not come")
        time.sleep(0.02)


def uids_of(dataset: Path) -> list[int]:
    """Every committed uid, read by the real reader."""
    from exitwave.ingest import open_dataset

    return [int(u) for u in open_dataset(dataset).uids]


def planned_uids(pipeline: Path, overrides: Sequence[str] = ()) -> list[int]:
    """Every uid of the plan."""
    from exitwave.workflows.campaigns import read_campaign

    return [sample.uid for sample in read_campaign(pipeline, overrides).plan.samples()]


def processes_naming(path: Path) -> list[int]:
    """Processes (ours excepted) whose command line names `path`."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                words = (folder / "cmdline").read_bytes()
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if str(path).encode() in words and state != "Z":
                found.append(int(folder.name))
    return found


def end(process: subprocess.Popen[bytes]) -> None:
    """Make sure that a process started here is gone."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
