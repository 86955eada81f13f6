"""A training as it stands: made by `build`, advanced by `loop`, closed by `closing`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from exitwave.ingest import GlobalSampler, ShardDataset
from exitwave.ingest.events import EventLog
from exitwave.ingest.prefetch import Prefetcher
from exitwave.train.allreduce.engine import GroupedAllreduce
from exitwave.train.mesh import Ranks
from exitwave.train.parallel import DataPlan
from exitwave.train.spec import TrainSpec
from exitwave.train.task import Task

__all__ = ["Training", "count_parameters", "exposed_s"]


@dataclass(kw_only=True)
class Training:
    """Everything that a step needs. `plan`: this rank's part of each batch; `measured`: what the task measured."""

    spec: TrainSpec
    task: Task
    data: Path
    cache: Path | None
    out: Path
    ranks: Ranks
    plan: DataPlan
    events: EventLog | None
    dataset: ShardDataset
    measured: Any
    module: nn.Module
    engine: GroupedAllreduce
    optimizer: torch.optim.Optimizer
    sampler: GlobalSampler
    total_steps: int | None
    step: int
    resumed_from: int
    elapsed_s: float
    saved_step: int = -1
    loss: float = float("nan")
    samples: int = 0
    prefetcher: Prefetcher | None = None
    started: float = field(default_factory=time.perf_counter)

    def emit(self, kind: str, **fields: Any) -> None:
        if self.events is not None:
            self.events.emit(kind, **fields)

    def clock_s(self) -> float:
        """Seconds of training, those before the last interruption included."""
        return self.elapsed_s + time.perf_counter() - self.started

    def finished(self, clock_s: float) -> bool:
        limit = self.spec.max_seconds
        return (self.total_steps is not None and self.step >= self.total_steps) or (
            limit is not None and clock_s >= limit
        )

    def progress(self, clock_s: float) -> float:
        """Fraction of the training that lies behind, by steps or by time, whichever is further."""
        by_steps = self.step / self.total_steps if self.total_steps else 0.0
        by_time = clock_s / self.spec.max_seconds if self.spec.max_seconds else 0.0
        return max(by_steps, by_time)


def count_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def exposed_s(engine: GroupedAllreduce) -> float:
    """Seconds so far in which computation stood still for communication."""
    return float(engine.counters.exposed_s)
