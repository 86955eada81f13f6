"""One optimizer step.

1. Forward and backward: the mean gradient over the global batch (gradients.py).
2. The loss over all ranks; one that is not finite stops all of them, naming samples and the first bad layer.
3. fp16: gradients are divided by the loss scale. Where one overflowed, all ranks leave this update out, count it, and
   halve the scale; they decide alike, since they look at the same reduced gradients.
4. The norm of the gradient is bounded; optimizer; the running mean of the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from exitwave.ingest.errors import ExitwaveError
from exitwave.train.gradients import mean_gradients
from exitwave.train.loader import Batch
from exitwave.train.nonfinite import not_finite
from exitwave.train.training import Training

__all__ = ["StepOutcome", "take_step"]

_LEAST_SCALE = 2.0**-14


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """`loss`: mean over the global batch. `gradient_norm`: before clipping, None where nobody asked for it."""

    loss: float
    gradient_norm: float | None
    skipped: bool


def take_step(training: Training, batch: Batch) -> StepOutcome:
    """Every rank calls it with its part of the batch."""
    training.module.train()
    training.optimizer.zero_grad(set_to_none=True)
    losses = mean_gradients(training, batch)
    bad = ~torch.isfinite(losses)
    loss, n_bad = _over_ranks(training, losses, bad)
    if n_bad:
        with training.autocast():
            raise not_finite(training.ranks, training.module, batch, bad, step=training.step + 1)
    norm, skipped = _update(training)
    return StepOutcome(loss=loss, gradient_norm=norm, skipped=skipped)


def _over_ranks(training: Training, losses: torch.Tensor, bad: torch.Tensor) -> tuple[float, float]:
    """(loss over the global batch, number of samples without a finite one)"""
    ranks = training.ranks
    copies = ranks.info.world_size / training.plan.size  # of each sample, where ranks share them
    if training.spec.deterministic == "any-ranks":
        # rounded once, at the end: the order of samples and ranks does not matter
        every = [value for part in ranks.gather(losses.double().tolist()) for value in part]
        n_bad = float(sum(not math.isfinite(value) for value in every))
        total = math.nan if n_bad else math.fsum(every)
    else:
        total, n_bad = ranks.sum(float(losses.sum()), float(bad.sum()))
    return total / (training.spec.batch * copies), n_bad


def _update(training: Training) -> tuple[float | None, bool]:
    spec, scaler = training.spec, training.scaler
    if scaler is not None:
        training.engine.unscale_(scaler, training.optimizer)
    norm: torch.Tensor | None = None
    # With overlap "step" a norm is a barrier; without clipping a gradient that is not finite shows in the next loss.
    if spec.optimizer.clip is not None or spec.engine.overlap != "step":
        # the norm is that of the averaged gradient, so every rank sees the same and decides the same
        norm = training.engine.clip_grad_norm_(spec.optimizer.clip or float("inf"))
        if scaler is None and not torch.isfinite(norm):
            raise _lost(training, "the loss is finite but its gradient is not")
    if scaler is None:
        training.optimizer.step()
    else:
        before = training.scale()
        scaler.step(training.optimizer)
        scaler.update()
        if training.scale() < before:
            training.skipped += 1
            if training.scale() < _LEAST_SCALE:
                raise _lost(training, "gradients overflow fp16 however small the loss scale; precision: bf16 or fp32")
            return None, True
    if training.ema is not None:
        with training.engine.full_parameters():
            training.ema.update(training.step)
    return None if norm is None else float(norm), False


def _lost(training: Training, why: str) -> ExitwaveError:
    named = reversed(list(training.module.named_parameters()))
    bad = [name for name, p in named if p.grad is not None and not bool(torch.isfinite(p.grad).all())]
    first = f" (first, on the way back, in {bad[0]})" if bad else ""
    return ExitwaveError(f"step {training.step + 1}: {why}{first}; lower optimizer.lr")
