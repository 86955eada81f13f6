"""A compact 3D U-Net: from a stack of images to a volume, for through-focal series and potentials by slab.

The network of Çiçek et al., "3D U-Net: learning dense volumetric segmentation from sparse annotation" (MICCAI 2016,
arXiv:1606.06650): at each level two 3x3x3 convolutions, maximum pooling by 2 on the way down, transposed convolution by
2 and concatenation of the skip on the way up. Differences: group norm instead of batch norm, since batches are small
and split over ranks, and a number of output planes that may differ from the input's only by interpolation afterwards.

Every direct child of `UNet3D` is one block (`down1`, …, `bottom`, `unpool1`, …, `up1`, `final`), as tensor groups by
"layer-blocks" want it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from exitwave.ingest.errors import UsageError

__all__ = ["UNet3D"]


class UNet3D(nn.Module):
    """Input (B, in_channels, D, H, W) float32, output (B, out_channels, D, H, W).

    Args:
        in_channels: channels of the input volume.
        out_channels: channels of the output volume.
        width: channels of the first level; each level below has twice as many.
        levels: poolings; D, H and W must be divisible by 2**levels.

    Raises:
        UsageError: a width or a number of levels below one; from `forward`, a volume that cannot be pooled.
    """

    def __init__(self, *, in_channels: int = 1, out_channels: int = 1, width: int = 16, levels: int = 3) -> None:
        super().__init__()
        if width < 1 or levels < 1:
            raise UsageError(f"UNet3D: width and levels must be at least 1, got {width} and {levels}")
        self.levels = levels
        channels = in_channels
        for level in range(levels):
            self.add_module(f"down{level + 1}", _two_convolutions(channels, width << level))
            channels = width << level
        self.bottom = _two_convolutions(channels, width << levels)
        for level in reversed(range(levels)):
            below, here = width << (level + 1), width << level
            self.add_module(f"unpool{level + 1}", nn.ConvTranspose3d(below, here, 2, stride=2))
            self.add_module(f"up{level + 1}", _two_convolutions(2 * here, here))
        self.final = nn.Conv3d(width, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        if any(side % (1 << self.levels) for side in x.shape[2:]):
            raise UsageError(
                f"UNet3D: expected depth, height and width divisible by {1 << self.levels}, got {tuple(x.shape[2:])}"
            )
        skips: list[Tensor] = []
        for level in range(1, self.levels + 1):
            x = self.get_submodule(f"down{level}")(x)
            skips.append(x)
            x = nn.functional.max_pool3d(x, 2)
        x = self.bottom(x)
        for level in range(self.levels, 0, -1):
            x = self.get_submodule(f"unpool{level}")(x)
            x = self.get_submodule(f"up{level}")(torch.cat([skips[level - 1], x], dim=1))
        y: Tensor = self.final(x)
        return y


def _two_convolutions(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(before, after, 3, padding=1, bias=False),
        nn.GroupNorm(min(8, after), after),
        nn.ReLU(inplace=True),
        nn.Conv3d(after, after, 3, padding=1, bias=False),
        nn.GroupNorm(min(8, after), after),
        nn.ReLU(inplace=True),
    )
