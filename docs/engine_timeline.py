"""Draw a step, from real Chrome traces: `python docs/engine_timeline.py docs/engine-timeline.png`.

Two ranks on a link of 400 Mbit/s (network namespaces: needs root) train an FC-DenseNet, once with DDP's grouping (a cap
of 25 MB), once with the optimal one, and once with overlap "step"; a step of rank 0 is drawn. `--traces FOLDER` keeps
the traces, for Perfetto.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from exitwave.train.allreduce.bench_timeline import record_timeline

_ROWS = {"computation": "#4c72b0", "collective": "#dd8452", "exposed": "#c44e52"}


def spans_of_step(trace: dict[str, Any], step: int) -> list[dict[str, Any]]:
    """Rank 0's complete events of one step."""
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 0 and e["args"]["step"] == step]


def length(spans: list[dict[str, Any]]) -> float:
    """Microseconds from the first begin to the last end."""
    return float(max(e["ts"] + e["dur"] for e in spans) - min(e["ts"] for e in spans))


def draw(traces: dict[str, dict[str, Any]], target: Path) -> None:
    """One panel a trace, the step of median length of three late ones, on one scale."""
    figure, panels = plt.subplots(len(traces), 1, figsize=(7.2, 1.5 * len(traces)), sharex=True, squeeze=False)
    for panel, (title, trace) in zip(panels[:, 0], traces.items(), strict=True):
        last = max(e["args"]["step"] for e in trace["traceEvents"] if e["ph"] == "X")
        spans = sorted((spans_of_step(trace, step) for step in range(last - 3, last)), key=length)[1]
        begun = min(e["ts"] for e in spans)
        for e in spans:
            row = list(_ROWS).index(e["cat"])
            panel.barh(
                -row, e["dur"] / 1e3, left=(e["ts"] - begun) / 1e3, height=0.7, color=_ROWS[e["cat"]], edgecolor="white"
            )
        end = max(e["ts"] + e["dur"] for e in spans)
        exposed = sum(e["dur"] for e in spans if e["cat"] == "exposed")
        panel.set_title(
            f"{title}: {(end - begun) / 1e3:.0f} ms, exposed {exposed / 1e3:.0f} ms", fontsize=9, loc="left"
        )
        panel.set_yticks([-k for k in range(len(_ROWS))], list(_ROWS), fontsize=8)
        panel.tick_params(axis="x", labelsize=8)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    panels[-1, 0].set_xlabel("ms since the step began (rank 0 of 2)", fontsize=8)
    figure.tight_layout()
    figure.savefig(target, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("--traces", type=Path)
    options = parser.parse_args()
    traces = {
        "backward, bytes:25": record_timeline("bytes:25"),
        "backward, optimal": record_timeline("optimal"),
        "step": record_timeline("optimal", overlap="step"),
    }
    if options.traces is not None:
        options.traces.mkdir(parents=True, exist_ok=True)
        for name, trace in traces.items():
            path = options.traces / f"{name.replace(', ', '-').replace(':', '-')}.json"
            path.write_text(json.dumps(trace), encoding="utf-8")
    draw(traces, options.target)


if __name__ == "__main__":
    main()
