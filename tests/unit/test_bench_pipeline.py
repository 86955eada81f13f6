"""The benchmark of the whole line: what it makes of the logs, and one small round of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from exitwave.workflows import bench_pipeline
from exitwave.workflows.bench_pipeline import document_of, round_of

LINE = [
    {"kind": "part_started", "part": "simulate", "t": 101.0},
    {"kind": "part_finished", "part": "simulate", "seconds": 20.0, "t": 121.0},
    {"kind": "staged", "bytes_copied": 6_000_000, "seconds": 0.5, "t": 122.0},
    {"kind": "part_finished", "part": "stage", "seconds": 0.6, "t": 122.1},
    {"kind": "part_started", "part": "train", "t": 123.0},
    {"kind": "part_finished", "part": "train", "seconds": 9.0, "t": 132.0},
    {"kind": "part_finished", "part": "evaluate", "seconds": 2.0, "t": 134.0},
    {"kind": "part_finished", "part": "evaluate", "seconds": 1.0, "t": 135.0},
    {"kind": "part_finished", "part": "report", "seconds": 1.0, "t": 136.0},
]
CAMPAIGN = [{"kind": "shard_committed", "n": 4, "t": t} for t in (106.0, 108.0, 110.0)]
TRAINING = [{"kind": "train_step", "step": k + 1, "step_s": s, "t": 126.0 + k} for k, s in enumerate((9, 9, 0.5, 0.7))]
EVENTS: dict[str, list[dict[str, Any]]] = {"line": LINE, "campaign": CAMPAIGN, "training": TRAINING}


def test_the_logs_of_a_line_give_its_parts_and_its_rates() -> None:
    found = round_of(EVENTS, began=100.0, ended=140.0)
    assert found["seconds"] == {"simulate": 20.0, "stage": 0.6, "train": 9.0, "evaluate": 3.0, "report": 1.0}
    assert (found["samples"], found["samples_per_s"]) == (12, 2.0)  # eight samples in four seconds
    assert found["stage_bytes_per_s"] == 12_000_000
    assert found["step_s"] == pytest.approx(0.6)  # the first two are left out
    assert (found["first_step_s"], found["first_step_of_training_s"], found["total_s"]) == (26.0, 3.0, 40.0)


def test_medians_spread_and_targets() -> None:
    one = round_of(EVENTS, began=100.0, ended=140.0)
    bare = {"bare_s": 6.0, "plain_first_step_s": 3.0, "machine": {"cores": 2}}
    rounds = [
        {**one, **bare, "bare_samples_per_s": 2.0, "plain_step_s": 0.5},
        {**one, **bare, "bare_samples_per_s": 2.1, "plain_step_s": 0.6},
        {**one, **bare, "bare_samples_per_s": 2.5, "plain_step_s": 0.6},
    ]
    document = document_of(rounds)
    rows = {row["what"]: row for row in document["rows"]}
    assert rows["bare simulation"] | {} == {
        "what": "bare simulation", "unit": "samples/s", "median": 2.1, "least": 2.0, "most": 2.5,
    }  # fmt: skip
    assert rows["outside its parts"]["median"] == pytest.approx(6.4)
    share = rows["share of the line that is neither simulation nor steps"]["median"]
    assert share == pytest.approx(1 - (6.0 + 4 * 0.6) / 40, abs=1e-4)
    campaign, step = document["targets"]
    assert (campaign["value"], campaign["holds"]) == (pytest.approx(2 / 2.1, abs=1e-3), False)
    assert (step["value"], step["holds"]) == (1.0, True)
    assert document["machine"] == {"cores": 2} and len(document["rounds"]) == 3


@pytest.mark.long
def test_one_small_round(tmp_path: Path) -> None:
    found = bench_pipeline._one_round(tmp_path / "0", 4, 6)
    assert found["samples"] == 24 and found["steps"] == 6
    assert all(found["seconds"][part] > 0 for part in bench_pipeline.PARTS)
    assert found["total_s"] > sum(found["seconds"].values())
    assert found["bare_samples_per_s"] > 0 and found["plain_step_s"] > 0
