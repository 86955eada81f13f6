"""`exitwave bench simulate`: whole campaigns beside the script that one would write with abTEM, Dask and h5py.

Both do the same samples with as many single-threaded workers: ours through plan, Dask, HDF5, checksums and manifest,
theirs as benchmarks/peers/abtem_dask_script.py. Campaigns last for hours, so that steady states are compared, in
samples per core-hour: on either side after each worker has once compiled, planned its transforms and built a
potential. What that took stands beside it. The campaigns are small parts of the real ones and say so. Before anything
is timed, patterns of one sample must agree.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.events import read_events
from exitwave.simulate.plan import Plan, make_plan
from exitwave.simulate.spec import CampaignSpec
from exitwave.simulate.tasks import SampleSpec

__all__ = ["bench_campaigns", "reference_campaign", "small_angle_campaign"]

_AGREE = 5e-5
SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "peers" / "abtem_dask_script.py"


def reference_campaign(*, structures: int = 1, samples: int = 6, displaced: bool = False) -> CampaignSpec:
    """The seed's small variant: 50 x 50 x 100 Å, 8 x 8 probes over the central half, 256 x 256 pixels, four energies,
    two defoci a pass, discs that touch (lambda / 2d of Si 220).

    At rest on a grid that repeats with the crystal, or `displaced`: one thermal displacement of every atom, as in the
    seed, on the fastest grid of the supercell.
    """
    return CampaignSpec.model_validate(
        {
            "name": "bench-reference",
            "phonons": {"count": int(displaced), "rms_A": 0.08},
            "structures": [{"library": ["Si", "Au", "GaAs", "Cu"][:structures]}],
            "split": {},
            "samples_per_structure": samples,
            "samples_per_shard": 2,
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
            "grid": {"sampling_A": 0.2, "slice_thickness_A": 2.0, "commensurate": not displaced},
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
            "samples_per_shard": 4,
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
    reference = reference_campaign(structures=4 if full else 1, samples=40)
    rows_, ratio, _ = _one("reference campaign", reference, workers, theirs=4, rounds=2, note=note)
    rows += rows_
    targets.append(_target("samples per core-hour, reference campaign / abTEM + Dask script", ratio, 4.0))
    displaced = reference_campaign(structures=4 if full else 1, displaced=True)
    rows_, ratio, overhead = _one(
        "the same, one displacement an atom", displaced, workers, theirs=4, rounds=2, note=note
    )
    rows += rows_
    targets += [
        _target("samples per core-hour, the same with one displacement an atom / script", ratio, 4.0),
        _target("campaign overhead over bare simulation", overhead, 0.03, at_most=True),
    ]
    small = small_angle_campaign(samples=8)
    rows_, ratio, _ = _one("small semi-angle campaign", small, workers, theirs=1, rounds=1, note=note)
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


@dataclass(frozen=True, kw_only=True)
class _Side:
    """One side's run: a campaign's steady state, and what it costs once."""

    samples: int  # of the steady state
    seconds: float
    once_s: float
    overhead: float = 0.0  # what the steady state took beyond the simulation itself


def _one(
    what: str,
    spec: CampaignSpec,
    workers: int,
    *,
    theirs: int,
    rounds: int,
    note: Callable[[str], None],
) -> tuple[list[dict[str, Any]], float, float]:
    """Rows, ours over theirs in samples per core-hour, and our campaign's overhead; `theirs` samples by the script.

    The sides take turns. Each side's rate is that of its steady state, since a campaign lasts hours; what either does
    once stands beside it.
    """
    plan = make_plan(spec, base_dir=Path())
    samples = list(plan.samples())
    chosen = samples[-theirs:]
    note(f"{what}: {len(samples)} samples, {plan.core_seconds:.0f} core-seconds predicted")
    runs: dict[str, list[_Side]] = {"exitwave": [], "script": []}
    with tempfile.TemporaryDirectory(prefix="exitwave-bench-") as folder:
        difference = _gate(samples[0], Path(folder))
        for turn in range(rounds):
            runs["exitwave"].append(_ours(plan, Path(folder) / f"data-{turn}", workers))
            note(f"{what}: {len(chosen)} samples by the abTEM + Dask script")
            runs["script"].append(_script(chosen, Path(folder), workers))
    rates = {
        who: sum(3600 * side.samples / side.seconds / workers for side in sides) / rounds for who, sides in runs.items()
    }
    rows = [
        {
            "what": f"{what}, {who}",
            "samples": sides[0].samples,
            "seconds": [round(side.seconds, 2) for side in sides],
            "samples_per_core_hour": round(rates[who]),
            "once_s": [round(side.once_s, 2) for side in sides],
            "scale": f"{len(plan.structures)} structure(s) of the campaign's many, {workers} worker(s), steady state",
            "route": sorted({_route(sample) for sample in samples}) if who == "exitwave" else [],
            "overhead": [round(side.overhead, 3) for side in sides] if who == "exitwave" else None,
            "grid": list(samples[0].grid_yx if who == "exitwave" else _plain_grid(samples[0])),
            "predicted_core_seconds": round(plan.core_seconds, 2) if who == "exitwave" else None,
            "differs_by": difference,
        }
        for who, sides in runs.items()
    ]
    overhead = sum(side.overhead for side in runs["exitwave"]) / rounds
    return rows, rates["exitwave"] / rates["script"], overhead


def _route(sample: SampleSpec) -> str:
    from exitwave.simulate.route import route

    return route(sample)


def _plain_grid(spec: SampleSpec) -> tuple[int, int]:
    """What the script gets: the fastest grid of the sampling, which has no more points than one that repeats."""
    return spec.structure.grid_yx(spec.recipe.grid.model_copy(update={"commensurate": False}))


def _ours(plan: Plan, dataset: Path, workers: int) -> _Side:
    """A campaign of several shards. Steady is all after the first shard of each worker: tasks, Dask, HDF5, checksums,
    manifest, and the plan's share of those samples; what came before (compiled code, plans, potentials) is `once_s`."""
    from exitwave.simulate.campaign import run_campaign
    from exitwave.simulate.campaign_files import EVENTS_NAME
    from exitwave.simulate.cluster import make_cluster
    from exitwave.simulate.wisdom import make_wisdom

    moments: list[tuple[float, dict[str, Any]]] = []
    began = time.perf_counter()
    plan = make_plan(plan.spec, base_dir=Path())
    planning = (time.perf_counter() - began) / plan.n_samples
    dataset.mkdir()
    began = time.perf_counter()
    make_wisdom(replace(plan, core_seconds=1e6), dataset)  # as the whole campaign has, which is that long
    searched = time.perf_counter() - began
    run_campaign(
        plan,
        dataset,
        make_cluster("local", workers=workers),
        listeners=[lambda event: moments.append((time.perf_counter(), event))],
    )
    assert read_events(dataset / EVENTS_NAME)
    (started,) = (moment for moment, event in moments if event["kind"] == "campaign_started")
    shards = [(moment, event) for moment, event in moments if event["kind"] == "shard_committed"]
    if len(shards) <= workers:
        raise RuntimeError(f"{len(shards)} shards for {workers} workers: no steady state to be measured")
    first, steady = shards[workers - 1][0], shards[workers:]
    counted = sum(event["n"] for _, event in steady)
    seconds = steady[-1][0] - first + planning * counted
    bare = sum(event["simulated_s"] for _, event in steady) / workers
    spent = seconds / counted
    before = sum(event["n"] for _, event in shards[:workers]) * spent / workers
    return _Side(
        samples=counted, seconds=seconds, once_s=searched + first - started - before, overhead=seconds / bare - 1.0
    )


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
            "gpts": _plain_grid(spec)[::-1],
            "slice_thickness_A": structure.slice_thickness_A,
            "displacement_A": spec.recipe.phonons.rms_A if spec.recipe.phonons.count else 0.0,
            "seed": spec.phonon_seed,
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


def _script(samples: list[SampleSpec], folder: Path, workers: int, *, max_angle_mrad: float | str = "valid") -> _Side:
    """The script for these samples, once it has planned its transforms and built the first potential."""
    jobs = folder / "jobs.json"
    jobs.write_text(json.dumps(_jobs(samples, max_angle_mrad=max_angle_mrad)))
    command = [sys.executable, str(SCRIPT), str(jobs), str(folder / "script.h5"), "--workers", str(workers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the abTEM + Dask script failed: {done.stderr[-2000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    return _Side(samples=int(told["samples"]), seconds=float(told["seconds"]), once_s=float(told["first_s"]))


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
