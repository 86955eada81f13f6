"""One optimizer step.

1. Forward; then `decide`, which may end the training here; backward: the mean gradient over the global batch
   (gradients.py). The loss travels beside the gradients, so that nobody waits for it.
2. The loss over all ranks; one that is not finite stops all of them, naming samples and the first bad layer.
3. fp16: gradients are divided by the loss scale. Where one overflowed, all ranks leave this update out, count it, and
   halve the scale; they decide alike, since they look at the same reduced gradients.
4. The norm of the gradient is bounded; optimizer; the running mean of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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


def take_step(training: Training, batch: Batch, decide: Callable[[], None]) -> StepOutcome:
    """Every rank calls it with its part of the batch.

    `decide` is called after the forward pass, before gradients meet those of other ranks; what it raises ends the step
    without a trace in parameters, optimizer and scale.
    """
    if not training.module.training:
        training.module.train()
    training.optimizer.zero_grad(set_to_none=True)
    known: list[torch.Tensor] = []
    over_ranks: list[Callable[[], tuple[float, float]]] = []

    def forwarded(losses: torch.Tensor) -> None:
        decide()
        known.append(losses)
        over_ranks.append(_over_ranks(training, losses))

    mean_gradients(training, batch, forwarded=forwarded)
    loss, n_bad = over_ranks[0]()
    if n_bad:
        bad = ~torch.isfinite(known[0])
        with training.autocast():
            raise not_finite(training.ranks, training.module, batch, bad, step=training.step + 1)
    norm, skipped = _update(training)
    return StepOutcome(loss=loss, gradient_norm=norm, skipped=skipped)


def _over_ranks(training: Training, losses: torch.Tensor) -> Callable[[], tuple[float, float]]:
    """To be called when gradients have met: (loss over the global batch, number of samples without a finite one)."""
    ranks = training.ranks
    copies = ranks.info.world_size / training.plan.size  # of each sample, where ranks share them
    divisor = training.spec.batch * copies
    if training.spec.deterministic == "any-ranks":

        def rounded_once() -> tuple[float, float]:
            # at the end: the order of samples and ranks does not matter
            every = [value for part in ranks.gather(losses.double().tolist()) for value in part]
            n_bad = float(sum(not math.isfinite(value) for value in every))
            return (math.nan if n_bad else math.fsum(every)) / divisor, n_bad

        return rounded_once
    here = float(losses.sum())
    # a sum that is finite has no part that is not
    sums = ranks.start_sum(here, 0.0 if math.isfinite(here) else float((~torch.isfinite(losses)).sum()))

    def added() -> tuple[float, float]:
        total, n_bad = sums()
        return total / divisor, n_bad

    return added


def _update(training: Training) -> tuple[float | None, bool]:
    spec, scaler = training.spec, training.scaler
    if scaler is not None:
        training.engine.unscale_(scaler, training.optimizer)
    norm: float | None = None
    # With overlap "step" a norm is a barrier; without clipping a gradient that is not finite shows in the next loss.
    if spec.optimizer.clip is not None or spec.engine.overlap != "step":
        # the norm is that of the averaged gradient, so every rank sees the same and decides the same
        norm = float(training.engine.clip_grad_norm_(spec.optimizer.clip or float("inf")))
        if scaler is None and not math.isfinite(norm):
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
    return norm, False


def _lost(training: Training, why: str) -> ExitwaveError:
    named = reversed(list(training.module.named_parameters()))
    bad = [name for name, p in named if p.grad is not None and not bool(torch.isfinite(p.grad).all())]
    first = f" (first, on the way back, in {bad[0]})" if bad else ""
    return ExitwaveError(f"step {training.step + 1}: {why}{first}; lower optimizer.lr")
