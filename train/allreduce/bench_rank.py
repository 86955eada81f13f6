"""One rank of `exitwave bench allreduce`: takes the steps of every method in turn and writes how long they took."""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from exitwave.train.allreduce.engine import GroupedAllreduce
from exitwave.train.allreduce.tuning import MEASURED_PASSES, WARM_PASSES
from exitwave.train.models.fc_densenet import build_model

__all__ = ["meet"]

_SETTLE = WARM_PASSES + MEASURED_PASSES + 2  # steps until a plan is final, and two by it
_BLOCK = 4  # steps of a method in a round, the first of which is not counted


def make(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A model of `MODELS` and its input."""
    torch.manual_seed(0)
    if name.startswith("fc-densenet-"):
        preset = name.removeprefix("fc-densenet-")
        model: nn.Module = build_model(
            preset=preset,
            layout="detector-as-channels",
            in_channels=256,
            in_shape=(8, 8),
            out_shape=(32, 32),
            overrides={"dropout": 0.0},  # the keyed dropout wants to know its samples
        )
        return model, torch.randn(4 if preset == "tiny" else 2, 256, 8, 8)
    # 1,000 tensors of at most 1 KiB: what a step costs beside arithmetic and bytes
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(500)]), torch.randn(8, 16)


def wrap(model: nn.Module, method: str) -> nn.Module:
    """A copy of the model under a method of `METHODS`."""
    model = copy.deepcopy(model)
    kind, _, detail = method.partition("/")
    if kind == "compute":
        return model
    if kind == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=float(detail.removesuffix("MB")))
    return GroupedAllreduce(model, protocol=kind, grouping=detail)


def measure(model: nn.Module, x: torch.Tensor, names: list[str], seconds: float) -> dict[str, Any]:
    """Step times of the methods `names`, in rounds; see `rows_and_targets` for the record."""
    wrapped = {name: wrap(model, name) for name in names}

    def step(name: str) -> float:
        begun = time.perf_counter()
        wrapped[name].zero_grad(set_to_none=True)
        wrapped[name](x).square().mean().backward()
        return time.perf_counter() - begun

    def block(name: str) -> list[float]:
        dist.barrier()
        return [step(name) for _ in range(_BLOCK)][1:]

    for name in names:
        for _ in range(_SETTLE if name.endswith("optimal") else 3):
            step(name)
    engines = {name: module for name, module in wrapped.items() if isinstance(module, GroupedAllreduce)}
    communication_s = _communication_s(model)
    begun = time.perf_counter()
    for name in names:
        block(name)
    rounds = _agree(max(3, round(seconds / (time.perf_counter() - begun))))
    before = {name: engine.counters.exposed_s for name, engine in engines.items()}
    steps: dict[str, list[list[float]]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            steps[name].append(block(name))
    exposed = {name: (engine.counters.exposed_s - before[name]) / (rounds * _BLOCK) for name, engine in engines.items()}
    planning = engines["static/optimal"].planning
    assert planning is not None
    parameters = [p for p in model.parameters() if p.requires_grad]
    record = {
        "steps_s": steps,
        "exposed_s": exposed,
        "communication_s": communication_s,
        "tensors": len(parameters),
        "nbytes": sum(p.numel() * p.element_size() for p in parameters),
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


def _communication_s(model: nn.Module) -> float:
    """One allreduce of all gradients, nothing else going on."""
    gradients = torch.zeros(sum(p.numel() for p in model.parameters() if p.requires_grad))
    times = []
    for _ in range(4):
        dist.barrier()
        begun = time.perf_counter()
        dist.all_reduce(gradients)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


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
    record = measure(*make(options.model), options.methods, options.seconds)
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


def _die_with(parent: int) -> None:
    """Be killed when the benchmark ends, however it ends (prctl(2), PR_SET_PDEATHSIG = 1)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)


if __name__ == "__main__":
    main()
