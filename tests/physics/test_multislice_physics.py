"""The reference simulator against textbooks and symmetry: potential, kinematics, propagation, aberrations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import abtem
import numpy as np
import pytest
from ase.build import bulk
from sim_samples import campaign, sample, single_atom

from exitwave.simulate.abtem_backend import AbtemSimulator, Slices
from exitwave.simulate.physics import interaction_parameter, probe_radius_A, wavelength_A
from exitwave.simulate.plan import make_plan
from exitwave.simulate.tasks import SampleSpec, draw_sample
from exitwave.simulate.weak_phase import probe_spectrum


@pytest.fixture(scope="module")
def simulator() -> AbtemSimulator:
    return AbtemSimulator()


def crystal(builder: dict[str, Any], **changes: Any) -> SampleSpec:
    spec = campaign(structures=[{"builder": builder, **changes.pop("source", {})}], split={}, **changes)
    structure = make_plan(spec, base_dir=Path()).structures[0]
    return draw_sample(structure, spec.recipe(), 0, "train")


def bulk_cell(name: str, *args: Any) -> dict[str, Any]:
    return {"name": "bulk", "args": [name, *args], "kwargs": {"cubic": True}}


@pytest.mark.parametrize(
    ("builder", "volts"),
    [
        (bulk_cell("Si"), 13.96),
        (bulk_cell("C", "diamond", 3.57), 21.18),
        (bulk_cell("Al"), 16.98),
        (bulk_cell("Cu"), 22.80),
        (bulk_cell("Ge"), 15.70),
        (bulk_cell("GaAs", "zincblende", 5.653), 15.42),
        (bulk_cell("MgO", "rocksalt", 4.212), 18.55),
        (bulk_cell("Ag"), 24.27),
        (bulk_cell("W"), 38.35),
        (bulk_cell("Au"), 29.82),
    ],
    ids=lambda value: value["args"][0] if isinstance(value, dict) else str(value),
)
def test_mean_inner_potential(simulator: AbtemSimulator, builder: dict[str, Any], volts: float) -> None:
    """Lobato's parametrisation, infinite projection: the mean of one period, from the slices that waves pass."""
    spec = crystal(builder, grid={"sampling_A": 0.1}, sampling={"thickness_A": 12})
    slices = simulator.static_slices(spec)
    assert len(slices.order) == spec.exit_plane and len(slices.different) == spec.structure.slices
    mean = slices.projected().mean() / spec.thickness_A
    whole_periods = spec.exit_plane % spec.structure.slices == 0
    if not whole_periods:
        mean = slices.different.sum(axis=0, dtype=np.float64).mean() / spec.structure.lengths_A[2]
    assert mean == pytest.approx(volts, abs=0.1)


def one_slice(atoms: Any, thickness: float, points: int = 96) -> np.ndarray:
    """Projected potential of one cell in one slice, (x, y) in V Å, in float64."""
    with abtem.config.set({"precision": "float64"}):
        potential = abtem.Potential(
            atoms, gpts=(points, points), slice_thickness=thickness, parametrization="lobato", projection="infinite"
        )
        array = np.asarray(potential.build(lazy=False).array)
    assert array.dtype == np.float64 and len(array) == 1
    return array[0]


def plane_wave_pattern(potential: np.ndarray, energy_keV: float = 200.0) -> np.ndarray:
    exit_wave = np.exp(1j * interaction_parameter(energy_keV) * potential)
    return np.abs(np.fft.fft2(exit_wave) / exit_wave.size) ** 2


def friedel_asymmetry(pattern: np.ndarray) -> float:
    """Largest difference of I(q) and I(-q) over the largest scattered intensity, Nyquist rows excluded."""
    n = len(pattern) // 2
    shifted = np.fft.fftshift(pattern)[1:, 1:]
    scattered = shifted.copy()
    scattered[n - 1, n - 1] = 0.0
    return float(np.abs(shifted - shifted[::-1, ::-1]).max() / scattered.max())


@pytest.mark.parametrize("name", ["Si", "Au"])
def test_friedel_pairs_are_equal_for_one_slice_of_a_centrosymmetric_crystal(name: str) -> None:
    atoms = bulk(name, cubic=True)
    assert friedel_asymmetry(plane_wave_pattern(one_slice(atoms, float(atoms.cell[2, 2])))) <= 1e-12


def gallium_arsenide_110() -> Any:
    from ase import Atoms

    from exitwave.simulate.structures.orient import orient

    cell = orient(
        bulk("GaAs", "zincblende", 5.653, cubic=True),
        (1, 1, 0),
        max_strain=1e-6,
        slice_thickness_A=100.0,
        max_atoms=10_000,
    )
    return Atoms(numbers=cell.numbers, positions=cell.positions_A, cell=cell.lengths_A, pbc=True) * (1, 1, 2)


def test_gallium_arsenide_along_110_breaks_friedel_and_a_weak_potential_restores_it() -> None:
    potential = one_slice(gallium_arsenide_110(), 8.0)
    strong, weak = (friedel_asymmetry(plane_wave_pattern(potential * factor)) for factor in (1.0, 1e-3))
    assert strong > 1e-2
    assert weak < 1e-3 * 10 * strong


def test_kinematic_limit() -> None:
    """I_g = |sigma V_g|^2 for Si 220 at a hundredth of the potential, one cell in one slice."""
    atoms = bulk("Si", cubic=True)
    potential = one_slice(atoms, float(atoms.cell[2, 2])) * 0.01
    expected = np.abs(interaction_parameter(200.0) * np.fft.fft2(potential) / potential.size) ** 2
    ratio = plane_wave_pattern(potential)[2, 2] / expected[2, 2]
    assert 0.999 <= ratio <= 1.001


def test_fourfold_symmetry_of_silicon(simulator: AbtemSimulator) -> None:
    """Si[001], the probe on a column, slices of a whole cell: the pattern is fourfold about [Q//2, Q//2]."""
    spec = crystal(
        bulk_cell("Si"),
        grid={"sampling_A": 0.12, "slice_thickness_A": 5.43},
        sampling={"thickness_A": 22, "semiangle_mrad": 12},
        detector={"shape": [32, 32], "max_q_per_A": 1.5},
        scan={"shape": [1, 1], "step_A": 0.5},
    )
    assert spec.structure.slices == 1 and spec.exit_plane == 4
    x, y, _ = spec.structure.positions_A[0]
    on_axis = draw_sample(
        spec.structure,
        spec.recipe.model_copy(update={"sampling": spec.recipe.sampling.model_copy(update={"scan_origin": (y, x)})}),
        0,
        "train",
    )
    (made,) = simulator.simulate([on_axis])
    pattern = made.arrays["cbed"][0, 0, 1:, 1:].astype(np.float64)
    assert np.abs(pattern - np.rot90(pattern)).max() <= 1e-5


def test_a_vanishing_specimen_leaves_everything_in_the_disc(simulator: AbtemSimulator) -> None:
    """t -> 0: what is scattered out of the disc falls with the square of the potential, to nothing."""
    spec = sample(single_atom(), sampling={"scan_origin": [8, 8]})
    slices = simulator.static_slices(spec)
    scattered = []
    for factor in (0.0, 0.01, 0.02):
        weaker = Slices(different=slices.different * np.float32(factor), order=slices.order)
        intensity = simulator.exit_intensity(spec, weaker, np.array([[8.0, 8.0]]))[0]
        q = np.fft.fftfreq(len(intensity), d=16.0 / len(intensity))
        angle = np.hypot(q[:, None], q[None, :]) * spec.wavelength_A * 1e3
        edge = 20 + spec.wavelength_A * 1e3 / 16.0
        scattered.append(float(intensity[angle > edge].sum() / intensity.sum()))
    assert scattered[0] < 1e-9
    assert scattered[2] / scattered[1] == pytest.approx(4.0, rel=0.02)


def test_the_whole_grid_never_holds_more_than_the_beam(simulator: AbtemSimulator) -> None:
    spec = crystal(bulk_cell("Au"), sampling={"thickness_A": 30, "semiangle_mrad": 15})
    intensity = simulator.exit_intensity(spec, simulator.static_slices(spec), np.array([[3.0, 4.0], [5.5, 1.0]]))
    fraction = intensity.sum((-2, -1)) / simulator._incident_norm(spec)
    assert (fraction <= 1 + 1e-5).all() and (fraction > 0.5).all()


def test_positive_defocus_puts_the_crossover_downstream(simulator: AbtemSimulator) -> None:
    """A probe of defocus 60 Å, after 60 Å of vacuum, is the focused probe, to the rounding of float32."""
    focused = sample(single_atom(), sampling={"scan_origin": [8, 8]})
    ahead = sample(single_atom(height_A=60.0), sampling={"scan_origin": [8, 8], "defocus_A": 60, "thickness_A": 60})
    scan = simulator._scan(np.array([[8.0, 8.0]]))
    direct = np.asarray(simulator._probe(focused).build(scan, lazy=False).array)[0]
    vacuum = simulator._potential_array(ahead.structure, np.zeros((1, *ahead.grid_yx[::-1]), np.float32))
    arrived = np.asarray(simulator._probe(ahead).multislice(vacuum, scan=scan, lazy=False).array)[0]
    peak = float((np.abs(direct) ** 2).max())
    assert np.abs(np.abs(direct) ** 2 - np.abs(arrived) ** 2).max() < 1e-4 * peak


ABERRATIONS = {
    "defocus_A": 80.0,
    "C12_A": 30.0,
    "phi12_deg": 25.0,
    "C21_A": 400.0,
    "phi21_deg": -40.0,
    "C23_A": 300.0,
    "phi23_deg": 10.0,
    "C30_A": 2e4,
    "C32_A": 1e4,
    "phi32_deg": 70.0,
    "C34_A": 1.5e4,
    "phi34_deg": 5.0,
    "C50_A": 2e6,
}


@pytest.mark.parametrize("names", [(name,) for name in ABERRATIONS if name[0] != "p"] + [tuple(ABERRATIONS)], ids=str)
def test_aberrations_follow_the_stated_convention(simulator: AbtemSimulator, names: tuple[str, ...]) -> None:
    """abTEM's probe against the polar expansion written out in NumPy, one coefficient at a time and all together."""
    chosen = {
        n: v for n, v in ABERRATIONS.items() if n in names or n.replace("phi", "C").replace("_deg", "_A") in names
    }
    spec = sample(single_atom(width_A=24.0), sampling=chosen)
    built = simulator._probe(spec).build(simulator._scan(np.zeros((1, 2))), lazy=False)
    ours = probe_spectrum(spec.values, spec.grid_yx, spec.structure.extent_yx_A)
    theirs = np.fft.fft2(np.asarray(built.array)[0]).T
    theirs = theirs / np.sqrt((np.abs(theirs) ** 2).sum())
    phase = np.vdot(theirs, ours)
    assert abs(phase) == pytest.approx(1.0, abs=1e-5)
    assert np.abs(theirs * phase - ours).max() < 2e-3 * np.abs(ours).max()


def test_frozen_phonons_repeat_and_soften_the_discs(simulator: AbtemSimulator) -> None:
    common: dict[str, Any] = {"sampling": {"thickness_A": 16, "semiangle_mrad": 15}}
    cold = crystal(bulk_cell("Au"), **common)
    warm = crystal(bulk_cell("Au"), phonons={"count": 2, "rms_A": 0.12}, **common)
    first, again = (next(iter(simulator.simulate([warm]))) for _ in range(2))
    still = next(iter(simulator.simulate([cold])))
    assert first.arrays["cbed"].tobytes() == again.arrays["cbed"].tobytes()
    assert np.abs(first.arrays["cbed"] - still.arrays["cbed"]).max() > 1e-4
    assert first.arrays["potential"].tobytes() == still.arrays["potential"].tobytes()  # the label is of static atoms
    assert first.params["phonon_seed"] != 0 and still.params["phonon_seed"] == 0


def test_finite_projection_has_the_same_total(simulator: AbtemSimulator) -> None:
    infinite, finite = (
        simulator.static_slices(crystal(bulk_cell("Si"), grid={"sampling_A": 0.2, "projection": p})).stacked()
        for p in ("infinite", "finite")
    )
    assert finite.shape == infinite.shape
    # In real space the cusps of the atoms are sampled, in Fourier space they are not: a grid of 0.2 Å tells them apart.
    assert finite.mean() == pytest.approx(float(infinite.mean()), rel=0.1)


def test_wavelength_and_interaction_parameter() -> None:
    """Kirkland, table 2.2 and eq. 5.6."""
    assert wavelength_A(100.0) == pytest.approx(0.0370144, abs=1e-6)
    assert wavelength_A(200.0) == pytest.approx(0.0250793, abs=1e-6)
    assert interaction_parameter(100.0) == pytest.approx(0.924e-3, rel=1e-3)
    assert interaction_parameter(200.0) == pytest.approx(0.7288e-3, rel=1e-3)


def test_the_probe_radius_knows_large_aberrations() -> None:
    values = {n: 0.0 for n in ABERRATIONS} | {"energy_keV": 200.0, "semiangle_mrad": 35.0}
    assert probe_radius_A(values | {"C30_A": 1.3e7}, 0.0) == pytest.approx(557, rel=0.02)
    assert probe_radius_A(values | {"energy_keV": 60.0, "semiangle_mrad": 1.0}, 0.0) == pytest.approx(30, rel=0.02)
