"""Strong scaling in `exitwave bench spatial`: steps of a mesh, and beside them all that the model predicts them from.

One job a number of ranks. Every round takes in turn, so that what else a machine does falls on all of them alike:

- parts: steps of a whole, a half and a quarter of a sample, by every rank for itself and at the same time, nothing
  travels. From these come seconds a FLOP and a layer call with so many busy processes as there are ranks: where ranks
  have no core of their own, or share caches, that is in them.
- messages: exchanges of neighbours, both ways at once, after a pause, as halos come after computation.
- collectives: allreduces of all ranks.
- calls: steps of the split module over few places, without the reduction: hardly anything to compute or to send, but
  every layer is called, cut and put together, and waits for its neighbours' strips, on as many processes.
- steps: of the split module, with halos, gradients and engine. These are what is predicted, and enter nothing.

Two workloads. `network`: a U-Net computes. Not `network`: convolutions along the split dim, whose computation is a
calibrated sleep, as long as the tile has places, so that ranks need no core; everything else is real.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from exitwave.train.allreduce.engine import GroupedAllreduce
from exitwave.train.models.unet3d import UNet3D
from exitwave.train.spatial import parallelize, scatter

__all__ = ["PARTS", "bench_unet", "scale", "workload"]

PARTS = (1.0, 0.5, 0.25)
_SLEEPING_SHAPE = (1, 1, 16, 64, 128)  # halos of 8,192 values a neighbour, little to compute
_LAYERS = 8
_FORWARD_S = 0.06  # of a layer over all places
_FEW = 4  # places along each dim that is not split: what the U-Net can halve twice
_MESSAGES = (1 << 12, 1 << 15, 1 << 16, 1 << 17, 1 << 18)
_PAUSE_S = 0.02


def bench_unet(shape: tuple[int, int, int] = (16, 64, 64), width: int = 8) -> tuple[nn.Module, Tensor]:
    """A U-Net and one sample for it."""
    torch.manual_seed(0)
    return UNet3D(width=width, levels=2), torch.randn(1, 1, *shape)


def workload(*, network: bool) -> tuple[nn.Module, Tensor]:
    """A module and a sample, split along dim 3."""
    if network:
        return bench_unet((16, 64, 64))
    torch.manual_seed(0)
    layers = [nn.Conv3d(1, 1, (1, 3, 1), padding=(0, 1, 0)) for _ in range(_LAYERS)]
    return nn.Sequential(*layers), torch.randn(_SLEEPING_SHAPE)


def _sleep_in(network: nn.Module) -> None:
    places = math.prod(_SLEEPING_SHAPE)
    part = [1.0]

    def before(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
        x = inputs[0]
        part[0] = math.prod(getattr(x, "local", x).shape) / places
        time.sleep(_FORWARD_S * part[0])

    def in_backward(gradient: Tensor) -> Tensor:
        time.sleep(2 * _FORWARD_S * part[0])
        return gradient

    for layer in network.children():
        layer.register_forward_pre_hook(before)
        assert isinstance(layer, nn.Conv3d)
        layer.weight.register_hook(in_backward)


def scale(world: int, *, rounds: int, network: bool) -> dict[str, Any]:
    """Median seconds of everything of the module's list, on a 1 x world mesh; of steps, every one."""
    module, x = workload(network=network)
    mesh, dims = init_device_mesh("cpu", (1, world), mesh_dim_names=("data", "spatial")), {"spatial": 3}
    alone, cut = copy.deepcopy(module), copy.deepcopy(module)
    works: dict[str, Callable[[], Any]] = {}
    for part in PARTS:
        some = x[:, :, :, : int(x.shape[3] * part)].contiguous()
        works[f"part {part}"] = partial(_step, alone, some)
    if world > 1:
        split = parallelize(module, mesh, dims, weight_gradients="partial")
        engine, tile = GroupedAllreduce(split, average_over=1), scatter(x, mesh, dims, multiple_of=4)
        few = x[:, :, :_FEW, :, :_FEW].contiguous()
        cut = parallelize(cut, mesh, dims, weight_gradients="partial")
        works["call"] = partial(_step, cut, scatter(few, mesh, dims, multiple_of=4))
        for nbytes in _MESSAGES:
            works[f"message {nbytes}"] = partial(_exchange, nbytes)
            works[f"collective {nbytes}"] = partial(dist.all_reduce, torch.zeros(nbytes // 4))
        works["step"] = partial(_step, engine, tile)
    else:
        works["step"] = partial(_step, module, x)
    if not network:
        for each in (alone, module, cut):
            _sleep_in(each)
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 2):
        for name, work in works.items():
            dist.barrier()
            time.sleep(_PAUSE_S)
            dist.barrier()
            begun = time.perf_counter()
            work()
            if name[:4] in ("part", "step", "call"):
                dist.barrier()
            if turn >= 2:
                seconds[name].append(time.perf_counter() - begun)
    found = {name: statistics.median(some) for name, some in seconds.items()}
    return {
        "parts": [(part, found[f"part {part}"]) for part in PARTS],
        "messages": [(n, found[f"message {n}"]) for n in _MESSAGES if world > 1],
        "collectives": [(n, found[f"collective {n}"]) for n in _MESSAGES if world > 1],
        "call_s": found.get("call", 0.0),
        "call_part": _FEW * _FEW / (x.shape[2] * x.shape[4]),
        "steps_s": seconds["step"],
    }


def _step(module: nn.Module, x: Tensor) -> None:
    module.zero_grad(set_to_none=True)
    module(x).square().mean().backward()


def _exchange(nbytes: int) -> None:
    """With one neighbour, both ways at once, as halos travel."""
    peer = dist.get_rank() ^ 1
    if peer < dist.get_world_size():
        out, into = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
        works = [dist.irecv(into, src=peer), dist.isend(out, dst=peer)]
        for work in works:
            if work is not None:
                work.wait()
