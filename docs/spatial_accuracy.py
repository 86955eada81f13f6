"""The error of a regression against the size of its samples: python docs/spatial_accuracy.py OUT.png RUN RUN …

Each RUN is a training of the task regress that was evaluated: its crop is the size, its metrics.json the error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    out, *runs = (Path(argument) for argument in sys.argv[1:])
    points = []
    for run in runs:
        crop = json.loads((run / "train.json").read_text())["spec"]["series"]["crop"]
        metrics = json.loads((run / "metrics.json").read_text())["metrics"]
        points.append((crop, metrics["model"]["mse"], metrics["mean"]["mse"]))
    points.sort()
    figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    axes.plot([p[0] for p in points], [p[1] for p in points], "o-", label="CosmoFlow")
    axes.plot([p[0] for p in points], [p[2] for p in points], "--", color="grey", label="training set's mean")
    axes.set_xscale("log", base=2)
    axes.set_xticks([p[0] for p in points], [f"{p[0]}²" for p in points])
    axes.set_xlabel("pixels of a sample (eight images each)")
    axes.set_ylabel("mean squared error, standardised")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
