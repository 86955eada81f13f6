"""A training as it stands: made by `build`, advanced by `loop`, closed by `closing`."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from exitwave.ingest import GlobalSampler, GrowingDataset, ReservoirSampler, ShardDataset
from exitwave.ingest.prefetch import Prefetcher
from exitwave.train.allreduce.engine import GroupedAllreduce
from exitwave.train.dropout import KeyedDropout, dropouts_of
from exitwave.train.ema import Ema
from exitwave.train.mesh import Ranks
from exitwave.train.online import Arrivals
from exitwave.train.parallel import DataPlan
from exitwave.train.recorder import Recorder
from exitwave.train.spec import TrainSpec
from exitwave.train.task import Task

__all__ = ["DTYPE", "LOW_PRECISION", "Training", "count_parameters", "exposed_s"]

# of weights, gradients, optimizer and batches; and of the operators that autocast lets compute in 16 bits
DTYPE = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.float32, "fp16": torch.float32}
LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(kw_only=True)
class Training:
    """Everything that a step needs. `plan`: this rank's part of each batch; `measured`: what the task measured.

    `arrivals`: where the data set grows meanwhile, what each step knows; None where all is there.
    """

    spec: TrainSpec
    task: Task
    data: Path
    cache: Path | None
    out: Path
    ranks: Ranks
    plan: DataPlan
    recorder: Recorder | None
    dataset: ShardDataset | GrowingDataset
    measured: Any
    module: nn.Module
    engine: GroupedAllreduce
    optimizer: torch.optim.Optimizer
    sampler: GlobalSampler | ReservoirSampler
    total_steps: int | None
    step: int
    resumed_from: int
    elapsed_s: float
    device: torch.device
    scaler: torch.amp.GradScaler | None = None
    ema: Ema | None = None
    skipped: int = 0
    flops_a_sample: float | None = None
    peak_flops_per_s: float | None = None
    saved_step: int = -1
    loss: float = float("nan")
    samples: int = 0
    prefetcher: Prefetcher | None = None
    arrivals: Arrivals | None = None
    started: float = field(default_factory=time.perf_counter)

    @cached_property
    def dropouts(self) -> tuple[KeyedDropout, ...]:
        """Those of the module that want to be told each step's key."""
        return dropouts_of(self.module)

    def emit(self, kind: str, **fields: Any) -> None:
        if self.recorder is not None:
            self.recorder.emit(kind, **fields)

    def autocast(self) -> AbstractContextManager[Any]:
        """What a forward pass runs in."""
        low = LOW_PRECISION.get(self.spec.precision)
        return nullcontext() if low is None else torch.autocast(self.device.type, dtype=low)

    def scale(self) -> float:
        """The loss scale, a power of two; 1 where there is none."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

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
