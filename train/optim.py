"""The optimizer and its learning rate as a pure function of progress."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from exitwave.train.lamb import Lamb
from exitwave.train.larc import Larc
from exitwave.train.spec import OptimizerSpec

__all__ = ["learning_rate", "make_optimizer", "set_learning_rate"]


def make_optimizer(spec: OptimizerSpec, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """The one that the spec names; weight decay acts on weights (two or more dims), not on biases and gains."""
    named = [(name, p) for name, p in named_parameters if p.requires_grad]
    if spec.larc is not None:
        return Larc(named, lr=spec.lr, momentum=spec.momentum, weight_decay=spec.weight_decay, trust=spec.larc.trust)
    param_groups = [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": spec.weight_decay},
        {"params": [p for _, p in named if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if spec.name == "sgd":
        return torch.optim.SGD(param_groups, lr=spec.lr, momentum=spec.momentum)
    if spec.name == "lamb":
        return Lamb(param_groups, lr=spec.lr, betas=spec.betas, eps=spec.eps)
    return torch.optim.AdamW(param_groups, lr=spec.lr, betas=spec.betas, eps=spec.eps)


def learning_rate(spec: OptimizerSpec, *, step: int, progress: float, batch: int | None = None) -> float:
    """Learning rate of optimizer step `step` (0, 1, …).

    Linear warm-up over `warmup_steps`, times the schedule: cosine at `progress` in [0, 1] through the training (by
    steps, or by time where time ends it), or a decay every so many steps. Linear scaling with the `batch` is that of
    Goyal et al., "Accurate, large minibatch SGD" (arXiv:1706.02677).
    """
    warmup = min(1.0, (step + 1) / spec.warmup_steps) if spec.warmup_steps else 1.0
    decay = 1.0
    if spec.schedule == "cosine":
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, max(0.0, progress))))
        decay = spec.final_lr_fraction + (1.0 - spec.final_lr_fraction) * cosine
    elif spec.schedule == "step":
        decay = max(spec.decay_factor ** (step // spec.decay_every_steps), spec.final_lr_fraction)
    scale = batch / spec.lr_batch if spec.lr_batch is not None and batch is not None else 1.0
    return spec.lr * scale * warmup * decay


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
