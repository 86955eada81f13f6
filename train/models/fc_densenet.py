"""FC-DenseNet: from a stack of diffraction patterns to the projected potential.

The network of Jégou et al., "The one hundred layers tiramisu" (CVPR workshops 2017, arXiv:1611.09326), in the form
that Laanait et al., "Exascale deep learning for scientific inverse problems" (arXiv:1909.11150), used for electron
scattering:

    initial conv -> n_pool x (dense block -> transition down) -> bottleneck
                 -> n_pool x (transition up of the block's new features -> concatenate skip -> dense block) -> 1x1 conv

A dense layer is [norm] -> ReLU -> conv -> dropout, and its output is appended to its input. Sizes are configuration;
`PRESETS` names four.

Two layouts of the input:

- `detector-as-channels`: (B, detector pixels + conditions, Ry, Rx). An optional stem (convolutions over the scan
  plane, where they are cheap) is followed by interpolation onto the label's grid (H, W); the dense network works there.
- `probes-as-channels` (the paper's): (B, probe positions + conditions, Qy, Qx). The dense network works over the
  detector plane and its result is interpolated onto (H, W) where the sizes differ.

Every direct child of `FCDenseNet` is one block (`stem`, `initial`, `down1`, …, `final`) and every parameter lies in
one, the last layer too: the first part of a parameter's name is its block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from exitwave.ingest.errors import UsageError
from exitwave.train.dropout import KeyedDropout

__all__ = ["PRESETS", "DenseNetSize", "FCDenseNet", "build_model", "interpolation_matrix"]


@dataclass(frozen=True, kw_only=True)
class DenseNetSize:
    """The sizes of an FC-DenseNet. `layers` counts the dense layers of each block: downward, bottleneck, upward."""

    growth: int
    layers: tuple[int, ...]
    kernel: int = 3
    up_kernel: int = 3
    skips: bool = True
    norm: str = "group"
    dropout: float = 0.2
    stem: tuple[int, ...] = ()
    stem_kernel: int = 3

    @property
    def n_pool(self) -> int:
        return len(self.layers) // 2


PRESETS: dict[str, DenseNetSize] = {
    "tiny": DenseNetSize(growth=16, layers=(2, 2, 3, 2, 2), dropout=0.0, stem=(64, 48)),
    "small": DenseNetSize(growth=32, layers=(2, 3, 4, 4, 4, 3, 2), dropout=0.1, stem=(128, 96)),
    "paper-23M": DenseNetSize(growth=128, layers=(2, 2, 3, 4, 3, 2, 2), up_kernel=1),
    "paper-40M": DenseNetSize(growth=128, layers=(2,) * 7, kernel=5),
    "paper-220M": DenseNetSize(growth=256, layers=(3,) * 7, kernel=5, skips=False),
}


def build_model(
    *,
    preset: str,
    layout: str,
    in_channels: int,
    in_shape: tuple[int, int],
    out_shape: tuple[int, int],
    overrides: dict[str, object] | None = None,
) -> FCDenseNet:
    """The FC-DenseNet of a preset, with single sizes overridden where given.

    Args:
        in_channels: channels of the input, conditions included.
        in_shape: the input's plane: scan positions (Ry, Rx) or detector pixels (Qy, Qx), by the layout.
        out_shape: the label's grid (H, W).

    Raises:
        UsageError: unknown preset or layout, or a grid that the pooling does not divide.
    """
    if preset not in PRESETS:
        raise UsageError(f"model.preset: expected one of {', '.join(PRESETS)}, got {preset!r}")
    size = replace(PRESETS[preset], **(overrides or {}))  # type: ignore[arg-type]
    if layout not in ("detector-as-channels", "probes-as-channels"):
        raise UsageError(f"model.layout: expected detector-as-channels or probes-as-channels, got {layout!r}")
    early = layout == "detector-as-channels"
    return FCDenseNet(size, in_channels=in_channels, in_shape=in_shape, out_shape=out_shape, interpolate_early=early)


class FCDenseNet(nn.Module):
    """See the module's docstring. Input (B, C, h, w) float32, output (B, H, W) in standardised units."""

    def __init__(
        self,
        size: DenseNetSize,
        *,
        in_channels: int,
        in_shape: tuple[int, int],
        out_shape: tuple[int, int],
        interpolate_early: bool,
    ) -> None:
        super().__init__()
        _check(size, plane=out_shape if interpolate_early else in_shape)
        self.size = size
        self.n_pool = size.n_pool
        channels = in_channels
        if size.stem:
            self.stem = _stem(size, channels)
            channels = size.stem[-1]
        self.before = _Resize(in_shape, out_shape) if interpolate_early and in_shape != out_shape else nn.Identity()
        self.initial = nn.Conv2d(channels, size.growth, size.kernel, padding=size.kernel // 2)
        channels = size.growth
        skips: list[int] = []
        for level in range(self.n_pool):
            block = DenseBlock(size, channels, size.layers[level])
            channels = block.out_channels
            skips.append(channels)
            self.add_module(f"down{level + 1}", block)
            self.add_module(f"pool{level + 1}", TransitionDown(channels, size.dropout))
        self.bottleneck = DenseBlock(size, channels, size.layers[self.n_pool])
        new = self.bottleneck.new_channels
        for level in reversed(range(self.n_pool)):
            self.add_module(f"unpool{level + 1}", TransitionUp(new, size.up_kernel))
            block = DenseBlock(size, new + (skips[level] if size.skips else 0), size.layers[2 * self.n_pool - level])
            self.add_module(f"up{level + 1}", block)
            new = block.new_channels
        self.final = nn.Conv2d(block.out_channels if self.n_pool else self.bottleneck.out_channels, 1, 1)
        self.after = _Resize(in_shape, out_shape) if not interpolate_early and in_shape != out_shape else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.size.stem:
            x = self.stem(x)
        x = self.initial(self.before(x))
        skips: list[Tensor] = []
        for level in range(1, self.n_pool + 1):
            x = self._block(f"down{level}")(x)
            skips.append(x)
            x = self._block(f"pool{level}")(x)
        everything = self.bottleneck(x)
        new = everything[:, -self.bottleneck.new_channels :]
        for level in range(self.n_pool, 0, -1):
            x = self._block(f"unpool{level}")(new)
            if self.size.skips:
                x = torch.cat([x, skips.pop()], dim=1)
            block = self._block(f"up{level}")
            everything = block(x)
            new = everything[:, -block.new_channels :]
        # (B, 1, h, w) -> (B, 1, H, W) -> (B, H, W)
        out: Tensor = self.after(self.final(everything)).squeeze(1)
        return out

    def _block(self, name: str) -> DenseBlock:
        block: DenseBlock = getattr(self, name)
        return block


class DenseLayer(nn.Module):
    """[norm] -> ReLU -> conv -> dropout: (B, C, h, w) -> (B, growth, h, w), the new features only."""

    def __init__(self, size: DenseNetSize, channels: int) -> None:
        super().__init__()
        self.norm = _norm(size.norm, channels)
        self.conv = nn.Conv2d(channels, size.growth, size.kernel, padding=size.kernel // 2)
        self.dropout = KeyedDropout(size.dropout)

    def forward(self, x: Tensor) -> Tensor:
        new: Tensor = self.dropout(self.conv(torch.relu(self.norm(x))))
        return new


class DenseBlock(nn.Module):
    """(B, C, h, w) -> (B, C + layers·growth, h, w): each layer's output is appended to all that came before."""

    def __init__(self, size: DenseNetSize, channels: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(size, channels + i * size.growth) for i in range(layers))
        self.new_channels = layers * size.growth
        self.out_channels = channels + self.new_channels

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], dim=1)
        return x


class TransitionDown(nn.Module):
    """ReLU -> 1x1 conv -> dropout -> 2x2 max-pool: (B, C, h, w) -> (B, C, h/2, w/2)."""

    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 1)
        self.dropout = KeyedDropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.max_pool2d(self.dropout(self.conv(torch.relu(x))), 2)


class TransitionUp(nn.Module):
    """Stride-2 transposed conv: (B, C, h, w) -> (B, C, 2h, 2w)."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        # output = (h - 1)·2 - 2·padding + kernel + output_padding, to be 2h
        padding = kernel // 2
        self.conv = nn.ConvTranspose2d(
            channels, channels, kernel, stride=2, padding=padding, output_padding=2 + 2 * padding - kernel
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return out


class _Resize(nn.Module):
    """Separable linear interpolation between grids that share their origin: out = Ry · x · Rxᵀ."""

    def __init__(self, source: tuple[int, int], target: tuple[int, int]) -> None:
        super().__init__()
        self.register_buffer("rows", interpolation_matrix(source[0], target[0]), persistent=False)
        self.register_buffer("columns", interpolation_matrix(source[1], target[1]), persistent=False)
        self.rows: Tensor
        self.columns: Tensor

    def forward(self, x: Tensor) -> Tensor:
        # (H, h) @ (B, C, h, w) @ (w, W) -> (B, C, H, W)
        return self.rows @ x @ self.columns.T


def interpolation_matrix(source: int, target: int) -> Tensor:
    """(target, source) weights: output pixel i lies at i·source/target in units of input pixels.

    Pixel 0 of both grids is the same point, as probe 0 and label pixel 0 are (contract: both at `scan_origin`). Beyond
    the last input pixel its value is held.
    """
    position = (torch.arange(target, dtype=torch.float64) * source / target).clamp(max=source - 1)
    low = position.floor().long().clamp(max=max(source - 2, 0))
    fraction = (position - low).to(torch.float32)
    weights = torch.zeros(target, source)
    rows = torch.arange(target)
    weights[rows, low] += 1 - fraction
    weights[rows, (low + 1).clamp(max=source - 1)] += fraction
    return weights


def _stem(size: DenseNetSize, channels: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in size.stem:
        layers += [nn.Conv2d(channels, width, size.stem_kernel, padding=size.stem_kernel // 2), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers)


def _norm(kind: str, channels: int) -> nn.Module:
    if kind == "group":
        # GroupNorm looks at one sample only, so that it does not matter which rank holds it.
        # Wide groups of channels: normalising each channel alone would blow up the nearly constant ones.
        return nn.GroupNorm(
            max(n for n in range(1, 9) if channels % n == 0 and (channels // n >= 16 or n == 1)), channels
        )
    return nn.Identity()


def _check(size: DenseNetSize, *, plane: tuple[int, int]) -> None:
    if len(size.layers) % 2 == 0:
        raise UsageError(
            f"model.layers: expected an odd number of blocks (down, bottleneck, up), got {len(size.layers)}"
        )
    if size.kernel % 2 == 0 or size.stem_kernel % 2 == 0:
        raise UsageError(f"model.kernel: expected an odd size, got {size.kernel} (stem {size.stem_kernel})")
    factor = 2**size.n_pool
    if any(n % factor for n in plane):
        raise UsageError(
            f"model.layers: {size.n_pool} poolings halve the plane {plane[0]}x{plane[1]} that many times, which needs "
            f"sizes divisible by {factor}; use fewer blocks or another label (or detector) size"
        )
    if size.norm not in ("group", "none"):
        raise UsageError(f"model.norm: expected group or none, got {size.norm!r}")
