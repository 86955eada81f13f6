"""A running mean of the weights, which often scores better than the last ones (Polyak and Juditsky, 1992).

mean <- d mean + (1 - d) weights,   d = min(decay, (1 + n) / (10 + n)) after n updates, so that the start is forgotten
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["Ema"]


class Ema:
    """The mean of a module's floating-point parameters. `mean`: name -> tensor, part of the checkpoint."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self._module = module
        self.mean: dict[str, Tensor] = {name: p.detach().clone() for name, p in module.named_parameters()}

    @torch.no_grad()
    def update(self, n: int) -> None:
        """Takes in the weights as they are after `n` updates before this one."""
        d = min(self.decay, (1 + n) / (10 + n))
        weights = [p.detach() for _, p in self._module.named_parameters()]
        torch._foreach_lerp_(list(self.mean.values()), weights, 1.0 - d)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the module has the mean weights; nothing may train it meanwhile."""
        kept = {name: p.detach().clone() for name, p in self._module.named_parameters()}
        self._set(self.mean)
        try:
            yield
        finally:
            self._set(kept)

    @torch.no_grad()
    def _set(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self._module.named_parameters():
            parameter.copy_(values[name])
