"""A network that is trained once is judged on new compositions and on new prototypes, each by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CAMPAIGN = """\
name: two questions
seed: 5
simulator: weak-phase
structures:
  - {library: [Al, Cu, Ag, Au, Fe, W, Mo, Si, Ge]}
split: {new_prototype: 1, new_composition: 2, val: 1}
samples_per_structure: 3
samples_per_shard: 3
cell: {min_extent_A: 16}
sampling: {energy_keV: 200, semiangle_mrad: 15, thickness_A: {uniform: [8, 16]}}
scan: {shape: [4, 4], step_A: 0.6}
grid: {sampling_A: 0.25, max_gpts: 128}
detector: {shape: [16, 16], max_angle_mrad: 30}
label: {shape: [16, 16], blur_A: 0.4}
"""
TRAIN = """\
model: {preset: tiny}
data: {detector_bin: 8}
batch: 4
steps: 4
optimizer: {warmup_steps: 2}
"""


def exitwave(*words: str, folder: Path) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "exitwave.workflows", *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.long
def test_both_test_sets_are_evaluated_apart(tmp_path: Path) -> None:
    (tmp_path / "campaign.yaml").write_text(CAMPAIGN)
    (tmp_path / "train.yaml").write_text(TRAIN)
    exitwave("simulate", "campaign.yaml", "--out", "data", "--cluster", "inline", "--quiet", folder=tmp_path)
    exitwave("train", "train.yaml", "--data", "data", "--out", "run", "--quiet", folder=tmp_path)
    seen: set[str] = set()
    for split, by, count in (("new_prototype", "prototype", 1), ("new_composition", "structure", 2)):
        done = exitwave("evaluate", "run", "--data", "data", "--split", split, "--json", "--quiet", folder=tmp_path)
        told = json.loads(done.stdout)
        assert told["split"] == split and told["groups"]["by"] == by and told["groups"]["n"] == count
        assert told["groups"]["anecdotal"] is (by == "prototype")
        interval = told["rmse_VA_interval_95"]["model"]
        if count == 1:
            assert interval is None
        else:
            assert interval[0] <= told["metrics"]["model"]["rmse_VA"] <= interval[1]
        seen.add(split)
    assert seen == {"new_prototype", "new_composition"}
    shown = exitwave("evaluate", "run", "--data", "data", "--split", "new_prototype", "--quiet", folder=tmp_path)
    assert "anecdotal" in shown.stdout
