"""The error of a regression against the size of its samples: python docs/spatial_accuracy.py OUT.png SIZE=FILE.json …

Each FILE is what `exitwave evaluate RUN --data DATASET --split SPLIT --json` printed for a training with
`series.crop` SIZE; every split becomes a line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    out, *files = sys.argv[1:]
    lines: dict[str, list[tuple[int, float, float]]] = {}
    for argument in files:
        size, _, name = argument.partition("=")
        document = json.loads(Path(name).read_text())
        errors = (document["metrics"][who]["mse"] for who in ("model", "mean"))
        lines.setdefault(document["split"], []).append((int(size), *errors))
    figure, axes = plt.subplots(figsize=(5, 3.4), layout="constrained")
    for number, (split, points) in enumerate(sorted(lines.items())):
        sizes, model, mean = zip(*sorted(points), strict=True)
        axes.plot(sizes, model, "o-", color=f"C{number}", label=f"CosmoFlow, split {split}")
        axes.plot(sizes, mean, "--", color=f"C{number}", alpha=0.5, label=f"training set's mean, split {split}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size}²" for size in sizes])
    axes.set_xlabel("pixels of a sample (eight images each)")
    axes.set_ylabel("mean squared error, standardised")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
