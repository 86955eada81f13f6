"""What stands before the first step: samples, model, optimizer, engine, and the checkpoint to go on from.

1. Open the training samples; what one rank cannot open, none trains on.
2. Rank 0 measures the training set and tells the others. Of a growing one it waits for the watermark, and measures what
   is there.
3. Model, parallelize (parallel.py), optimizer, in this order.
4. The last checkpoint, if there is one, into model, optimizer and sampler.
5. The engine, which compares all ranks and makes the parameters those of rank 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from exitwave.ingest import GlobalSampler, GrowingDataset, ReservoirSampler, ShardDataset, Window
from exitwave.ingest.errors import UsageError
from exitwave.train.allreduce.engine import GroupedAllreduce
from exitwave.train.device import device_of
from exitwave.train.ema import Ema
from exitwave.train.loader import EVALUATION_EPOCH, open_split
from exitwave.train.mesh import Ranks
from exitwave.train.meter import flops_of_a_sample, peak_flops_per_s
from exitwave.train.online import Arrivals, Online, open_growing, reservoir_sampler
from exitwave.train.optim import make_optimizer
from exitwave.train.parallel import DataPlan, Parallel
from exitwave.train.recompute import recompute_blocks
from exitwave.train.recorder import Recorder
from exitwave.train.spec import TrainSpec
from exitwave.train.state import Progress, latest_checkpoint, load_checkpoint
from exitwave.train.task import Task
from exitwave.train.training import DTYPE, LOW_PRECISION, Training, count_parameters

__all__ = ["build", "open_samples"]


def open_samples(
    spec: TrainSpec,
    task: Task,
    data: Path,
    cache: Path | None,
    ranks: Ranks,
    plan: DataPlan,
    online: Online | None = None,
) -> ShardDataset | GrowingDataset:
    """The training samples; what one rank cannot open, none trains on."""
    if online is not None:
        return open_growing(spec, data, task.fields, online, ranks, plan)
    dataset: ShardDataset | None = None
    error: Exception | None = None
    try:
        dataset = open_split(data, spec.train_split, cache=cache, fields=task.fields)
        if spec.batch > len(dataset):
            raise UsageError(f"batch: expected at most the {len(dataset)} training samples, got {spec.batch}")
        if spec.batch < plan.size:
            raise UsageError(f"batch: expected at least one sample a rank, got {spec.batch} for {plan.size}")
        if spec.deterministic == "any-ranks" and plan.size != ranks.info.world_size:
            raise UsageError("deterministic: any-ranks serves ranks that read whole samples, not a spatial mesh")
    except Exception as caught:
        error = caught
    ranks.agree(error=error)
    assert dataset is not None
    return dataset


def build(
    spec: TrainSpec,
    task: Task,
    dataset: ShardDataset | GrowingDataset,
    *,
    data: Path,
    cache: Path | None,
    out: Path,
    ranks: Ranks,
    parallel: Parallel,
    plan: DataPlan,
    recorder: Recorder | None,
    arrivals: Arrivals | None = None,
) -> Training:
    """Steps 2 to 5 of the module's text; every rank calls it."""
    if arrivals is not None and recorder is not None and not arrivals.entries:
        recorder.emit("train_waiting", samples=arrivals.online.settings.watermark)
    measured = _measured(task, dataset, ranks, arrivals)
    device = device_of(spec, ranks)
    module = task.make_model(measured).to(device, DTYPE[spec.precision])
    flops = peak = None
    if recorder is not None and type(plan) is DataPlan:  # one sample fits a rank's memory
        flops, peak = _speed(spec, task, dataset, measured, module)
    module = parallel.parallelize(module, ranks)
    if spec.gradient_checkpointing:
        recompute_blocks(module)
    if spec.compile:
        module.compile()
    ema = None if spec.optimizer.ema is None else Ema(module, spec.optimizer.ema)
    scaler = None
    if spec.precision == "fp16":
        scaler = torch.amp.GradScaler(
            device.type, init_scale=spec.loss_scale.start, growth_interval=spec.loss_scale.growth_steps
        )
        scaler.scale(torch.zeros((), device=device))  # it has a scale from here on
    optimizer = make_optimizer(spec.optimizer, module.named_parameters())
    sampler = _sampler(spec, dataset, plan, arrivals)
    planned = len(dataset) if arrivals is None else arrivals.online.settings.planned
    progress = Progress(step=0, elapsed_s=0.0, sampler=sampler.state_dict())
    checkpoint = ranks.from_first(lambda: latest_checkpoint(out / "checkpoints"))
    if checkpoint is not None:
        progress = load_checkpoint(checkpoint, ranks, module, optimizer, means=None if ema is None else ema.mean)
        sampler.load_state_dict(progress.sampler)
        if arrivals is not None:
            arrivals.go_on(progress.step)
        if scaler is not None and progress.scaler is not None:
            scaler.load_state_dict(progress.scaler)
    engine = GroupedAllreduce(
        module,
        protocol=spec.engine.protocol,
        grouping=spec.engine.grouping,
        overlap=spec.engine.overlap,
        average_over=None if plan.size == ranks.info.world_size else plan.size,
        timeout_s=spec.engine.timeout_s,
    )
    optimizer = engine.wrap(optimizer)  # overlap "step" deals it out, state and all
    training = Training(
        spec=spec,
        task=task,
        data=data,
        cache=cache,
        out=out,
        ranks=ranks,
        plan=plan,
        recorder=recorder,
        dataset=dataset,
        measured=measured,
        module=module,
        engine=engine,
        optimizer=optimizer,
        sampler=sampler,
        total_steps=_total_steps(spec, planned),
        arrivals=arrivals,
        step=progress.step,
        resumed_from=progress.step,
        elapsed_s=progress.elapsed_s,
        device=device,
        scaler=scaler,
        ema=ema,
        skipped=progress.skipped,
        flops_a_sample=flops,
        peak_flops_per_s=peak,
        saved_step=progress.step if checkpoint is not None else -1,
    )
    training.emit(
        "train_started" if checkpoint is None else "train_resumed",
        step=training.step,
        total_steps=training.total_steps,
        max_seconds=spec.max_seconds,
        samples=planned,
        batch=spec.batch,
        world_size=ranks.info.world_size,
        mesh=f"{plan.size}x{ranks.info.world_size // plan.size}",
        parameters=count_parameters(module),
        flops_a_sample=flops,
        peak_flops_per_s=peak,
    )
    return training


def _measured(task: Task, dataset: ShardDataset | GrowingDataset, ranks: Ranks, arrivals: Arrivals | None) -> Any:
    """Of all samples, or of those that the first step knows where others will come."""
    if arrivals is None or not isinstance(dataset, GrowingDataset):
        return ranks.from_first(lambda: task.measure(dataset))
    first = arrivals.begin()

    def work() -> Any:
        dataset.refresh()
        return task.measure(dataset.until(first))

    return ranks.from_first(work)


def _sampler(
    spec: TrainSpec, dataset: ShardDataset | GrowingDataset, plan: DataPlan, arrivals: Arrivals | None
) -> GlobalSampler | ReservoirSampler:
    if arrivals is not None:
        assert isinstance(dataset, GrowingDataset)
        return reservoir_sampler(spec, dataset, plan, arrivals)
    assert isinstance(dataset, ShardDataset)
    return GlobalSampler(
        dataset,
        rank=plan.rank,
        world_size=plan.size,
        global_batch=spec.batch,
        seed=spec.seed,
        window=None if spec.data.window is None else Window(**spec.data.window.model_dump()),
    )


def _speed(
    spec: TrainSpec, task: Task, dataset: ShardDataset | GrowingDataset, measured: Any, module: nn.Module
) -> tuple[float | None, float]:
    """Operations a sample, and operations a second that this rank could do."""
    flops = flops_of_a_sample(module, task.prepare(measured, epoch=EVALUATION_EPOCH)([dataset[0]]))
    device, dtype = next(module.parameters()).device, DTYPE[spec.precision]
    if device.type != "cpu":
        dtype = LOW_PRECISION.get(spec.precision, dtype)
    return flops, peak_flops_per_s(device, dtype)


def _total_steps(spec: TrainSpec, samples: int) -> int | None:
    """Steps to train, or None where only time ends it. An epoch is the whole global batches that the samples fill."""
    by_epochs = spec.epochs * (samples // spec.batch) if spec.epochs is not None else None
    limits = [steps for steps in (spec.steps, by_epochs) if steps is not None]
    return min(limits) if limits else None
