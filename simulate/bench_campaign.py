"""`exitwave bench simulate`: whole campaigns beside the script that one would write with abTEM, Dask and h5py.

Both do the same samples with as many single-threaded workers: ours through plan, Dask, HDF5, checksums and manifest,
theirs as benchmarks/abtem_dask_script.py. Workers have started and imported before either clock runs. The campaigns are
small parts of the real ones and say so; what is compared are samples per core-hour. Before anything is timed, patterns
of one sample must agree.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.events import read_events
from exitwave.simulate.plan import Plan, make_plan
from exitwave.simulate.spec import CampaignSpec
from exitwave.simulate.tasks import SampleSpec

__all__ = ["bench_campaigns", "reference_campaign", "small_angle_campaign"]

_AGREE = 5e-5
SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "abtem_dask_script.py"


def reference_campaign(*, structures: int = 1, samples: int = 8) -> CampaignSpec:
    """The seed's small variant: 50 x 50 x 100 Å, 8 x 8 probes over the central half, 256 x 256 pixels, four energies,
    two defoci a pass, discs that touch (lambda / 2d of Si 220)."""
    return CampaignSpec.model_validate(
        {
            "name": "bench-reference",
            "structures": [{"library": ["Si", "Au", "GaAs", "Cu"][:structures]}],
            "split": {},
            "samples_per_structure": samples,
            "samples_per_shard": samples,
            "cell": {"min_extent_A": 48},
            "sampling": {
                "energy_keV": {"linspace": [100, 200, 4]},
                "semiangle_mrad": 6.5,
                "thickness_A": 100,
                "defocus_A": {"uniform": [-200, 200]},
                "scan_origin": [12, 12],
            },
            "fan_out": {"defocus_A": 2},
            "scan": {"shape": [8, 8], "step_A": 3.0},
            "grid": {"sampling_A": 0.2, "slice_thickness_A": 2.0},
            "detector": {"shape": [256, 256], "max_q_per_A": 1.6},
            "label": {"shape": [128, 128]},
        }
    )


def small_angle_campaign(*, scan: int = 32, samples: int = 4) -> CampaignSpec:
    """3.7 mrad at 200 keV over a cell of 49 Å: a disc of some 200 beams, `scan` squared probes, four defoci a pass."""
    return CampaignSpec.model_validate(
        {
            "name": "bench-small-angle",
            "structures": [{"library": ["Si"]}],
            "split": {},
            "samples_per_structure": samples,
            "samples_per_shard": samples,
            "cell": {"min_extent_A": 48},
            "sampling": {
                "energy_keV": 200,
                "semiangle_mrad": 3.7,
                "thickness_A": 50,
                "defocus_A": {"uniform": [-1000, 1000]},
                "scan_origin": [10, 10],
            },
            "fan_out": {"defocus_A": 4},
            "scan": {"shape": [scan, scan], "step_A": 24.0 / scan},
            "grid": {"sampling_A": 0.2, "slice_thickness_A": 2.0},
            "detector": {"shape": [64, 64], "max_angle_mrad": 20},
            "label": {"shape": [64, 64]},
        }
    )


def bench_campaigns(
    *, full: bool = False, workers: int = 1, note: Callable[[str], None] = lambda text: None
) -> dict[str, list[dict[str, Any]]]:
    """{"rows", "targets"} of both campaigns."""
    rows: list[dict[str, Any]] = []
    targets: list[dict[str, Any]] = []
    if not SCRIPT.exists():
        note("the abTEM + Dask script is not installed with the package: campaigns are left out")
        return {"rows": rows, "targets": targets}
    reference = reference_campaign(structures=4 if full else 1)
    rows_, ratio, overhead = _one("reference campaign", reference, workers, theirs=None if full else 4, note=note)
    rows += rows_
    targets += [
        _target("samples per core-hour, reference campaign / abTEM + Dask script", ratio, 4.0),
        _target("campaign overhead over bare simulation", overhead, 0.03, at_most=True),
    ]
    rows_, ratio, _ = _one("small semi-angle campaign", small_angle_campaign(), workers, theirs=1, note=note)
    rows += rows_
    targets.append(_target("samples per core-hour, small semi-angle campaign / abTEM + Dask script", ratio, 10.0))
    note("small semi-angle: abTEM's own SMatrix")
    row, ratio = _beside_smatrix(small_angle_campaign())
    rows.append(row)
    targets.append(_target("small semi-angle pass / abTEM's own SMatrix", ratio, 1.5))
    return {"rows": rows, "targets": targets}


def _target(name: str, value: float, target: float, *, at_most: bool = False) -> dict[str, Any]:
    return {
        "name": name,
        "value": round(value, 3),
        "target": target,
        "holds": value <= target if at_most else value >= target,
    }


def _one(
    what: str, spec: CampaignSpec, workers: int, *, theirs: int | None, note: Callable[[str], None]
) -> tuple[list[dict[str, Any]], float, float]:
    """Rows, ours over theirs in samples per core-hour, and our campaign's overhead; `theirs` samples by the script."""
    plan = make_plan(spec, base_dir=Path())
    samples = list(plan.samples())
    note(f"{what}: {len(samples)} samples, {plan.core_seconds:.0f} core-seconds predicted")
    with tempfile.TemporaryDirectory(prefix="exitwave-bench-") as folder:
        difference = _gate(samples[0], Path(folder))
        ours, bare = _ours(plan, Path(folder) / "data", workers)
        chosen = samples[: theirs or len(samples)]
        note(f"{what}: {len(chosen)} samples by the abTEM + Dask script")
        script = _script(chosen, Path(folder), workers)
    rates = {"exitwave": 3600 * len(samples) / ours / workers, "script": 3600 * len(chosen) / script / workers}
    scale = f"{len(plan.structures)} structure(s) of the campaign's many, one worker" if workers == 1 else "scaled"
    rows = [
        {
            "what": f"{what}, {who}",
            "samples": count,
            "seconds": round(seconds, 2),
            "samples_per_core_hour": round(rates[who]),
            "scale": scale,
            "route": sorted({_route(sample) for sample in samples}) if who == "exitwave" else [],
            "predicted_core_seconds": round(plan.core_seconds, 2) if who == "exitwave" else None,
            "differs_by": difference,
        }
        for who, count, seconds in (("exitwave", len(samples), ours), ("script", len(chosen), script))
    ]
    return rows, rates["exitwave"] / rates["script"], ours / bare - 1.0


def _route(sample: SampleSpec) -> str:
    from exitwave.simulate.route import route

    return route(sample)


def _ours(plan: Plan, dataset: Path, workers: int) -> tuple[float, float]:
    """(seconds of the campaign from the workers' readiness to its end, seconds of the same simulation alone)."""
    from exitwave.simulate.campaign import EVENTS_NAME, run_campaign
    from exitwave.simulate.cluster import make_cluster
    from exitwave.simulate.simulator import get_simulator
    from exitwave.simulate.wisdom import make_wisdom, use_wisdom

    moments: dict[str, float] = {}

    def listen(event: dict[str, Any]) -> None:
        moments[event["kind"]] = time.perf_counter()

    began = time.perf_counter()
    plan = make_plan(plan.spec, base_dir=Path())
    planning = time.perf_counter() - began
    dataset.mkdir()
    make_wisdom(replace(plan, core_seconds=1e6), dataset)  # as the whole campaign has, which is that long
    run_campaign(plan, dataset, make_cluster("local", workers=workers), listeners=[listen])
    assert read_events(dataset / EVENTS_NAME)
    campaign = planning + moments["campaign_finished"] - moments["campaign_started"]
    use_wisdom(dataset)
    simulator = get_simulator(plan.simulator)
    first = next(iter(plan.samples()))
    list(simulator.simulate([first]))  # imports, compiles, plans, as the workers had before
    simulator = get_simulator(plan.simulator)
    began = time.perf_counter()
    for task in plan.tasks:
        for _ in simulator.simulate(task.samples()):
            pass
    return campaign, (time.perf_counter() - began) / workers


def _jobs(samples: list[SampleSpec], *, max_angle_mrad: float | str) -> list[dict[str, Any]]:
    from exitwave.simulate.label import lattice_points

    jobs = []
    for spec in samples:
        structure, scan = spec.structure, spec.recipe.scan
        points = lattice_points(scan.shape, scan.step_A, spec.scan_origin_yx_A, spec.values["scan_rotation_deg"])
        periods = -(-spec.exit_plane // structure.slices)
        crystal = {
            "numbers": structure.numbers,
            "positions_A": structure.positions_A,
            "cell_A": structure.lengths_A,
            "repeat": [*structure.repeat_xy, periods],
            "gpts": spec.grid_yx[::-1],
            "slice_thickness_A": structure.slice_thickness_A,
        }
        jobs.append(
            {
                "energy_eV": spec.values["energy_keV"] * 1e3,
                "semiangle_mrad": spec.values["semiangle_mrad"],
                "defocus_A": spec.values["defocus_A"],
                "positions_xy_A": np.mod(points.reshape(-1, 2), structure.extent_yx_A)[:, ::-1].tolist(),
                "max_angle_mrad": max_angle_mrad,
                "structure": json.dumps(crystal),
            }
        )
    return jobs


def _script(samples: list[SampleSpec], folder: Path, workers: int, *, max_angle_mrad: float | str = "valid") -> float:
    """Seconds of the script for these samples."""
    jobs = folder / "jobs.json"
    jobs.write_text(json.dumps(_jobs(samples, max_angle_mrad=max_angle_mrad)))
    command = [sys.executable, str(SCRIPT), str(jobs), str(folder / "script.h5"), "--workers", str(workers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the abTEM + Dask script failed: {done.stderr[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def _gate(spec: SampleSpec, folder: Path) -> float:
    """How far a sample of the campaign is from abTEM's own, of the largest; raises where that is too much."""
    from exitwave.simulate.abtem_backend import AbtemSimulator
    from exitwave.simulate.simulator import get_simulator

    recipe = spec.recipe.model_copy(
        update={"scan": spec.recipe.scan.model_copy(update={"shape": (2, 2)}), "fields": ("cbed",)}
    )
    few = replace(spec, recipe=recipe)
    (ours,) = get_simulator(_route(spec)).simulate([few])
    (theirs,) = AbtemSimulator().simulate([few])
    difference = float(np.abs(ours.arrays["cbed"] - theirs.arrays["cbed"]).max() / theirs.arrays["cbed"].max())
    if difference > _AGREE:
        raise RuntimeError(f"patterns differ by {difference:.1e} of the largest, at most {_AGREE:.0e} expected")
    return difference


def _beside_smatrix(spec: CampaignSpec) -> tuple[dict[str, Any], float]:
    """One pass (all defoci) by our matrix and by abTEM's, in turn, on one core."""
    from exitwave.simulate.abtem_backend import AbtemSimulator
    from exitwave.simulate.smatrix import SMatrixSimulator

    members = list(make_plan(spec, base_dir=Path()).samples())
    ours, theirs = SMatrixSimulator(), AbtemSimulator()
    with ours.configured(planning="FFTW_MEASURE"):
        slices = theirs.static_slices(members[0])
        ours.pass_patterns(members[:1], slices)
        times: dict[str, list[float]] = {"ours": [], "theirs": []}
        for _ in range(2):
            began = time.process_time()
            ours.pass_patterns(members, slices)
            times["ours"].append(time.process_time() - began)
            began = time.process_time()
            theirs.smatrix_patterns(members, slices)
            times["theirs"].append(time.process_time() - began)
    row = {
        "what": "small semi-angle pass, matrix and reduction alone",
        "samples": len(members),
        "exitwave_s": round(min(times["ours"]), 2),
        "abtem_smatrix_s": round(min(times["theirs"]), 2),
    }
    return row, min(times["theirs"]) / min(times["ours"])
