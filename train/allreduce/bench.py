"""`exitwave bench allreduce`: step times of this engine beside DDP's and FSDP2's, on the same ranks, models and links.

Two processes with one thread each take the same steps (forward, loss, backward, optimizer) by every method in turn, for
several rounds, the order turned by one each round, so that whatever else the machine does falls on all of them. A
method's step time is the median over its steps; methods are compared by the ratio of their medians within each round,
and then the median of those.

The batch of a model is chosen so that communication/compute is about 0.5 at 1 Gbit/s; slower links then give more. The
ratio that the targets go by is the measured one.

What runs where: `run_bench` starts the ranks (over the loopback interface, or in two network namespaces whose link is
slowed down: `bench_links`) and reads what they wrote; `bench_rank` is one rank. The control plane is counted by
`bench_control`, the scaling model checked by `bench_scaling`.
"""

from __future__ import annotations

import json
import platform
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from exitwave.ingest.errors import ExitwaveError, InterruptedRunError, UsageError
from exitwave.train.allreduce.bench_control import control_rows, control_table, control_targets
from exitwave.train.allreduce.bench_links import LINKS, open_link, terminated_as_interrupt
from exitwave.train.allreduce.bench_scaling import check_scaling, scale_rows, scaling_table

__all__ = ["METHODS", "MODELS", "rows_and_targets", "run_bench", "table"]

_BEST, _STEP = "static/optimal", "step/optimal"
_TRAFFIC = "compute+traffic"
# "compute" exchanges nothing, "compute+traffic" computes beside allreduces that it does not need; ddp by bucket cap;
# fsdp2 is fully_shard of each block; ours by protocol and grouping, "step" with overlap="step".
METHODS = (
    "compute",
    _TRAFFIC,
    *(f"ddp/{cap}MB" for cap in (1, 4, 10, 25, 50)),
    "fsdp2",
    "static/bytes",
    _BEST,
    "bitvector/bytes",
    "coordinator/bytes",
    _STEP,
)
MODELS = ("fc-densenet", "unet3d", "small-tensors-1000", "fc-densenet-tiny", "fc-densenet-small")
_DEFAULT_MODELS, _DEFAULT_LINKS = MODELS[:3], ("loopback", "1gbit", "400mbit", "250mbit")
_SLOW_LINK = 0.05  # communication/compute from which on the link matters
# communication/compute -> target of overlap="step" against the best of DDP and FSDP2
_STEP_TARGETS = (((0.35, 0.65), 0.95), ((0.8, 1.5), 0.80), ((1.7, 2.4), 0.90))


def run_bench(
    *,
    links: Sequence[str] | None = None,
    models: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    seconds: float | None = None,
    full: bool = False,
    beside: bool | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure, and return the document: `bench`, `machine`, `rows`, `control`, `scaling`, `targets`, `skipped`.

    Args:
        links: of `LINKS`; None means four, the slowest with the first model only. Those that need root are skipped,
            and said so, where there is none.
        models: of `MODELS`; None means the first three, with `full` all but the tiny one.
        methods: of `METHODS`, with "compute", "static/optimal" and one of ddp among them; fewer get more rounds.
        seconds: to measure each model on each link, after warming up; None means 8, with `full` 60.
        full: more models, more rounds, and the coordinator.
        beside: count the control plane and check the scaling model, too; None: unless links or models were chosen.
        say: told what is going on.

    Raises:
        UsageError: an unknown link, model or method.
        InterruptedRunError: stopped by a signal; processes and namespaces are gone.
    """
    if beside is None:
        beside = links is None and models is None
    chosen = tuple(links or ())
    links = chosen or _DEFAULT_LINKS
    models = tuple(models or (m for m in MODELS if m in _DEFAULT_MODELS or (full and m != "fc-densenet-tiny")))
    methods = tuple(methods or (m for m in METHODS if full or not m.startswith("coordinator")))
    seconds = seconds or (60.0 if full else 8.0)
    for given, known, what in ((links, tuple(LINKS), "link"), (models, MODELS, "model"), (methods, METHODS, "method")):
        for name in given:
            if name not in known:
                raise UsageError(f"bench allreduce: {what} {name!r} does not exist: choose from {', '.join(known)}")
    rows: list[dict[str, Any]] = []
    targets: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    control: list[dict[str, Any]] = []
    scaling: list[dict[str, Any]] = []
    try:
        with terminated_as_interrupt():
            if beside:
                say("counting the messages of the control plane")
                control = control_rows()
                targets += control_targets(control)
            for link in links:
                here = models if full or link in chosen or link != _DEFAULT_LINKS[-1] else models[:1]
                try:
                    _on_link(link, here, methods, seconds, say, rows, targets, skipped)
                except UsageError as error:
                    skipped.append({"link": link, "why": str(error)})
                    say(f"{link}: skipped: {error}")
            if beside:
                try:
                    scaling, more = check_scaling(say=say)
                    targets += more
                except UsageError as error:
                    skipped.append({"link": "scaling model", "why": str(error)})
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
    return {
        "bench": "allreduce",
        "machine": machine,
        "rows": rows,
        "control": control,
        "scaling": {"rows": scaling, "model": scale_rows()},
        "targets": targets,
        "skipped": skipped,
    }


def _on_link(
    link: str,
    models: Sequence[str],
    methods: Sequence[str],
    seconds: float,
    say: Callable[[str], None],
    rows: list[dict[str, Any]],
    targets: list[dict[str, Any]],
    skipped: list[dict[str, str]],
) -> None:
    with open_link(link) as ranks, tempfile.TemporaryDirectory(prefix="exitwave-bench-") as folder:
        for model in models:
            say(f"{link}, {model}: measuring for {seconds:g} s after warming up")
            out = Path(folder) / f"{model}.json"
            arguments = ["--model", model, "--seconds", str(seconds), "--out", str(out), "--methods", *methods]
            ranks.run("exitwave.train.allreduce.bench_rank", arguments, limit_s=10 * seconds + 300)
            if not out.exists():
                raise ExitwaveError(f"bench allreduce: the ranks of {link}, {model} ended without a result")
            measured = json.loads(out.read_text(encoding="utf-8"))
            some_rows, some_targets = rows_and_targets(link, model, measured)
            rows += some_rows
            targets += some_targets
            for method, why in measured["refused"].items():
                skipped.append({"link": f"{link}, {model}, {method}", "why": why})


def rows_and_targets(
    link: str, model: str, measured: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and targets of one model on one link. Pure.

    `measured` is what rank 0 wrote: `steps_s` (method -> rounds -> step times, seconds), `exposed_s` (method of ours ->
    seconds a step), `communication_s` (one allreduce of all gradients), `reduction_s` (static/optimal's, from the first
    gradient to the end), `reduction_to_limit` (its end to F(n), with the ready times of the same steps), `batch`,
    `nbytes`, `tensors`, `planning`.
    """
    steps: dict[str, list[list[float]]] = measured["steps_s"]
    medians = {method: statistics.median(t for one in rounds for t in one) for method, rounds in steps.items()}
    compute = medians["compute"]
    best_ddp = _best((method for method in steps if method.startswith("ddp")), steps)
    ratio = float(measured["communication_s"]) / compute
    rows = []
    for method, rounds in steps.items():
        low, high = _quartiles([t for one in rounds for t in one])
        row = {
            "link": link,
            "model": model,
            "method": method,
            "step_s": medians[method],
            "spread_s": [low, high],
            "steps": sum(len(one) for one in rounds),
            "to_best_ddp": _paired(steps[method], steps[best_ddp]),
            "exposed_s": measured["exposed_s"].get(method),
            "batch": measured["batch"],
            "tensors": measured["tensors"],
            "nbytes": measured["nbytes"],
            "communication_s": measured["communication_s"],
            "communication_to_compute": ratio,
        }
        if method == _BEST:
            row["planning"] = measured["planning"]
            row["reduction_s"] = measured["reduction_s"]
            if "static/bytes" in steps:
                row["grouping_gain"] = {
                    "predicted": 1 - measured["planning"]["predicted_s"] / measured["planning"]["predicted_before_s"],
                    "measured": 1 - _paired(steps[_BEST], steps["static/bytes"]),
                }
        if method == "bitvector/bytes" and "static/bytes" in steps:
            row["added_to_static_s"] = medians[method] - medians["static/bytes"]
        rows.append(row)
    return rows, _targets(f"{link}, {model}", steps, medians, measured, best_ddp, ratio)


def _targets(
    where: str,
    steps: Mapping[str, list[list[float]]],
    medians: Mapping[str, float],
    measured: Mapping[str, Any],
    best_ddp: str,
    ratio: float,
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def add(name: str, value: float, target: float) -> None:
        found.append({"name": f"{where}: {name}", "value": value, "target": target, "holds": value <= target})

    slow = ratio >= _SLOW_LINK
    add(f"step time of {_BEST} / best DDP ({best_ddp})", _paired(steps[_BEST], steps[best_ddp]), 1.00 if slow else 1.02)
    if slow:
        add("end of reduction / F(n) of the same steps", measured["reduction_to_limit"], 1.05)
    if _STEP in steps:
        peers = [best_ddp, *(["fsdp2"] if "fsdp2" in steps else [])]
        best = _best(peers, steps)
        value = _paired(steps[_STEP], steps[best])
        what = f'step time of overlap="step" / best of DDP and FSDP2 ({best}) at communication/compute {ratio:.2f}'
        if not slow:
            add(what, value, 1.02)
        for (low, high), target in _STEP_TARGETS:
            if low <= ratio <= high:
                add(what, value, target)
        if _TRAFFIC in steps:
            bound = max(medians[_TRAFFIC], measured["communication_s"])
            add('step time of overlap="step" / max(compute under traffic, communication)', medians[_STEP] / bound, 1.20)
    return found


def _best(methods: Iterable[str], steps: Mapping[str, list[list[float]]]) -> str:
    """The quickest of `methods`, each by its ratio to plain computation within each round."""
    return min(methods, key=lambda method: _paired(steps[method], steps["compute"]))


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
    for row in document["rows"]:
        where = f"{row['link']}, {row['model']}"
        if "added_to_static_s" in row:
            lines.append(f"{where}: bitvector adds {1e3 * row['added_to_static_s']:.2f} ms a step to static")
        if "grouping_gain" in row:
            gain = row["grouping_gain"]
            lines.append(
                f"{where}: communication/compute {row['communication_to_compute']:.2f}; optimal grouping: reduction "
                f"ends {gain['predicted']:.1%} sooner (predicted), the step {gain['measured']:.1%} (measured)"
            )
    if document["control"]:
        lines.append(control_table(document["control"]))
    if document["scaling"]["rows"]:
        lines.append(scaling_table(document["scaling"]["rows"], document["scaling"]["model"]))
    for target in document["targets"]:
        verdict = "holds" if target["holds"] else "MISSED"
        lines.append(f"{target['name']}: {target['value']:.3f}, target {target['target']:.2f}: {verdict}")
    lines += [f"{one['link']}: skipped: {one['why']}" for one in document["skipped"]]
    return "\n".join(lines)
