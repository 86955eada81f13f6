"""`--mesh auto`: what this machine's ranks and links are measured to take, and the mesh that the model then picks."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from exitwave.ingest import open_dataset
from exitwave.train.allreduce.cost import LinkCost, fit_link
from exitwave.train.mesh import Ranks
from exitwave.train.mesh_model import Machine, MeshEstimate, fastest
from exitwave.train.models.counting import count
from exitwave.train.series import SeriesMeasured
from exitwave.train.spec import TrainSpec
from exitwave.train.task import task_of

__all__ = ["choose_mesh", "measure_machine", "rank_meshes"]

_MEMORY_SHARE = 0.8  # of what is free
_SIZES = (4096, 1 << 20)
_REPEATS = 5


def choose_mesh(spec: TrainSpec, data: Path, ranks: Ranks) -> list[MeshEstimate]:
    """All meshes of these ranks, the fastest that fits first. Every rank calls it, and gets what rank 0 found."""
    link = _measure_link(ranks)
    return ranks.from_first(lambda: rank_meshes(spec, data, ranks.info.world_size, measure_machine(link)))


def rank_meshes(spec: TrainSpec, data: Path, world: int, machine: Machine) -> list[MeshEstimate]:
    """All meshes of a training of `spec` on the samples in `data`, the fastest that fits first."""
    shapes = {field.name: field.shape for field in open_dataset(data).fields}
    crop = spec.series.crop

    def cropped(name: str) -> tuple[int, ...]:
        shape = shapes.get(name, (1, 1, 1))
        return shape if crop is None else (shape[0], crop, crop)

    images, volume = cropped(spec.series.input), cropped(spec.series.target)
    measured = SeriesMeasured(
        images_shape=images,
        volume_shape=volume if spec.task == "volume" else (),
        image_mean=0.0,
        image_std=1.0,
        volume_mean_VA=0.0,
        volume_std_VA=1.0,
        targets_mean=(),
        targets_std=(),
    )
    with torch.device("meta"):
        model = task_of(spec).make_model(measured)
    space = (measured.planes, *images[1:])
    return fastest(count(model, (1, 1, *space)), world, batch=spec.batch, rows=space[1], machine=machine)


def measure_machine(link: LinkCost) -> Machine:
    """Seconds a FLOP from a convolution of this rank, forward and backward; memory and cores shared by all ranks."""
    layer, x = nn.Conv3d(8, 8, 3, padding=1), torch.randn(1, 8, 8, 32, 32, requires_grad=True)
    flop = 3 * 2 * 8 * 8 * 27 * 8 * 32 * 32
    seconds: list[float] = []
    small: list[float] = []
    for _ in range(_REPEATS):
        for some, kept in ((x, seconds), (x[:, :, :2, :2, :2].detach().requires_grad_(), small)):
            begun = time.perf_counter()
            layer(some).sum().backward()
            kept.append(time.perf_counter() - begun)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cores = len(os.sched_getaffinity(0))
    return Machine(
        s_per_flop=max(min(seconds) - min(small), 1e-9) / flop,
        s_per_layer=min(small) / 2,
        halos=link,
        gradients=link,
        cores=cores,
        memory_bytes=_MEMORY_SHARE * free / cores,
    )


def _measure_link(ranks: Ranks) -> LinkCost:
    """Of one message between two ranks, from allreduces over all of them: a ring has 2 (p-1) of n / p bytes."""
    world = ranks.info.world_size
    if world == 1:
        return LinkCost(alpha_s=0.0, beta_s_per_byte=0.0)
    best = []
    for nbytes in _SIZES:
        tensor, seconds = torch.zeros(nbytes // 4), []
        for _ in range(_REPEATS):
            begun = time.perf_counter()
            dist.all_reduce(tensor, group=ranks.process_group)
            seconds.append(time.perf_counter() - begun)
        best.append(min(seconds))
    return fit_link([n // world for n in _SIZES], [s / (2 * (world - 1)) for s in best])
