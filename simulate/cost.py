"""What samples cost: seconds, bytes on disk, memory. A model for the plan, and a short calibration by measurement."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from exitwave.ingest.schema import FieldSpec
from exitwave.simulate.outputs import fields_of
from exitwave.simulate.scanning import probe_count
from exitwave.simulate.tasks import SampleSpec

if TYPE_CHECKING:
    from exitwave.simulate.plan import Plan

__all__ = ["Calibration", "calibrate", "estimate_seconds", "sample_bytes", "worker_memory_bytes"]

# Nanoseconds per probe, slice and grid point at 128 squared on one core, and by which power of the number of points it
# grows as the grid leaves the cache; a part that every sample costs, in seconds.
_SPEED = {"fast": (4.5e-9, 0.15, 0.02), "abtem": (15e-9, 0.56, 0.05)}
_POTENTIAL = 80e-9  # seconds per slice and grid point: a potential and its transmission functions
_BASE_MEMORY = 450_000_000  # a worker after importing abTEM, numba, h5py and distributed


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What one core needs for the whole plan, scaled from samples that were measured."""

    core_seconds: float
    measured_samples: int
    measured_seconds: float


def estimate_seconds(sample: SampleSpec, simulator: str = "fast") -> float:
    """Seconds on one core by a model: per probe, slice and grid point a time that grows as the grid leaves the cache.

    Measured on one core: the fast multislice 4.2, 4.5 and 6.1 ns a point at 128², 256² and 512²; abTEM's eager one with
    estimated plans 15, 34 and 71 ns. Each frozen-phonon configuration has a potential of its own to be made.
    """
    at_128, power, once = _SPEED.get(simulator, _SPEED["abtem"])
    points = sample.grid_yx[0] * sample.grid_yx[1]
    probes = probe_count(sample)
    per_point = at_128 * max(1.0, points / 128**2) ** power
    configurations = sample.recipe.phonons.count
    per_slice = points * (probes * per_point + (_POTENTIAL if configurations else 0.0))
    return once + max(1, configurations) * sample.exit_plane * per_slice


def sample_bytes(fields: Iterable[FieldSpec]) -> int:
    """Bytes of one sample's arrays."""
    return sum(np.dtype(f.dtype).itemsize * math.prod(f.shape) for f in fields)


def worker_memory_bytes(sample: SampleSpec, simulator: str = "fast") -> int:
    """Peak memory of a worker, beside what it holds from its start: slices in float32, twice while they are built, and

    - fast: the buffers of the grids that it keeps, the transmission functions in hand and those kept for other
      samples, and what abTEM needs for one probe;
    - abTEM: about 5 x batch x grid x 8 bytes of waves.
    """
    from exitwave.simulate.abtem_backend import batch_positions
    from exitwave.simulate.multislice import KEPT_GRIDS, KEPT_TRANSMISSION_BYTES
    from exitwave.simulate.propagation import propagation_bytes

    points = sample.grid_yx[0] * sample.grid_yx[1]
    if simulator == "fast":
        static = sample.recipe.grid.projection == "infinite" and not sample.recipe.phonons.count
        different = sample.structure.slices if static else sample.exit_plane + sample.structure.slices
        transmissions = different * points * 8 + KEPT_TRANSMISSION_BYTES
        waves = KEPT_GRIDS * propagation_bytes(sample.grid_yx) + transmissions + 10 * points * 8
    else:
        different = 2 * sample.exit_plane
        waves = 5 * batch_positions(sample.grid_yx) * points * 8
    return _BASE_MEMORY + waves + 2 * different * points * 4 + 2 * sample_bytes_of(sample)


def sample_bytes_of(sample: SampleSpec) -> int:
    """Bytes of one sample's arrays in float64, as they are summed over phonons; patterns of all simulated positions."""
    recipe = sample.recipe
    others = sum(math.prod(field.shape) for field in fields_of(recipe) if field.name != "cbed")
    return 8 * (probe_count(sample) * math.prod(recipe.detector.shape) + others)


def calibrate(plan: Plan, *, budget_s: float = 10.0) -> Calibration:
    """Simulate the cheapest sample of each grid, costliest grids first, for `budget_s`; scale by the model.

    The first sample of all is simulated twice, since the first run compiles and imports.
    """
    from exitwave.simulate.simulator import get_simulator

    cheapest: dict[tuple[int, int], SampleSpec] = {}
    weight: dict[tuple[int, int], float] = {}
    for sample in plan.samples():
        grid = sample.grid_yx
        cost = estimate_seconds(sample, plan.simulator)
        weight[grid] = weight.get(grid, 0.0) + cost
        if grid not in cheapest or cost < estimate_seconds(cheapest[grid], plan.simulator):
            cheapest[grid] = sample
    simulator = get_simulator(plan.simulator)
    order = sorted(cheapest, key=lambda grid: -weight[grid])
    next(iter(simulator.simulate([cheapest[order[0]]])))
    ratios: dict[tuple[int, int], float] = {}
    began = time.perf_counter()
    for grid in order:
        start = time.perf_counter()
        next(iter(simulator.simulate([cheapest[grid]])))
        ratios[grid] = (time.perf_counter() - start) / estimate_seconds(cheapest[grid], plan.simulator)
        if time.perf_counter() - began > budget_s:
            break
    usual = float(np.median(list(ratios.values())))
    seconds = sum(w * ratios.get(grid, usual) for grid, w in weight.items())
    return Calibration(core_seconds=seconds, measured_samples=len(ratios), measured_seconds=time.perf_counter() - began)
