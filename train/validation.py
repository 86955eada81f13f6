"""The loss over the validation split, now and then while training."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from exitwave.train.loader import EVALUATION_EPOCH, open_split
from exitwave.train.training import DTYPE, Training

__all__ = ["validate"]


def validate(training: Training) -> None:
    """Its samples dealt out to the ranks; evaluation noise, no augmentation. Errors are told in physical units too.

    While a campaign has not brought the whole split yet, none is done: its loss could not be compared with later ones.
    """
    spec, ranks, plan = training.spec, training.ranks, training.plan
    if training.arrivals is not None and not training.arrivals.may_validate():
        training.emit("train_eval_postponed", step=training.step, split=spec.val_split)
        return
    loss = count = 0.0
    squares: dict[str, float] = {}
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
                output = training.module(batch.inputs)
                loss += float(training.task.per_sample_loss(output, batch))
                for name, square in training.task.squared_errors(output, batch, training.measured).items():
                    squares[name] = squares.get(name, 0.0) + float(square)
                count += 1
    except Exception as caught:
        error = caught
    ranks.agree(error=error)
    n = len(dataset)
    names = sorted(set().union(*ranks.gather(sorted(squares))))  # a rank without a sample knows none
    loss, count, *sums = ranks.sum(loss, count, *(squares.get(name, 0.0) for name in names))
    figures = {name: (total / count) ** 0.5 for name, total in zip(names, sums, strict=True)}
    clock_s = round(training.clock_s(), 3)
    training.emit(
        "train_eval", step=training.step, split=spec.val_split, loss=loss / count, n=n, clock_s=clock_s, **figures
    )
