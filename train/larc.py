"""LARC: SGD whose rate in each block of the network follows from that block's weights and gradient.

You, Gitman and Ginsburg, "Large batch training of convolutional networks" (arXiv:1708.03888), with the rate clipped at
the global one, and norms over a whole block as Laanait et al. (arXiv:1909.11150) take them:

    ratio = min(1, trust ||w|| / (lr (||g|| + decay ||w||)))        g <- ratio (g + decay w), then SGD with momentum

A parameter's block is the first part of its name, compared as a whole; every parameter lies in exactly one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

__all__ = ["Larc", "blocks_of"]


def blocks_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Block -> names of its parameters, in their order."""
    blocks: dict[str, list[str]] = {}
    for name in names:
        blocks.setdefault(name.split(".", 1)[0], []).append(name)
    return blocks


class Larc(torch.optim.SGD):
    """See the module's docstring. One parameter group a block; decay spares biases and gains (fewer than two dims)."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        trust: float,
    ) -> None:
        named = dict(named_parameters)
        groups = [{"params": [named[name] for name in names]} for names in blocks_of(named).values()]
        super().__init__(groups, lr=lr, momentum=momentum)
        for group in self.param_groups:
            group["trust"], group["decay"] = trust, weight_decay

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Scales the gradients block by block, in place, and takes the step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            there = [p for p in group["params"] if p.grad is not None]
            if not there:
                continue
            gradients: list[Tensor] = [p.grad for p in there if p.grad is not None]
            weights, gradient = _norm(there), _norm(gradients)
            most = group["trust"] * weights / (group["lr"] * (gradient + group["decay"] * weights))
            # a block of zeros, or one without a gradient, has no rate of its own
            ratio = torch.where((weights > 0) & (gradient > 0), most.clamp(max=1.0), torch.ones_like(most))
            for p, g in zip(there, gradients, strict=True):
                if p.ndim > 1:
                    g.add_(p, alpha=group["decay"])
                g.mul_(ratio)
        super().step()
        return loss


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t) for t in tensors]))
