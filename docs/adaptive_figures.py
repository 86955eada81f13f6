"""Draws docs/adaptive.png from what benchmarks/adaptive_against_uniform.py left: `python docs/adaptive_figures.py OUT`.

Left: what each round of the first seed favoured. Right: the error of each arm, a dot for each seed. Prints the table of
docs/adaptive.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LogNorm

from exitwave.simulate.steer_rounds import read_rounds

COLOURS = {"adaptive": "#3b82f6", "uniform": "#f97316", "uniform-longer": "#10b981"}
REGIONS = {"hard": "heavy and thick", "rest": "all the rest", "all": "everything"}


def table(result: dict[str, Any]) -> str:
    """Means over seeds, each seed in brackets, as Markdown."""
    columns = {
        "training_samples": ("training samples", "{:.0f}"),
        "core_s": ("simulation, core-s", "{:.1f}"),
        "steps": ("steps", "{:.0f}"),
        "judge_steps": ("of judges", "{:.0f}"),
        **{f"rmse_VA_{key}": (f"{name}, V·Å", "{:.1f}") for key, name in REGIONS.items()},
    }
    heads = ["arm", *(name for name, _ in columns.values())]
    lines = ["| " + " | ".join(heads) + " |", "| --- |" + " ---: |" * len(columns)]
    for arm in COLOURS:
        rows = [row for row in result["rows"] if row["arm"] == arm]
        cells = []
        for key, (_, form) in columns.items():
            values = [float(row[key]) for row in rows]
            each = f" ({', '.join(map(form.format, values))})" if key.startswith("rmse") else ""
            cells.append(form.format(np.mean(values)) + each)
        lines.append("| " + " | ".join([arm, *cells]) + " |")
    lines += ["", "| ratio, geometric mean over seeds | value | each seed |", "| --- | ---: | --- |"]
    for target in result["targets"]:
        lines.append(f"| {target['name']} | {target['value']:.3f} | {', '.join(f'{v:.3f}' for v in target['seeds'])} |")
    return "\n".join(lines)


def main() -> None:
    out = Path(sys.argv[1])
    result = json.loads((out / "result.json").read_text())
    print(table(result))
    seed = result["rows"][0]["seed"]
    rounds = read_rounds(out / f"seed-{seed}" / "adaptive" / "dataset")[1:]
    figure, axes = plt.subplots(1, len(rounds) + 1, figsize=(11, 3.6), width_ratios=[*([1] * len(rounds)), 1.9])
    for made, place in zip(rounds, axes, strict=False):
        down, across = made.axes
        ratio = np.full((len(down.labels), len(across.labels)), np.nan)
        for row in made.cells:
            ratio[row.cell] = row.share / row.natural
        place.imshow(ratio, cmap="RdBu_r", norm=LogNorm(0.25, 4), aspect="auto")
        for (y, x), value in np.ndenumerate(ratio):
            place.text(x, y, f"{value:.2g}", ha="center", va="center", fontsize=7)
        place.set_title(f"round {made.number}", fontsize=9)
        place.set_xticks(
            range(len(across.labels)), [f"{label} Å" for label in across.labels], fontsize=6.5, rotation=25
        )
        names = [label.split(" [")[0] for label in down.labels] if place is axes[0] else []
        place.set_yticks(range(len(down.labels)), names or [""] * len(down.labels), fontsize=8)
    last = axes[-1]
    for k, (arm, colour) in enumerate(COLOURS.items()):
        rows = [row for row in result["rows"] if row["arm"] == arm]
        for j, region in enumerate(REGIONS):
            values = [row[f"rmse_VA_{region}"] for row in rows]
            last.bar(j + 0.26 * (k - 1), np.mean(values), 0.24, color=colour, alpha=0.6, label=arm if j == 0 else None)
            last.plot([j + 0.26 * (k - 1)] * len(values), values, "o", ms=3.5, color="black")
    last.set_xticks(range(len(REGIONS)), list(REGIONS.values()), fontsize=8)
    last.set_ylabel("RMSE on the test set, V·Å", fontsize=8)
    last.tick_params(axis="y", labelsize=8)
    last.legend(frameon=False, fontsize=8)
    figure.suptitle("How many times its natural share each region got, and the error that came of it", fontsize=10)
    figure.tight_layout()
    figure.savefig(Path(__file__).parent / "adaptive.png", dpi=110, metadata={"Software": ""})


if __name__ == "__main__":
    main()
