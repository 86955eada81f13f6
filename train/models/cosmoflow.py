"""CosmoFlow: a 3D convolutional network that regresses a few numbers from a volume.

The network of Mathuriya et al., "CosmoFlow: using deep learning to learn the universe at scale" (SC18,
arXiv:1808.04728), as extended to larger samples by Oyama et al., "The case for strong scaling in deep learning"
(arXiv:2007.12856):

    7 x [conv 3³, same padding, no bias -> [batch norm] -> leaky ReLU -> average pool 3/2]
      -> fully connected 2048 -> 256 -> numbers, leaky ReLU and dropout between

The fourth convolution has stride 2. Samples of 512³ are pooled seven times, those of 256³ six, of 128³ five: the last
poolings are left out so that 2³ places remain before the fully connected layers, which are then the same for all sizes.
Here this is a rule: a dim that has come down to two places is neither pooled nor strided any more, each dim for itself,
so that flat volumes (few slabs, many pixels) fit too.

Every direct child of `CosmoFlow` is one block (`conv1`, …, `conv7`, `flatten`, `fc1`, …).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor, nn

from exitwave.ingest.errors import UsageError
from exitwave.train.dropout import KeyedDropout

__all__ = ["CosmoFlow"]

_WIDTHS = (16, 32, 64, 128, 256, 256, 256)
_STRIDED = 4  # which convolution has stride 2, counted from 1
_LEAST = 2  # places that are left of each dim
_SLOPE = 0.01


class CosmoFlow(nn.Module):
    """Input (B, in_channels, D, H, W), output (B, outputs).

    Args:
        in_shape: (D, H, W) of one sample; each side a power of two, at least 2, at most 512.
        in_channels: channels of the input; 4 in the papers.
        outputs: how many numbers; 4 in the papers.
        widths: filters of the convolutions.
        hidden: units of the fully connected layers.
        norm: "none", or "batch" for batch normalisation after each convolution.
        dropout: how much is dropped before each fully connected layer but the first (the papers keep 0.8).

    Raises:
        UsageError: a shape or width that the network does not take.
    """

    def __init__(
        self,
        *,
        in_shape: Sequence[int],
        in_channels: int = 4,
        outputs: int = 4,
        widths: Sequence[int] = _WIDTHS,
        hidden: Sequence[int] = (2048, 256),
        norm: str = "none",
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        if len(in_shape) != 3 or any(n < 2 or n > 512 or n & (n - 1) for n in in_shape):
            raise UsageError(f"CosmoFlow: expected three sides that are powers of two, 2 to 512, got {tuple(in_shape)}")
        if norm not in ("none", "batch"):
            raise UsageError(f"CosmoFlow: norm: expected none or batch, got {norm!r}")
        if not widths or min(*widths, *hidden, in_channels, outputs) < 1:
            raise UsageError("CosmoFlow: expected at least one convolution, and widths of at least 1")
        self.in_shape = tuple(in_shape)
        shape, channels = list(in_shape), in_channels
        for number, width in enumerate(widths, start=1):
            stride = [2 if number == _STRIDED and n > _LEAST else 1 for n in shape]
            shape = [n // s for n, s in zip(shape, stride, strict=True)]
            pool = [2 if n > _LEAST else 1 for n in shape]
            shape = [n // s for n, s in zip(shape, pool, strict=True)]
            self.add_module(f"conv{number}", _block(channels, width, stride, pool, norm))
            channels = width
        self.flatten = nn.Flatten()
        features = channels * prod(shape)
        for number, units in enumerate((*hidden, outputs), start=1):
            layers: list[nn.Module] = [] if number == 1 or dropout == 0 else [KeyedDropout(dropout)]
            layers.append(nn.Linear(features, units))
            if number <= len(hidden):
                layers.append(nn.LeakyReLU(_SLOPE))
            self.add_module(f"fc{number}", nn.Sequential(*layers))
            features = units

    def forward(self, x: Tensor) -> Tensor:
        if tuple(x.shape[2:]) != self.in_shape:
            raise UsageError(f"CosmoFlow: made for samples of {self.in_shape}, got {tuple(x.shape[2:])}")
        for block in self.children():
            x = block(x)
        return x


def _block(before: int, after: int, stride: Sequence[int], pool: Sequence[int], norm: str) -> nn.Sequential:
    layers: list[nn.Module] = [
        nn.Conv3d(before, after, 3, stride=(stride[0], stride[1], stride[2]), padding=1, bias=False)
    ]
    if norm == "batch":
        layers.append(nn.BatchNorm3d(after))
    layers.append(nn.LeakyReLU(_SLOPE))
    if any(s > 1 for s in pool):
        a, b, c = (3 if s > 1 else 1 for s in pool)  # a dim that is pooled no more has a kernel of 1
        layers.append(nn.AvgPool3d((a, b, c), stride=(pool[0], pool[1], pool[2]), padding=(a // 2, b // 2, c // 2)))
    return nn.Sequential(*layers)
