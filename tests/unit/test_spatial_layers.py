"""Every layer on tiles equals one process in float64: output, gradients of input, weight, bias, running statistics.

Ranks are threads of this process, so that many cases are cheap: 1 to 5 ranks, primes, uneven, one-plane, empty tiles,
kernels 1 to 5, strides beyond the kernel, dilation 3, paddings that are not "same", 2-D and 3-D, meshes of 1 to 3 dims.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch
from spatial_threads import difference, grids, on_ranks, worst
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from exitwave.train.spatial import UnsupportedLayerError, convolution, mean, parallelize, scatter, total
from exitwave.train.spatial.convolution_plan import returned_strips
from exitwave.train.spatial.draws import Draws
from exitwave.train.spatial.tile import Space

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


class Parts(nn.Module):
    """A function of a module's parts: two convolutions, a scale."""

    def __init__(self, function) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.scale = nn.Parameter(torch.tensor([1.5, 0.5, -1.0]))
        self.function = function

    def forward(self, x):
        return self.function(self, x)


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.round(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def of_two_ranks(module: nn.Module, x: torch.Tensor, call=lambda module, x: module(x)) -> torch.Tensor:
    def work(grid, rank):
        ours = parallelize(copy.deepcopy(module), grid, {"s": 2})
        return call(ours, scatter(x, grid, {"s": 2})).detach()

    return torch.cat(on_ranks(grids(s=2), work), 2)


@pytest.mark.parametrize("weight_gradients", ["summed", "partial"])
def test_a_shift_that_is_computed_from_tiles(weight_gradients):
    functions = (
        lambda m, x: F.conv2d(x, m.first.weight, x.mean((0, 2, 3)) * m.scale),
        lambda m, x: F.batch_norm(x, None, None, m.scale, x.square().mean((0, 2, 3)), True),
    )
    for function in functions:
        module = Parts(function).double()
        x = torch.randn(2, 3, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        whole_x = x.clone().requires_grad_()
        y = module(whole_x)
        y.square().sum().backward()

        def work(grid, rank, module=module, x=x):
            ours = parallelize(copy.deepcopy(module), grid, {"s": 2}, weight_gradients=weight_gradients)
            ours.zero_grad()
            own_x = x.clone().requires_grad_()
            total(ours(scatter(own_x, grid, {"s": 2})).square(), grid, {"s": 2}).backward()
            return own_x.grad, ours.scale.grad

        found = on_ranks(grids(s=2), work)
        scales = [scale for _, scale in found]
        ours = sum(scales) if weight_gradients == "partial" else scales[0]
        assert max(difference(dx, whole_x.grad) for dx, _ in found) <= LIMIT
        assert difference(ours, module.scale.grad) <= LIMIT


def test_a_bias_without_a_weight_gets_its_gradient():
    module = Parts(lambda m, x: F.batch_norm(m.first(x), None, None, None, m.scale, True))
    del module.second
    assert worst(module, (2, 3, 7, 5), {"s": 2}, {"s": 2}) <= LIMIT


def test_tiles_in_lists_and_dictionaries_are_tiles():
    module = Parts(lambda m, given: m.first(given["image"]) + m.second(given["more"][0]))
    x = torch.randn(1, 3, 7, 5, generator=torch.Generator().manual_seed(1))

    def call(m, x):
        return m({"image": x, "more": [x * 2]})

    assert difference(of_two_ranks(module, x, call), call(module, x).detach()) <= 1e-6


@pytest.mark.parametrize(
    ("function", "call", "said"),
    [
        (lambda m, x: m.first(x), lambda m, x: m.first(x), "layer 'first' .*called by itself"),
        (lambda m, x: Rounded.apply(m.first(x)), lambda m, x: m(x), "autograd Function"),
        (lambda m, x: checkpoint(m.first, m.second(x), use_reentrant=True), lambda m, x: m(x), "layer 'first'"),
        (lambda m, x: torch.where(m.first(x) > 0)[0], lambda m, x: m(x), "where: with a condition alone"),
        (lambda m, x: x.squeeze((0, 1)), lambda m, x: m(x), "squeeze"),
        (lambda m, x: F.dropout(m.first(x).flatten(1)), lambda m, x: m(x), "dropout: draws from each"),
        (lambda m, x: m.first(x) + torch.rand(3, 1, 1), lambda m, x: m(x), "rand: draws from each"),
    ],
    ids=["part", "function", "reentrant", "where", "squeeze", "dropout", "rand"],
)
def test_what_would_be_wrong_without_a_word_is_refused(function, call, said):
    with pytest.raises(UnsupportedLayerError, match=said):
        of_two_ranks(Parts(function), torch.randn(1, 3, 6, 6), call)


def test_random_numbers_that_all_ranks_share_are_let_through():
    def noisy(m, x):
        source = torch.Generator().manual_seed(3)
        return F.dropout(m.first(x), 0.5, False) + torch.rand(3, 1, 1, generator=source)

    module, x = Parts(noisy), torch.randn(1, 3, 6, 6)
    assert difference(of_two_ranks(module, x), module(x).detach()) <= 1e-6


def test_only_calls_of_the_module_are_watched():
    module = Parts(lambda m, x: F.dropout(m.first(x).flatten(1)))

    def work(grid, rank):
        ours = parallelize(copy.deepcopy(module), grid, {"s": 2})
        with pytest.raises(UnsupportedLayerError):
            ours(scatter(torch.zeros(1, 3, 6, 6), grid, {"s": 2}))
        before = torch.overrides._get_current_function_mode_stack()
        mode = Draws(ours, Space(()))
        with mode:  # as an interrupt leaves it behind
            torch.rand(2)
        return before

    assert on_ranks(grids(s=2), work) == [[], []]


def test_recomputed_layers_are_not_taken_for_calls_of_their_own():
    module = Parts(lambda m, x: m.second(checkpoint(m.first, x, use_reentrant=False)))
    del module.scale
    assert worst(module, (2, 3, 7, 5), {"s": 2}, {"s": 2}) <= LIMIT


def test_nearest_takes_the_inputs_that_torch_takes_in_single_precision():
    x = torch.arange(31.0).view(1, 1, 31, 1)
    layer = nn.Upsample(scale_factor=(2.3, 1.0))
    assert torch.equal(of_two_ranks(layer, x), layer(x))


def test_half_precision_sums_do_not_overflow():
    x = torch.full((1, 1, 300, 300), 3.0, dtype=torch.float16)
    for function in (lambda m, x: x.mean((2, 3), keepdim=True), lambda m, x: F.adaptive_avg_pool2d(x, 1)):
        assert of_two_ranks(Parts(function).half(), x).unique().tolist() == [3.0]
    means = on_ranks(grids(s=2), lambda grid, rank: mean(scatter(x, grid, {"s": 2}), grid, {"s": 2}))
    assert [float(m) for m in means] == [3.0, 3.0]


def test_half_precision_norms_are_as_good_as_those_of_torch():
    source = torch.Generator().manual_seed(1)
    x = (torch.randn(2, 3, 16, 16, generator=source) + 30.0).bfloat16()
    for layer in (nn.BatchNorm2d(3), nn.GroupNorm(3, 3)):
        fine = copy.deepcopy(layer)
        y = fine(x.float())
        (y * y.detach().bfloat16()).sum().backward()

        dy = y.detach().bfloat16()

        def work(grid, rank, layer=layer, dy=dy):
            ours = parallelize(copy.deepcopy(layer), grid, {"s": 2})
            out = ours(scatter(x, grid, {"s": 2}))
            (out * scatter(dy, grid, {"s": 2})).float().sum().backward()
            return out.detach().float(), ours.weight.grad

        found = on_ranks(grids(s=2), work)
        assert difference(torch.cat([out for out, _ in found], 2), y.detach()) <= 2**-8
        assert difference(found[0][1], fine.weight.grad) <= 1e-5
