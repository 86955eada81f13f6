"""Forward and backward of one step: the mean gradient over the global batch, in `.grad` of every rank.

Three ways, all of them equal but for rounding:

- at once: the engine reduces behind the backward pass.
- `accumulate` parts: only the last backward pass is reduced, the others add up on their rank.
- `deterministic: any-ranks`: one sample at a time, added without rounding (exact_sums.py). The gradient is the same
  to the bit however the samples are dealt out to ranks; nothing hides behind the backward pass.

Before any gradient is sent to another rank, when the losses of this rank's samples are known, `forwarded` is called.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from exitwave.train.dropout import set_keys
from exitwave.train.exact_sums import ExactSums
from exitwave.train.loader import Batch
from exitwave.train.training import Training

__all__ = ["forward", "mean_gradients"]


def forward(training: Training, batch: Batch) -> Tensor:
    """Losses (B,) of a batch, with the graph to go back."""
    set_keys(training.dropouts, seed=training.spec.seed, step=training.step, uids=batch.uids)
    with training.autocast():
        output = training.engine(batch.inputs)
    wide = output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
    return training.task.per_sample_loss(wide, batch)


def mean_gradients(training: Training, batch: Batch, *, forwarded: Callable[[Tensor], None]) -> None:
    """Leaves the mean gradients in `.grad` (overlap "step": on their way), times the loss scale where there is one.

    Args:
        forwarded: called once, with the losses of this rank's samples (B,), without a graph and without the scale;
            what it raises ends the step before this rank's gradients have met those of others.
    """
    if training.spec.deterministic == "any-ranks":
        _one_by_one(training, batch, forwarded)
        return
    n_local = len(batch.uids)
    training.engine.set_local_batch(n_local, training.spec.batch)
    parts = batch.split(training.spec.accumulate)
    losses = []
    for part in parts:
        with nullcontext() if part is parts[-1] else training.engine.no_sync():
            each = forward(training, part)
            mean = each.mean() if len(parts) == 1 else each.sum() / n_local
            losses.append(each.detach())
            if part is parts[-1]:
                forwarded(torch.cat(losses))
            training.scaled(mean).backward()


def _one_by_one(training: Training, batch: Batch, forwarded: Callable[[Tensor], None]) -> None:
    sums = ExactSums([p for p in training.module.parameters() if p.requires_grad])
    losses = []
    for part in batch.split(len(batch.uids)):
        with training.engine.no_sync():
            each = forward(training, part)
            training.scaled(each.sum()).backward()
        sums.take(training.scale())
        losses.append(each.detach())
    forwarded(torch.cat(losses))
    group = training.ranks.process_group
    began = time.perf_counter()
    with training.ranks.contact():
        sums.give(
            lambda all_sums: dist.all_reduce(all_sums, group=group), factor=training.scale() / training.spec.batch
        )
    training.engine.counters.exposed_s += time.perf_counter() - began
