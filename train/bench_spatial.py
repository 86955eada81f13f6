"""`exitwave bench spatial`: what is promised of spatial parallelism, row by row, measured now.

Ranks are processes on this machine. Where there are more of them than cores, or where a slow link is asked for, they
run in network namespaces whose links `tc tbf` slows down; without root these rows are skipped, and said so.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from exitwave.ingest.errors import ExitwaveError, InterruptedRunError, UsageError
from exitwave.train.allreduce.bench_links import open_link, terminated_as_interrupt
from exitwave.train.allreduce.cost import LinkCost, fit_link
from exitwave.train.bench_spatial_scaling import workload
from exitwave.train.mesh_model import Machine, estimate, fit_computation
from exitwave.train.models.cosmoflow import CosmoFlow
from exitwave.train.models.counting import ModelCount, count
from exitwave.train.models.unet3d import UNet3D

__all__ = ["counted_reads", "run_bench_spatial", "spatial_table"]

_RANK = "exitwave.train.bench_spatial_rank"
_LINK = "100mbit"
_SLOW_LINK = "25mbit"  # halos of the benchmark's network take as long as much of its computation
_BURST = "16kb"  # an idle link lets no halo through for nothing
_PAPER = {128: (18.52, 0.824), 256: (147.9, 6.59), 512: (1183.0, 52.7)}  # GFLOP and GiB of the published table
_PARAMETERS = 9_437_636


class _Report:
    """Rows and targets as they come."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.rows: list[dict[str, Any]] = []
        self.targets: list[dict[str, Any]] = []
        self.skipped: list[dict[str, str]] = []

    def target(self, name: str, value: float, limit: float, *, at_least: bool = False) -> None:
        holds = value >= limit if at_least else value <= limit
        self.targets.append({"name": name, "value": value, "target": limit, "holds": bool(holds)})
        self.say(
            f"{name}: {value:.3g} (target {'>=' if at_least else '<='} {limit:g}) {'holds' if holds else 'MISSED'}"
        )


def run_bench_spatial(*, full: bool = False, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Every row, about three minutes; `full`: more configurations and rounds.

    Raises:
        InterruptedRunError: stopped. ExitwaveError: a rank failed.
    """
    report = _Report(say)
    try:
        with terminated_as_interrupt():
            _counters(report)
            _tile_reads(report)
            _equality(report, 60 if full else 15)
            _steps(report)
            _memory(report)
            for part in (_overlap, _scaling):
                try:
                    part(report, 15 if full else 5)
                except UsageError as error:
                    report.skipped.append({"what": part.__name__.strip("_"), "why": str(error)})
                    say(f"{part.__name__.strip('_')}: skipped: {error}")
    except KeyboardInterrupt:
        raise InterruptedRunError("the benchmark was stopped; nothing was kept") from None
    machine = {
        "system": platform.system(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads_per_rank": 1,
    }
    return {
        "bench": "spatial",
        "machine": machine,
        "rows": report.rows,
        "targets": report.targets,
        "skipped": report.skipped,
    }


def _job(job: str, ranks: int, *, link: str = "loopback", rounds: int = 7, burst: str = "256kb") -> Any:
    with open_link(link, ranks, burst=burst) as opened, tempfile.TemporaryDirectory(prefix="exitwave-bench-") as folder:
        out = Path(folder) / "record.json"
        opened.run(_RANK, ["--job", job, "--rounds", str(rounds), "--out", str(out)], limit_s=300)
        if not out.exists():
            raise ExitwaveError(f"bench spatial: the ranks of {job} ended without a result")
        return json.loads(out.read_text(encoding="utf-8"))


def _counters(report: _Report) -> None:
    for side, (gflop, gib) in _PAPER.items():
        with torch.device("meta"):
            counted = count(CosmoFlow(in_shape=(side,) * 3), (1, 4, side, side, side))
        made = {"GFLOP": counted.convolution_flop / 1e9, "GiB": counted.memory_GiB, "parameters": counted.parameters}
        report.rows.append({"what": "counters", "network": "cosmoflow", "side": side, **made})
        same = (
            counted.parameters == _PARAMETERS
            and float(f"{made['GFLOP']:.4g}") == gflop
            and float(f"{made['GiB']:.3g}") == gib
        )
        report.target(
            f"CosmoFlow {side}: parameters, GFLOP and GiB of the published table", float(same), 1, at_least=True
        )
    with torch.device("meta"):
        unet = count(UNet3D(width=32, widening="second", norm="batch"), (1, 1, 64, 64, 64))
    report.rows.append({"what": "counters", "network": "unet3d", "side": 64, "parameters": unet.parameters})
    report.target("3D U-Net: millions of parameters, off 19.07", abs(round(unet.parameters / 1e6, 2) - 19.07), 0)


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """The bytes of every `preadv` of this process while it is open: all that is read of shards goes through it."""
    counts: list[int] = []
    real = os.preadv

    def counting(fd: int, buffers: Any, offset: int, flags: int = 0, /) -> int:
        n = real(fd, buffers, offset, flags)
        counts.append(n)
        return n

    os.preadv = counting
    try:
        yield counts
    finally:
        os.preadv = real


def _tile_reads(report: _Report) -> None:
    from exitwave.ingest import ShardDataset
    from exitwave.train.bench_spatial_data import make_volumes
    from exitwave.train.tile_store import TileStore
    from exitwave.train.tiled_data import TileReader

    with tempfile.TemporaryDirectory(prefix="exitwave-bench-") as folder:
        data = make_volumes(Path(folder) / "data", samples=6, shape=(8, 128, 128))
        dataset = ShardDataset(data, fields=("images", "volume"))
        for ranks in (2, 4):
            worst = 0.0
            for rank in range(ranks):
                reader = TileReader(dataset, crop=None, spatial_rank=rank, spatial_size=ranks, halvings=3)
                dataset.data.close()  # the tables of a shard, which opening it reads, count too
                with counted_reads() as counts:
                    tiles = [reader[i] for i in range(6)]
                nbytes = sum(tile["images"].nbytes + tile["volume"].nbytes for tile in tiles)
                worst = max(worst, sum(counts) / nbytes)
            report.rows.append({"what": "tile reads", "ranks": ranks, "read_over_tile": worst})
            report.target(f"tile reads, {ranks} ranks: bytes read / bytes of the tile", worst, 1.05)
        store = TileStore(reader.__getitem__, n_samples=6)
        for epoch in range(3):
            with counted_reads() as counts:
                order = np.random.default_rng(epoch).permutation(6)[:4].tolist()  # two are left over, as a tail is
                store.batch(order[:2])
                store.batch(order[2:])
            report.rows.append({"what": "store", "epoch": epoch, "bytes_read": sum(counts)})
            store.first_epoch_ended()
            if epoch == 0:
                with counted_reads() as counts:
                    store.batch([0])  # what epoch 0 left over
        later = [row["bytes_read"] for row in report.rows if row["what"] == "store" and row["epoch"]]
        report.target("bytes read from shared storage after epoch 0", float(sum(later)), 0)


def _equality(report: _Report, configurations: int) -> None:
    for ranks in (1, 2, 3, 4, 5):
        record = _job("equality", ranks, rounds=configurations)
        report.rows.append({"what": "equality", "ranks": ranks, **record})
        for name, value in record["worst"].items():
            report.target(f"{name} against one process, {ranks} ranks, float64", value, 1e-12)


def _steps(report: _Report) -> None:
    for row in _job("steps", 4):
        report.rows.append({"what": "steps", **row})
        worst = max(row["losses_off"], row["weights_off"])
        report.target(f"10 steps of {row['network']} at {row['mesh']}: losses and weights off", worst, 1e-9)


def _memory(report: _Report) -> None:
    peaks = {ranks: _job("memory", ranks) for ranks in (1, 2, 4)}
    for network in peaks[2]:
        for ranks, limit in ((2, 0.55), (4, 0.30)):
            ratio = peaks[ranks][network] / peaks[1][network.split(",")[0]]
            report.rows.append(
                {
                    "what": "memory",
                    "network": network,
                    "ranks": ranks,
                    "peak_bytes": peaks[ranks][network],
                    "of_one": ratio,
                }
            )
            report.target(f"peak activation memory a rank, {network}, {ranks}-way / one process", ratio, limit)


def _overlap(report: _Report, rounds: int) -> None:
    for link in (_LINK, _SLOW_LINK):
        record = _job("overlap", 2, link=link, rounds=rounds + 4, burst=_BURST)
        report.rows.append({"what": "overlap", "link": link, **record})
        report.target(f"overlap on against off, {link}: largest difference", record["largest_difference"], 0)
    report.target(f"overlap: gain on a link of {_SLOW_LINK}", record["gain"], 0.0, at_least=True)


def _scaling(report: _Report, rounds: int) -> None:
    """Two workloads, sleeping and computing, on 1, 2, 4 ranks; what the model is told is measured beside the steps."""
    for kind, job in (("calibrated sleep", "scale"), ("a network computes", "network")):
        module, x = workload(network=job == "network")
        counted = count(module, x.shape)
        for ranks in (1, 2, 4):
            record = _job(job, ranks, link=_LINK if ranks > 1 else "loopback", rounds=rounds, burst=_BURST)
            predicted = estimate(counted, 1, ranks, batch=1, machine=scaling_machine(counted, ranks, record))
            measured = statistics.median(record["steps_s"])
            report.rows.append(
                {
                    "what": "scaling",
                    "computation": kind,
                    "link": _LINK,
                    "ranks": ranks,
                    "predicted_s": predicted.step_s,
                    "compute_s": predicted.compute_s,
                    "halos_s": predicted.halos_s,
                    "allreduce_s": predicted.allreduce_s,
                    "measured_s": measured,
                    "spread_s": [min(record["steps_s"]), max(record["steps_s"])],
                    "told": {name: value for name, value in record.items() if name != "steps_s"},
                }
            )
            report.target(
                f"strong scaling, {ranks} ranks ({kind}): |predicted / measured - 1|",
                abs(predicted.step_s / measured - 1),
                0.15,
            )


def scaling_machine(counted: ModelCount, ranks: int, record: dict[str, Any]) -> Machine:
    """What was measured beside the steps of `ranks` ranks, as the model takes it; the steps themselves do not enter.

    Computation was measured with `ranks` busy processes, so the ranks' taking turns is in it. What a split step takes
    however small the tiles are, latencies of halos too, is the step over few places, less the computation in it. An
    allreduce is a ring of 2 (ranks - 1) messages of a `ranks`-th of its bytes.
    """
    link = LinkCost(alpha_s=0.0, beta_s_per_byte=0.0)
    machine = Machine(s_per_flop=0.0, s_per_layer=0.0, halos=link, gradients=link, overlap=False)
    machine = fit_computation(machine, counted, record["parts"])
    if ranks == 1:
        return machine
    messages = 2 * (ranks - 1)
    collectives = [(n // ranks, s / messages) for n, s in record["collectives"]]
    few = 3 * counted.flop * record["call_part"] / ranks * machine.s_per_flop
    return replace(
        machine,
        s_per_layer=0.0,  # in what the calls take
        halos=replace(fit_link(*_pairs(record["messages"])), alpha_s=0.0),
        gradients=fit_link(*_pairs(collectives)),
        rest_s=max(record["call_s"] - few, 0.0),
    )


def _pairs(measured: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [n for n, _ in measured], [s for _, s in measured]


def spatial_table(document: dict[str, Any]) -> str:
    """The targets as lines of text."""
    lines = [f"{'value':>10}  {'target':>8}      what"]
    for target in document["targets"]:
        mark = " " if target["holds"] else "✗"
        lines.append(f"{target['value']:10.3g}  {target['target']:8g}  {mark}   {target['name']}")
    lines += [f"skipped: {one['what']}: {one['why']}" for one in document["skipped"]]
    return "\n".join(lines)
