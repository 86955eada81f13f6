"""Spatial ranks as threads of this process: a mesh of `LoopbackHub`s, one for each line of ranks along each dim."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from exitwave.train.loopback import LoopbackHub
from exitwave.train.spatial import gather, parallelize, scatter
from exitwave.train.spatial.links import Axis, Grid


def grids(**sizes: int) -> list[Grid]:
    """A Grid for each rank of a mesh with named dims, ranks in row-major order."""
    names, shape = list(sizes), list(sizes.values())
    places = [[]]
    for n in shape:
        places = [[*p, i] for p in places for i in range(n)]
    number = {tuple(p): r for r, p in enumerate(places)}
    hubs: dict[Any, LoopbackHub] = {}
    made = []
    for place in places:
        axes = []
        for k, name in enumerate(names):
            line = (k, *place[:k], *place[k + 1 :])
            hub = hubs.setdefault(line, LoopbackHub(shape[k]))
            ranks = [number[(*place[:k], i, *place[k + 1 :])] for i in range(shape[k])]
            link = hub.transport(place[k]) if shape[k] > 1 else None
            axes.append(Axis(name, place[k], ranks, link, timeout_s=20.0))
        made.append(Grid(tuple(axes)))
    assert len(made) == prod(shape)
    return made


def on_ranks(made: list[Grid], work: Callable[[Grid, int], Any]) -> list[Any]:
    """work(grid, rank) on a thread a rank; raises the first rank's error, or returns all results."""
    results: list[Any] = [None] * len(made)
    errors: dict[int, BaseException] = {}
    ends = [[(axis._link, axis.place) for axis in grid.axes if axis._link is not None] for grid in made]

    def run(rank: int) -> None:
        try:
            results[rank] = work(made[rank], rank)
        except BaseException as error:
            errors[rank] = error
            for link, place in ends[rank]:
                link._hub.lose(place, str(error))  # wakes those who wait for it

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "ranks hang"
    if errors:
        own = [e for e in errors.values() if type(e).__name__ != "LostRankError"]
        raise (own or list(errors.values()))[0]
    return results


def difference(ours: Tensor, serial: Tensor) -> float:
    """The largest difference, relative to the largest value of the serial result (at least 1)."""
    assert ours.shape == serial.shape, f"{tuple(ours.shape)} for {tuple(serial.shape)}"
    if not serial.numel():
        return 0.0
    return float((ours - serial).abs().max() / serial.abs().max().clamp(min=1.0))


def worst(
    module: nn.Module,
    shape: Sequence[int],
    mesh: dict[str, int],
    dims: dict[str, int],
    *,
    bounds: dict[str, tuple[int, ...]] | None = None,
    replicated: bool = False,
    **options: Any,
) -> float:
    """The largest difference from one process, in float64: output, gradients of input and parameters, buffers.

    `replicated`: the module's result is the same on all ranks, not tiles.
    """
    source = torch.Generator().manual_seed(7)
    x = torch.randn(*shape, dtype=torch.float64, generator=source)
    serial = copy.deepcopy(module.double())
    whole_x = x.clone().requires_grad_()
    y = serial(whole_x)
    dy = torch.randn(y.shape, dtype=torch.float64, generator=source)
    y.backward(dy)

    def work(grid: Grid, rank: int) -> float:
        ours = parallelize(copy.deepcopy(module), grid, dims, **options)
        own_x = x.clone().requires_grad_()
        out = ours(scatter(own_x, grid, dims, bounds=bounds))
        out = out if replicated else gather(out, grid, dims)
        out.backward(dy)
        found = [difference(out.detach(), y.detach()), difference(own_x.grad, whole_x.grad)]
        for mine, other in zip(ours.parameters(), serial.parameters(), strict=True):
            found.append(difference(mine.grad, other.grad))
        for mine, other in zip(ours.buffers(), serial.buffers(), strict=True):
            found.append(difference(mine.double(), other.double()))
        assert list(ours.state_dict()) == list(serial.state_dict())
        return max(found)

    return max(on_ranks(grids(**mesh), work))
