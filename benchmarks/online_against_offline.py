"""Time to the same validation error: training beside the campaign against simulating first and training then.

    python benchmarks/online_against_offline.py [--rounds 3] [--size full] [--cores shared apart]

Each arm is the same pipeline on the same machine, in turn, the order turned each round:

    offline         `exitwave run`: simulate; then train
    online          `exitwave run --online`: both at once, as it comes. No sample is used more often before the last
                    has come than the whole training uses it, so that the training ends after the campaign
    online, longer  the same with a quarter more epochs: steps that were taken on few samples are made up for
    online, eager   the same with `online.max_reuse` three times the epochs: most steps are taken by the time that a
                    third of the samples is there. It pays where the samples of a campaign resemble each other

and all of it in two layouts of the same cores:

    shared          a worker on every core, then a rank on every core; online as many of both, the ranks first. Cores do
                    the same work in either order: what can be gained is the time in which a stage leaves a core idle
                    (processes that start, ranks that wait for each other, a campaign's last tasks)
    apart           half of the cores have workers and the other half ranks, in both arms: as where simulations run on
                    processors and the training on accelerators, and neither can do the other's work

The error is the RMSE [V·Å] over the validation split (a loss is in units of what had arrived when it was first
measured). What all arms of a round have to reach is 1.05 times the last one of the offline arm; an arm's time is from
the start of the command to the first validation that is there. `balance` is the time of the offline arm's simulation
over that of its training: the goal is set for stages that take the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GOAL = 0.65
SLACK = 1.05
EAGER = 3
LONGER = 1.25
# samples a structure, epochs, validations
SIZES = {"tiny": (4, 6, 6), "small": (12, 16, 16), "full": (48, 10, 30)}

PIPELINE = """\
name: online-against-offline
ranks: {each}
cluster: {{kind: local, workers: {each}}}
campaign:
  name: online-against-offline
  seed: 7
  structures:
    - library: [Al, Cu, Ag, Au, Pt, Ni, Fe, W, Mo, Si, Ge, GaAs, SiC]
    - {{prototype: rocksalt, elements: [Mg, O], a_A: 4.212}}
    - {{prototype: fluorite, elements: [Ca, F], a_A: 5.463}}
    - {{prototype: cesiumchloride, elements: [Cs, Cl], a_A: 4.123}}
  split: {{by: composition, val: 2, test: 1}}
  samples_per_structure: {samples}
  samples_per_shard: {shard}
  cell: {{min_extent_A: 20.0}}
  sampling:
    energy_keV: {{choice: [100, 200]}}
    semiangle_mrad: 12
    defocus_A: {{uniform: [-30, 30]}}
    thickness_A: {{uniform: [20, 60]}}
    scan_origin: random
  scan: {{shape: [8, 8], step_A: 0.5}}
  grid: {{sampling_A: 0.19, max_gpts: 128, slice_thickness_A: 2.0}}
  detector: {{shape: [32, 32], max_q_per_A: 1.2}}
  label: {{shape: [32, 32], blur_A: 0.3}}
train:
  model: {{preset: tiny}}
  data: {{dose_e_per_pattern: 10000, detector_bin: 16}}
  batch: 16
  epochs: {epochs}
  optimizer: {{lr: 0.002, warmup_steps: 20}}
  eval_every_steps: {every}
  checkpoint: {{every_steps: 200, keep: 1}}
"""


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


def run(pipeline: Path, out: Path, *options: str) -> dict[str, Any]:
    """One arm: (seconds since the start, RMSE [V·Å]) of each validation, and what the parts took."""
    command = [sys.executable, "-m", "exitwave.workflows", "run", str(pipeline), "--out", str(out), *options]
    one = {"OMP_NUM_THREADS": "1"}  # a rank has one core, in each arm and layout
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | one)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    line, train = events(out / "events.jsonl"), events(out / "train" / "events.jsonl")
    began = line[0]["t"]
    parts = {e["part"]: e["seconds"] for e in line if e["kind"] == "part_finished"}
    return {
        "curve": [(e["t"] - began, float(e["rmse_VA"])) for e in train if e["kind"] == "train_eval"],
        "trained_s": max(e["t"] for e in train) - began,
        "simulate_s": parts["simulate"],
        "train_s": parts["train"],
    }


def reached_s(curve: list[tuple[float, float]], error: float) -> float | None:
    return next((seconds for seconds, rmse in curve if rmse <= error), None)


def arms_of(epochs: int) -> dict[str, tuple[str, ...]]:
    return {
        "offline": (),
        "online": ("--online",),
        "online, longer": ("--online", "--set", f"train.epochs={round(LONGER * epochs)}"),
        "online, eager": ("--online", "--set", f"online.max_reuse={EAGER * epochs}"),
    }


def one_round(pipeline: Path, folder: Path, epochs: int, number: int) -> dict[str, Any]:
    arms = list(arms_of(epochs).items())
    turn = number % len(arms)
    measured = {}
    for name, options in arms[turn:] + arms[:turn]:
        measured[name] = run(pipeline, folder / f"{number}-{name}", *options)
        shutil.rmtree(folder / f"{number}-{name}", ignore_errors=True)
    return measured


def row(cores: str, round_number: int, measured: dict[str, Any]) -> dict[str, Any]:
    offline = measured["offline"]
    error = SLACK * offline["curve"][-1][1]
    found: dict[str, Any] = {
        "cores": cores,
        "round": round_number,
        "error_VA": error,
        "balance": offline["simulate_s"] / offline["train_s"],
    }
    for name, arm in measured.items():
        key = name.replace(", ", "_")
        found[f"{key}_reached_s"] = reached_s(arm["curve"], error)
        found[f"{key}_trained_s"] = arm["trained_s"]
        found[f"{key}_last_rmse_VA"] = arm["curve"][-1][1]
    return found


def ratios(rows: list[dict[str, Any]], arm: str) -> list[float]:
    """Of the rounds in which the arm got there."""
    return [r[f"{arm}_reached_s"] / r["offline_reached_s"] for r in rows if r[f"{arm}_reached_s"] is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--cores", nargs="+", choices=("shared", "apart"), default=["shared", "apart"])
    parser.add_argument("--work", type=Path, help="where to work; else the system's temporary folder")
    options = parser.parse_args()
    samples, epochs, validations = SIZES[options.size]
    cores = os.cpu_count() or 1
    steps = epochs * (13 * samples // 16)  # 16 compositions, of which 13 are for training
    rows = []
    with tempfile.TemporaryDirectory(dir=options.work) as name:
        folder = Path(name)
        for k in range(options.rounds):
            for layout in options.cores:
                each = cores if layout == "shared" else max(1, cores // 2)
                pipeline = folder / f"{layout}.yaml"
                shard, every = max(2, samples // 8), max(1, steps // validations)
                text = PIPELINE.format(each=each, samples=samples, shard=shard, epochs=epochs, every=every)
                pipeline.write_text(text)
                rows.append(row(layout, k, one_round(pipeline, folder, epochs, k)))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    targets = []
    for layout in options.cores:
        mine = [r for r in rows if r["cores"] == layout]
        for arm in list(arms_of(epochs))[1:]:
            got = ratios(mine, arm.replace(", ", "_"))
            value = statistics.median(got) if len(got) == len(mine) else None
            name = f"{layout}: {arm}: time to the same validation error / offline"
            holds = value is not None and value <= GOAL
            targets.append({"name": name, "value": value, "spread": sorted(got), "target": GOAL, "holds": holds})
    machine = {"cpu": platform.processor() or platform.machine(), "cores": cores, "python": platform.python_version()}
    print(json.dumps({"bench": "online", "machine": machine, "rows": rows, "targets": targets}, indent=1))


if __name__ == "__main__":
    main()
