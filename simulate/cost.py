"""What samples cost: seconds, bytes on disk, memory. A model for the plan, and a short calibration by measurement."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from exitwave.ingest.schema import FieldSpec
from exitwave.simulate.distributions import bounds
from exitwave.simulate.imaging import QUADRATURE as FOCAL_POINTS
from exitwave.simulate.passes import PASS_BYTES, sample_bytes_of
from exitwave.simulate.physics import ANTIALIAS_CUTOFF
from exitwave.simulate.route import FAST_ROUTES, pass_cost, route, settings_per_pass
from exitwave.simulate.scanning import probe_count
from exitwave.simulate.tasks import SampleSpec

if TYPE_CHECKING:
    from exitwave.simulate.plan import Plan

__all__ = [
    "Calibration",
    "calibrate",
    "duration",
    "estimate_seconds",
    "sample_bytes",
    "worker_memory_bytes",
]

# abTEM's eager multislice: seconds per probe, slice and grid point at 128 squared on one core, and by which power of
# the number of points it grows as the grid leaves the cache.
_ABTEM, _ABTEM_GROWTH = 15e-9, 0.56
_ONCE = 0.02  # seconds that every sample costs beside its waves: optics, label, writing
_POTENTIAL = 80e-9  # seconds per slice and grid point: a potential and its transmission functions
_PLANE_WAVE = 30e-9  # seconds per slice and grid point of a plane wave: two transforms
_START, _START_EACH = 3.0, 2.0  # seconds until a scheduler listens, core-seconds until a worker takes tasks
_PHASE, _TERM = 40e-9, 0.7e-9  # seconds per complex exponential, and per term of a Fourier sum
_SHORT_S = 1.0  # of calibration: a pass that takes less is measured again
_BASE_MEMORY = 450_000_000  # a worker after importing abTEM, numba, h5py and distributed


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What one core needs for the whole plan, scaled from samples that were measured."""

    core_seconds: float
    measured_samples: int
    measured_seconds: float


def duration(core_hours: float | None, *, workers: int, shards: int, cores: int | None = None) -> dict[str, float]:
    """`eta_s`, and `start_s` of it until workers take tasks; nothing where the work is not known.

    A shard is one worker's. Workers on this machine share its `cores` and are started first; None: they are elsewhere,
    and when they come is not for us to say.
    """
    if core_hours is None:
        return {}
    work = 3600 * core_hours / max(1, min(workers, shards, cores or workers))
    start = 0.0 if cores is None else _START + _START_EACH * workers / min(workers, cores)
    return {"eta_s": start + work, "start_s": start}


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
    if simulator in FAST_ROUTES:
        waves = cost.of(simulator) / cost.samples
    else:
        waves = probe_count(sample) * sample.exit_plane * points * _ABTEM * max(1.0, points / 128**2) ** _ABTEM_GROWTH
    potential = deepest * points * _POTENTIAL / sharers if configurations or finite else 0.0
    # Neighbours with one exit plane share their label; thickness runs fastest.
    imaged, labelled = _images_seconds(sample), _label_seconds(sample) / (settings if planes == 1 else 1)
    labels = max(1, configurations) if sample.recipe.label.atoms == "phonon-mean" else 1
    return _ONCE + labels * labelled + max(1, configurations) * (waves + potential + imaged)


def _images_seconds(sample: SampleSpec) -> float:
    """A plane wave through the specimen, and every image of the series a Fourier sum over what the aperture leaves."""
    images = sample.recipe.images
    if images is None:
        return 0.0
    points = sample.grid_yx[0] * sample.grid_yx[1]
    most = ANTIALIAS_CUTOFF / (2.0 * sample.grid_sampling_A)
    reach = min(most, 1e-3 * (images.aperture_mrad or 1e3) / sample.wavelength_A)
    beams = math.pi * reach**2 * math.prod(sample.structure.extent_yx_A)
    rows, columns = sample.recipe.images_shape
    sums = len(images.focus_A) * (FOCAL_POINTS if images.focal_spread_A else 1)
    return sample.exit_plane * points * _PLANE_WAVE + beams * (
        _PHASE * (rows + columns) + _TERM * sums * rows * columns
    )


def _label_seconds(sample: SampleSpec) -> float:
    """The label and each slab of a volume: Fourier sums over half of what the band limit leaves."""
    recipe = sample.recipe
    kept = math.pi / 2.0 * sample.label_bandlimit_per_A**2 * math.prod(sample.structure.extent_yx_A)
    layers = ("potential" in recipe.fields) + (recipe.volume.slabs if recipe.volume is not None else 0)
    rows, columns = recipe.label.shape
    return layers * kept * (_PHASE * (rows + columns) + _TERM / 2.0 * rows * columns)


def sample_bytes(fields: Iterable[FieldSpec]) -> int:
    """Bytes of one sample's arrays."""
    return sum(np.dtype(f.dtype).itemsize * math.prod(f.shape) for f in fields)


def worker_memory_bytes(sample: SampleSpec, simulator: str = "auto") -> int:
    """Peak memory of a worker, beside what it holds from its start: slices in float32, twice while they are built, and

    - fast: the buffers of the grids that it keeps, the transmission functions in hand and those kept for other
      samples, and what abTEM needs for one probe;
    - smatrix: the matrix, or as much of it as is held at a time, beside all that; bloch: the matrix of one cell;
    - abTEM: about 5 x batch x grid x 8 bytes of waves;

    and the patterns of the samples that share a pass, in float64, which wait for each other.
    """
    from exitwave.simulate.abtem_backend import batch_positions
    from exitwave.simulate.multislice import KEPT_GRIDS, KEPT_TRANSMISSION_BYTES
    from exitwave.simulate.propagation import propagation_bytes

    points = sample.grid_yx[0] * sample.grid_yx[1]
    planes, settings = settings_per_pass(sample)
    if simulator == "auto":
        simulator = route(sample)
    if simulator in FAST_ROUTES:
        static = sample.recipe.grid.projection == "infinite" and not sample.recipe.phonons.count
        different = sample.structure.slices if static else sample.exit_plane + sample.structure.slices
        transmissions = different * points * 8 + KEPT_TRANSMISSION_BYTES
        waves = KEPT_GRIDS * propagation_bytes(sample.grid_yx) + transmissions + 10 * points * 8
        if simulator == "smatrix":
            waves += int(1.2 * pass_cost(sample).matrix_bytes) + 40_000_000
        if simulator == "bloch":
            waves += int(pass_cost(sample).bloch_bytes)
    else:
        different = 2 * sample.exit_plane
        waves = 5 * batch_positions(sample.grid_yx) * points * 8
    # Two float64 copies of a pass (sum over configurations and the one in hand), one sample leaving in float32.
    in_pass = min(2 * PASS_BYTES, 2 * max(1, planes * settings) * sample_bytes_of(sample))
    return _BASE_MEMORY + waves + 2 * different * points * 4 + in_pass + sample_bytes_of(sample)


def calibrate(plan: Plan, *, budget_s: float = 10.0) -> Calibration:
    """Simulate the cheapest pass of each class of samples, costliest classes first, for `budget_s`; scale by the model.

    A class is a grid, a route, and whether atoms are displaced. Passes are measured whole, since what a pass shares is
    most of its cost. Each class is entered through a single slice first: what happens once in a worker (imports,
    compiled code, plans) is no part of core-hours.
    """
    from exitwave.simulate.passes import passes
    from exitwave.simulate.simulator import get_simulator

    cheapest: dict[Hashable, tuple[float, list[SampleSpec]]] = {}
    weight: dict[Hashable, float] = {}
    for task in plan.tasks:
        for members in passes(task.samples()):
            spec = members[0]
            kind: Hashable = (
                spec.grid_yx,
                route(spec) if plan.simulator == "auto" else "",
                bool(spec.recipe.phonons.count),
            )
            cost = sum(estimate_seconds(member, plan.simulator) for member in members)
            weight[kind] = weight.get(kind, 0.0) + cost
            if kind not in cheapest or cost < cheapest[kind][0]:
                cheapest[kind] = (cost, members)
    simulator = get_simulator(plan.simulator)
    ratios: dict[Hashable, float] = {}
    measured = 0
    began = time.perf_counter()
    for kind in sorted(cheapest, key=lambda one: -weight[one]):
        cost, members = cheapest[kind]
        first = members[0]
        slices = 1 if first.recipe.volume is None else first.recipe.volume.slabs  # a slab has at least one
        for _ in simulator.simulate([replace(first, exit_plane=min(slices, first.exit_plane))]):
            pass
        times: list[float] = []
        while len(times) < 3 and sum(times) < _SHORT_S:  # one short run may be off by a quarter
            start = time.process_time()  # core-seconds: what other programs take does not count
            measured += sum(1 for _ in simulator.simulate(members))
            times.append(time.process_time() - start)
        ratios[kind] = float(np.median(times)) / cost
        if time.perf_counter() - began > budget_s:
            break
    usual = float(np.median(list(ratios.values())))
    seconds = sum(w * ratios.get(kind, usual) for kind, w in weight.items())
    return Calibration(core_seconds=seconds, measured_samples=measured, measured_seconds=time.perf_counter() - began)
