"""A plan of a very large campaign from an index and a given cost: the same counts as a plan that draws every sample."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from line import environment

from exitwave.ingest.errors import UsageError
from exitwave.simulate.cost import duration
from exitwave.simulate.estimate import can_estimate, estimate_campaign, staging_times
from exitwave.simulate.plan import make_plan
from exitwave.simulate.spec import CampaignSpec, CostSpec
from exitwave.simulate.structures.prototypes import build_prototype

ROOT = Path(__file__).resolve().parents[2]


def write_index(path: Path) -> None:
    rows = []
    for number, (first, second) in enumerate((("Mg", "O"), ("Na", "Cl"), ("K", "F"), ("Li", "F"), ("Ca", "O"))):
        atoms = build_prototype("rocksalt", (first, second), 4.2 + 0.1 * number, None)
        rows.append(
            {
                "source": f"made-up:{first}{second}",
                "formula": f"{first}{second}",
                "space_group": 225,
                "prototype_group": 1,
                "numbers": atoms.numbers.tolist(),
                "cell_A": atoms.cell.tolist(),
                "positions_A": atoms.positions.tolist(),
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def spec(**more: Any) -> CampaignSpec:
    content = {
        "name": "from an index",
        "structures": [{"index": "index.jsonl"}],
        "split": {"by": "composition", "val": 1, "test": 1},
        "samples_per_structure": 6,
        "samples_per_shard": 4,
        "cell": {"min_extent_A": 16},
        "sampling": {"energy_keV": 200, "semiangle_mrad": 15, "thickness_A": {"uniform": [8, 16]}},
        "scan": {"shape": [4, 4], "step_A": 0.6},
        "grid": {"sampling_A": 0.25, "max_gpts": 128},
        "detector": {"shape": [16, 16], "max_angle_mrad": 30},
        "label": {"shape": [16, 16], "blur_A": 0.4},
        "cost": {"us_per_probe_slice": 100.0, "grid": 128},
    }
    return CampaignSpec.model_validate({**content, **more})


def test_counts_are_those_of_the_whole_plan(tmp_path: Path) -> None:
    write_index(tmp_path / "index.jsonl")
    assert can_estimate(spec()) and not can_estimate(spec(cost=None))
    found, plan = estimate_campaign(spec(), base_dir=tmp_path, workers=3), make_plan(spec(), base_dir=tmp_path)
    summary = plan.summary()
    for key in ("samples", "shards", "structures", "splits", "bytes", "rejected", "rejected_samples"):
        assert found[key] == summary[key], key
    samples = list(plan.samples())
    points = [s.grid_yx[0] * s.grid_yx[1] / 128**2 for s in samples]
    exact = sum(16 * s.exit_plane * 100e-6 * p for s, p in zip(samples, points, strict=True)) / 3600
    assert abs(found["core_hours"] - exact) < 4 * found["core_hours_error"] + 0.05 * exact
    assert found["eta_s"] == pytest.approx(found["core_hours"] * 1200)


def test_staging_is_as_slow_as_the_slower_side() -> None:
    cost = CostSpec(us_per_probe_slice=1, shared_GB_per_s=100, node_GB_per_s=2, node_disk_GB=30, nodes=(10, 100))
    assert staging_times(10**12, cost) == [
        {"nodes": 10, "GB_per_node": 100.0, "fits": False, "seconds": 50},
        {"nodes": 100, "GB_per_node": 10.0, "fits": True, "seconds": 10},
    ]


@pytest.mark.parametrize("text", ["{", "[]", '{"source": "a"}', "\x00", '{"numbers": 5}'])
def test_a_line_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    write_index(tmp_path / "index.jsonl")
    with (tmp_path / "index.jsonl").open("a") as file:
        file.write(text)
    with pytest.raises(UsageError, match=r"structures\[0\]\.index: .*index\.jsonl:6"):
        estimate_campaign(spec(), base_dir=tmp_path)


@pytest.mark.long
def test_the_full_data_set_is_planned_quickly(tmp_path: Path) -> None:
    """930,000 samples, half a petabyte: within 30 seconds of a core and 500 MB, with the Slurm script."""
    examples = ROOT / "examples"
    index = tmp_path / "seed-full-index.jsonl.gz"
    subprocess.run([sys.executable, examples / "seed_full_index.py", index], check=True, env=environment())
    campaign = tmp_path / "seed-full.yaml"
    campaign.write_text((examples / "seed-full.yaml").read_text())
    script = (
        "import json, resource, subprocess, sys\n"
        "done = subprocess.run(sys.argv[1:], capture_output=True, text=True, check=True)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(json.dumps([json.loads(done.stdout), used.ru_utime + used.ru_stime, 1024 * used.ru_maxrss]))\n"
    )
    command = [sys.executable, "-c", script, sys.executable, "-m", "exitwave.workflows", "plan", campaign, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    document, seconds, memory = json.loads(done.stdout)
    assert document["samples"] == 930_000 and document["structures"] == 31_000
    assert 4.9e14 < document["bytes"] < 5.1e14
    assert seconds < 30 and memory < 500e6
    assert len(document["staging"]) == 5 and "#SBATCH" in document["slurm_script"]


def test_a_duration_counts_what_works_at_once_and_the_start_of_it() -> None:
    elsewhere = {"workers": 8, "shards": 20}
    assert duration(1.0, **elsewhere) == {"eta_s": pytest.approx(450), "start_s": 0}
    assert duration(1.0, workers=8, shards=4)["eta_s"] == pytest.approx(900)  # a shard is one worker's
    here = duration(1.0, **elsewhere, cores=2)
    assert here["eta_s"] == pytest.approx(1800 + here["start_s"])
    assert here["start_s"] > duration(1.0, workers=2, shards=20, cores=2)["start_s"] > 0
    assert duration(None, **elsewhere) == {}
