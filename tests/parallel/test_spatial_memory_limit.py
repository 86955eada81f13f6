"""A sample that does not fit: under a limit of memory where one rank fails, two ranks train."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

RANK = Path(__file__).resolve().parent.parent / "support" / "limited_rank.py"
# A step of this network takes about 390 MiB on one rank where there is room, at the least 330; 235 on each of two.
LIMIT_MIB = 280


def run(ranks: int, limit_mib: int) -> list[dict[str, object]]:
    """What each rank says: {"ok": bool, "why": text, "losses": [...], "peak_mib": float}."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    quiet = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}  # each thread's arena reserves 64 MiB of address space
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}  # a Dask nanny here sets some
    processes = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(limit_mib)],
            env={**inherited, **meeting, **quiet, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@pytest.mark.timeout(400)
def test_two_ranks_train_where_one_has_not_the_memory():
    (alone,) = run(1, LIMIT_MIB)
    assert not alone["ok"]
    # oneDNN's word for no memory is that it could not create a primitive
    assert any(word in str(alone["why"]) for word in ("allocate", "memory", "could not create a primitive"))
    both = run(2, LIMIT_MIB)
    assert all(said["ok"] for said in both), both
    losses = both[0]["losses"]
    assert isinstance(losses, list)
    assert both[1]["losses"] == pytest.approx(losses)
    assert losses[-1] < losses[0]
