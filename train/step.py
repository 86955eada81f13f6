"""One optimizer step."""

from __future__ import annotations

import torch

from exitwave.ingest.errors import ExitwaveError
from exitwave.train.dropout import set_dropout_key
from exitwave.train.loader import Batch
from exitwave.train.nonfinite import not_finite
from exitwave.train.training import Training

__all__ = ["take_step"]


def take_step(training: Training, batch: Batch) -> float:
    """Forward, backward, clip, update; returns the loss averaged over the global batch. Every rank calls it."""
    spec = training.spec
    n_local, n_global = len(batch.uids), spec.batch
    training.module.train()
    set_dropout_key(training.module, seed=spec.seed, step=training.step, uids=batch.uids)
    training.engine.set_local_batch(n_local, n_global)
    training.optimizer.zero_grad(set_to_none=True)
    losses = training.task.per_sample_loss(training.engine(batch.inputs), batch)
    losses.mean().backward()
    bad = ~torch.isfinite(losses.detach())
    loss_sum, n_bad = training.ranks.sum(float(losses.detach().sum()), float(bad.sum()))
    if n_bad:
        raise not_finite(training.ranks, training.module, batch, bad, step=training.step + 1)
    # With overlap "step" a norm is a barrier; without clipping a gradient that is not finite shows in the next loss.
    if spec.optimizer.clip is not None or spec.engine.overlap != "step":
        # the norm is that of the averaged gradient, so every rank sees the same and decides the same
        norm = training.engine.clip_grad_norm_(spec.optimizer.clip or float("inf"))
        if not torch.isfinite(norm):
            raise ExitwaveError(
                f"step {training.step + 1}: the loss is finite but its gradient is not; lower optimizer.lr"
            )
    training.optimizer.step()
    copies = training.ranks.info.world_size / training.plan.size  # of each sample, where ranks share them
    return loss_sum / (n_global * copies)
