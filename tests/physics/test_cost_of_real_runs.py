"""What the plan foretells is what happens: the seconds of small real campaigns, and the memory of a real worker."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from sim_samples import DATA, campaign

from exitwave.simulate.cost import calibrate
from exitwave.simulate.plan import Plan, make_plan
from exitwave.simulate.simulator import get_simulator
from exitwave.simulate.spec import CampaignSpec

SMALL: dict[str, Any] = {
    "structures": [{"library": ["Si", "Cu"]}],
    "split": {},
    "cell": {"min_extent_A": 20},
    "grid": {"sampling_A": 0.2, "slice_thickness_A": 2.0},
    "detector": {"shape": [64, 64], "max_q_per_A": 1.5},
    "label": {"shape": [32, 32]},
    "samples_per_structure": 4,
}
OPTICS = {"energy_keV": 200, "defocus_A": {"uniform": [-50, 50]}, "scan_origin": "random"}

CAMPAIGNS: dict[str, dict[str, Any]] = {
    "phonons": {
        "sampling": OPTICS | {"semiangle_mrad": 15, "thickness_A": 60},
        "scan": {"shape": [4, 4], "step_A": 1.0},
        "phonons": {"count": 3, "rms_A": 0.08},
    },
    "exit planes of one pass": {
        "sampling": OPTICS | {"semiangle_mrad": 15, "defocus_A": 0, "thickness_A": {"uniform": [20, 100]}},
        "scan": {"shape": [8, 8], "step_A": 0.5},
        "fan_out": {"thickness_A": 4},
    },
    "one cell of a crystal": {
        "sampling": OPTICS | {"semiangle_mrad": 8, "thickness_A": 60},
        "scan": {"shape": [16, 16], "step_A": 0.6},
        "grid": {"sampling_A": 0.2, "slice_thickness_A": 2.0, "commensurate": True},
        "fan_out": {"defocus_A": 2},
    },
    "scattering matrix": {
        "sampling": OPTICS | {"semiangle_mrad": 8, "thickness_A": 60},
        "scan": {"shape": [24, 24], "step_A": 0.4},
        "fan_out": {"defocus_A": 2},
    },
}


def processor_seconds(plan: Plan) -> float:
    """Of one core, for the whole campaign: it is what another program on the machine does not change."""
    simulator = get_simulator(plan.simulator)
    began = time.process_time()
    for task in plan.tasks:
        for _ in simulator.simulate(task.samples()):
            pass
    return time.process_time() - began


@pytest.mark.long
@pytest.mark.parametrize("what", CAMPAIGNS)
def test_core_hours_are_right_within_a_quarter(what: str) -> None:
    plan = make_plan(CampaignSpec.model_validate({"name": what} | SMALL | CAMPAIGNS[what]), base_dir=DATA)
    foretold = calibrate(plan).core_seconds
    spent = processor_seconds(plan)
    print(f"{what}: {foretold:.2f} core-seconds foretold, {spent:.2f} spent")
    assert 0.75 * spent <= foretold <= 1.25 * spent


MEASURE = """
import pickle, resource, sys
from exitwave.simulate.worker import prepare_worker, run_task
import h5py, distributed
task = pickle.loads(sys.stdin.buffer.read())
prepare_worker(task.simulator)
run_task(task, sys.argv[1])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def peak_bytes(plan: Plan, folder: Path) -> int:
    """Of a fresh process that imports what a worker imports and runs the plan's first task."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder)],
        input=pickle.dumps(plan.tasks[0]),
        capture_output=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return int(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.long
@pytest.mark.parametrize("simulator", ["fast", "smatrix", "bloch"])
def test_a_worker_stays_within_the_memory_that_the_plan_tells(simulator: str, tmp_path: Path) -> None:
    """A grid of 300 squared or so, displaced atoms (at rest where cells are to repeat), two defoci a pass."""
    bloch = simulator == "bloch"
    changes: dict[str, Any] = {
        "simulator": simulator,
        "structures": [{"library": ["Cu"]}],
        "cell": {"min_extent_A": 40},
        "grid": {"sampling_A": 0.14, "slice_thickness_A": 2.0, "commensurate": bloch},
        "detector": {"shape": [128, 128], "max_q_per_A": 2.0},
        "sampling": OPTICS | {"semiangle_mrad": 4, "thickness_A": 30},
        "scan": {"shape": [6, 6], "step_A": 1.0},
        "fan_out": {"defocus_A": 2},
        "phonons": {"count": 0 if bloch else 2, "rms_A": 0.08},
        "samples_per_structure": 2,
    }
    plan = make_plan(CampaignSpec.model_validate({"name": "memory"} | SMALL | changes), base_dir=DATA)
    (tmp_path / "shards").mkdir()
    peak = peak_bytes(plan, tmp_path)
    print(f"{simulator}: {plan.memory_per_worker_bytes / 1e6:.0f} MB foretold, {peak / 1e6:.0f} MB at most")
    assert 0.3 * plan.memory_per_worker_bytes <= peak <= plan.memory_per_worker_bytes


def test_calibration_measures_whole_passes() -> None:
    made = make_plan(
        campaign(
            simulator="weak-phase", split={}, fan_out={"defocus_A": 2}, sampling={"defocus_A": {"uniform": [0, 9]}}
        ),
        base_dir=DATA,
    )
    measured = calibrate(made, budget_s=0.0)
    assert measured.measured_samples in (2, 4, 6) and measured.core_seconds > 0
