"""A small convolutional classifier of diffraction patterns.

Levels of two 3x3 convolutions with group norm and ReLU, halved by maximum pooling; then the mean and the maximum over
the plane, dropout and one linear layer. Group norm sees one sample only, so that it does not matter which rank holds
it. Every direct child is one block (`level1`, …, `head`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from exitwave.train.dropout import KeyedDropout

__all__ = ["PatternClassifier"]


class PatternClassifier(nn.Module):
    """Input (B, channels, h, w), output (B, classes) logits.

    Args:
        width: channels of the first level; each level below has twice as many.
        levels: how many levels; the plane is halved before each but the first.
    """

    def __init__(self, *, channels: int, classes: int, width: int = 24, levels: int = 4, dropout: float = 0.2) -> None:
        super().__init__()
        self.levels = levels
        for level in range(levels):
            out = width << level
            self.add_module(f"level{level + 1}", nn.Sequential(*_convolution(channels, out), *_convolution(out, out)))
            channels = out
        self.dropout = KeyedDropout(dropout)
        self.head = nn.Linear(2 * channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        for level in range(self.levels):
            x = self.get_submodule(f"level{level + 1}")(x)
            if level + 1 < self.levels and min(x.shape[2:]) >= 2:
                x = nn.functional.max_pool2d(x, 2)
        # (B, C, h, w) -> (B, 2C)
        pooled = torch.cat([x.mean(dim=(2, 3)), x.amax(dim=(2, 3))], dim=1)
        out: Tensor = self.head(self.dropout(pooled))
        return out


def _convolution(channels: int, out: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(max(1, out // 12), out), nn.ReLU()]
