"""Every layer on tiles equals one process in float64: output, gradients of input, weight, bias, running statistics.

Ranks are threads of this process, so that many cases are cheap: 1 to 5 ranks, primes, uneven, one-plane, empty tiles,
kernels 1 to 5, strides beyond the kernel, dilation 3, paddings that are not "same", 2-D and 3-D, meshes of 1 to 3 dims.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch
from spatial_threads import grids, on_ranks, worst
from torch import nn
from torch.nn import functional as F

from exitwave.train.spatial import convolution, parallelize, scatter
from exitwave.train.spatial.convolution_plan import returned_strips

LIMIT = 1e-12
LINE = [({"s": 3}, {"s": 2}, None), ({"s": 5}, {"s": 3}, None), ({"s": 4}, {"s": 2}, {"s": (0, 1, 1, 8, 11)})]
PLANE = [({"h": 2, "w": 3}, {"h": 2, "w": 3}, None), ({"data": 1, "w": 2, "h": 2}, {"h": 2, "w": 3}, {"h": (0, 9, 11)})]


class Call(nn.Module):
    """A function as a module, on the output of a convolution."""

    def __init__(self, function, channels: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, padding=1)
        self.scale = nn.Parameter(torch.full((channels, 1, 1), 1.5))
        self.function = function

    def forward(self, x):
        return self.function(self.conv(x) * self.scale)


TWO_D = {
    "conv": nn.Conv2d(3, 4, 3, padding=1),
    "conv 5 stride 2": nn.Conv2d(3, 4, 5, stride=2),
    "conv dilation 3": nn.Conv2d(3, 4, 3, dilation=3, padding=2),
    "conv stride over kernel": nn.Conv2d(3, 4, 2, stride=4, padding=1),
    "conv groups": nn.Conv2d(3, 6, (4, 1), padding=(2, 0), groups=3, bias=False),
    "conv same, even kernel": nn.Conv2d(3, 2, 4, padding="same"),
    "transposed": nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1),
    "transposed 2/2": nn.ConvTranspose2d(3, 4, 2, stride=2),
    "transposed stride over kernel": nn.ConvTranspose2d(3, 4, 2, stride=5, output_padding=4),
    "transposed dilation, groups": nn.ConvTranspose2d(4, 4, 3, stride=2, dilation=3, padding=2, groups=2),
    "max pool": nn.MaxPool2d(2),
    "max pool 3/2": nn.MaxPool2d(3, 2, 1),
    "max pool dilation, ceil": nn.MaxPool2d(2, 2, dilation=2, ceil_mode=True),
    "average pool": nn.AvgPool2d(3, 2, 1),
    "average pool, ceil, no pad": nn.AvgPool2d(3, 2, 1, count_include_pad=False, ceil_mode=True),
    "average pool, ceil": nn.AvgPool2d(2, 3, 1, ceil_mode=True),
    "average pool, divisor": nn.AvgPool2d(2, 2, divisor_override=3),
    "batch norm": nn.BatchNorm2d(3),
    "batch norm, plain": nn.BatchNorm2d(3, affine=False, track_running_stats=False),
    "batch norm, eval": nn.BatchNorm2d(3).eval(),
    "group norm": nn.GroupNorm(3, 6),
    "instance norm": nn.InstanceNorm2d(3, affine=True),
    "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
    "bilinear, corners": nn.Upsample(size=(17, 9), mode="bilinear", align_corners=True),
    "bilinear, down": nn.Upsample(size=(5, 4), mode="bilinear"),
    "nearest": nn.Upsample(scale_factor=1.7),
    "nearest-exact": nn.Upsample(size=(23, 9), mode="nearest-exact"),
    "adaptive average": nn.AdaptiveAvgPool2d((4, 3)),
    "adaptive maximum": nn.AdaptiveMaxPool2d(1),
    "prelu": nn.PReLU(3),
    "odd skip": Call(lambda x: torch.cat([x, F.interpolate(F.max_pool2d(x, 2), x.shape[2:])], 1)),
    "re-tiled skip": Call(
        lambda x: torch.cat(
            [F.conv_transpose2d(F.max_pool2d(x, 2), torch.ones(3, 2, 2, 2).double(), stride=2), x[:, :, :10, :6]], 1
        )
    ),
    "pad and crop": Call(lambda x: F.pad(x, (1, 2, -1, 3))[:, 1:, 2:9] + 1.0),
    "chunks": Call(lambda x: torch.stack([c.squeeze(1) for c in x.chunk(3, 1)], 1).transpose(2, 3).transpose(-1, -2)),
    "linear on channels": Call(lambda x: F.linear(x.permute(0, 2, 3, 1), torch.ones(2, 3).double()).movedim(-1, 1)),
    "in place": Call(lambda x: F.relu(x.add_(0.5), inplace=True) - torch.arange(7.0, dtype=torch.float64)),
    "matrices": Call(lambda x: torch.linspace(0, 1, 33).view(3, 11).double() @ x @ torch.eye(7, 5).double()),
}
REPLICATED = {
    "global average": nn.AdaptiveAvgPool2d(1),
    "flatten, linear": nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(), nn.Linear(154, 5), nn.Tanh(), nn.Linear(5, 2)),
    "mean over space": Call(lambda x: x.relu().mean(dim=(2, 3))),
    "view": Call(lambda x: x.view(x.shape[0], -1)),
    "squeeze and excite": Call(lambda x: (x * torch.sigmoid(x.mean((2, 3), keepdim=True))).sum((2, 3))),
}
THREE_D = {
    "conv": nn.Conv3d(2, 3, 3, padding=1),
    "conv stride 2": nn.Conv3d(2, 3, (3, 4, 1), stride=2, padding=(2, 1, 0)),
    "conv dilation 3": nn.Conv3d(2, 3, 3, dilation=3, padding=3),
    "transposed": nn.ConvTranspose3d(2, 3, 2, stride=2),
    "transposed odd": nn.ConvTranspose3d(2, 3, 3, stride=2, padding=1, output_padding=1),
    "max pool": nn.MaxPool3d(2),
    "average pool": nn.AvgPool3d(3, 2, 1),
    "average pool, no pad": nn.AvgPool3d(3, 2, 1, count_include_pad=False),
    "batch norm": nn.BatchNorm3d(2),
    "group norm": nn.GroupNorm(1, 2),
    "trilinear": nn.Upsample(scale_factor=2, mode="trilinear"),
    "nearest": nn.Upsample(scale_factor=2),
}


def channels(module: nn.Module) -> int:
    return {nn.GroupNorm: 6}.get(type(module), getattr(module, "in_channels", 3))


@pytest.mark.parametrize("name", TWO_D)
def test_two_dims_of_space(name):
    module = TWO_D[name]
    for mesh, dims, bounds in (*LINE, *PLANE):
        for options in ({}, {"overlap": True}) if "conv" in name else ({},):
            found = worst(module, (2, channels(module), 11, 7), mesh, dims, bounds=bounds, **options)
            assert found <= LIMIT, (mesh, bounds, options, found)


@pytest.mark.parametrize("name", REPLICATED)
def test_results_that_every_rank_holds(name):
    for mesh, dims, bounds in (*LINE, *PLANE):
        found = worst(REPLICATED[name], (2, 3, 11, 7), mesh, dims, bounds=bounds, replicated=True)
        assert found <= LIMIT, (mesh, bounds, found)


@pytest.mark.parametrize("name", THREE_D)
def test_three_dims_of_space(name):
    module = THREE_D[name]
    shape = (2, 6 if type(module) is nn.GroupNorm and module.num_channels == 6 else 2, 7, 5, 6)
    for mesh, dims in [
        ({"s": 3}, {"s": 2}),
        ({"s": 2}, {"s": 4}),
        ({"d": 2, "h": 2}, {"d": 2, "h": 3}),
        ({"d": 2, "h": 1, "w": 3}, {"d": 2, "h": 3, "w": 4}),
    ]:
        assert worst(module, shape, mesh, dims) <= LIMIT, mesh


def grid_of_windows(cases: int, seed: int) -> None:
    draw = random.Random(seed)
    ran = 0
    while ran < cases:
        nd = draw.choice([2, 2, 3])
        n = [draw.choice([1, 2, 3, 5, 7, 11, 13]) for _ in range(nd)]
        k, s, d, p = (
            [draw.choice(options) for _ in range(nd)]
            for options in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 7], [1, 2, 3], [0, 1, 2, 3])
        )
        transposed = draw.random() < 0.3
        split = draw.sample(range(nd), draw.choice([1, 1, 2] if nd == 2 else [1, 2, 3]))
        names = ["x", "y", "z"][: len(split)]
        ranks = {
            name: draw.choice([1, 2, 3, 4, 5] if len(split) == 1 else [1, 2, 3] if len(split) == 2 else [1, 2])
            for name in names
        }
        dims = {name: dim + 2 for name, dim in zip(names, split, strict=True)}
        bounds = {
            name: (0, *sorted(draw.randint(0, n[dims[name] - 2]) for _ in range(ranks[name] - 1)), n[dims[name] - 2])
            for name in names
        }
        if transposed:
            extra = [draw.randrange(max(a, b)) for a, b in zip(s, d, strict=True)]
            out = [
                (a - 1) * b - 2 * c + e * (f - 1) + g + 1 for a, b, c, e, f, g in zip(n, s, p, d, k, extra, strict=True)
            ]
            module = (nn.ConvTranspose2d if nd == 2 else nn.ConvTranspose3d)(2, 2, k, s, p, extra, dilation=d)
        else:
            out = [(a + 2 * c - e * (f - 1) - 1) // b + 1 for a, b, c, e, f in zip(n, s, p, d, k, strict=True)]
            module = (nn.Conv2d if nd == 2 else nn.Conv3d)(2, 2, k, s, p, d)
        if min(out) < 1:
            continue
        ran += 1
        found = worst(module, (1, 2, *n), ranks, dims, bounds=bounds, overlap=draw.random() < 0.5 and not transposed)
        assert found <= LIMIT, (module, n, ranks, dims, bounds, found)


def test_random_windows_on_random_tiles():
    grid_of_windows(60, seed=1)


@pytest.mark.long
def test_many_random_windows_on_random_tiles():
    grid_of_windows(3000, seed=2)


STRIPS_FIRST = {
    "3": nn.Conv2d(2, 3, 3, padding=1),
    "5 stride 2": nn.Conv2d(2, 3, 5, stride=2, padding=3),
    "3 dilation 3": nn.Conv2d(2, 3, 3, dilation=3, padding=2),
}


@pytest.mark.parametrize("name", STRIPS_FIRST)
def test_strips_that_travel_before_the_rest_give_the_same_bits(name: str, monkeypatch):
    """Tiles long enough that the strips of the gradient are computed on their own, with and without overlap."""
    found, alone = [], []
    monkeypatch.setattr(convolution, "returned_strips", lambda *a: alone.append(returned_strips(*a)) or alone[-1])
    layer = copy.deepcopy(STRIPS_FIRST[name])
    for overlap in (False, True):
        assert worst(layer, (2, 2, 203, 6), {"s": 2}, {"s": 2}, bounds={"s": (0, 101, 203)}, overlap=overlap) <= 1e-12

        def work(grid, rank, overlap=overlap):
            ours = parallelize(copy.deepcopy(layer), grid, {"s": 2}, overlap=overlap)
            x = torch.linspace(-1, 1, 2 * 2 * 203 * 6, dtype=torch.float64).view(2, 2, 203, 6).sin().requires_grad_()
            ours(scatter(x, grid, {"s": 2})).square().sum().backward()
            return [x.grad, *(p.grad for p in ours.parameters())]

        found.append(on_ranks(grids(s=2), work)[0])
    assert all(strips is not None for strips in alone) and any(alone)
    assert all(torch.equal(off, on) for off, on in zip(*found, strict=True))
