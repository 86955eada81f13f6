"""A compact 3D U-Net: from a stack of images to a volume, for through-focal series and potentials by slab.

The network of Çiçek et al., "3D U-Net: learning dense volumetric segmentation from sparse annotation" (MICCAI 2016,
arXiv:1606.06650): at each level two 3x3x3 convolutions, maximum pooling by 2 on the way down, transposed convolution by
2 and concatenation of the skip on the way up. `widening="second"` with width 32 and three levels is the network of the
paper, 19.07 M parameters: there the second convolution of a level doubles the channels (32-64, 64-128, 128-256, bottom
256-512) and the transposed convolutions keep them. By default the first one does, which is lighter. Group norm takes
the place of batch norm unless asked for, since batches are small and split over ranks.

Every direct child of `UNet3D` is one block (`down1`, `pool1`, …, `bottom`, `unpool1`, …, `up1`, `final`), as tensor
groups by "layer-blocks" want it.
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
        widening: "first" or "second", the convolution of a level that widens.
        norm: "group" or "batch"; with batch norm the convolutions before it have a bias, as in the paper.
        flat: levels, counted from the bottom, that leave depth as it is: for volumes of few planes.

    Raises:
        UsageError: a width or a number of levels below one; from `forward`, a volume that cannot be pooled.
    """

    def __init__(
        self,
        *,
        in_channels: int = 1,
        out_channels: int = 1,
        width: int = 16,
        levels: int = 3,
        widening: str = "first",
        norm: str = "group",
        flat: int = 0,
    ) -> None:
        super().__init__()
        if width < 1 or levels < 1:
            raise UsageError(f"UNet3D: width and levels must be at least 1, got {width} and {levels}")
        if widening not in ("first", "second") or norm not in ("group", "batch"):
            raise UsageError(f"UNet3D: expected widening first or second, norm group or batch, got {widening}, {norm}")
        if not 0 <= flat <= levels:
            raise UsageError(f"UNet3D: flat: expected 0 to {levels}, the levels, got {flat}")
        self.levels = levels
        self.deep = levels - flat
        late = widening == "second"
        channels = in_channels
        skips: list[int] = []
        for level in range(levels):
            after = width << (level + late)
            self.add_module(f"down{level + 1}", _two_convolutions(channels, width << level, after, norm))
            self.add_module(f"pool{level + 1}", nn.MaxPool3d(self._factor(level)))
            skips.append(after)
            channels = after
        after = width << (levels + late)
        self.bottom = _two_convolutions(channels, width << levels, after, norm)
        channels = after
        for level in reversed(range(levels)):
            here, factor = skips[level], self._factor(level)
            wide = channels if late else here
            self.add_module(f"unpool{level + 1}", nn.ConvTranspose3d(channels, wide, factor, stride=factor))
            self.add_module(f"up{level + 1}", _two_convolutions(here + wide, here, here, norm))
            channels = here
        self.final = nn.Conv3d(channels, out_channels, 1)

    def _factor(self, level: int) -> tuple[int, int, int]:
        return (2 if level < self.deep else 1, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        depth, plane = 1 << self.deep, 1 << self.levels
        if x.shape[2] % depth or x.shape[3] % plane or x.shape[4] % plane:
            raise UsageError(
                f"UNet3D: expected depth divisible by {depth}, height and width divisible by {plane}, got "
                f"{tuple(x.shape[2:])}"
            )
        skips: list[Tensor] = []
        for level in range(1, self.levels + 1):
            x = self.get_submodule(f"down{level}")(x)
            skips.append(x)
            x = self.get_submodule(f"pool{level}")(x)
        x = self.bottom(x)
        for level in range(self.levels, 0, -1):
            x = self.get_submodule(f"unpool{level}")(x)
            x = self.get_submodule(f"up{level}")(torch.cat([skips.pop(), x], dim=1))
        y: Tensor = self.final(x)
        return y


def _two_convolutions(before: int, between: int, after: int, norm: str) -> nn.Sequential:
    layers: list[nn.Module] = []
    for source, target in ((before, between), (between, after)):
        layers.append(nn.Conv3d(source, target, 3, padding=1, bias=norm == "batch"))
        layers.append(nn.BatchNorm3d(target) if norm == "batch" else nn.GroupNorm(min(8, target), target))
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)
