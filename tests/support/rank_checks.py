"""Test files that launch themselves under torchrun: every rank runs all checks, each check becomes a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

Check = Callable[[int, int], None]
CHECK_S = 200.0


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
        aside = folder / f"{rank}.new"
        aside.write_text(json.dumps(results))
        aside.replace(folder / f"{rank}.json")
        if results[check.__name__] != "passed":
            os._exit(1)  # the ranks are out of step from here on
    dist.destroy_process_group()


def launch(file: str, size: int, folder: Path, *arguments: str) -> list[dict[str, str]]:
    """Runs `file` as `size` ranks; for each rank check -> "passed" or its traceback, and what went to stderr.

    A hang is known by no check coming to its end for `CHECK_S`, however long all of them take on a busy machine.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    support = str(Path(__file__).parent)
    files = [folder / f"{rank}.json" for rank in range(size)]
    with (folder / "stderr").open("w+") as stderr:
        ran = subprocess.Popen(
            [*command, file, str(folder), *arguments],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": support},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
        try:
            moved = time.time()
            while ran.poll() is None and time.time() - moved < CHECK_S:
                time.sleep(0.1)
                moved = max(moved, *(f.stat().st_mtime for f in files if f.exists()), 0.0)
        finally:
            if ran.poll() is None:
                ran.terminate()  # torchrun ends its ranks
                try:
                    ran.wait(30)
                except subprocess.TimeoutExpired:
                    ran.kill()
    said = (folder / "stderr").read_text()
    assert all(f.exists() for f in files), said[-3000:]
    return [{**json.loads(f.read_text()), "stderr": said[-2000:]} for f in files]


def expect_passed(results: list[dict[str, str]], check: Check) -> None:
    """Fails with the first rank's traceback."""
    for rank, row in enumerate(results):
        said = row.get(check.__name__, f"did not run: an earlier check failed\n{row['stderr']}")
        assert said == "passed", f"rank {rank}: {said}"
