"""One rank of `exitwave bench spatial`: a job is done by all ranks, and rank 0 writes what came of it.

- equality: random layers in float64, tiles of any sizes, against one process: outputs, and gradients of input, weight
  and bias.
- steps: ten optimizer steps of three networks on every mesh of the ranks, against one process.
- memory: the peak of what torch allocates in a training step beyond parameters.
- overlap: steps with and without, in turns.
- scale: steps whose computation is a calibrated sleep, rows of a tile long (there are fewer cores than ranks); halos,
  gradients and engine are real. With one rank: what the model is told of computation; with two: of the link.
- network: steps of a network that really computes.
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

from exitwave.train.allreduce.bench_rank import meet, time_allreduces
from exitwave.train.allreduce.engine import GroupedAllreduce
from exitwave.train.models.cosmoflow import CosmoFlow
from exitwave.train.models.fc_densenet import DenseNetSize, FCDenseNet
from exitwave.train.models.unet3d import UNet3D
from exitwave.train.spatial import gather, parallelize, scatter

__all__ = ["LAYERS", "SLEEPING_SHAPE", "bench_unet", "sleeping_network"]

SLEEPING_SHAPE = (1, 2, 16, 16, 256)
LAYERS = 8
_FORWARD_S = 0.06  # of a layer over all rows
_MESSAGES = (1 << 12, 1 << 14, 1 << 16, 1 << 18)


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


def bench_unet(shape: tuple[int, int, int] = (16, 64, 64), width: int = 8) -> tuple[nn.Module, Tensor]:
    """A U-Net and one sample for it."""
    torch.manual_seed(0)
    return UNet3D(width=width, levels=2), torch.randn(1, 1, *shape)


def memory(world: int) -> dict[str, Any]:
    """The most that any rank allocates in a step of each network, beyond what it holds before.

    Two samples: of a single one torch computes small tiles by another algorithm than large ones, whose scratch space is
    larger than the activations.
    """
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("data", "spatial"))
    network, x = bench_unet((16, 128, 64))
    cosmo = CosmoFlow(in_shape=(32, 64, 64), widths=(16, 32, 64, 64), hidden=(64, 16), dropout=0.0)
    peaks = {}
    for name, module, sample in (("unet3d", network, x), ("cosmoflow", cosmo, torch.randn(1, 4, 32, 64, 64))):
        if world > 1:
            parallelize(module, mesh, {"spatial": 3}, weight_gradients="partial")
        both = torch.cat([sample, sample])
        tile = scatter(both, mesh, {"spatial": 3}, multiple_of=4) if world > 1 else both
        peaks[name] = _step_bytes(module, tile)
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


# ------------------------------------------------------------------------------------------------------------ scaling


def sleeping_network() -> nn.Sequential:
    """Convolutions whose computation is a sleep: what they really compute is little beside it."""
    torch.manual_seed(0)
    channels = SLEEPING_SHAPE[1]
    return nn.Sequential(*[nn.Conv3d(channels, channels, 3, padding=1) for _ in range(LAYERS)])


def _sleep_in(network: nn.Sequential) -> None:
    rows = SLEEPING_SHAPE[3]
    part = [1.0]

    def before(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
        x = inputs[0]
        part[0] = getattr(x, "local", x).shape[3] / rows
        time.sleep(_FORWARD_S * part[0])

    def in_backward(gradient: Tensor) -> Tensor:
        time.sleep(2 * _FORWARD_S * part[0])
        return gradient

    for layer in network:
        layer.register_forward_pre_hook(before)
        assert isinstance(layer, nn.Conv3d)
        layer.weight.register_hook(in_backward)


def scale(world: int, *, rounds: int, network: bool) -> dict[str, Any]:
    """Seconds of steps on a 1 x world mesh; with one rank also of parts of the sample, with two of messages."""
    if network:
        module, x = bench_unet((16, 64, 64))
    else:
        module, x = sleeping_network(), torch.randn(SLEEPING_SHAPE)
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("data", "spatial"))
    record: dict[str, Any] = {}
    if world > 1:
        parallelize(module, mesh, {"spatial": 3}, weight_gradients="partial")
    if not network:
        _sleep_in(module)  # type: ignore[arg-type]
    if world == 1:
        rows = x.shape[3]
        parts = [(part, x[:, :, :, : int(rows * part)].contiguous()) for part in (1.0, 0.5, 0.25)]
        record["parts"] = [(part, statistics.median(_steps(module, some, rounds))) for part, some in parts]
    elif world == 2:
        record["messages"], record["collectives"] = _messages(), time_allreduces(_MESSAGES)
    tile = scatter(x, mesh, {"spatial": 3}, multiple_of=4 if network or world < 5 else 1) if world > 1 else x
    engine = GroupedAllreduce(module, average_over=1) if world > 1 else module
    record["steps_s"] = _steps(engine, tile, rounds)
    return record


def _steps(module: nn.Module, x: Tensor, rounds: int) -> list[float]:
    seconds = []
    for _ in range(rounds + 2):
        module.zero_grad(set_to_none=True)
        dist.barrier()
        begun = time.perf_counter()
        module(x).square().mean().backward()
        dist.barrier()
        seconds.append(time.perf_counter() - begun)
    return seconds[2:]


def _messages() -> list[tuple[int, float]]:
    """Bytes and seconds of an exchange of two ranks, both ways at once, as halos are."""
    found, peer = [], 1 - dist.get_rank()
    for nbytes in _MESSAGES:
        out, into, seconds = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8), []
        for _ in range(7):
            dist.barrier()
            begun = time.perf_counter()
            works = [dist.irecv(into, src=peer), dist.isend(out, dst=peer)]
            for work in works:
                if work is not None:
                    work.wait()
            seconds.append(time.perf_counter() - begun)
        found.append((nbytes, statistics.median(seconds[2:])))
    return found


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
