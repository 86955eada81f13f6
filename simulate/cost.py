"""What samples cost: seconds, bytes on disk, memory. A model for the plan, and a short calibration by measurement."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from exitwave.ingest.schema import FieldSpec
from exitwave.simulate.distributions import bounds
from exitwave.simulate.outputs import fields_of
from exitwave.simulate.route import pass_cost, route, settings_per_pass
from exitwave.simulate.scanning import probe_count
from exitwave.simulate.tasks import SampleSpec

if TYPE_CHECKING:
    from exitwave.simulate.plan import Plan

__all__ = ["Calibration", "calibrate", "estimate_seconds", "sample_bytes", "worker_memory_bytes"]

# abTEM's eager multislice: seconds per probe, slice and grid point at 128 squared on one core, and by which power of
# the number of points it grows as the grid leaves the cache.
_ABTEM, _ABTEM_GROWTH = 15e-9, 0.56
_ONCE = 0.02  # seconds that every sample costs beside its waves: optics, label, writing
_POTENTIAL = 80e-9  # seconds per slice and grid point: a potential and its transmission functions
_BASE_MEMORY = 450_000_000  # a worker after importing abTEM, numba, h5py and distributed


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What one core needs for the whole plan, scaled from samples that were measured."""

    core_seconds: float
    measured_samples: int
    measured_seconds: float


def estimate_seconds(sample: SampleSpec, simulator: str = "auto") -> float:
    """Seconds on one core by a model: this sample's part of the pass that serves it (route.py).

    Each frozen-phonon configuration has a potential of its own to be made, once for a pass. abTEM shares potentials
    and nothing else.
    """
    planes, settings = settings_per_pass(sample)
    finite = sample.recipe.grid.projection == "finite"
    sharers = settings if finite else planes * settings
    cost = pass_cost(sample, slices=float(sample.exit_plane) if planes == 1 or finite else None)
    deepest = sample.exit_plane
    if planes > 1 and not finite:
        least, most = bounds(sample.recipe.sampling.thickness_A)
        deepest = max(1, round((least + (most - least) * planes / (planes + 1)) / sample.structure.slice_thickness_A))
    points = sample.grid_yx[0] * sample.grid_yx[1]
    configurations = sample.recipe.phonons.count
    if simulator == "auto":
        simulator = route(sample)
    if simulator in ("fast", "smatrix"):
        waves = (cost.smatrix if simulator == "smatrix" else cost.fast) / cost.samples
    else:
        waves = probe_count(sample) * sample.exit_plane * points * _ABTEM * max(1.0, points / 128**2) ** _ABTEM_GROWTH
    potential = deepest * points * _POTENTIAL / sharers if configurations or finite else 0.0
    return _ONCE + max(1, configurations) * (waves + potential)


def sample_bytes(fields: Iterable[FieldSpec]) -> int:
    """Bytes of one sample's arrays."""
    return sum(np.dtype(f.dtype).itemsize * math.prod(f.shape) for f in fields)


def worker_memory_bytes(sample: SampleSpec, simulator: str = "auto") -> int:
    """Peak memory of a worker, beside what it holds from its start: slices in float32, twice while they are built, and

    - fast: the buffers of the grids that it keeps, the transmission functions in hand and those kept for other
      samples, and what abTEM needs for one probe;
    - smatrix: the matrix, or as much of it as is held at a time, beside all that;
    - abTEM: about 5 x batch x grid x 8 bytes of waves;

    and the patterns of the samples that share a pass, in float64, which wait for each other.
    """
    from exitwave.simulate.abtem_backend import batch_positions
    from exitwave.simulate.multislice import KEPT_GRIDS, KEPT_TRANSMISSION_BYTES
    from exitwave.simulate.passes import PASS_BYTES
    from exitwave.simulate.propagation import propagation_bytes

    points = sample.grid_yx[0] * sample.grid_yx[1]
    planes, settings = settings_per_pass(sample)
    if simulator == "auto":
        simulator = route(sample)
    if simulator in ("fast", "smatrix"):
        static = sample.recipe.grid.projection == "infinite" and not sample.recipe.phonons.count
        different = sample.structure.slices if static else sample.exit_plane + sample.structure.slices
        transmissions = different * points * 8 + KEPT_TRANSMISSION_BYTES
        waves = KEPT_GRIDS * propagation_bytes(sample.grid_yx) + transmissions + 10 * points * 8
        if simulator == "smatrix":
            waves += int(1.2 * pass_cost(sample).matrix_bytes) + 40_000_000
    else:
        different = 2 * sample.exit_plane
        waves = 5 * batch_positions(sample.grid_yx) * points * 8
    # Two float64 copies of a pass (sum over configurations and the one in hand), one sample leaving in float32.
    in_pass = min(2 * PASS_BYTES, 2 * max(1, planes * settings) * sample_bytes_of(sample))
    return _BASE_MEMORY + waves + 2 * different * points * 4 + in_pass + sample_bytes_of(sample)


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
