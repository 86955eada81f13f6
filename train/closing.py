"""What a training leaves behind: checkpoints on the way, the trained model at the end."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from exitwave.ingest import GrowingDataset
from exitwave.ingest.errors import ExitwaveError
from exitwave.train.allreduce.sharded_optimizer import whole_optimizer
from exitwave.train.mesh import RankInfo
from exitwave.train.online import whole_measure
from exitwave.train.run import read_curve, saved_facts
from exitwave.train.state import Progress, save_checkpoint
from exitwave.train.training import Training, count_parameters

__all__ = ["TrainResult", "already_done", "checkpoint", "finish"]


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a training ended. `resumed_from`: the step of the checkpoint that it began with (0: from the start)."""

    run: Path
    step: int
    loss: float
    samples_per_s: float
    seconds: float
    parameters: int
    resumed_from: int
    world_size: int


def checkpoint(training: Training) -> None:
    """The state after the last step, unless it is saved already. Every rank calls it."""
    if training.saved_step == training.step:
        return
    began = time.perf_counter()
    _refuse_to_save_what_is_lost(training)
    if training.recorder is not None:
        training.recorder.flush()
    progress = Progress(
        step=training.step,
        elapsed_s=training.clock_s(),
        sampler=training.sampler.state_dict(),
        scaler=None if training.scaler is None else training.scaler.state_dict(),
        skipped=training.skipped,
    )
    with whole_optimizer(training.optimizer) as optimizer:
        path = save_checkpoint(
            training.out / "checkpoints",
            training.ranks,
            training.module,
            optimizer,
            progress,
            keep=training.spec.checkpoint.keep,
            means=None if training.ema is None else training.ema.mean,
        )
    training.saved_step = training.step
    training.emit("train_checkpoint", step=training.step, path=path.name, seconds=time.perf_counter() - began)


def _refuse_to_save_what_is_lost(training: Training) -> None:
    """A finite loss may have had gradients that were not, and then the next loss comes too late for the checkpoint.

    All ranks hold the same parameters, so all raise.
    """
    with training.engine.full_parameters():
        for name, parameter in training.module.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                raise ExitwaveError(
                    f"step {training.step}: parameter {name} is not finite; nothing was saved, the checkpoint before "
                    "stands; lower optimizer.lr, or set optimizer.clip"
                )


def finish(training: Training) -> TrainResult:
    """The last checkpoint and model.pt. Every rank calls it."""
    checkpoint(training)
    training.ranks.from_first(lambda: _save_model(training))
    if training.arrivals is not None and (reuse := training.arrivals.reuse()):
        training.emit("train_reservoir", reuse=sorted(reuse.items()))  # (uses, samples)
    seconds = time.perf_counter() - training.started
    result = TrainResult(
        run=training.out,
        step=training.step,
        loss=training.loss,
        samples_per_s=training.samples / seconds,
        seconds=seconds,
        parameters=count_parameters(training.module),
        resumed_from=training.resumed_from,
        world_size=training.ranks.info.world_size,
    )
    training.emit(
        "train_finished",
        step=result.step,
        loss=result.loss,
        samples_per_s=result.samples_per_s,
        seconds=training.clock_s(),
        parameters=result.parameters,
    )
    if training.recorder is not None:
        training.recorder.flush()
    return result


def _save_model(training: Training) -> None:
    measured = training.measured
    if training.arrivals is not None:
        assert isinstance(training.dataset, GrowingDataset)
        training.arrivals.finish(training.step)
        known = training.dataset.until(training.arrivals.seq_of(max(0, training.step - 1)))
        measured = whole_measure(measured, training.task.measure(known))
    with nullcontext() if training.ema is None else training.ema.in_place():
        training.task.save(
            training.out / "model.pt",
            training.module,
            measured,
            dataset_id=training.dataset.dataset_id,
            step=training.step,
        )


def already_done(out: Path, info: RankInfo) -> TrainResult:
    """What `finish` returned when the run's folder was made, as far as it still matters."""
    facts, curve = saved_facts(out), read_curve(out)
    return TrainResult(
        run=out,
        step=facts.step,
        loss=curve[-1]["loss"] if curve else float("nan"),
        samples_per_s=0.0,
        seconds=0.0,
        parameters=facts.parameters,
        resumed_from=facts.step,
        world_size=info.world_size,
    )
