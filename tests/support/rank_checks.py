"""Test files that launch themselves under torchrun: every rank runs all checks, each check becomes a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

Check = Callable[[int, int], None]


def run_here(checks: Sequence[Check], folder: Path) -> None:
    """One rank: runs `checks` as check(rank, size) in order until one fails, and writes what happened."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    results = {}
    for check in checks:
        try:
            check(rank, size)
            results[check.__name__] = "passed"
        except BaseException:
            results[check.__name__] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(results))
        if results[check.__name__] != "passed":
            os._exit(1)  # the ranks are out of step from here on
    dist.destroy_process_group()


def launch(file: str, size: int, folder: Path) -> list[dict[str, str]]:
    """Runs `file` as `size` ranks; for each rank check -> "passed" or its traceback, and what went to stderr."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    support = str(Path(__file__).parent)
    ran = subprocess.run(
        [*command, file, str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": support},
        capture_output=True,
        text=True,
        timeout=200,
    )
    files = [folder / f"{rank}.json" for rank in range(size)]
    assert all(f.exists() for f in files), ran.stderr[-3000:]
    return [{**json.loads(f.read_text()), "stderr": ran.stderr[-2000:]} for f in files]


def expect_passed(results: list[dict[str, str]], check: Check) -> None:
    """Fails with the first rank's traceback."""
    for rank, row in enumerate(results):
        said = row.get(check.__name__, f"did not run: an earlier check failed\n{row['stderr']}")
        assert said == "passed", f"rank {rank}: {said}"
