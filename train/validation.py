"""The loss over the validation split, now and then while training."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from exitwave.train.loader import EVALUATION_EPOCH, open_split
from exitwave.train.training import DTYPE, Training

__all__ = ["validate"]


def validate(training: Training) -> None:
    """Its samples dealt out to the ranks; evaluation noise, no augmentation."""
    spec, ranks, plan = training.spec, training.ranks, training.plan
    loss = count = 0.0
    error: Exception | None = None
    try:
        dataset = open_split(training.data, spec.val_split, cache=training.cache, fields=training.task.fields)
        prepare = training.task.prepare(training.measured, epoch=EVALUATION_EPOCH)
        source = plan.view(dataset)
        training.module.eval()
        means = nullcontext() if training.ema is None else training.ema.in_place()
        with torch.no_grad(), training.engine.full_parameters(), means:
            for index in range(plan.rank, len(dataset), plan.size):
                batch = prepare([source[index]]).to(DTYPE[spec.precision], training.device)
                loss += float(training.task.per_sample_loss(training.module(batch.inputs), batch))
                count += 1
    except Exception as caught:
        error = caught
    ranks.agree(error=error)
    loss, count = ranks.sum(loss, count)
    n = len(dataset)
    clock_s = round(training.clock_s(), 3)
    training.emit("train_eval", step=training.step, split=spec.val_split, loss=loss / count, n=n, clock_s=clock_s)
