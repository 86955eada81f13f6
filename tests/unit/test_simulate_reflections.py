"""Zone axes from the strongest reflections: intensities by the textbook sum, axes by geometry, and what follows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk
from pydantic import ValidationError
from sim_samples import campaign, plan

from exitwave.simulate.abtem_backend import scattering_factor
from exitwave.simulate.physics import wavelength_A
from exitwave.simulate.plan import Plan
from exitwave.simulate.structures.preflight import rotations_of
from exitwave.simulate.structures.reflections import Axis, AxisError, strongest_axes

STRONGEST: dict[str, Any] = {"strongest": 5, "d_A": [1.0, 5.0]}


def axes_of(atoms: Atoms, count: int = 5, d_A: tuple[float, float] = (1.0, 5.0)) -> list[Axis]:
    found = strongest_axes(atoms, index_cell=atoms.cell.array, rotations=rotations_of(atoms), count=count, d_A=d_A)
    return [axis for axis in found if isinstance(axis, Axis)]


def intensity(atoms: Atoms, hkl: tuple[int, int, int]) -> float:
    """|F|² as it stands in the textbook, atom by atom."""
    g = np.asarray(hkl) @ np.linalg.inv(atoms.cell.array).T
    total = 0j
    for number, position in zip(atoms.numbers, atoms.positions, strict=True):
        f = float(scattering_factor(int(number), np.array([np.linalg.norm(g)]))[0])
        total += f * np.exp(2j * np.pi * float(g @ position))
    return abs(total) ** 2


@pytest.mark.parametrize(("symbol", "volts"), [("Si", 13.96), ("Cu", 22.80), ("Au", 29.82)])
def test_factors_give_the_mean_inner_potential(symbol: str, volts: float) -> None:
    """V0 = h² / (2 pi m e) / Omega x sum f(0); the constant is 47.878 V Å²."""
    atoms = bulk(symbol, cubic=True)
    f0 = sum(float(scattering_factor(int(z), np.zeros(1))[0]) for z in atoms.numbers)
    assert 47.878 * f0 / atoms.get_volume() == pytest.approx(volts, abs=0.1)


def test_the_strongest_of_silicon_are_those_of_the_sum_over_atoms() -> None:
    atoms = bulk("Si", cubic=True)
    found = axes_of(atoms)
    assert [a.reflection for a in found] == [(1, 1, 1), (2, 2, 0), (4, 0, 0), (3, 1, 1), (4, 2, 2)]
    assert [a.zone for a in found] == [(1, 1, 1), (1, 1, 0), (1, 0, 0), (3, 1, 1), (2, 1, 1)]
    strongest = intensity(atoms, (1, 1, 1))
    for axis in found:
        assert axis.d_A == pytest.approx(5.43 / math.sqrt(sum(i * i for i in axis.reflection)))
        assert axis.intensity == pytest.approx(intensity(atoms, axis.reflection) / strongest, rel=1e-6)
    every = {
        (h, k, m): intensity(atoms, (h, k, m))
        for h in range(6) for k in range(h + 1) for m in range(k + 1)
        if h and 1 <= 5.43 / math.sqrt(h * h + k * k + m * m) <= 5
    }  # fmt: skip
    best = max(every, key=lambda hkl: every[hkl])
    assert best == (1, 1, 1)


def test_a_normal_of_a_hexagonal_crystal_is_no_direction_of_the_same_indices() -> None:
    found = {a.reflection: a for a in axes_of(bulk("Mg"), 4)}
    assert found[0, 0, 2].zone == (0, 0, 1)
    assert found[1, 0, 0].zone == (2, 1, 0)  # (100) is normal to [210] where gamma is 120 degrees
    assert found[1, 1, 0].zone == (1, 1, 0)


def test_the_choice_hangs_on_no_writing_of_the_cell() -> None:
    cubic = bulk("Si", cubic=True)
    shifted = cubic.copy()
    shifted.positions += [0.3, 1.1, 0.7]
    shifted = shifted[::-1]
    assert [a.reflection for a in axes_of(shifted)] == [a.reflection for a in axes_of(cubic)]


def test_no_reflection_in_the_range_is_told() -> None:
    with pytest.raises(AxisError, match=r"no reflection has a spacing of 8 to 9 Å"):
        axes_of(bulk("Si", cubic=True), d_A=(8, 9))


def seed_like(**changes: Any) -> Plan:
    content: dict[str, Any] = {
        "structures": [{"library": ["Si", "Au"], "zone_axes": STRONGEST}],
        "split": {},
        "sampling": {"energy_keV": {"choice": [100, 200]}, "touching_discs": True, "thickness_A": {"uniform": [8, 40]}},
        "grid": {"sampling_A": 0.2, "slice_thickness_A": "d_hkl"},
        "cell": {"min_extent_A": 40},
        "detector": {"shape": [16, 16], "max_q_per_A": 1.2},
    }
    return plan(**content | changes)


def test_slices_are_of_the_spacing_and_discs_touch_as_in_the_seed_data() -> None:
    made = seed_like()
    assert len(made.structures) == 9 and not made.rejected  # gold has four families of d >= 1 Å that are no multiples
    for structure in made.structures:
        assert structure.slice_thickness_A == pytest.approx(structure.reflection_d_A, rel=1e-3)
    for spec in made.samples():
        wanted = 1e3 * wavelength_A(spec.values["energy_keV"]) / (2 * spec.structure.reflection_d_A)
        assert spec.values["semiangle_mrad"] == pytest.approx(wanted)
        row = spec.params(captured_fraction=1.0)
        assert tuple(row["reflection"]) == spec.structure.reflection
        assert row["reflection_d_A"] == spec.structure.reflection_d_A


def test_what_needs_a_reflection_is_refused_without_one() -> None:
    with pytest.raises(ValidationError, match=r"grid.slice_thickness_A: d_hkl needs .* structures\[0\].zone_axes"):
        campaign(grid={"slice_thickness_A": "d_hkl"})
    with pytest.raises(ValidationError, match=r"sampling\.touching_discs needs the reflection of each zone axis"):
        campaign(sampling={"touching_discs": True})
    with pytest.raises(ValidationError, match="leave semiangle_mrad away"):
        seed_like(sampling={"touching_discs": True, "semiangle_mrad": 3})
    with pytest.raises(ValidationError, match=r"d_A: \[least, largest\]"):
        seed_like(structures=[{"library": ["Si"], "zone_axes": {"strongest": 2, "d_A": [5, 1]}}])


def test_low_symmetry_gives_axes_or_reasons() -> None:
    made = seed_like(structures=[{"cif": "awkward/monoclinic.cif", "zone_axes": STRONGEST}])
    axes = len(made.structures) + sum("along" in r.source or "reflection" in r.why for r in made.rejected)
    assert axes == 5 and made.structures
    assert all(s.strain <= 0.01 for s in made.structures)
