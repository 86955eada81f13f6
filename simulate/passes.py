"""Which neighbouring samples one pass through a specimen serves: pure functions of their specifications.

A pass is one potential at one energy and tilt (and one set of displaced configurations). Within it, samples whose
probes and positions are the same too are one *propagation*, detected at several exit planes; samples that differ in
positions, defocus or aberrations share the slices, and a scattering matrix where one is used. Sharing saves work and
changes no bit: what a sample holds is a function of its own specification.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby

from exitwave.simulate.outputs import fields_of
from exitwave.simulate.scanning import probe_count
from exitwave.simulate.tasks import SampleSpec

__all__ = ["PASS_BYTES", "pass_key", "passes", "propagation_key", "propagations", "sample_bytes_of"]

# What tells waves of one pass apart.
_OF_THE_WAVE = ("scan_rotation_deg", "defocus_A")
# A pass holds the arrays of all of its samples until it ends, in float64: at most so many bytes.
PASS_BYTES = 256 * 2**20


def _served(name: str) -> bool:
    return name in _OF_THE_WAVE or name.startswith(("C", "phi"))


def pass_key(spec: SampleSpec) -> Hashable:
    """Equal for samples that one pass can serve: one structure, grid, detector, energy, semi-angle, tilt and phonons.

    With finite projections the slices near the exit surface hold what reaches into them from beyond it, so that
    samples of different thickness share nothing there.
    """
    structure, recipe = spec.structure, spec.recipe
    values = tuple((name, value) for name, value in spec.values.items() if not _served(name))
    depth = spec.exit_plane if recipe.grid.projection == "finite" else 0
    crystal = (structure.key, structure.zone_axis, structure.repeat_xy, structure.slices)
    return (*crystal, recipe.grid, recipe.scan, recipe.detector, recipe.phonons, spec.phonon_seed, values, depth)


def propagation_key(spec: SampleSpec) -> Hashable:
    """Equal for samples of one pass that differ in thickness alone: the same waves, seen at different exit planes."""
    return (spec.scan_origin_yx_A, spec.scan_jitter_seed, tuple(spec.values.items()))


def passes(specs: Sequence[SampleSpec]) -> Iterator[list[SampleSpec]]:
    """Neighbours that share a pass, in order; a pass whose patterns would fill the memory is cut into several."""
    for _, members in groupby(specs, key=pass_key):
        shared = list(members)
        each = max(map(sample_bytes_of, shared))
        most = max(1, PASS_BYTES // each)
        for start in range(0, len(shared), most):
            yield shared[start : start + most]


def sample_bytes_of(sample: SampleSpec) -> int:
    """Bytes of one sample's arrays in float64, as they are summed over phonons; patterns of all simulated positions."""
    recipe = sample.recipe
    others = sum(math.prod(field.shape) for field in fields_of(recipe) if field.name != "cbed")
    return 8 * (probe_count(sample) * math.prod(recipe.detector.shape) + others)


def propagations(members: Sequence[SampleSpec]) -> list[list[int]]:
    """Samples of a pass by propagation: for each, their places in `members`, thinnest first."""
    found: dict[Hashable, list[int]] = {}
    for place, spec in enumerate(members):
        found.setdefault(propagation_key(spec), []).append(place)
    return [sorted(places, key=lambda place: members[place].exit_plane) for places in found.values()]
