"""`status --watch`: what the picture in a terminal and the lines in a pipe say of a campaign."""

from __future__ import annotations

import io
import time
from typing import Any

from rich.console import Console

from exitwave.simulate.counters import fold
from exitwave.workflows.watching import plain_line, watch_view

NOW = time.time()
TOLD: list[dict[str, Any]] = [
    {"kind": "campaign_started", "t": NOW - 100, "name": "gold", "samples": 80, "shards": 10, "bytes": 10**9,
     "workers": 4, "cluster": "local", "dashboard": "http://127.0.0.1:8787/status"},
    *({"kind": "task_submitted", "t": NOW - 90, "task": f"t{k}", "samples": 8} for k in range(8)),
    *(
        {"kind": "shard_committed", "t": NOW - 60 + k, "task": f"t{k}", "n": 8, "nbytes": 10**8, "seconds": 4.0}
        for k in range(5)
    ),
    {"kind": "task_failed", "t": NOW - 50, "task": "t5", "state": "memory", "why": "it used [red]too much[/red]",
     "final": True, "samples": 8},
    {"kind": "train_started", "t": NOW, "step": 0, "total_steps": 500},
    {"kind": "train_step", "t": NOW, "step": 7, "loss": 0.25, "data_wait_s": 0.5},
]  # fmt: skip


def document(**changes: Any) -> dict[str, Any]:
    return {
        **fold(TOLD).snapshot(NOW),
        "updated": time.time(),
        "running": True,
        "state": "running (host a, pid 1)",
        **changes,
    }


def shown(told: dict[str, Any], width: int = 110) -> str:
    console = Console(width=width, record=True, force_terminal=True, file=io.StringIO())
    console.print(watch_view(told))
    return console.export_text()


def test_the_picture_tells_all_of_it() -> None:
    text = shown(document())
    for words in (
        "gold", "running (host a, pid 1)", "50 %", "5 committed", "2 running", "1 failed", "2 pending",
        "40 of 80 samples, 8 failed".replace(" samples", ""), "samples/s", "left", "500 MB of about 1 GB",
        "8, 1 failed (1 memory)", "4 (local)", "http://127.0.0.1:8787/exitwave", "it used [red]too much[/red]",
        "step 7 of 500, loss 0.25, 0.5 s a step for data",
    ):  # fmt: skip
        assert words in text, (words, text)
    assert "said nothing" not in text
    assert "said nothing for" in shown(document(updated=NOW - 60))
    bar = next(line for line in text.splitlines() if "━" in line)
    assert bar.count("━") == 48


def test_whatever_is_missing_is_left_out() -> None:
    """Before the first commit, of a data set made of others, in a narrow terminal."""
    samples = {"planned": 0, "committed": 0, "failed": 0, "rejected": 0}
    bare = {"samples": samples, "shards": {"pending": 0, "committed": 0}, "attempts": 0, "state": "nothing yet"}
    assert "0 of 0" in shown({**bare, "rate_samples_per_s": None, "eta_s": None, "stages": {"train": "not yet"}})
    assert all(len(line) <= 40 for line in shown(document(), width=40).splitlines())


def test_a_line_in_a_pipe() -> None:
    line = plain_line(document())
    assert line.startswith("40 of 80 samples, running (host a, pid 1), ") and "samples/s, about" in line
    assert line.endswith("1 attempt failed, training at step 7")
    assert plain_line({"samples": {"committed": 3, "planned": 3}, "state": "complete"}) == "3 of 3 samples, complete"
