"""An adaptive campaign beside a uniform one of equal core-hours: `python benchmarks/adaptive_against_uniform.py OUT`.

For each seed three arms, of one set of structures:

- adaptive: a campaign, samples that only judge, and rounds that go where the judge's error is.
- uniform: the same campaign, and as many core-seconds more of samples drawn as the campaign draws. It needs no judge:
  what those samples cost goes into its training set.
- uniform-longer: the network of `uniform`, trained for as many steps more as the adaptive arm spent on judges.

All networks are trained from their beginning on what their arm simulated; adaptive and uniform for as many steps. They
are measured on one test set of the same structures, drawn by the campaign's distributions with a seed of its own, which
nobody trains on. The hard region was named before anything was run: atoms heavier than 40 on average, and thicker than
100 Å, where scattering is strongly dynamical. Core-seconds are those of the model of the cost by which rounds are
budgeted; processor seconds of the simulation, as measured, stand beside them.

Each arm is a folder of OUT; a killed benchmark goes on where it was. `--seeds 0 1 2`, `--scale 0.1` for a trial.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.files import write_atomic
from exitwave.ingest.manifest import MANIFEST_NAME, load_manifest
from exitwave.simulate.bench import machine
from exitwave.simulate.campaign import run_campaign
from exitwave.simulate.cluster import make_cluster
from exitwave.simulate.plan import Plan, make_plan
from exitwave.simulate.spec import CampaignSpec
from exitwave.simulate.steer_rounds import mean_atomic_number, trained_structures
from exitwave.train.judge import Judged, judge
from exitwave.train.spec import TrainSpec
from exitwave.train.trainer import train
from exitwave.workflows.adaptive import Hands, judge_final, run_rounds
from exitwave.workflows.adaptive_spec import AdaptiveSection

HEAVY_Z, THICK_A = 40.0, 100.0
CAMPAIGN: dict[str, Any] = {
    "name": "adaptive-against-uniform",
    "structures": [
        {"library": ["Al", "Si", "Cu", "Ag", "Au", "W", "GaAs"]},
        {"prototype": "rocksalt", "elements": ["Mg", "O"], "a_A": 4.212},
        {"prototype": "perovskite", "elements": ["Sr", "Ti", "O"], "a_A": 3.905},
        {"prototype": "cesiumchloride", "elements": ["Cs", "Cl"], "a_A": 4.123},
    ],
    "samples_per_shard": 16,
    "structures_per_shard": 16,
    "cell": {"min_extent_A": 16},
    "sampling": {
        "energy_keV": 200,
        "semiangle_mrad": 12,
        "defocus_A": {"uniform": [-30, 30]},
        "thickness_A": {"uniform": [10, 150]},
    },
    "scan": {"shape": [8, 8], "step_A": 0.5},
    "grid": {"sampling_A": 0.25, "max_gpts": 128, "slice_thickness_A": 2.0},
    "detector": {"shape": [16, 16], "max_q_per_A": 1.2},
    "label": {"shape": [16, 16], "blur_A": 0.4},
}
TRAIN: dict[str, Any] = {
    "model": {"preset": "tiny"},
    "data": {"dose_e_per_pattern": 10000, "detector_bin": 16},
    "batch": 16,
    "optimizer": {"lr": 0.002, "warmup_steps": 20},
    "checkpoint": {"every_steps": 50},
    "trackers": (),
}
REGIONS = {"structure": "each", "thickness_A": (50.0, 100.0)}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the benchmark is made of; steps so many that samples limit the error. `scale` makes it smaller."""

    start: int = 6  # samples of each structure before the first round
    pool: int = 4
    rounds: int = 3
    per_round: int = 60
    steps: int = 1200
    judge_steps: int = 150
    test: int = 24

    def scaled(self, scale: float) -> Sizes:
        made = {name: max(2, round(value * scale)) for name, value in vars(self).items() if name != "rounds"}
        return Sizes(**{**made, "steps": max(16, made["steps"]), "judge_steps": max(8, made["judge_steps"])})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--scale", type=float, default=1.0)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _stop)
    sizes = Sizes().scaled(arguments.scale)
    test = _test_set(arguments.out / "test", sizes)
    rows = []
    for seed in arguments.seeds:
        folder = arguments.out / f"seed-{seed}"
        rows += [row | {"seed": seed} for row in _arms(folder, seed, sizes, test)]
    document = {
        "bench": "adaptive against uniform",
        "machine": machine(),
        "sizes": vars(sizes) | {"hard": f"mean atomic number over {HEAVY_Z:g}, thicker than {THICK_A:g} A"},
        "rows": rows,
        "targets": _targets(rows, arguments.seeds),
    }
    write_atomic(arguments.out / "result.json", json.dumps(document, indent=1).encode() + b"\n")
    print(json.dumps(document, indent=1))


# --- arms -----------------------------------------------------------------------------------------------------------


def _plan(folder: Path, *, seed: int, samples: int) -> Plan:
    spec = CampaignSpec.model_validate({**CAMPAIGN, "seed": seed, "samples_per_structure": samples})
    return make_plan(spec, base_dir=folder)


def _test_set(folder: Path, sizes: Sizes) -> Path:
    plan = _plan(folder, seed=10_000, samples=sizes.test)
    _simulate(plan, folder)
    return folder


def _arms(folder: Path, seed: int, sizes: Sizes, test: Path) -> list[dict[str, Any]]:
    folder.mkdir(parents=True, exist_ok=True)
    spec = TrainSpec.model_validate({**TRAIN, "steps": sizes.steps, "seed": seed})
    longer = spec.model_copy(update={"steps": sizes.steps + sizes.rounds * sizes.judge_steps})
    structures = len(trained_structures(_plan(folder, seed=seed, samples=1)))
    adaptive = AdaptiveSection(
        rounds=sizes.rounds,
        samples_per_round=sizes.per_round,
        regions=REGIONS,  # type: ignore[arg-type]
        pool=sizes.pool,
        judge_steps=sizes.judge_steps,
    )
    uniform = adaptive.model_copy(
        update={
            "rounds": 1,
            "samples_per_round": sizes.rounds * sizes.per_round + structures * sizes.pool,
            "pool": 0,
            "uniform_share": 1.0,
            "regions": {"thickness_A": (50.0, 100.0)},
        }
    )
    rows = []
    for arm, section, training in (
        ("adaptive", adaptive, spec),
        ("uniform", uniform, spec),
        ("uniform-longer", uniform, longer),
    ):
        path = folder / f"{arm}.json"
        if not path.exists():
            home = folder / arm.removesuffix("-longer")
            row = {"arm": arm} | _arm(home, folder / arm / "train", seed, sizes, section, training, test)
            write_atomic(path, json.dumps(row).encode())
        rows.append(json.loads(path.read_text()))
        print(json.dumps({"seed": seed, **rows[-1]}), flush=True)
    return rows


def _arm(
    home: Path, run: Path, seed: int, sizes: Sizes, section: AdaptiveSection, spec: TrainSpec, test: Path
) -> dict[str, Any]:
    dataset = home / "dataset"
    base = _plan(home, seed=seed, samples=sizes.start)
    hands = Hands(
        simulate=lambda plan: _simulate(plan, dataset),
        train=lambda spec, folder: _train(spec, dataset, folder),
        note=lambda text: print(text, flush=True),
    )
    plan, failed = run_rounds(base, dataset, home / "rounds", section, spec, hands)
    assert failed == 0, f"{failed} shards failed"
    _train(spec, dataset, run)
    judge_final(plan, dataset, home / "rounds", run, section, spec)
    return {
        "samples": plan.n_samples,
        "training_samples": sum(len(task.sample_indices) for task in plan.tasks if task.split == "train"),
        "core_s": round(plan.core_seconds, 3),
        "simulation_cpu_s": round(_spent(dataset), 3),
        "judging_cpu_s": round(sum(_spent(p) for p in (home / "rounds").glob("round-*") if p.is_dir()), 3),
        "training_cpu_s": round(_spent(run), 3),
        "steps": spec.steps,
        "judge_steps": section.judge_steps * section.rounds if section.uniform_share < 1 else 0,
        **_scores(judge(run, test, "train"), _plan(test, seed=10_000, samples=sizes.test)),
    }


def _simulate(plan: Plan, dataset: Path) -> int:
    """In this process, on one core."""
    if (dataset / MANIFEST_NAME).exists():
        there = {shard.shard_id for shard in load_manifest(dataset).shards}
        if {task.shard_id for task in plan.tasks} <= there:
            return 0
    with _counted(dataset):
        result = run_campaign(plan, dataset, make_cluster("inline", workers=None))
    return int(result.failed)


def _train(spec: TrainSpec, dataset: Path, folder: Path) -> None:
    with _counted(folder):
        train(spec, data=dataset, out=folder, threads=1)


@contextmanager
def _counted(folder: Path) -> Iterator[None]:
    """Adds the processor seconds that were spent to a file; what SIGKILL cuts off is not counted."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    began = time.process_time()
    try:
        yield
    finally:
        with _ledger(folder).open("a") as file:
            file.write(f"{time.process_time() - began}\n")


def _ledger(folder: Path) -> Path:
    return folder.parent / f"{folder.name}.cpu"


def _spent(folder: Path) -> float:
    path = _ledger(folder)
    return math.fsum(map(float, path.read_text().split())) if path.exists() else 0.0


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


# --- figures --------------------------------------------------------------------------------------------------------


def _scores(judged: tuple[Judged, ...], plan: Plan) -> dict[str, Any]:
    """RMSE over the hard region, over what is not hard, and over all samples, in V·Å and, over thickness, in V."""
    heavy = {
        sample.uid: mean_atomic_number(sample.structure) > HEAVY_Z and sample.thickness_A > THICK_A
        for sample in plan.samples()
    }
    hard = np.array([heavy[row.uid] for row in judged])
    mse = np.array([row.mse_VA2 for row in judged])
    depth = np.array([row.thickness_A for row in judged])
    loss = np.array([row.loss for row in judged])
    found: dict[str, Any] = {"test_samples": len(judged), "hard_samples": int(hard.sum())}
    for name, chosen in (("hard", hard), ("rest", ~hard), ("all", np.ones_like(hard))):
        found[f"rmse_VA_{name}"] = round(float(np.sqrt(mse[chosen].mean())), 4)
        found[f"rmse_V_{name}"] = round(float(np.sqrt((mse[chosen] / depth[chosen] ** 2).mean())), 5)
        found[f"loss_{name}"] = round(float(loss[chosen].mean()), 5)
    return found


def _targets(rows: list[dict[str, Any]], seeds: list[int]) -> list[dict[str, Any]]:
    """Ratios adaptive / other, the geometric mean over seeds, each seed's beside it."""
    by = {(row["seed"], row["arm"]): row for row in rows}

    def ratios(key: str, other: str) -> list[float]:
        return [by[seed, "adaptive"][key] / by[seed, other][key] for seed in seeds]

    def row(name: str, values: list[float], target: float) -> dict[str, Any]:
        mean = math.exp(statistics.fmean(map(math.log, values)))
        return {
            "name": name,
            "value": round(mean, 4),
            "seeds": [round(v, 4) for v in values],
            "target": target,
            "holds": mean <= target,
        }

    made = [row("core-seconds, adaptive / uniform", ratios("core_s", "uniform"), 1.02)]
    for other in ("uniform", "uniform-longer"):
        for region in ("hard", "rest", "all"):
            name = f"RMSE V·Å, {region}, adaptive / {other}"
            made.append(row(name, ratios(f"rmse_VA_{region}", other), 1.0))
    return made


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on")
