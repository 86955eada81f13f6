"""Dropout whose mask belongs to the sample and the step, not to the rank.

`torch.nn.Dropout` draws from the process's generator: with another number of ranks, or another order of samples, every
mask changes and two runs cannot be compared. `KeyedDropout` draws the mask of each sample under the key (seed, step,
uid, layer). A sample gets the same mask whichever rank holds it and whatever else is in the batch.

The model is told the key before each step: `set_dropout_key(model, seed=…, step=…, uids=…)`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from exitwave.train.keys import key_of

__all__ = ["KeyedDropout", "dropouts_of", "set_dropout_key", "set_keys"]


class KeyedDropout(nn.Module):
    """Zeroes elements with probability `p` and scales the rest by 1/(1-p), in training mode only.

    `layer` tells one dropout of a model from another; `set_dropout_key` numbers them in the order of construction.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"dropout probability: expected 0 <= p < 1, got {p}")
        self.p = p
        self.layer = 0
        self._key: tuple[int, int, tuple[int, ...]] | None = None

    def set_key(self, *, seed: int, step: int, uids: tuple[int, ...], layer: int) -> None:
        """What the masks of the coming forward passes belong to; `uids` in the order of the batch."""
        self.layer = layer
        self._key = (seed, step, uids)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, …) -> the same shape. Raises RuntimeError in training mode where no key fits the batch."""
        if not self.training or self.p == 0.0:
            return x
        if self._key is None or len(self._key[2]) != x.shape[0]:
            held = "none" if self._key is None else f"{len(self._key[2])} uids"
            raise RuntimeError(
                f"dropout key: expected the uids of {x.shape[0]} samples, have {held}; call set_dropout_key"
            )
        seed, step, uids = self._key
        mask = torch.stack([self._mask(seed, step, uid, x.shape[1:]) for uid in uids])
        return x * mask.to(device=x.device, dtype=x.dtype)

    def _mask(self, seed: int, step: int, uid: int, shape: Sequence[int]) -> Tensor:
        source = torch.Generator().manual_seed(key_of("dropout", seed, step, uid, self.layer) & (2**63 - 1))
        return (torch.rand(tuple(shape), generator=source) >= self.p).to(torch.float32) / (1.0 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def set_dropout_key(model: nn.Module, *, seed: int, step: int, uids: Sequence[int]) -> None:
    """Gives every `KeyedDropout` of the model the key of the coming step; layers are numbered in the model's order."""
    set_keys(dropouts_of(model), seed=seed, step=step, uids=uids)


def dropouts_of(model: nn.Module) -> tuple[KeyedDropout, ...]:
    """In the model's order; for who asks before each step and does not want to walk through the model each time."""
    return tuple(module for module in model.modules() if isinstance(module, KeyedDropout))


def set_keys(dropouts: Sequence[KeyedDropout], *, seed: int, step: int, uids: Sequence[int]) -> None:
    """As `set_dropout_key`, for the dropouts of a model."""
    key = tuple(int(uid) for uid in uids)
    for layer, module in enumerate(dropouts):
        module.set_key(seed=seed, step=step, uids=key, layer=layer)
