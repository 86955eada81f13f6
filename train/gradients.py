"""Forward and backward of one step: the mean gradient over the global batch, in `.grad` of every rank.

Three ways, all of them equal but for rounding:

- at once: the engine reduces behind the backward pass.
- `accumulate` parts: only the last backward pass is reduced, the others add up on their rank.
- `deterministic: any-ranks`: one sample at a time, added without rounding (exact_sums.py). The gradient is the same
  to the bit however the samples are dealt out to ranks; nothing hides behind the backward pass.
"""

from __future__ import annotations

import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from exitwave.train.dropout import set_dropout_key
from exitwave.train.exact_sums import ExactSums
from exitwave.train.loader import Batch
from exitwave.train.training import Training

__all__ = ["forward", "mean_gradients"]


def forward(training: Training, batch: Batch) -> Tensor:
    """Losses (B,) of a batch, with the graph to go back."""
    set_dropout_key(training.module, seed=training.spec.seed, step=training.step, uids=batch.uids)
    with training.autocast():
        output = training.engine(batch.inputs)
    wide = output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
    return training.task.per_sample_loss(wide, batch)


def mean_gradients(training: Training, batch: Batch) -> Tensor:
    """Leaves the mean gradients in `.grad` (overlap "step": on their way), times the loss scale where there is one.

    Returns:
        losses of this rank's samples (B,), without a graph and without the scale
    """
    if training.spec.deterministic == "any-ranks":
        return _one_by_one(training, batch)
    n_local = len(batch.uids)
    training.engine.set_local_batch(n_local, training.spec.batch)
    parts = batch.split(training.spec.accumulate)
    losses = []
    for part in parts:
        with nullcontext() if part is parts[-1] else training.engine.no_sync():
            each = forward(training, part)
            mean = each.mean() if len(parts) == 1 else each.sum() / n_local
            training.scaled(mean).backward()
        losses.append(each.detach())
    return torch.cat(losses)


def _one_by_one(training: Training, batch: Batch) -> Tensor:
    sums = ExactSums([p for p in training.module.parameters() if p.requires_grad])
    losses = []
    for part in batch.split(len(batch.uids)):
        with training.engine.no_sync():
            each = forward(training, part)
            training.scaled(each.sum()).backward()
        sums.take(training.scale())
        losses.append(each.detach())
    group = training.ranks.process_group
    began = time.perf_counter()
    with training.ranks.contact():
        sums.give(
            lambda all_sums: dist.all_reduce(all_sums, group=group), factor=training.scale() / training.spec.batch
        )
    training.engine.counters.exposed_s += time.perf_counter() - began
    return torch.cat(losses)
