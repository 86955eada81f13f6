"""LAMB: Adam's direction with a rate for each tensor in proportion to its weights.

You et al., "Large batch optimization for deep learning" (arXiv:1904.00962), algorithm 2, with Adam's bias correction:

    r = m / (sqrt(v) + eps) + decay w        w <- w - lr (||w|| / ||r||) r
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Lamb"]


class Lamb(torch.optim.Optimizer):
    """See the module's docstring. `weight_decay` and `lr` are those of the parameter groups."""

    def __init__(self, params: Any, *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                count = float(state["step"])
                state["exp_avg"].lerp_(p.grad, 1.0 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1.0 - beta2)
                spread = (state["exp_avg_sq"] / (1.0 - beta2**count)).sqrt_().add_(group["eps"])
                update = (state["exp_avg"] / (1.0 - beta1**count)).div_(spread).add_(p, alpha=group["weight_decay"])
                weights, length = torch.linalg.vector_norm(p), torch.linalg.vector_norm(update)
                trust = torch.where((weights > 0) & (length > 0), weights / length, torch.ones_like(weights))
                p.sub_(update.mul_(group["lr"] * trust))
        return loss
