"""What makes a reconstruction better: more structures, the layout of the input, a known thickness.

    python benchmarks/reconstruction.py [--data DATASET] [--steps 150] [--structures 8 16 32 64] [--keep DIR]

Without --data a small campaign is simulated first: examples/reconstruct.yaml with every third crystal, one zone axis
and one pass of each. Every network then takes the same number of steps (so that other work on the machine changes
nothing but how long it takes) and is scored on the same unseen compositions, beside the best classical method from the
same noisy patterns. With --keep, what is done is not done again:

- structures: nested subsets of the training structures, the curve of error against their number
- layout: detector pixels as channels over the scan, against probe positions as channels over the detector
- thickness: not told (as in an experiment), against thickness and defocus told

Short trainings show what helps, not what a long one reaches: that is `exitwave run examples/reconstruct.yaml`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from exitwave.ingest import open_dataset

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "reconstruct.yaml"
KNOWN = "[energy_keV, semiangle_mrad, R_sampling_A, thickness_A, defocus_A]"


def exitwave(*words: object) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "exitwave.workflows", *map(str, words), "--json", "--quiet"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def small_campaign(folder: Path) -> Path:
    """Every third crystal of the example along its first zone axis, one pass of each."""
    text = EXAMPLE.read_text(encoding="utf-8")
    head, _, tail = text.partition("  structures:\n")
    body, _, rest = tail.partition("\n  # Two questions")
    lines = [line for line in body.splitlines() if "prototype" in line][::3]
    lines = [f"{line.partition('zone_axes')[0].rstrip(' ,')}, zone_axes: [[0, 0, 1]] }}" for line in lines]
    path = folder / "campaign.yaml"
    path.write_text(head + "  structures:\n" + "\n".join(lines) + "\n\n  # Two questions" + rest, encoding="utf-8")
    changes = {
        "samples_per_structure": 3,
        "samples_per_shard": 3,
        "split.new_composition": 15,
        "split.new_prototype": 0,
        "split.val": 6,
    }
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    exitwave("simulate", path, "--out", folder / "data", "--cluster", "local", "--workers", 2, *words)
    return folder / "data"


def subset(data: Path, out: Path, count: int) -> Path:
    """The data set with `count` of its training structures; a larger count holds all of a smaller one."""
    train = open_dataset(data).split("train").params
    structures = sorted({int(s) for s in train["structure"]})
    random.Random(0).shuffle(structures)
    if count >= len(structures) or out.exists():
        return data if count >= len(structures) else out
    chosen = ", ".join(map(str, structures[:count]))
    exitwave("subset", data, "--where", f"split!='train' or structure in ({chosen})", "--out", out)
    return out


def trained(data: Path, run: Path, steps: int, split: str, **changes: str) -> dict[str, Any]:
    settings = {"max_seconds": "null", "steps": str(steps), "eval_every_steps": "null"}
    settings |= {"checkpoint.every_steps": "50", "optimizer.warmup_steps": "20"} | changes
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    exitwave("train", EXAMPLE, "--data", data, "--out", run, "--ranks", 2, *words)
    result = exitwave("evaluate", run, "--data", data, "--split", split)
    metrics = result["metrics"]
    best = min(("idpc", "com"), key=lambda m: float(metrics[m]["rmse_V"]))
    return {
        "steps": result["model"]["step"],
        "parameters": result["model"]["parameters"],
        "rmse_V": metrics["model"]["rmse_V"],
        "rmse_V_fitted": metrics["model"]["rmse_V_fitted"],
        "classical_rmse_V": metrics[best]["rmse_V"],
        "mean_rmse_V": metrics["mean"]["rmse_V"],
        "ratio": metrics["model"]["rmse_V"] / metrics[best]["rmse_V"],
        "ms_per_sample": result["ms_per_sample"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a data set with splits train, val and new_composition (or test)")
    parser.add_argument("--steps", type=int, default=150, help="of each training")
    parser.add_argument("--structures", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--keep", type=Path, help="work here and keep what is made")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def tell(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        data = args.data or small_campaign(folder)
        splits = open_dataset(data).splits
        split = "new_composition" if "new_composition" in splits else "test"
        plain: dict[str, Any] = {}
        for count in args.structures:
            part = subset(data, folder / f"subset-{count}", count)
            plain = trained(part, folder / f"structures-{count}", args.steps, split)
            tell({"what": "structures", "structures": count} | plain)
        if part != data:
            plain = trained(data, folder / "structures-all", args.steps, split)
        # over the detector's 16 x 16 pixels the patterns of all positions are the channels
        turned = {"model.layout": "probes-as-channels"}
        tell({"what": "layout", "layout": "detector-as-channels"} | plain)
        probes = trained(data, folder / "probes-as-channels", args.steps, split, **turned)
        tell({"what": "layout", "layout": "probes-as-channels"} | probes)
        tell({"what": "thickness and defocus", "known": "not told"} | plain)
        known = trained(data, folder / "thickness-told", args.steps, split, **{"data.conditions": KNOWN})
        tell({"what": "thickness and defocus", "known": "told"} | known)
    curve = [row["rmse_V"] for row in rows if row["what"] == "structures"]
    target = {
        "name": "error with the most structures over that with the fewest",
        "value": curve[-1] / curve[0],
        "target": 1.0,
        "holds": curve[-1] < curve[0],
    }
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    print(json.dumps({"bench": "reconstruction", "machine": machine, "rows": rows, "targets": [target]}, indent=1))


if __name__ == "__main__":
    main()
