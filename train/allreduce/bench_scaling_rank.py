"""One rank of the check of the scaling model: what the model is told, and what a step really takes.

- "real": a network computes. What the model is told is measured without communication: when each gradient is ready.
- "sleep": there are more ranks than cores, so that the computation of a rank is replaced by a calibrated sleep, layer
  by layer; gradients, tensor groups, collectives and the engine are the real ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from exitwave.train.allreduce.bench_rank import make, meet, time_allreduces
from exitwave.train.allreduce.engine import GroupedAllreduce

__all__: list[str] = []

_LAYERS, _NUMEL = 16, 64 * 1024  # of the sleeping network: 4 MiB of gradients
_FORWARD_S, _BACKWARD_S = 0.2, 0.4
_SIZES = (2**12, 2**18, 2**20, 2**22)  # bytes of the collectives that alpha and beta are fitted to
_STEPS = 9


class _Sleep(torch.autograd.Function):
    """As long as a layer would take, forward and backward; the weight's gradient is zero."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.backward_s = backward_s
        _sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _sleep(ctx.backward_s)
        return gradients[0], torch.zeros_like(ctx.saved_tensors[0]), None, None


class _SleepingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(_NUMEL))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slept: torch.Tensor = _Sleep.apply(x, self.weight, _FORWARD_S / _LAYERS, _BACKWARD_S / _LAYERS)
        return slept


_late_s = 0.0  # by how much a sleep is longer than asked for


def _sleep(seconds: float) -> None:
    time.sleep(max(seconds - _late_s, 0.0))


def _calibrate() -> None:
    global _late_s
    begun = time.perf_counter()
    for _ in range(20):
        time.sleep(_BACKWARD_S / _LAYERS)
    _late_s = (time.perf_counter() - begun) / 20 - _BACKWARD_S / _LAYERS


def _step(model: nn.Module, x: torch.Tensor) -> float:
    begun = time.perf_counter()
    model.zero_grad(set_to_none=True)
    model(x).square().mean().backward()
    return time.perf_counter() - begun


def _ready_times(model: nn.Module, x: torch.Tensor) -> tuple[dict[str, float], float]:
    """Without communication: when each gradient is ready and when backward ends, medians, the slowest rank's."""
    begun = 0.0
    now: dict[str, float] = {}

    def note(name: str) -> None:
        now[name] = time.perf_counter() - begun

    hooks = [
        p.register_post_accumulate_grad_hook(lambda _, name=name: note(name)) for name, p in model.named_parameters()
    ]
    passes, ends = [], []
    for _ in range(_STEPS):
        dist.barrier()
        begun = time.perf_counter()
        ends.append(_step(model, x))
        passes.append(dict(now))
    for hook in hooks:
        hook.remove()
    names = list(passes[0])
    medians = [statistics.median(one[name] for one in passes[2:]) for name in names]
    slowest = torch.tensor([*medians, statistics.median(ends[2:])], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    *times, end = slowest.tolist()
    return dict(zip(names, times, strict=True)), end


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=["real", "sleep"], required=True)
    parser.add_argument("--grouping", required=True)
    parser.add_argument("--out", required=True)
    options = meet(parser)
    _calibrate()
    if options.kind == "real":
        model, x = make("fc-densenet-tiny")
    else:
        model, x = nn.Sequential(*[_SleepingLayer() for _ in range(_LAYERS)]), torch.ones(1)
        x.requires_grad_()
    ready, backward_end_s = _ready_times(model, x)
    collectives = time_allreduces(_SIZES)
    engine = GroupedAllreduce(model, protocol="static", grouping=options.grouping)
    steps = []
    for _ in range(_STEPS):
        dist.barrier()
        steps.append(_step(engine, x))
    plan = engine.plan
    engine.close()
    if options.rank == 0:
        record = {
            "ready_s": [max(ready[name] for name in group.names) for group in plan.groups],
            "nbytes": [group.nbytes for group in plan.groups],
            "tensors": [len(group.names) for group in plan.groups],
            "backward_end_s": backward_end_s,
            "collectives": collectives,
            "steps_s": steps[2:],
        }
        Path(options.out).write_text(json.dumps(record), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
