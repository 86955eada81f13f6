"""`exitwave bench allreduce`: step times of this engine beside DDP's, on the same ranks, models and links.

Two processes with one thread each take the same steps (forward, loss, backward, until the gradients are the mean) by
every method in turn, for several rounds, the order turned by one each round, so that whatever else the machine does
falls on all of them. A method's step time is the median over its steps; methods are compared by the ratio of their
medians within each round, and then the median of those.

What runs where: `run_bench` starts the ranks (over the loopback interface, or in two network namespaces whose link is
slowed down: `bench_links`) and reads what they wrote; `python -m exitwave.train.allreduce.bench` is one rank.
"""

from __future__ import annotations

import json
import platform
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from exitwave.ingest.errors import ExitwaveError, InterruptedRunError, UsageError
from exitwave.train.allreduce.bench_links import LINKS, open_link, terminated_as_interrupt

__all__ = ["METHODS", "MODELS", "rows_and_targets", "run_bench", "table"]

_BEST = "static/optimal"
# "compute" exchanges nothing; ddp by bucket cap; ours by protocol and grouping
METHODS = (
    "compute",
    *(f"ddp/{cap}MB" for cap in (1, 4, 10, 25, 50)),
    "static/bytes",
    _BEST,
    "bitvector/bytes",
    "coordinator/bytes",
)
MODELS = ("fc-densenet-tiny", "fc-densenet-small", "small-tensors-1000")
_SLOW_LINK = 0.05  # communication/compute from which on the link matters


def run_bench(
    *,
    links: Sequence[str] | None = None,
    models: Sequence[str] | None = None,
    methods: Sequence[str] = METHODS,
    seconds: float = 20.0,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure, and return the benchmark document: `bench`, `machine`, `rows`, `targets`, `skipped`.

    Args:
        links: of `LINKS`; None means all. Those that need root are skipped, and said so, where there is none.
        models: of `MODELS`; None means all.
        methods: of `METHODS`, with "compute", "static/optimal" and one of ddp among them; fewer get more rounds.
        seconds: to measure each model on each link, after warming up.
        say: told what is going on.

    Raises:
        UsageError: an unknown link, model or method.
        InterruptedRunError: stopped by a signal; processes and namespaces are gone.
    """
    links, models = tuple(links or ("loopback", "1gbit", "400mbit")), tuple(models or MODELS)
    for given, known, what in ((links, tuple(LINKS), "link"), (models, MODELS, "model"), (methods, METHODS, "method")):
        for name in given:
            if name not in known:
                raise UsageError(f"bench allreduce: {what} {name!r} does not exist: choose from {', '.join(known)}")
    rows: list[dict[str, Any]] = []
    targets: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    try:
        with terminated_as_interrupt():
            for link in links:
                try:
                    _on_link(link, models, methods, seconds, say, rows, targets)
                except UsageError as error:
                    skipped.append({"link": link, "why": str(error)})
                    say(f"{link}: skipped: {error}")
    except KeyboardInterrupt:
        raise InterruptedRunError("the benchmark was stopped; nothing was kept") from None
    machine = {
        "system": platform.system(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ranks": 2,
        "threads_per_rank": 1,
    }
    return {"bench": "allreduce", "machine": machine, "rows": rows, "targets": targets, "skipped": skipped}


def _on_link(
    link: str,
    models: Sequence[str],
    methods: Sequence[str],
    seconds: float,
    say: Callable[[str], None],
    rows: list[dict[str, Any]],
    targets: list[dict[str, Any]],
) -> None:
    with open_link(link) as ranks, tempfile.TemporaryDirectory(prefix="exitwave-bench-") as folder:
        for model in models:
            say(f"{link}, {model}: measuring for {seconds:g} s after warming up")
            out = Path(folder) / f"{model}.json"
            arguments = ["--model", model, "--seconds", str(seconds), "--out", str(out), "--methods", *methods]
            ranks.run("exitwave.train.allreduce.bench_rank", arguments, limit_s=10 * seconds + 300)
            if not out.exists():
                raise ExitwaveError(f"bench allreduce: the ranks of {link}, {model} ended without a result")
            some_rows, some_targets = rows_and_targets(link, model, json.loads(out.read_text(encoding="utf-8")))
            rows += some_rows
            targets += some_targets


def rows_and_targets(
    link: str, model: str, measured: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and targets of one model on one link. Pure.

    `measured` is what rank 0 wrote: `steps_s` (method -> rounds -> step times, seconds), `exposed_s` (method of ours ->
    seconds a step), `communication_s` (one allreduce of all gradients), `nbytes`, `tensors`, `planning`.
    """
    steps: dict[str, list[list[float]]] = measured["steps_s"]
    medians = {method: statistics.median(t for one in rounds for t in one) for method, rounds in steps.items()}
    compute = medians["compute"]
    best_ddp = min((method for method in medians if method.startswith("ddp")), key=lambda method: medians[method])
    ratio = float(measured["communication_s"]) / compute
    rows = []
    for method, rounds in steps.items():
        low, high = _quartiles([t for one in rounds for t in one])
        rows.append(
            {
                "link": link,
                "model": model,
                "method": method,
                "step_s": medians[method],
                "spread_s": [low, high],
                "steps": sum(len(one) for one in rounds),
                "to_best_ddp": _paired(steps[method], steps[best_ddp]),
                "exposed_s": measured["exposed_s"].get(method),
                "tensors": measured["tensors"],
                "nbytes": measured["nbytes"],
                "communication_to_compute": ratio,
                **({"planning": measured["planning"]} if method == _BEST else {}),
            }
        )
    limit = 1.00 if ratio >= _SLOW_LINK else 1.02
    value = _paired(steps[_BEST], steps[best_ddp])
    targets = [
        {
            "name": f"{link}, {model}: step time of {_BEST} / best DDP ({best_ddp})",
            "value": value,
            "target": limit,
            "holds": value <= limit,
        }
    ]
    return rows, targets


def _paired(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """The median over rounds of the ratio of medians."""
    return statistics.median(
        statistics.median(a) / statistics.median(b) for a, b in zip(ours, theirs, strict=True) if a and b
    )


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def table(document: Mapping[str, Any]) -> str:
    """The document for people."""
    lines = [f"{'link':<10} {'model':<20} {'method':<18} {'ms a step':>10} {'quartiles':>17} {'/ best DDP':>11}"]
    for row in document["rows"]:
        low, high = row["spread_s"]
        spread = f"{1e3 * low:.1f}..{1e3 * high:.1f}"
        lines.append(
            f"{row['link']:<10} {row['model']:<20} {row['method']:<18} {1e3 * row['step_s']:>10.1f} {spread:>17} "
            f"{row['to_best_ddp']:>11.3f}"
        )
    for target in document["targets"]:
        verdict = "holds" if target["holds"] else "MISSED"
        lines.append(f"{target['name']}: {target['value']:.3f}, target {target['target']:.2f}: {verdict}")
    lines += [f"{one['link']}: skipped: {one['why']}" for one in document["skipped"]]
    return "\n".join(lines)
