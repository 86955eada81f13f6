"""`exitwave bench simulate`: the multislice loop beside its floor and its peers, in one run, on one core.

The floor is two whole transforms for each slice and probe with the best warm FFTW plan that measuring finds: what a
loop would take that did nothing else. The peers are abTEM's eager and lazy ways, with the same potential and positions
and its own default of measured plans (the reference simulator has estimated ones, the same in every process, which are
slower). Everything is run in turns, so that a busy moment of the machine falls on all; medians and spread over the
turns. Times are of the processor, not of the clock on the wall: all ways run in one thread, and what other programs
take does not count.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from exitwave.simulate.tasks import SampleSpec, StructureSpec, draw_sample

__all__ = ["bench_simulate", "bench_spec", "machine"]

_SAMPLING_A = 0.2
_CELL_A = 25.6 / 6
# grid -> (scan, slices): enough that what is done once for a sample weighs as it does in a campaign.
_WORK = {128: ((8, 8), 48), 256: ((8, 8), 24), 512: ((4, 4), 24)}
# grid -> how many times as fast as the faster of abTEM's two ways the fast multislice should be
_TARGETS = {128: 2.5, 256: 3.0, 512: 3.5}
_FLOOR_TARGET = 1.15


def bench_simulate(
    *,
    full: bool = False,
    grids: Sequence[int] | None = None,
    rounds: int = 5,
    planning_s: float = 10.0,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The benchmark's JSON document: {"bench", "machine", "rows", "targets", "campaigns"}.

    `full` adds 512 x 512 and larger parts of the campaigns (some minutes, most of them in abTEM); `grids` asks for
    other grids, multiples of 64, and no campaigns. Each of the floor's plans may be sought for `planning_s` seconds.
    """
    rows: list[dict[str, Any]] = []
    targets: list[dict[str, Any]] = []
    for points in grids or ((128, 256, 512) if full else (128, 256)):
        note(f"{points} x {points}: planning the floor, then {rounds} rounds")
        grid_rows = _one_grid(points, rounds, planning_s)
        rows += grid_rows
        median = {row["what"]: row["us_per_probe_slice"] for row in grid_rows}
        abtem = min(median["abtem-eager"], median["abtem-lazy"])
        ratios = [
            (f"fast / floor at {points}", median["fast"] / median["floor"], _FLOOR_TARGET, False),
            (f"faster of abTEM's ways / fast at {points}", abtem / median["fast"], _TARGETS.get(points, 2.5), True),
        ]
        for name, value, target, more in ratios:
            holds = value >= target if more else value <= target
            targets.append({"name": name, "value": round(value, 3), "target": target, "holds": holds})
    document: dict[str, Any] = {"bench": "simulate", "machine": machine(), "rows": rows, "targets": targets}
    if grids is None:
        from exitwave.simulate.bench_campaign import bench_campaigns

        whole = bench_campaigns(full=full, note=note)
        document["campaigns"] = whole["rows"]
        targets += whole["targets"]
    return document


def bench_spec(points: int, *, thickness_slices: int, scan: tuple[int, int]) -> SampleSpec:
    """A gold crystal on a grid of `points` squared at 0.2 Å, two slices in a period."""
    from exitwave.simulate.spec import Recipe

    a = _CELL_A
    repeat = round(points * _SAMPLING_A / a)
    structure = StructureSpec(
        index=0,
        key="bench-gold",
        source="benchmark: gold",
        licence="computed",
        formula="Au4",
        space_group=225,
        wyckoff="a",
        prototype_group=1,
        zone_axis=(0, 0, 1),
        inplane_axis=(1, 0, 0),
        strain=0.0,
        numbers=(79,) * 4,
        positions_A=((0, 0, 0), (a / 2, a / 2, 0), (a / 2, 0, a / 2), (0, a / 2, a / 2)),
        lengths_A=(a, a, a),
        repeat_xy=(repeat, repeat),
        slices=2,
    )
    recipe = Recipe.model_validate(
        {
            "sampling": {
                "energy_keV": 200,
                "semiangle_mrad": 15,
                "thickness_A": thickness_slices * a / 2,
                "scan_origin": [3, 3],
            },
            "scan": {"shape": scan, "step_A": 0.5},
            "grid": {"sampling_A": _SAMPLING_A * 1.0001, "slice_thickness_A": a / 2},
            "detector": {"shape": [64, 64], "max_angle_mrad": 36},
            "label": {"shape": scan},
        }
    )
    spec = draw_sample(structure, recipe, 0, "train")
    if spec.grid_yx != (points, points) or spec.exit_plane != thickness_slices:
        raise RuntimeError(
            f"grid {spec.grid_yx} and {spec.exit_plane} slices came, {points} and {thickness_slices} asked"
        )
    return spec


def machine() -> dict[str, Any]:
    """The kind of machine: what speed depends on, nothing that names it."""
    import psutil

    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
    }


def _one_grid(points: int, rounds: int, planning_s: float) -> list[dict[str, Any]]:
    from exitwave.simulate.abtem_backend import AbtemSimulator
    from exitwave.simulate.multislice import FastSimulator
    from exitwave.simulate.transforms import search, set_wisdom

    scan, slices = _WORK.get(points, ((2, 2), 8))
    spec = bench_spec(points, thickness_slices=slices, scan=scan)
    reference, fast = AbtemSimulator(), FastSimulator()
    set_wisdom(search([points], limit_s=planning_s))  # as a campaign of some length has
    times: dict[str, list[float]] = {"floor": [], "fast": [], "abtem-eager": [], "abtem-lazy": []}
    with fast.configured(planning="FFTW_MEASURE"):
        static = reference.static_slices(spec)
        positions = reference.positions(spec)
        ways: dict[str, Callable[[], Any]] = {
            "fast": lambda: fast.patterns(spec, static),
            "abtem-eager": lambda: reference.patterns(spec, static),
            "abtem-lazy": lambda: reference.lazy_intensity(spec, static, positions),
        }
        _gate(*(simulator.exit_intensity(spec, static, positions[:2]) for simulator in (fast, reference)))
        for run in ways.values():  # compile, plan, make what is made once
            run()
        ways["floor"] = _floor(points, len(positions) * slices, planning_s)
        for _ in range(rounds):
            for what in times:
                began = time.process_time()
                ways[what]()
                times[what].append(1e6 * (time.process_time() - began) / (len(positions) * slices))
    set_wisdom(b"")
    return [
        {
            "grid": points,
            "what": what,
            "us_per_probe_slice": round(statistics.median(values), 1),
            "least": round(min(values), 1),
            "most": round(max(values), 1),
            "rounds": rounds,
            "probes": len(positions),
            "slices": slices,
        }
        for what, values in times.items()
    ]


def _gate(ours: Any, theirs: Any) -> None:
    """Nothing is timed that does not agree."""
    difference = float(np.abs(ours - theirs).max() / theirs.max())
    if difference > 5e-5:
        raise RuntimeError(f"the fast multislice differs from abTEM by {difference:.1e} of the largest intensity")


def _floor(points: int, steps: int, planning_s: float) -> Callable[[], None]:
    """A run of `steps` pairs of whole transforms, in the best of a few batches."""
    from exitwave.simulate.transforms import measured_plane_plans

    best: tuple[float, int, Callable[[], None]] | None = None
    for batch in (1, 4):
        pair = measured_plane_plans((batch, points, points), np.dtype(np.complex64), planning_s=planning_s)
        pair()
        times = []
        for _ in range(5):
            began = time.process_time()
            for _ in range(max(1, 32 // batch)):
                pair()
            times.append((time.process_time() - began) / max(1, 32 // batch) / batch)
        if best is None or min(times) < best[0]:
            best = (min(times), batch, pair)
    assert best is not None
    _, batch, pair = best

    def run() -> None:
        for _ in range(steps // batch):
            pair()

    return run
