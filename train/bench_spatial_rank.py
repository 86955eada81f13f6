"""One rank of `exitwave bench spatial`: a job is done by all ranks, and rank 0 writes what came of it.

- equality: random layers in float64, tiles of any sizes, against one process: outputs, and gradients of input, weight
  and bias.
- steps: ten optimizer steps of three networks on every mesh of the ranks, against one process.
- memory: the peak of what torch allocates in a training step beyond parameters, overlap off and on.
- overlap: steps with and without, in turns.
- scale, network: steps of a mesh, and beside them what the performance model is told (`bench_spatial_scaling`).
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from exitwave.train.allreduce.bench_rank import meet
from exitwave.train.allreduce.engine import GroupedAllreduce
from exitwave.train.bench_spatial_scaling import bench_unet, scale
from exitwave.train.models.cosmoflow import CosmoFlow
from exitwave.train.models.fc_densenet import DenseNetSize, FCDenseNet
from exitwave.train.models.unet3d import UNet3D
from exitwave.train.spatial import gather, parallelize, scatter

__all__ = ["equality", "memory", "overlap", "steps"]


# ----------------------------------------------------------------------------------------------------------- equality


def _layer(rng: random.Random, dims: int) -> nn.Module:
    """A random layer of any kernel, stride, dilation and padding."""
    kind = rng.choice(["conv", "conv", "transposed", "max", "avg"])
    kernel, stride, dilation = rng.randint(1, 5), rng.randint(1, 4), rng.randint(1, 3)
    padding = rng.randint(0, 3)
    made: nn.Module
    if kind == "conv":
        made = (nn.Conv2d if dims == 2 else nn.Conv3d)(2, 3, kernel, stride, padding, dilation)
    elif kind == "transposed":
        made = (nn.ConvTranspose2d if dims == 2 else nn.ConvTranspose3d)(
            2, 3, kernel, stride, min(padding, dilation * (kernel - 1)), 0, 1, True, dilation
        )
    elif kind == "max":
        made = (nn.MaxPool2d if dims == 2 else nn.MaxPool3d)(kernel, stride, min(padding, kernel // 2), dilation)
    else:
        made = (nn.AvgPool2d if dims == 2 else nn.AvgPool3d)(kernel, stride, min(padding, kernel // 2))
    return made.double()


def _bounds(rng: random.Random, n: int, parts: int) -> tuple[int, ...]:
    cuts = sorted(rng.randint(0, n) for _ in range(parts - 1))
    return (0, *cuts, n)


def equality(world: int, *, configurations: int) -> dict[str, Any]:
    """The largest differences over random layers and tiles."""
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("data", "spatial"))
    rng, worst = random.Random(world), {"forward": 0.0, "dx": 0.0, "dw": 0.0, "db": 0.0}
    done = empty = 0
    while done < configurations:
        dims = rng.choice([2, 3])
        torch.manual_seed(rng.randint(0, 2**31))
        layer = _layer(rng, dims)
        n = rng.choice([5, 7, 11, 13, 17, 23])
        x = torch.randn(2, 2, n, *[rng.randint(4, 7) for _ in range(dims - 1)], dtype=torch.float64)
        bounds = _bounds(rng, n, world)
        serial = copy.deepcopy(layer)
        try:
            whole = x.clone().requires_grad_()
            y = serial(whole)
        except RuntimeError:
            continue  # the window does not fit
        if not y.numel():
            continue
        weight = torch.randn_like(y)
        (y * weight).sum().backward()
        where = {"spatial": 2}
        tile = scatter(x, mesh, where, bounds={"spatial": bounds}).detach().requires_grad_()
        out = gather(parallelize(layer, mesh, where)(tile), mesh, where)
        (out * weight).sum().backward()
        grad = gather(tile.grad if tile.grad is not None else torch.zeros_like(tile), mesh, where)
        assert whole.grad is not None
        worst["forward"] = max(worst["forward"], float((out - y).abs().max()))
        worst["dx"] = max(worst["dx"], float((grad - whole.grad).abs().max()))
        for name, parameter in layer.named_parameters():
            expected = serial.get_parameter(name).grad
            assert expected is not None and parameter.grad is not None
            # sums over all places: their rounding is that of their size
            scale = max(1.0, float(expected.abs().max()))
            key = "dw" if name == "weight" else "db"
            worst[key] = max(worst[key], float((parameter.grad - expected).abs().max()) / scale)
        done += 1
        empty += any(a == b for a, b in pairwise(bounds))
    return {"configurations": done, "with_empty_tiles": empty, "worst": worst}


# -------------------------------------------------------------------------------------------------------------- steps

_Made = tuple[nn.Module, Tensor, Tensor, int]  # network, inputs, targets, the dim that is split


def _networks() -> dict[str, Callable[[], _Made]]:
    def dense() -> _Made:
        size = DenseNetSize(growth=4, layers=(1, 1, 1), dropout=0.0)
        network = FCDenseNet(size, in_channels=3, in_shape=(16, 8), out_shape=(16, 8), interpolate_early=False)
        return network, torch.randn(4, 3, 16, 8), torch.randn(4, 16, 8), 2

    def unet() -> _Made:
        return UNet3D(width=2, levels=2, norm="batch"), torch.randn(4, 1, 4, 16, 8), torch.randn(4, 1, 4, 16, 8), 3

    def cosmo() -> _Made:
        network = CosmoFlow(
            in_shape=(4, 16, 8), in_channels=1, widths=(4, 4, 8, 8), hidden=(8,), norm="batch", dropout=0.0
        )
        return network, torch.randn(4, 1, 4, 16, 8), torch.randn(4, 4), 3

    return {"fc-densenet": dense, "unet3d": unet, "cosmoflow": cosmo}


def steps(world: int, *, number: int = 10) -> list[dict[str, Any]]:
    """Each network on each mesh: the largest relative difference of losses and weights to one process."""
    rows = []
    for name, make in _networks().items():
        torch.manual_seed(0)
        network, x, target, dim = make()
        network, x, target = network.double(), x.double(), target.double()
        serial = copy.deepcopy(network)
        expected = _train(serial, serial.parameters(), x, target, number, samples=4, copies=1, whole=target.numel())
        for data, spatial in [(1, world), (2, world // 2), (world, 1)]:
            mesh = init_device_mesh("cpu", (data, spatial), mesh_dim_names=("data", "spatial"))
            n, place = 4 // data, mesh.get_local_rank("data")
            mine = slice(place * n, (place + 1) * n)
            split = parallelize(
                copy.deepcopy(network), mesh, {"spatial": dim}, batch_norm="global", weight_gradients="partial"
            )
            engine = GroupedAllreduce(split, average_over=data)
            tile, want, copies = scatter(x[mine], mesh, {"spatial": dim}, multiple_of=4), target[mine], spatial
            if target.ndim > 2:  # the output is split as the input is, along rows; numbers are on every rank
                want, copies = scatter(want, mesh, {"spatial": 1 if target.ndim == 3 else 3}, multiple_of=4), 1
            losses = _train(
                engine, split.parameters(), tile, want, number, samples=n, copies=copies, whole=target.numel()
            )
            weights = max(
                float((p - q).abs().max() / q.abs().max().clamp(min=1e-3))
                for p, q in zip(split.parameters(), serial.parameters(), strict=True)
            )
            engine.close()
            off = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
            rows.append({"network": name, "mesh": f"{data}x{spatial}", "losses_off": off, "weights_off": weights})
    return rows


def _train(
    run: nn.Module,
    parameters: Iterator[nn.Parameter],
    x: Tensor,
    target: Tensor,
    number: int,
    *,
    samples: int,
    copies: int,
    whole: int,
) -> list[float]:
    """Losses of `number` steps over the batch of four: `samples` of them here, `copies` ranks hold the same output."""
    optimizer = torch.optim.SGD(parameters, lr=0.02, momentum=0.9)
    losses = []
    for _ in range(number):
        optimizer.zero_grad()
        part = (run(x) - target).square().sum()
        (part / (whole * samples / 4)).backward()
        optimizer.step()
        value = part.detach().clone()
        if isinstance(run, GroupedAllreduce):
            dist.all_reduce(value)
        losses.append(float(value) / copies / whole)
    return losses


# ------------------------------------------------------------------------------------------------------------- memory


def memory(world: int) -> dict[str, Any]:
    """The most that any rank allocates in a step of each network, beyond what it holds before.

    Two samples: of a single one torch computes small tiles by another algorithm than large ones, whose scratch space is
    larger than the activations.
    """
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("data", "spatial"))
    peaks = {}
    for overlap in (False, True) if world > 1 else (False,):
        network, x = bench_unet((16, 128, 64))
        cosmo = CosmoFlow(in_shape=(32, 64, 64), widths=(16, 32, 64, 64), hidden=(64, 16), dropout=0.0)
        for name, module, sample in (("unet3d", network, x), ("cosmoflow", cosmo, torch.randn(1, 4, 32, 64, 64))):
            if world > 1:
                parallelize(module, mesh, {"spatial": 3}, weight_gradients="partial", overlap=overlap)
            both = torch.cat([sample, sample])
            tile = scatter(both, mesh, {"spatial": 3}, multiple_of=4) if world > 1 else both
            peaks[f"{name}, overlap on" if overlap else name] = _step_bytes(module, tile)
    return peaks


def _step_bytes(module: nn.Module, tile: Tensor) -> float:
    def step() -> None:
        module.zero_grad(set_to_none=True)
        module(tile).square().mean().backward()

    step()
    most = torch.tensor([float(_peak_bytes(step))], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def _peak_bytes(work: Callable[[], None]) -> int:
    """The most that torch has allocated at once while `work` runs, from its profiler's record of the allocator."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    held = most = 0
    results: Any = profiler.profiler
    events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return int(most)


# ------------------------------------------------------------------------------------------------------------ overlap


def overlap(world: int, *, rounds: int) -> dict[str, Any]:
    """Steps with halos behind the interior and without, in turns; the same bits?"""
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("data", "spatial"))
    network, x = bench_unet((16, 64, 64))
    ways = {}
    for on in (False, True):
        split = parallelize(copy.deepcopy(network), mesh, {"spatial": 3}, overlap=on, weight_gradients="partial")
        ways[on] = (split, scatter(x, mesh, {"spatial": 3}, multiple_of=4))
    seconds: dict[bool, list[float]] = {False: [], True: []}
    outputs: dict[bool, list[Tensor]] = {}
    for turn in range(rounds):
        for on in (False, True) if turn % 2 else (True, False):
            split, tile = ways[on]
            split.zero_grad(set_to_none=True)
            dist.barrier()
            begun = time.perf_counter()
            out = split(tile)
            out.square().mean().backward()
            dist.barrier()
            seconds[on].append(time.perf_counter() - begun)
            outputs[on] = [out.detach(), *(p.grad.clone() for p in split.parameters() if p.grad is not None)]
    differences = [float((a - b).abs().max()) for a, b in zip(outputs[False], outputs[True], strict=True)]
    off, on_ = (seconds[way][1:] for way in (False, True))
    return {
        "largest_difference": max(differences),
        "off_s": statistics.median(off),
        "on_s": statistics.median(on_),
        "gain": statistics.median(a / b for a, b in zip(off, on_, strict=True)) - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", choices=["equality", "steps", "memory", "overlap", "scale", "network"], required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--rounds", type=int, default=7)
    options = meet(parser)
    jobs: dict[str, Callable[[], Any]] = {
        "equality": lambda: equality(options.world, configurations=options.rounds),
        "steps": lambda: steps(options.world),
        "memory": lambda: memory(options.world),
        "overlap": lambda: overlap(options.world, rounds=options.rounds),
        "scale": lambda: scale(options.world, rounds=options.rounds, network=False),
        "network": lambda: scale(options.world, rounds=options.rounds, network=True),
    }
    result = jobs[options.job]()
    if options.rank == 0:
        Path(options.out).write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
