"""Draw the scaling model from 6 to 27,600 ranks: `python docs/engine_scaling.py docs/engine-scaling.png`.

The inputs are those frozen in `exitwave.train.scaling_inputs`; the published efficiency stands beside the curves.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from exitwave.train.scaling import at_scale
from exitwave.train.scaling_inputs import PAPER_EFFICIENCY, SUMMIT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    target = parser.parse_args().target
    ranks = [6 * 2**k for k in range(12)] + [SUMMIT.ranks]
    curves: dict[str, list[float]] = {}
    for size in ranks:
        for one in at_scale(replace(SUMMIT, ranks=size)):
            if one.collective == "hierarchical" and one.overlap == "backward":
                curves.setdefault(one.protocol, []).append(one.efficiency)
    figure, panel = plt.subplots(figsize=(6, 3.2))
    for (protocol, values), style in zip(curves.items(), ("-", "--", ":"), strict=True):
        panel.plot(ranks, values, style, label=protocol, linewidth=2)
    panel.plot([SUMMIT.ranks], [PAPER_EFFICIENCY], "k*", label="published (arXiv 1909.11150)")
    panel.set_xscale("log")
    panel.set_ylim(0, 1.05)
    panel.set_xlabel("ranks", fontsize=9)
    panel.set_ylabel("efficiency (model)", fontsize=9)
    panel.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
