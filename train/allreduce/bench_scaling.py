"""The scaling model (`exitwave.train.scaling`) against ranks that run, and at 27,600 ranks.

alpha and beta come from allreduces of two ranks. The model then predicts the step of two ranks whose network really
computes, and of 2, 4 and 8 ranks whose computation is a calibrated sleep (there are fewer cores than ranks), all on
links of one rate in network namespaces.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import ExitwaveError
from exitwave.train.allreduce.bench_links import open_link
from exitwave.train.allreduce.cost import LinkCost, fit_link
from exitwave.train.scaling import AtScale, Cluster, Workload, at_scale, sensitivity, step_s
from exitwave.train.scaling_inputs import PAPER_EFFICIENCY, SOURCES, SUMMIT

__all__ = ["check_scaling", "message_cost", "scale_rows", "scaling_table"]

_CASES = (("real", 2, "bytes:0.25"), ("sleep", 2, "count:8"), ("sleep", 4, "count:8"), ("sleep", 8, "count:8"))
_WITHIN = 0.10


def message_cost(collectives: Sequence[tuple[int, float]]) -> LinkCost:
    """alpha and beta of one message, from allreduces (bytes, seconds) of two ranks, 2 (alpha + n/2 beta)."""
    whole = fit_link([n for n, _ in collectives], [s for _, s in collectives])
    return LinkCost(alpha_s=whole.alpha_s / 2, beta_s_per_byte=whole.beta_s_per_byte)


def check_scaling(
    link: str = "100mbit",
    cases: Sequence[tuple[str, int, str]] = _CASES,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows (predicted and measured steps) and targets. Raises `UsageError` where there are no namespaces."""
    rows: list[dict[str, Any]] = []
    message: LinkCost | None = None
    for kind, ranks, grouping in cases:
        say(f"{link}: the scaling model against {ranks} ranks ({_label(kind)})")
        with open_link(link, ranks) as open_ranks, tempfile.TemporaryDirectory(prefix="exitwave-bench-") as folder:
            out = Path(folder) / "record.json"
            arguments = ["--kind", kind, "--grouping", grouping, "--out", str(out)]
            open_ranks.run("exitwave.train.allreduce.bench_scaling_rank", arguments, limit_s=240)
            if not out.exists():
                raise ExitwaveError("bench allreduce: the ranks of the scaling check ended without a result")
            record = json.loads(out.read_text(encoding="utf-8"))
        if message is None:
            message = message_cost(record["collectives"])
        work = Workload(
            ready_s=record["ready_s"],
            nbytes=record["nbytes"],
            tensors=record["tensors"],
            backward_end_s=record["backward_end_s"],
        )
        predicted = step_s(work, Cluster(ranks=ranks, across=message), collective="ring")
        measured = statistics.median(record["steps_s"])
        rows.append(
            {
                "link": link,
                "ranks": ranks,
                "computation": _label(kind),
                "alpha_s": message.alpha_s,
                "beta_s_per_byte": message.beta_s_per_byte,
                "compute_s": record["backward_end_s"],
                "nbytes": sum(record["nbytes"]),
                "predicted_s": predicted,
                "measured_s": measured,
                "spread_s": [min(record["steps_s"]), max(record["steps_s"])],
            }
        )
    targets = [
        {
            "name": f"scaling model, {row['ranks']} ranks ({row['computation']}), {link}: |predicted / measured - 1|",
            "value": abs(row["predicted_s"] / row["measured_s"] - 1),
            "target": _WITHIN,
            "holds": abs(row["predicted_s"] / row["measured_s"] - 1) <= _WITHIN,
        }
        for row in rows
    ]
    return rows, targets


def _label(kind: str) -> str:
    return "a network computes" if kind == "real" else "computation replaced by a calibrated sleep"


def scale_rows() -> dict[str, Any]:
    """The model at 27,600 ranks: inputs with their sources, answers beside the published one, sensitivity."""

    def row(one: AtScale) -> dict[str, Any]:
        return {
            "protocol": one.protocol,
            "collective": one.collective,
            "overlap": one.overlap,
            "step_s": one.step_s,
            "efficiency": one.efficiency,
            "paper": PAPER_EFFICIENCY,
            "difference": one.to_paper,
        }

    return {
        "inputs": {name: {"value": getattr(SUMMIT, name), "source": source} for name, source in SOURCES.items()},
        "answers": [row(one) for one in at_scale(SUMMIT)],
        "sensitivity": [
            {"input": name, "value": value, "efficiency": found} for name, value, found in sensitivity(SUMMIT)
        ],
    }


def scaling_table(rows: Sequence[dict[str, Any]], scale: dict[str, Any]) -> str:
    """Both for people."""
    lines = []
    if rows:
        lines.append(f"{'ranks':>5} {'computation':<44} {'predicted':>9} {'measured':>9} {'ratio':>6}")
    for row in rows:
        lines.append(
            f"{row['ranks']:>5} {row['computation']:<44} {row['predicted_s']:>8.3f}s {row['measured_s']:>8.3f}s "
            f"{row['predicted_s'] / row['measured_s']:>6.3f}"
        )
    lines.append(f"model at {SUMMIT.ranks:,} ranks (published efficiency {PAPER_EFFICIENCY})")
    for one in scale["answers"]:
        lines.append(
            f"{one['protocol']:<12} {one['collective']:<13} overlap {one['overlap']:<9} {one['step_s']:>6.3f} s a step"
            f", efficiency {one['efficiency']:.3f} ({one['difference']:+.3f})"
        )
    lines.append("one input changed (hierarchical collective): efficiency of coordinator, bitvector, static")
    for one in scale["sensitivity"]:
        found = "  ".join(f"{value:.3f}" for value in one["efficiency"].values())
        lines.append(f"  {one['input']:<20} {one['value']:>12.4g}   {found}")
    return "\n".join(lines)
