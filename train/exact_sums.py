"""Sums of gradients that do not depend on the order of adding: the same bits on any number of ranks.

Floating-point addition rounds, and rounding depends on the order. Rounded to a grid first, numbers add without
rounding as long as the sum fits the mantissa (Demmel and Nguyen, "Fast reproducible floating-point summation", ARITH
2013). Each element g of each sample's gradient is cut into two whole numbers on fixed grids,

    g = high 2^-24 + low 2^-64 + (what lies below 2^-65),

both exact in float64, as are the sums of all samples and ranks while |high| and |low| stay below 2^53: gradients up
to 2^28, ten thousand samples. What is cut off is far below the last bit of any gradient that matters in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["ExactSums"]

_HIGH = 2.0**24
_LOW = 2.0**40


class ExactSums:
    """Sums over samples of the gradients of `parameters`, float64."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._sizes = [p.numel() for p in self._parameters]
        n = sum(self._sizes)
        # high, low, and how often each parameter had a gradient
        self._all = torch.zeros(2 * n + len(self._sizes), dtype=torch.float64)
        self._high, self._low, self._used = self._all[:n], self._all[n : 2 * n], self._all[2 * n :]

    @torch.no_grad()
    def take(self, scale: float) -> None:
        """Adds what `.grad` holds now, divided by `scale` (a power of two), and clears it."""
        begin = 0
        for k, (parameter, size) in enumerate(zip(self._parameters, self._sizes, strict=True)):
            if parameter.grad is not None:
                fine = parameter.grad.detach().reshape(-1).to("cpu", torch.float64).mul(_HIGH / scale)
                whole = fine.round()
                self._high[begin : begin + size] += whole
                self._low[begin : begin + size] += fine.sub_(whole).mul_(_LOW).round_()
                self._used[k] += 1
                parameter.grad = None
            begin += size

    @torch.no_grad()
    def give(self, all_reduce: Callable[[Tensor], object], *, factor: float) -> None:
        """Sums over the ranks; `.grad` becomes `factor` times the sum, or stays None where no sample had one."""
        all_reduce(self._all)
        total = (self._low / _LOW + self._high) / _HIGH * factor
        pieces = total.split(self._sizes)
        for parameter, piece, used in zip(self._parameters, pieces, self._used.tolist(), strict=True):
            if used:
                parameter.grad = piece.reshape(parameter.shape).to(parameter.device, parameter.dtype)
