"""2 -> 3 -> 1 ranks, each a process with its own DataLoader, killed and resumed twice in a row: one sequence.

Every rank is a process of its own. After each step it writes down the uids of its piece and then the position, as a
trainer writes a checkpoint; SIGKILL ends it while its workers are reading ahead.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ingest_samples import make_dataset
from torch.utils.data import DataLoader

from exitwave.ingest import GlobalSampler, ShardDataset, Window, collate

BATCH = 6
WINDOW = {"none": None, "window": [3, 1]}
CHILD = Path(__file__).resolve().parents[1] / "support" / "ingest_rank.py"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("ranks") / "d", "t" * 9, n=8)


def uninterrupted(root: Path, window: Any, epochs: int = 1) -> list[int]:
    data = ShardDataset(root)
    sampler = GlobalSampler(
        data, rank=0, world_size=1, global_batch=BATCH, seed=5, window=window and Window(shards=3, structures=1)
    )
    found = []
    for _ in range(epochs):
        for batch in DataLoader(data, batch_sampler=sampler, collate_fn=collate):  # type: ignore[arg-type]
            found += batch["uid"].numpy().view(np.uint64).tolist()
            sampler.commit(BATCH)
    return found


def run(root: Path, log: Path, world_size: int, *, window: Any, workers: int, state: Any, steps: int | None) -> Any:
    """Starts the ranks; kills them once rank 0 has committed `steps`; the state it left and the steps that it held."""
    children = []
    for rank in range(world_size):
        settings = {
            "root": str(root),
            "log": str(log / f"{world_size}-{rank}.jsonl"),
            "rank": rank,
            "world_size": world_size,
            "batch": BATCH,
            "workers": workers,
            "window": window,
            "state": state,
            "slow_after": steps,
        }
        command = [sys.executable, str(CHILD), json.dumps(settings)]
        children.append(subprocess.Popen(command, start_new_session=True))
    try:
        deadline = time.monotonic() + 120
        if steps is None:
            assert [child.wait(120) for child in children] == [0] * world_size
        else:
            while not all(len(lines(log / f"{world_size}-{r}.jsonl")) >= steps for r in range(world_size)):
                assert time.monotonic() < deadline, "no steps"
                assert all(child.poll() is None for child in children)
                time.sleep(0.02)
    finally:
        for child in children:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)  # with its workers, in the middle of reading ahead
            child.wait()
    logs = [lines(log / f"{world_size}-{r}.jsonl") for r in range(world_size)]
    held = min(len(found) for found in logs) if steps is None else steps
    uids = [u for k in range(held) for found in logs for u in found[k]["uids"]]
    return logs[0][held - 1]["state"], uids


def lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    whole = path.read_text().split("\n")[:-1]  # a line that SIGKILL cut short is none
    return [json.loads(line) for line in whole]


@pytest.mark.parametrize(("window", "workers"), [pytest.param("none", 2, marks=pytest.mark.long), ("window", 0)])
def test_2_then_3_then_1_ranks_with_two_resumes_in_a_row(root: Path, tmp_path: Path, window: str, workers: int) -> None:
    expected = uninterrupted(root, WINDOW[window])
    assert len(set(expected)) == len(expected) == 72
    common = {"window": WINDOW[window], "workers": workers}
    state, first = run(root, tmp_path, 2, state=None, steps=3, **common)
    assert state["committed"] == 3 * BATCH
    state, second = run(root, tmp_path, 3, state=state, steps=4, **common)
    assert state["committed"] == 7 * BATCH, "the second resume goes on, not from the beginning"
    state, third = run(root, tmp_path, 1, state=state, steps=None, **common)
    assert first + second + third == expected
    assert (state["epoch"], state["committed"]) == (1, 0)
