"""Time to the same validation error: training beside the campaign against simulating first and training then.

    python benchmarks/online_against_offline.py [--rounds 3] [--size full]

Three arms, each the same pipeline on the same machine, in turn, the order turned each round:

    offline        `exitwave run`: simulate with a worker on every core; then train with a rank on every core
    online         `exitwave run --online`: both at once, as it comes. No sample is used more often before the last has
                   come than the whole training uses it, so that the training ends after the campaign
    online, eager  the same with `online.max_reuse` three times that: all steps are taken by the time that a third of
                   the samples is there. What comes later is never seen: it pays where the samples of a campaign
                   resemble each other, and only a comparison like this one tells

The error is the validation loss. What both arms of a pair have to reach is 1.05 times the last one of the offline arm
of the round; an arm's time is from the start of the command to the first validation that is there. `balance` is the
time of the offline arm's simulation over that of its training: the goal is set for stages that take the same time.

Two cores do the same work in either order, so that only this can be gained: phases in which a stage leaves a core idle
(processes that start, ranks that wait for each other, a campaign's last tasks), and samples that the error does not
need.
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
# samples a structure, epochs, validations
SIZES = {"tiny": (4, 6, 6), "small": (12, 16, 16), "full": (48, 24, 24)}

PIPELINE = """\
name: online-against-offline
ranks: {cores}
cluster: {{kind: local, workers: {cores}}}
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
  cell: {{min_extent_A: 26.7}}
  sampling:
    energy_keV: {{choice: [100, 200]}}
    semiangle_mrad: 12
    defocus_A: {{uniform: [-30, 30]}}
    thickness_A: {{uniform: [20, 60]}}
    scan_origin: random
  scan: {{shape: [8, 8], step_A: 0.5}}
  grid: {{sampling_A: 0.25, max_gpts: 128, slice_thickness_A: 2.0}}
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
    """One arm: (seconds since the start, validation loss) of each validation, and what the parts took."""
    command = [sys.executable, "-m", "exitwave.workflows", "run", str(pipeline), "--out", str(out), *options]
    subprocess.run(command, check=True, capture_output=True)
    line, train = events(out / "events.jsonl"), events(out / "train" / "events.jsonl")
    began = line[0]["t"]
    parts = {e["part"]: e["seconds"] for e in line if e["kind"] == "part_finished"}
    return {
        "curve": [(e["t"] - began, float(e["loss"])) for e in train if e["kind"] == "train_eval"],
        "trained_s": max(e["t"] for e in train) - began,
        "simulate_s": parts["simulate"],
        "train_s": parts["train"],
    }


def reached_s(curve: list[tuple[float, float]], error: float) -> float | None:
    return next((seconds for seconds, loss in curve if loss <= error), None)


def one_round(pipeline: Path, folder: Path, epochs: int, number: int) -> dict[str, Any]:
    eager = ("--online", "--set", f"online.max_reuse={EAGER * epochs}")
    arms: list[tuple[str, tuple[str, ...]]] = [("offline", ()), ("online", ("--online",)), ("online, eager", eager)]
    arms = arms[number % 3 :] + arms[: number % 3]
    measured = {name: run(pipeline, folder / f"{number}-{name}", *options) for name, options in arms}
    for name, _ in arms:
        shutil.rmtree(folder / f"{number}-{name}", ignore_errors=True)
    return measured


def row(round_number: int, measured: dict[str, Any]) -> dict[str, Any]:
    offline = measured["offline"]
    error = SLACK * offline["curve"][-1][1]
    found: dict[str, Any] = {
        "round": round_number,
        "error": error,
        "balance": offline["simulate_s"] / offline["train_s"],
    }
    for name, arm in measured.items():
        key = name.replace(", ", "_")
        found[f"{key}_reached_s"] = reached_s(arm["curve"], error)
        found[f"{key}_trained_s"] = arm["trained_s"]
        found[f"{key}_last_loss"] = arm["curve"][-1][1]
    return found


def ratios(rows: list[dict[str, Any]], arm: str) -> list[float]:
    """Of the rounds in which the arm got there."""
    return [r[f"{arm}_reached_s"] / r["offline_reached_s"] for r in rows if r[f"{arm}_reached_s"] is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", choices=SIZES, default="full")
    options = parser.parse_args()
    samples, epochs, validations = SIZES[options.size]
    cores = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pipeline = folder / "pipeline.yaml"
        steps = epochs * (13 * samples // 16)  # 16 compositions, of which 13 are for training
        shard = max(2, samples // 8)
        text = PIPELINE.format(
            cores=cores, samples=samples, shard=shard, epochs=epochs, every=max(1, steps // validations)
        )
        pipeline.write_text(text)
        rows = [row(k, one_round(pipeline, folder, epochs, k)) for k in range(options.rounds)]
    targets = []
    for arm in ("online", "online_eager"):
        got = ratios(rows, arm)
        value = statistics.median(got) if len(got) == len(rows) else None
        holds = value is not None and value <= GOAL
        name = f"{arm}: time to the same validation error / offline"
        targets.append({"name": name, "value": value, "spread": sorted(got), "target": GOAL, "holds": holds})
    machine = {"cpu": platform.processor() or platform.machine(), "cores": cores, "python": platform.python_version()}
    print(json.dumps({"bench": "online", "machine": machine, "rows": rows, "targets": targets}, indent=1))


if __name__ == "__main__":
    main()
