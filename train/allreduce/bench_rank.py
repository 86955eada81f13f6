"""One rank of `exitwave bench allreduce`: takes the steps of every method in turn and writes how long they took.

A step is forward, loss, backward and the optimizer (SGD with momentum), the same for every method. What
`overlap="step"` leaves behind a step is counted in the next one: the first step of a block is not counted, and what its
last leaves is waited for before another method's turn.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from exitwave.train.allreduce.cost import LinkCost, finish_times_s
from exitwave.train.allreduce.engine import GroupedAllreduce
from exitwave.train.allreduce.reducer import Moments
from exitwave.train.allreduce.tuning import MEASURED_PASSES, WARM_PASSES
from exitwave.train.models.fc_densenet import build_model
from exitwave.train.models.unet3d import UNet3D

__all__ = ["ends_to_limits", "make", "meet", "time_allreduces"]

_SETTLE = WARM_PASSES + MEASURED_PASSES + 2  # steps until a plan is final, and two by it
_BLOCK = 4  # steps of a method in a round, the first of which is not counted
_BYTES_PER_S = 125e6  # 1 Gbit/s: the batch is chosen for communication/compute of about 0.5 there


def make(name: str, batch: int | None = None) -> tuple[nn.Module, torch.Tensor]:
    """A model of `MODELS` and its input."""
    torch.manual_seed(0)
    if name == "unet3d":
        return UNet3D(width=24, levels=2), torch.randn(batch or 1, 1, 8, 16, 16)
    if name.startswith("fc-densenet"):
        preset = name.removeprefix("fc-densenet").removeprefix("-")
        side = 16 if not preset else 32
        size: dict[str, object] = {"dropout": 0.0}  # the keyed dropout wants to know its samples
        model: nn.Module = build_model(
            preset=preset or "tiny",
            layout="detector-as-channels",
            in_channels=256,
            in_shape=(8, 8),
            out_shape=(side, side),
            overrides=size if preset else {**size, "growth": 32},
        )
        return model, torch.randn(batch or (2 if preset == "small" else 4), 256, 8, 8)
    # 1,000 tensors of at most 1 KiB: what a step costs beside arithmetic and bytes
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(500)]), torch.randn(batch or 8, 16)


def _balanced(name: str) -> tuple[nn.Module, torch.Tensor]:
    """The model with so many samples that its computation takes about twice its communication at 1 Gbit/s."""
    model, x = make(name)
    if name == "small-tensors-1000":
        return model, x
    wanted_s = 2 * sum(p.numel() * p.element_size() for p in model.parameters()) / _BYTES_PER_S
    seconds = []
    for batch in (1, 3):
        x = make(name, batch)[1]
        times = []
        for _ in range(4):
            begun = time.perf_counter()
            model(x).square().mean().backward()
            times.append(time.perf_counter() - begun)
        seconds.append(min(times[1:]))
    each = max((seconds[1] - seconds[0]) / 2, 1e-4)
    return make(name, _agree(min(max(round(1 + (wanted_s - seconds[0]) / each), 1), 32)))


@dataclass(frozen=True, kw_only=True)
class Method:
    """A copy of the model under one method of `METHODS`, with its optimizer."""

    module: nn.Module
    optimizer: Any
    engine: GroupedAllreduce | None = None

    def step(self, x: torch.Tensor) -> float:
        begun = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        self.module(x).square().mean().backward()
        self.optimizer.step()
        return time.perf_counter() - begun

    def settle(self) -> None:
        """Wait for what a step leaves behind."""
        if self.engine is not None:
            self.engine.state_dict()


def wrap(model: nn.Module, method: str) -> Method:
    """Raises whatever the method does, where it cannot serve this model."""
    model = copy.deepcopy(model)
    kind, _, detail = method.partition("/")

    def sgd(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=1e-4, momentum=0.9)

    if kind in ("compute", "compute+traffic"):
        return Method(module=model, optimizer=sgd(model))
    if kind == "ddp":
        ddp = DistributedDataParallel(model, bucket_cap_mb=float(detail.removesuffix("MB")))
        return Method(module=ddp, optimizer=sgd(ddp))
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        children = [child for child in model.children() if any(True for _ in child.parameters())]
        # Gathered once a step, as here; of 500 layers each would be a message of its own.
        for child in children if len(children) <= 32 else []:
            fully_shard(child, mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        return Method(module=model, optimizer=sgd(model))
    if kind == "step":
        engine = GroupedAllreduce(model, grouping=detail, overlap="step")
        return Method(module=engine, optimizer=engine.wrap(sgd(model)), engine=engine)
    engine = GroupedAllreduce(model, protocol=kind, grouping=detail)
    return Method(module=engine, optimizer=sgd(model), engine=engine)


class _Traffic:
    """Allreduces of all gradients, one after the other, behind whatever else this rank does."""

    def __init__(self, nbytes: int) -> None:
        self._group = dist.new_group()
        self._tensors = [torch.zeros(nbytes // 4) for _ in range(2)]

    def during(self, seconds: float, one_s: float, work: Callable[[], list[float]]) -> list[float]:
        """`work`, with enough of them for `seconds`."""
        count = _agree(min(math.ceil(1.5 * seconds / max(one_s, 1e-4)) + 1, 400))
        handles = [dist.all_reduce(self._tensors[k % 2], group=self._group, async_op=True) for k in range(count)]
        times = work()
        for handle in handles:
            handle.wait()
        return times


def measure(model: nn.Module, x: torch.Tensor, names: list[str], seconds: float) -> dict[str, Any]:
    """Step times of the methods `names`, in rounds; see `rows_and_targets` for the record."""
    methods: dict[str, Method] = {}
    refused: dict[str, str] = {}
    for name in names:
        try:
            methods[name] = wrap(model, name)
            methods[name].step(x)
        except Exception as error:
            if name != "fsdp2":
                raise
            refused[name] = f"{type(error).__name__}: {error}"
            methods.pop(name, None)
    names = list(methods)
    parameters = [p for p in model.parameters() if p.requires_grad]
    nbytes = sum(p.numel() * p.element_size() for p in parameters)
    traffic = _Traffic(nbytes)
    communication_s = _communication_s(nbytes)
    compute_s = statistics.median(methods["compute"].step(x) for _ in range(4))
    reductions: list[float] = []
    moments: list[Moments] = []  # of the counted steps of static/optimal

    def block(name: str) -> list[float]:
        dist.barrier()
        method = methods[name]

        def steps() -> list[float]:
            times = [method.step(x)]
            before = method.engine.counters.reduction_s if method.engine is not None else 0.0
            for _ in range(_BLOCK - 1):
                times.append(method.step(x))
                if name == "static/optimal" and method.engine is not None and method.engine.counters.last is not None:
                    moments.append(method.engine.counters.last)
            if name == "static/optimal" and method.engine is not None:
                reductions.append((method.engine.counters.reduction_s - before) / (_BLOCK - 1))
            return times[1:]

        if name == "compute+traffic":
            return traffic.during(_BLOCK * compute_s, communication_s, steps)
        times = steps()
        method.settle()
        return times

    for name, method in methods.items():
        for _ in range(_SETTLE if name == "static/optimal" else 2):
            method.step(x)
        method.settle()
    begun = time.perf_counter()
    for name in names:
        block(name)
    rounds = _agree(max(3, round(seconds / (time.perf_counter() - begun))))
    engines = {name: method.engine for name, method in methods.items() if method.engine is not None}
    before = {name: engine.counters.exposed_s for name, engine in engines.items()}
    reductions.clear()
    moments.clear()
    steps: dict[str, list[list[float]]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            steps[name].append(block(name))
    exposed = {name: (engine.counters.exposed_s - before[name]) / (rounds * _BLOCK) for name, engine in engines.items()}
    planning = engines["static/optimal"].planning
    assert planning is not None
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, moments)
    record = {
        "steps_s": steps,
        "exposed_s": exposed,
        "communication_s": communication_s,
        "reduction_s": statistics.median(reductions),
        "reduction_to_limit": statistics.median(ends_to_limits(of_ranks, planning.link)),
        "refused": refused,
        "batch": len(x),
        "tensors": len(parameters),
        "nbytes": nbytes,
        "planning": {
            "groups": len(planning.plan),
            "groups_before": len(planning.before),
            "alpha_s": planning.link.alpha_s,
            "beta_s_per_byte": planning.link.beta_s_per_byte,
            "backward_s": planning.backward_s,
            "predicted_s": planning.predicted_s,
            "predicted_before_s": planning.predicted_before_s,
            "exposed_before_s": planning.exposed_before_s,
        },
    }
    for engine in engines.values():
        engine.close()
    return record


def ends_to_limits(ranks: Sequence[Sequence[Moments]], link: LinkCost) -> list[float]:
    """Of each step (`ranks`: rank -> steps): when its reduction ended, to F(n) with the ready times of that very step.

    Ready is a group when the slowest rank has it. Time counts from the first gradient of any rank: the ranks share one
    machine, so their performance counters agree. Pure.
    """
    ratios = []
    for step in zip(*ranks, strict=True):
        origin = min(own.begun for own in step)
        started = zip(*(own.started for own in step), strict=True)  # group -> ranks
        ready_s, sizes = zip(*((max(at for at, _ in group) - origin, group[0][1]) for group in started), strict=True)
        ratios.append((max(own.ended for own in step) - origin) / finish_times_s(ready_s, sizes, link)[-1])
    return ratios


def _communication_s(nbytes: int) -> float:
    """One allreduce of all gradients, nothing else going on."""
    return _allreduce_s(nbytes, times=4, cold=1)


def _allreduce_s(nbytes: int, *, times: int, cold: int) -> float:
    """Median seconds of so many allreduces of so many bytes, without the first `cold` ones."""
    tensor, seconds = torch.zeros(nbytes // 4), []
    for _ in range(times):
        dist.barrier()
        begun = time.perf_counter()
        dist.all_reduce(tensor)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[cold:])


def _agree(number: int) -> int:
    """Rank 0's number, on all ranks."""
    chosen = torch.tensor([number])
    dist.broadcast(chosen, 0)
    return int(chosen.item())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, required=True)
    for name in ("model", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--methods", nargs="+", required=True)
    options = meet(parser)
    record = measure(*_balanced(options.model), options.methods, options.seconds)
    if options.rank == 0:
        Path(options.out).write_text(json.dumps(record), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def meet(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line of a rank, whose place `bench_links` added, and join the others over gloo."""
    for name in ("rank", "world", "port", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--address", required=True)
    options = parser.parse_args()
    _die_with(options.parent)
    torch.set_num_threads(1)
    method = f"tcp://{options.address}:{options.port}"
    dist.init_process_group("gloo", init_method=method, rank=options.rank, world_size=options.world)
    return options


def time_allreduces(sizes: Sequence[int]) -> list[tuple[int, float]]:
    """Bytes and median seconds of allreduces of these many bytes, nothing else going on."""
    return [(nbytes, _allreduce_s(nbytes, times=7, cold=2)) for nbytes in sizes]


def _die_with(parent: int) -> None:
    """Be killed when the benchmark ends, however it ends (prctl(2), PR_SET_PDEATHSIG = 1)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)


if __name__ == "__main__":
    main()
