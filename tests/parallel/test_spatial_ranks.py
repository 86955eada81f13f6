"""Spatial parallelism on real ranks over gloo: primitives, training as one process trains, refusals on all ranks.

This file launches itself as four ranks under torchrun; each check becomes a test of its own.
"""

from __future__ import annotations

import copy
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import rank_checks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.func import functional_call
from torch.nn import functional as F

from exitwave.ingest.errors import UsageError
from exitwave.train import GroupedAllreduce
from exitwave.train.dropout import set_dropout_key
from exitwave.train.models.cosmoflow import CosmoFlow
from exitwave.train.models.fc_densenet import build_model
from exitwave.train.models.unet3d import UNet3D
from exitwave.train.spatial import UnsupportedLayerError, gather, mean, parallelize, scatter, total
from exitwave.train.spatial.halo import Fetch
from exitwave.train.spatial.links import open_grid
from exitwave.train.spatial.memory import peak_bytes
from exitwave.train.spatial.reduce import Part, Whole, replicated_sum
from exitwave.train.spatial.tile import Space, Split
from exitwave.train.spatial.tiles import moves

CPU = "cpu"
SIZE = 4


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def dot(a: torch.Tensor, b: torch.Tensor, *, summed: bool) -> float:
    value = (a.detach() * b).sum()
    if summed:
        dist.all_reduce(value)
    return float(value)


def primitives_are_adjoint(rank: int, size: int) -> None:
    """<P x, v> = <x, P* v>; where P's result is replicated it is counted once, since every rank holds the same."""
    mesh = init_device_mesh(CPU, (1, size), mesh_dim_names=("data", "s"))
    axis = open_grid(mesh)["s"]
    space = Space((axis,))
    for bounds in [(0, 3, 5, 9, 11), (0, 1, 1, 2, 7), (0, 0, 11, 11, 11)]:
        split, n = Split(axis, 2, bounds), bounds[-1]
        tile = noise(rank, 2, 3, split.size, 4).requires_grad_()
        for needs in [
            tuple((a - 1, b + 2) for a, b in pairwise(bounds)),
            tuple((a - 4, b + 4) if b > a else (0, 0) for a, b in pairwise(bounds)),
            ((2, 5), (0, 0), (-3, n + 1), (1, 2)),
        ]:
            y = Fetch.apply(tile, 2, moves(bounds, needs, rank), axis, 0.0)
            v = noise(10 + rank, *y.shape)
            (back,) = torch.autograd.grad(y, tile, v)
            assert abs(dot(y, v, summed=True) - dot(tile, back, summed=True)) < 1e-11
        whole = Whole.apply(tile, [split], 1.0)
        v = noise(20, *whole.shape)
        (back,) = torch.autograd.grad(whole, tile, v)
        assert abs(dot(whole, v, summed=False) - dot(tile, back, summed=True)) < 1e-11
        full = noise(21, 2, 3, n, 4).requires_grad_()
        part = Part.apply(full, [split])
        v = noise(30 + rank, *part.shape)
        (back,) = torch.autograd.grad(part, full, v)
        assert abs(dot(part, v, summed=True) - dot(full, back, summed=False)) < 1e-11
        same = noise(40 + rank, 5).requires_grad_()
        y = replicated_sum(same, space)
        v = noise(50, 5)
        (back,) = torch.autograd.grad(y, same, v)
        assert abs(dot(y, v, summed=False) - dot(same, back, summed=True)) < 1e-11
        shared = noise(41, 5).requires_grad_()
        y = space.shared(shared)
        v = noise(60 + rank, 5)
        (back,) = torch.autograd.grad(y, shared, v)
        assert abs(dot(y, v, summed=True) - dot(shared, back, summed=False)) < 1e-11


def gradcheck_on_a_line(rank: int, size: int) -> None:
    gradcheck_of_layers(init_device_mesh(CPU, (1, 4), mesh_dim_names=("data", "s")), {"s": 2})


def gradcheck_on_a_plane(rank: int, size: int) -> None:
    gradcheck_of_layers(init_device_mesh(CPU, (2, 2), mesh_dim_names=("h", "w")), {"h": 2, "w": 3})


def gradcheck_of_layers(mesh: DeviceMesh, dims: dict[str, int]) -> None:
    """All ranks perturb the same whole input and parameters in step."""
    layers: list[nn.Module] = [
        nn.Conv2d(1, 1, 3, padding=1),
        nn.Conv2d(1, 1, (3, 2), stride=2, dilation=(2, 1), bias=False),
        nn.ConvTranspose2d(1, 1, 3, stride=2, padding=1, output_padding=1),
        nn.AvgPool2d(3, 2, 1),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(1, track_running_stats=False),
        nn.GroupNorm(1, 1),
        nn.Upsample(scale_factor=2, mode="bilinear"),
    ]
    for layer in layers:
        module = parallelize(copy.deepcopy(layer).double(), mesh, dims)
        names = [name for name, _ in module.named_parameters()]
        values = [p.detach().clone().requires_grad_() for p in module.parameters()]

        def run(x, *weights, module=module, names=names):
            tile = scatter(x, mesh, dims)
            out = functional_call(module, dict(zip(names, weights, strict=True)), (tile,))
            return gather(out, mesh, dims), mean(out.square(), mesh, dims), total(out, mesh, dims)

        x = noise(1, 1, 1, 7, 3).requires_grad_()
        assert torch.autograd.gradcheck(run, (x, *values), check_undefined_grad=False), layer


def networks():
    """name -> (module, one sample's input shape, dims of space, shape of the target; tiles or replicated)."""
    torch.manual_seed(0)
    size = {"growth": 4, "stem": (6,), "dropout": 0.2}
    dense = build_model(
        preset="tiny", layout="detector-as-channels", in_channels=5, in_shape=(6, 6), out_shape=(16, 16), overrides=size
    )
    cosmo = CosmoFlow(in_shape=(16, 8, 8), in_channels=2, widths=(3, 4, 4, 4, 4), hidden=(8, 6), norm="batch")
    return {
        "fc-densenet": (dense, (5, 6, 6), (16, 16), True),
        "unet3d": (UNet3D(width=2, levels=2, norm="batch"), (1, 12, 8, 8), (1, 12, 8, 8), True),
        "cosmoflow": (cosmo, (2, 16, 8, 8), (4,), False),
    }


def ten_steps(name: str, data: int, spatial: int, **options) -> None:
    model, in_shape, out_shape, tiled = networks()[name]
    serial, ours = copy.deepcopy(model).double(), copy.deepcopy(model).double()
    mesh = init_device_mesh(CPU, (data, spatial), mesh_dim_names=("data", "spatial"))
    dims, out_dims = {"spatial": 2}, {"spatial": 1 if name == "fc-densenet" else 2}
    parallelize(ours, mesh, dims, **options)
    if options.get("weight_gradients") == "partial":
        engine = GroupedAllreduce(ours, average_over=data, timeout_s=120)
    else:
        engine = GroupedAllreduce(ours, process_group=mesh.get_group("data"), timeout_s=120)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (serial, ours)]
    share = 4 // data
    place = mesh.get_local_rank("data")
    mine = slice(place * share, (place + 1) * share)
    for step in range(10):
        x, target = noise(100 + step, 4, *in_shape), noise(200 + step, 4, *out_shape)
        uids = list(range(10 * step, 10 * step + 4))
        for optimizer in optimizers:
            optimizer.zero_grad()
        set_dropout_key(serial, seed=1, step=step, uids=uids)
        expected = F.mse_loss(serial(x), target)
        expected.backward()
        set_dropout_key(ours, seed=1, step=step, uids=uids[mine])
        out = engine(scatter(x[mine], mesh, dims))
        if tiled:
            loss = mean((out - scatter(target[mine], mesh, out_dims)).square(), mesh, dims)
        else:
            loss = F.mse_loss(out, target[mine])
        loss.backward()
        everywhere = loss.detach().clone()
        dist.all_reduce(everywhere)
        torch.testing.assert_close(everywhere / SIZE, expected.detach(), rtol=1e-10, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
    assert list(ours.state_dict()) == list(serial.state_dict())
    for key, value in serial.state_dict().items():
        torch.testing.assert_close(
            ours.state_dict()[key], value, rtol=1e-8, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}"
        )
    engine.close()


def ten_steps_of_fc_densenet(rank: int, size: int) -> None:
    for data, spatial in ((1, 4), (2, 2)):
        ten_steps("fc-densenet", data, spatial)


def ten_steps_of_unet3d(rank: int, size: int) -> None:
    for data, spatial in ((1, 4), (2, 2)):
        ten_steps("unet3d", data, spatial)


def ten_steps_of_cosmoflow(rank: int, size: int) -> None:
    for data, spatial in ((1, 4), (2, 2)):
        ten_steps("cosmoflow", data, spatial)


def ten_steps_with_partial_gradients(rank: int, size: int) -> None:
    ten_steps("fc-densenet", 2, 2, weight_gradients="partial")
    ten_steps("unet3d", 2, 2, weight_gradients="partial", overlap=True)
    ten_steps("cosmoflow", 2, 2, weight_gradients="partial")


def ten_steps_of_whole_samples(rank: int, size: int) -> None:
    for name in networks():
        ten_steps(name, 4, 1)


def overlap_changes_nothing(rank: int, size: int) -> None:
    mesh = init_device_mesh(CPU, (2, 2), mesh_dim_names=("h", "w"))
    dims = {"h": 2, "w": 3}
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 5, 5, stride=2), nn.Conv2d(5, 1, 3)
    ).double()
    found = []
    for overlap in (False, True):
        ours = parallelize(copy.deepcopy(net), mesh, dims, overlap=overlap)
        x = noise(3, 2, 2, 24, 20).requires_grad_()
        y = gather(ours(scatter(x, mesh, dims)), mesh, dims)
        y.square().sum().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in ours.parameters())])
    for off, on in zip(*found, strict=True):
        torch.testing.assert_close(on, off, rtol=1e-13, atol=1e-13)


class Wrong(nn.Module):
    """One layer that cannot be split, within others."""

    def __init__(self, layer) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.odd = layer if isinstance(layer, nn.Module) else Function(layer)

    def forward(self, x):
        return self.odd(self.first(x))


class Function(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


REFUSED = [
    (nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), "reflect"),
    (nn.Conv2d(4, 4, 9), "smaller than the window"),
    (nn.Dropout(0.5), "KeyedDropout"),
    (nn.Dropout2d(0.5), "KeyedDropout"),
    (lambda x: F.dropout(x, 0.5), "KeyedDropout"),
    (nn.MaxPool2d(2, return_indices=True), "with_indices|return_indices"),
    (nn.LPPool2d(2, 2), "no exact form|avg_pool|not"),
    (nn.LayerNorm([8]), "GroupNorm"),
    (nn.Softmax(2), "split dim"),
    (nn.PixelShuffle(2), "pixel_shuffle"),
    (nn.Upsample(scale_factor=2, mode="bicubic"), "bicubic"),
    (nn.AdaptiveMaxPool2d(3), "divide"),
    (nn.InstanceNorm2d(4, track_running_stats=True), "track_running_stats"),
    (nn.Fold(4, 2), "fold|no exact form"),
    (nn.Unfold(2), "im2col|unfold"),
    (lambda x: x.cumsum(2), "cumsum"),
    (lambda x: x.flip(2), "flip"),
    (lambda x: torch.roll(x, 1, 2), "roll"),
    (lambda x: x.std(), "std"),
    (lambda x: torch.fft.rfft2(x), "fft"),
    (lambda x: x[:, :, ::2], "step 1"),
    (lambda x: x[:, :, 3], "step 1"),
    (lambda x: torch.cat([x, x], 2), "split dim"),
    (lambda x: torch.cat([x, x[:, :, :5]], 1), "split differently"),
    (lambda x: x if x.sum(1) > 0 else -x, "bool"),
    (lambda x: x + torch.ones(3, 1), "replicated tensor"),
    (lambda x: x @ x, "matrix"),
    (lambda x: F.linear(x, torch.ones(2, 8)), "numpy|split"),
    (lambda x: x.numpy(), "numpy"),
]


def what_is_not_supported_raises_on_all_ranks(rank: int, size: int) -> None:
    mesh = init_device_mesh(CPU, (1, size), mesh_dim_names=("data", "s"))
    wide = init_device_mesh(CPU, (2, 2), mesh_dim_names=("h", "w"))
    x = torch.ones(2, 2, 8, 8)
    for layer, pattern in REFUSED:
        module = parallelize(
            Wrong(layer), mesh, {"s": 3 if "LayerNorm" in repr(layer) or pattern == "numpy|split" else 2}
        )
        dims = {"s": 3 if "LayerNorm" in repr(layer) or pattern == "numpy|split" else 2}
        with pytest.raises(UnsupportedLayerError, match=pattern) as caught:
            module(scatter(x, mesh, dims))
        assert "'odd'" in str(caught.value), caught.value
        told = torch.ones(())
        dist.all_reduce(told)  # every rank has come here, in step
        assert told == size
    with pytest.raises(UnsupportedLayerError, match="some of the split dims"):
        parallelize(Wrong(lambda t: t.mean(2)), wide, {"h": 2, "w": 3})(x[:, :, :4, :4])
    empty = parallelize(Wrong(nn.BatchNorm2d(4)), mesh, {"s": 2}, batch_norm="local")
    with pytest.raises(UnsupportedLayerError, match="without a tile"):
        empty(scatter(x, mesh, {"s": 2}, bounds={"s": (0, 4, 4, 8, 8)}))
    # tiles that do not fit, on one rank only, are an error on all
    fine = parallelize(nn.Conv2d(2, 2, 1), mesh, {"s": 2})
    with pytest.raises(UsageError, match="do not fit together"):
        fine(torch.ones(2, 2, 3, 8 if rank != 2 else 9))
    with pytest.raises(UsageError, match="do not fit together"):
        fine.train(rank != 1)(torch.ones(2, 2, 3, 8))
    with pytest.raises(UsageError, match="do not fit together"):
        parallelize(nn.Conv2d(2, 2 + (rank == 3), 1), mesh, {"s": 2})
    fine.train()
    with pytest.raises(UsageError, match="already"):
        parallelize(fine, mesh, {"s": 2})
    for bad in ({}, {"s": 1}, {"x": 2}):
        with pytest.raises(UsageError):
            parallelize(nn.Conv2d(2, 2, 1), mesh, bad)
    assert fine(torch.ones(2, 2, rank, 8)).shape == (2, 2, rank, 8)


def parameters_are_those_of_the_first_rank(rank: int, size: int) -> None:
    mesh = init_device_mesh(CPU, (2, 2), mesh_dim_names=("data", "s"))
    torch.manual_seed(rank)
    module = parallelize(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), mesh, {"s": 2})
    torch.manual_seed(rank - rank % 2)
    assert torch.equal(module[0].weight, nn.Conv2d(1, 2, 3).weight)


def batch_norm_has_three_scopes(rank: int, size: int) -> None:
    mesh = init_device_mesh(CPU, (2, 2), mesh_dim_names=("data", "s"))
    x = noise(5, 4, 3, 6, 5)
    place, spot = mesh.get_local_rank("data"), mesh.get_local_rank("s")
    mine = x[2 * place : 2 * place + 2]
    for scope, of in (("global", x), ("spatial", mine), ("local", mine[:, :, 3 * spot : 3 * spot + 3])):
        ours = parallelize(nn.BatchNorm2d(3).double(), mesh, {"s": 2}, batch_norm=scope)
        serial = nn.BatchNorm2d(3).double()
        y = ours(scatter(mine, mesh, {"s": 2}))
        expected = serial(of)
        rows = {"global": expected[2 * place : 2 * place + 2], "spatial": expected, "local": expected}[scope]
        cut = rows if scope == "local" else rows[:, :, 3 * spot : 3 * spot + 3]
        torch.testing.assert_close(y, cut, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ours.running_var, serial.running_var, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ours.running_mean, serial.running_mean, rtol=1e-12, atol=1e-12)


def a_rank_holds_its_share_of_activations(rank: int, size: int) -> None:
    """Peak of bytes that torch allocates in a step: of 2 ranks at most 0.55, of 4 at most 0.30 of one process."""
    torch.manual_seed(0)
    dense = build_model(
        preset="tiny",
        layout="detector-as-channels",
        in_channels=8,
        in_shape=(128, 64),
        out_shape=(128, 64),
        overrides={"stem": (8,)},
    )
    for model, shape, out_dim in ((UNet3D(width=4, levels=2), (1, 1, 64, 32, 32), 2), (dense, (1, 8, 128, 64), 1)):
        x = torch.randn(shape)
        with torch.no_grad():
            target = torch.randn_like(model(x))
        serial = copy.deepcopy(model)
        F.mse_loss(serial(x), target).backward()  # gradients exist from here on
        whole = peak_bytes(lambda s=serial, x=x, t=target: F.mse_loss(s(x), t).backward())
        for spatial, limit in ((2, 0.55), (4, 0.30)):
            mesh = init_device_mesh(CPU, (size // spatial, spatial), mesh_dim_names=("data", "s"))
            ours = parallelize(copy.deepcopy(model), mesh, {"s": 2})
            tile = scatter(x, mesh, {"s": 2}, multiple_of=4)
            wanted = scatter(target, mesh, {"s": out_dim}, multiple_of=4)

            def step(m=ours, x=tile, t=wanted, mesh=mesh):
                mean((m(x) - t).square(), mesh, {"s": 2}).backward()

            step()
            assert peak_bytes(step) <= limit * whole, (type(model).__name__, spatial)


CHECKS = [
    primitives_are_adjoint,
    gradcheck_on_a_line,
    overlap_changes_nothing,
    what_is_not_supported_raises_on_all_ranks,
    parameters_are_those_of_the_first_rank,
    batch_norm_has_three_scopes,
    a_rank_holds_its_share_of_activations,
    ten_steps_of_fc_densenet,
    ten_steps_of_unet3d,
    ten_steps_of_cosmoflow,
]
LONG = [gradcheck_on_a_plane, ten_steps_with_partial_gradients, ten_steps_of_whole_samples]

pytestmark = pytest.mark.timeout(1200)  # all checks run while the first test waits; launch knows a hang before


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict[str, str]]:
    return rank_checks.launch(__file__, SIZE, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def long_results(tmp_path_factory) -> list[dict[str, str]]:
    return rank_checks.launch(__file__, SIZE, tmp_path_factory.mktemp("long"), "long")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_ranks(results, check):
    rank_checks.expect_passed(results, check)


@pytest.mark.long
@pytest.mark.parametrize("check", LONG, ids=lambda check: check.__name__)
def test_ranks_at_length(long_results, check):
    rank_checks.expect_passed(long_results, check)


if __name__ == "__main__":
    rank_checks.run_here(LONG if "long" in sys.argv[2:] else CHECKS, Path(sys.argv[1]))
