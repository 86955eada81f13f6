"""The gates by which the simulation is known to be right: textbooks, symmetry, and another method. Prints one JSON.

    python benchmarks/physics_gates.py [NAME…]

Each gate is a function of nothing that returns rows: a value, and the least and the most that it may be. The tests in
tests/physics/test_physics_gates.py run the same functions. Crystals are ASE's (its lattice constants, or those given
here), potentials Lobato's in infinite projection, everything in float64 where the row does not say otherwise.
"""

from __future__ import annotations

import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.build import bulk
from numpy.typing import NDArray

from exitwave.simulate.abtem_backend import AbtemSimulator, configure_abtem
from exitwave.simulate.imaging import focal_images
from exitwave.simulate.multislice import FastSimulator
from exitwave.simulate.physics import interaction_parameter
from exitwave.simulate.plan import make_plan
from exitwave.simulate.slices import Slices
from exitwave.simulate.smatrix import SMatrixSimulator
from exitwave.simulate.spec import CampaignSpec
from exitwave.simulate.structures.orient import orient
from exitwave.simulate.tasks import SampleSpec, StructureSpec, draw_sample

INFINITY = math.inf


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured number and the range in which it must lie."""

    name: str
    value: float
    least: float = -INFINITY
    most: float = INFINITY

    @property
    def holds(self) -> bool:
        return self.least <= self.value <= self.most

    @property
    def required(self) -> str:
        if self.least == -INFINITY:
            return f"<= {self.most:g}"
        return f">= {self.least:g}" if self.most == INFINITY else f"{self.least:g} .. {self.most:g}"


@cache
def simulator(name: str = "abtem", precision: str = "float64") -> AbtemSimulator:
    kind = {"abtem": AbtemSimulator, "fast": FastSimulator}[name]
    return kind(precision=precision)  # type: ignore[arg-type]


def cubic(name: str, *args: Any) -> dict[str, Any]:
    return {"name": "bulk", "args": [name, *args], "kwargs": {"cubic": True}}


def specification(builder: dict[str, Any], *, single_cell: bool = False, **changes: Any) -> SampleSpec:
    """The first sample of a campaign over one structure; `single_cell`: of one period across the beam."""
    sampling = {"energy_keV": 200, "semiangle_mrad": 15, "thickness_A": 8} | changes.pop("sampling", {})
    content: dict[str, Any] = {
        "name": "gate",
        "samples_per_structure": 1,
        "samples_per_shard": 1,
        "structures": [{"builder": builder}],
        "sampling": sampling,
        "scan": {"shape": [1, 1], "step_A": 0.5},
        "label": {"shape": [4, 4]},
        "detector": {"shape": [32, 32], "max_q_per_A": 1.2},
    }
    grid = {"sampling_A": 0.2, "max_gpts": 4096} | changes.pop("grid", {})
    if not single_cell:
        campaign = CampaignSpec.model_validate(content | {"grid": grid} | changes)
        structure = make_plan(campaign, base_dir=Path()).structures[0]
    else:
        campaign = CampaignSpec.model_validate(content | {"grid": grid} | changes)
        safe = content | {"sampling": sampling | {"tilt_x_mrad": 0, "tilt_y_mrad": 0, "thickness_A": 8}}
        planned = CampaignSpec.model_validate(safe | {"grid": grid | {"sampling_A": 0.2}})
        structure = replace(make_plan(planned, base_dir=Path()).structures[0], repeat_xy=(1, 1))
    return draw_sample(structure, campaign.recipe(), 0, "train")


# -- potentials and single slices ------------------------------------------------------------------------------------

MEAN_INNER_POTENTIAL_V = {
    "Si": (cubic("Si"), 13.96),
    "C": (cubic("C", "diamond", 3.57), 21.18),
    "Al": (cubic("Al"), 16.98),
    "Cu": (cubic("Cu"), 22.80),
    "Ge": (cubic("Ge"), 15.70),
    "GaAs": (cubic("GaAs", "zincblende", 5.653), 15.42),
    "MgO": (cubic("MgO", "rocksalt", 4.212), 18.55),
    "Ag": (cubic("Ag"), 24.27),
    "W": (cubic("W"), 38.35),
    "Au": (cubic("Au"), 29.82),
}


def mean_inner_potential() -> Iterator[Row]:
    """The mean of one period, from the slices that waves pass."""
    for name, (builder, volts) in MEAN_INNER_POTENTIAL_V.items():
        spec = specification(builder, single_cell=True, grid={"sampling_A": 0.1})
        with simulator().configured():
            slices = simulator().static_slices(spec)
        mean = float(slices.different.sum(axis=0).mean() / spec.structure.lengths_A[2])
        yield Row(name=f"mean inner potential of {name}, V", value=mean, least=volts - 0.1, most=volts + 0.1)


def one_slice(atoms: Atoms, thickness: float, points: int = 96) -> NDArray[np.float64]:
    """Projected potential of one cell in one slice, (x, y) in V Å."""
    abtem = configure_abtem()
    with abtem.config.set({"precision": "float64"}):
        potential = abtem.Potential(
            atoms, gpts=(points, points), slice_thickness=thickness, parametrization="lobato", projection="infinite"
        )
        array = np.asarray(potential.build(lazy=False).array)
    assert array.dtype == np.float64 and len(array) == 1
    return array[0]


def pattern_behind(potential: NDArray[np.float64]) -> NDArray[np.float64]:
    """Intensity of a plane wave of 200 keV behind one slice, zero frequency first."""
    exit_wave = np.exp(1j * interaction_parameter(200.0) * potential)
    return np.abs(np.fft.fft2(exit_wave) / exit_wave.size) ** 2


def friedel_asymmetry(pattern: NDArray[np.float64]) -> float:
    """Largest difference of I(q) and I(-q) over the largest scattered intensity, Nyquist rows excluded."""
    n = len(pattern) // 2
    shifted = np.fft.fftshift(pattern)[1:, 1:]
    scattered = shifted.copy()
    scattered[n - 1, n - 1] = 0.0
    return float(np.abs(shifted - shifted[::-1, ::-1]).max() / scattered.max())


def gallium_arsenide_110() -> Atoms:
    cell = orient(
        bulk("GaAs", "zincblende", 5.653, cubic=True),
        (1, 1, 0),
        max_strain=1e-6,
        slice_thickness_A=100.0,
        max_atoms=10_000,
    )
    return Atoms(numbers=cell.numbers, positions=cell.positions_A, cell=cell.lengths_A, pbc=True) * (1, 1, 2)


def friedel() -> Iterator[Row]:
    """One slice: equal pairs for centrosymmetric crystals; GaAs along 110 breaks it, a weak potential restores it."""
    for name in ("Si", "Au"):
        atoms = bulk(name, cubic=True)
        asymmetry = friedel_asymmetry(pattern_behind(one_slice(atoms, float(atoms.cell[2, 2]))))
        yield Row(name=f"Friedel asymmetry of {name}", value=asymmetry, most=1e-12)
    potential = one_slice(gallium_arsenide_110(), 8.0)
    strong, weak = (friedel_asymmetry(pattern_behind(potential * factor)) for factor in (1.0, 1e-3))
    yield Row(name="Friedel asymmetry of GaAs[110], one slice of 8 Å", value=strong, least=1.25e-2, most=1.35e-2)
    yield Row(name="the same at V x 0.001, over it", value=weak / strong, most=5e-3)


def kinematic_limit() -> Iterator[Row]:
    """I_g over abs(sigma V_g)^2 for Si 220 at V x 0.01, one cell in one slice."""
    atoms = bulk("Si", cubic=True)
    potential = one_slice(atoms, float(atoms.cell[2, 2])) * 0.01
    expected = np.abs(interaction_parameter(200.0) * np.fft.fft2(potential) / potential.size) ** 2
    ratio = pattern_behind(potential)[2, 2] / expected[2, 2]
    yield Row(name="Si 220 over its kinematic intensity at V x 0.01", value=float(ratio), least=0.999, most=1.001)


# -- thickness -------------------------------------------------------------------------------------------------------


def vanishing_specimen() -> Iterator[Row]:
    """t -> 0: what leaves the disc goes to nothing, with the square of the potential."""
    spec = specification(cubic("Au"), sampling={"semiangle_mrad": 20, "thickness_A": 2})
    (ly, lx), (ny, nx) = spec.structure.extent_yx_A, spec.grid_yx
    angle = spec.wavelength_A * 1e3 * np.hypot(np.fft.fftfreq(ny, ly / ny)[:, None], np.fft.fftfreq(nx, lx / nx))
    outside = angle > 20 + spec.wavelength_A * 1e3 / min(lx, ly)
    scattered = []
    with simulator().configured():
        slices = simulator().static_slices(spec)
        for factor in (0.0, 0.01, 0.02):
            weaker = Slices(different=slices.different * factor, order=slices.order)
            intensity = simulator().exit_intensity(spec, weaker, np.array([[3.0, 4.0]]))[0]
            scattered.append(float(intensity[outside].sum() / intensity.sum()))
    yield Row(name="scattered out of the disc by nothing", value=scattered[0], most=1e-20)
    yield Row(
        name="scattered by V x 0.02 over that by V x 0.01", value=scattered[2] / scattered[1], least=3.9, most=4.1
    )


def plane_wave_intensities(**changes: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Si[001] at 200 kV: thickness in whole periods (Å), and intensities (thickness, ky, kx) of a plane wave."""
    changes["grid"] = {"slice_thickness_A": 1.36} | changes.pop("grid", {})
    spec = specification(cubic("Si"), single_cell=True, **changes)
    assert math.isclose(spec.structure.lengths_A[0], 5.43 / math.sqrt(2), rel_tol=1e-6)  # x along [110]
    planes = range(spec.structure.slices, spec.exit_plane + 1, spec.structure.slices)
    with simulator().configured():
        spectra = simulator().plane_waves(spec, simulator().static_slices(spec), list(planes))
    return np.array(planes) * spec.structure.slice_thickness_A, np.abs(spectra) ** 2


def minima(t: NDArray[np.float64], y: NDArray[np.float64]) -> list[float]:
    """Where y has its minima, by a parabola through three points."""
    found = []
    for k in range(1, len(y) - 1):
        if y[k] < y[k - 1] and y[k] <= y[k + 1]:
            shift = 0.5 * (y[k - 1] - y[k + 1]) / (y[k - 1] - 2 * y[k] + y[k + 1])
            found.append(float(t[k] + shift * (t[1] - t[0])))
    return found


def pendelloesung() -> Iterator[Row]:
    """Where the incident beam comes and goes: on the zone axis, and tilted to the Bragg angle of 220."""
    t, intensity = plane_wave_intensities(sampling={"thickness_A": 520}, grid={"sampling_A": 0.06})
    first, second = minima(t, intensity[:, 0, 0])
    yield Row(name="first minimum of I000 of Si[001], Å", value=first, least=157, most=169)
    yield Row(name="second minimum, Å", value=second, least=472, most=484)
    # 220 lies along x. 30 mrad about the row of its reflections leave no third beam.
    bragg = 1e3 * 0.0250793 / 2 / (5.43 / math.sqrt(8))
    tilt = {"tilt_x_mrad": bragg, "tilt_y_mrad": 30}
    t, intensity = plane_wave_intensities(sampling={"thickness_A": 560, **tilt}, grid={"sampling_A": 0.12})
    (only,) = minima(t, intensity[:, 0, 0])
    yield Row(name="minimum of I000 at two beams, 220, Å", value=only, least=473, most=493)


def bloch_waves() -> Iterator[Row]:
    """abTEM's Bloch waves, an eigenvalue problem without slices: the incident beam up to 163 Å."""
    configure_abtem()
    from abtem.bloch import BlochWaves, StructureFactor

    t, intensity = plane_wave_intensities(sampling={"thickness_A": 163}, grid={"sampling_A": 0.06})
    factor = StructureFactor(bulk("Si", cubic=True), g_max=8.0, parametrization="lobato")
    patterns = BlochWaves(factor, energy=200e3, sg_max=0.1, g_max=4.0).calculate_diffraction_patterns(t, lazy=False)
    incident = [tuple(hkl) for hkl in patterns.miller_indices].index((0, 0, 0))
    difference = np.abs(np.asarray(patterns.array)[:, incident] - intensity[:, 0, 0]).max()
    yield Row(name="I000 of Si[001] against Bloch waves, to 163 Å", value=float(difference), most=0.02)


# -- probes ----------------------------------------------------------------------------------------------------------


def full_detector_sum() -> Iterator[Row]:
    """The whole grid never holds more than the beam; what a detector catches has converged with the grid."""
    most = 0.0
    for name in ("Si", "Au"):
        for fast in ("abtem", "fast"):
            simulates = simulator(fast, "float32")
            spec = specification(cubic(name), sampling={"thickness_A": 50})
            with simulates.configured():
                slices = simulates.static_slices(spec)
                whole = simulates.exit_intensity(spec, slices, np.array([[3.0, 4.0], [5.5, 1.0]])).sum((-2, -1))
                most = max(most, float(whole.max()) / simulates._incident_norm(spec))
    yield Row(name="whole grid over the beam, largest, float32", value=most, most=1 + 1e-5)
    coarse, fine = (caught("Au", sampling, 102, (0.0, 0.0)) for sampling in (0.19, 0.12))
    yield Row(name="Au 102 Å, probe on a column, whole grid of 0.19 Å over the beam", value=coarse[0], most=1 + 1e-5)
    yield Row(name="the same on a grid of 0.12 Å, over it: hardly more", value=fine[0] / coarse[0], most=1.1)
    coarse, fine = (caught("Si", sampling, 50, (1.0, 0.5)) for sampling in (0.2, 0.1))
    ratio = fine[1] / coarse[1]
    yield Row(name="Si 50 Å inside 40 mrad, grid of 0.1 Å over 0.2 Å", value=ratio, least=0.99, most=1.01)


def caught(name: str, sampling_A: float, thickness_A: float, point_yx: tuple[float, float]) -> tuple[float, float]:
    """Of a beam of 15 mrad and 200 keV, what the whole grid and what a detector of 40 mrad hold."""
    spec = specification(cubic(name), sampling={"thickness_A": thickness_A}, grid={"sampling_A": sampling_A})
    (ly, lx), (ny, nx) = spec.structure.extent_yx_A, spec.grid_yx
    angle = spec.wavelength_A * 1e3 * np.hypot(np.fft.fftfreq(ny, ly / ny)[:, None], np.fft.fftfreq(nx, lx / nx))
    simulates = simulator("fast", "float32")
    with simulates.configured():
        intensity = simulates.exit_intensity(spec, simulates.static_slices(spec), np.array([point_yx]))[0]
        intensity /= simulates._incident_norm(spec)
    return float(intensity.sum()), float(intensity[angle < 40].sum())


def fourfold() -> Iterator[Row]:
    """Si[001], the probe on a column, slices of a whole cell: fourfold about [Q//2, Q//2]."""
    spec = specification(
        cubic("Si"),
        grid={"sampling_A": 0.12, "slice_thickness_A": 5.43},
        sampling={"thickness_A": 22, "semiangle_mrad": 12},
        detector={"shape": [32, 32], "max_q_per_A": 1.5},
    )
    x, y, _ = spec.structure.positions_A[0]
    centred = replace(spec, scan_origin_yx_A=(y, x))
    for name in ("abtem", "fast"):
        (made,) = simulator(name, "float32").simulate([centred])
        pattern = made.arrays["cbed"][0, 0, 1:, 1:].astype(np.float64)
        value = float(np.abs(pattern - np.rot90(pattern)).max())
        yield Row(name=f"Si[001] against itself turned by 90°, {name}, float32", value=value, most=1e-5)


def defocus_is_propagation() -> Iterator[Row]:
    """A probe of defocus 60 Å, after 60 Å of vacuum, is the focused probe: largest difference over the peak."""
    for precision, most in (("float32", 1e-5), ("float64", 1e-12)):
        simulates = simulator("abtem", precision)
        common: dict[str, Any] = {"cell": {"min_extent_A": 30}, "grid": {"sampling_A": 0.1}}
        focused = specification(cubic("Al"), sampling={"semiangle_mrad": 20, "thickness_A": 2}, **common)
        ahead = specification(
            cubic("Al"), sampling={"semiangle_mrad": 20, "thickness_A": 60, "defocus_A": 60}, **common
        )
        waves = []
        for spec, count in ((focused, 0), (ahead, 60)):
            structure = replace(spec.structure, slices=1, lengths_A=(*spec.structure.lengths_A[:2], 1.0))
            with simulates.configured():
                scan = simulates._scan(np.array([[8.0, 8.0]]))
                probe = simulates._probe(spec)
                if count:
                    vacuum = np.zeros((count, *spec.grid_yx[::-1]), simulates.real)
                    made = probe.multislice(simulates._potential_array(structure, vacuum), scan=scan, lazy=False)
                else:
                    made = probe.build(scan, lazy=False)
            waves.append(np.abs(np.asarray(made.array)[0]) ** 2)
        value = float(np.abs(waves[0] - waves[1]).max() / waves[0].max())
        yield Row(name=f"defocused probe against a propagated one, {precision}", value=value, most=most)


def crystal_without_symmetry() -> StructureSpec:
    """Four atoms anywhere in a cell that is not square, four slices a period."""
    plain = specification(cubic("Al")).structure
    return replace(
        plain,
        key="four atoms",
        numbers=(79, 14, 8, 31),
        positions_A=((1.2, 3.0, 0.3), (6.6, 5.2, 3.4), (9.6, 13.5, 5.1), (3.0, 9.0, 6.9)),
        lengths_A=(12.0, 15.0, 8.0),
        repeat_xy=(2, 2),
        slices=4,
    )


ABERRATIONS = {"defocus_A": 40.0, "C12_A": 20.0, "phi12_deg": 25.0, "C30_A": 1e4, "C34_A": 5e3, "phi34_deg": 10.0}


def reciprocity() -> Iterator[Row]:
    """The axial point of a scanned pattern is the pixel of an image, with the lens and the specimen turned about.

    A probe with this aperture and these aberrations, detected in one point on the axis, against a plane wave through
    the slices in reverse order, imaged by the same lens at the probe's positions. The image must be focused one slice
    further upstream: a wave is propagated behind each slice, so that the last slice of one is the first of the other.
    Aberrations of odd symmetry would change sign; these have none. The lens is ours and the probe abTEM's, whose
    constants of nature differ in the ninth digit.
    """
    crystal = crystal_without_symmetry()
    sampling = {"semiangle_mrad": 20, "thickness_A": 32, **ABERRATIONS}
    base = specification(cubic("Al"), sampling=sampling, grid={"sampling_A": 0.15})
    spec = replace(base, structure=crystal, exit_plane=16)
    points = np.array([[1.0, 2.0], [4.3, 7.7], [10.1, 3.3], [13.0, 11.0]])
    for name, precision, most in (("abtem", "float32", 1e-5), ("fast", "float32", 1e-5), ("fast", "float64", 1e-8)):
        simulates = simulator(name, precision)
        with simulates.configured():
            slices = simulates.static_slices(spec)
            scanned = simulates.exit_intensity(spec, slices, points)[:, 0, 0]
            probe = np.fft.fft2(simulates.optics(spec).probe.astype(np.complex128))  # (kx, ky)
            turned = Slices(different=slices.different[::-1], order=np.arange(len(slices.different))[slices.order])
            (exit_wave,) = simulates.plane_waves(spec, turned, [spec.exit_plane])
        # The detector's point sees sum_k P(k) S(k); the lens A(k) is P(k) over its value on the axis.
        imaged = [
            focal_images(
                exit_wave,
                crystal.extent_yx_A,
                spec.values,
                [spec.values["defocus_A"] + crystal.slice_thickness_A],
                shape=(1, 1),
                sampling_A=1.0,
                origin_yx_A=(y, x),
                rotation_deg=0.0,
                aperture_mrad=20.0,
            )[0, 0, 0]
            for y, x in points
        ]
        expected = np.array(imaged) * np.abs(probe[0, 0]) ** 2
        value = float(np.abs(scanned - expected).max() / expected.max())
        yield Row(name=f"scanned on the axis against imaged, {name}, {precision}", value=value, most=most)


def supercells() -> Iterator[Row]:
    """Si, 8 mrad, pixels of 0.03 /Å: one probe over two cells, after resampling onto one detector."""
    for narrow, wide in ((38.0, 76.0), (68.0, 100.0)):
        patterns, centres = [], []
        for extent in (narrow, wide):
            spec = specification(
                cubic("Si"),
                cell={"min_extent_A": extent, "max_atoms": 100_000},
                sampling={"semiangle_mrad": 8, "thickness_A": 50, "scan_origin": [1.0, 0.4]},
                detector={"shape": [48, 48], "max_q_per_A": 0.72},
            )
            (made,) = simulator("fast", "float32").simulate([spec])
            pattern = made.arrays["cbed"][0, 0].astype(np.float64)
            q = np.arange(48) - 24
            centres.append(np.array([(pattern.sum(1 - axis) * q).sum() / pattern.sum() for axis in (0, 1)]))
            patterns.append(pattern)
        apart = np.abs(patterns[0] - patterns[1]).max() / patterns[1].max()
        moved = np.abs(centres[0] - centres[1]).max()
        cells = f"cells of {narrow:g} and {wide:g} Å"
        enough = narrow * 0.03 >= 2  # points of the grid in a pixel; else the plan reports it
        most = 0.05 if enough else 0.16
        yield Row(name=f"Si in {cells}, apart over the maximum", value=float(apart), most=most)
        yield Row(name=f"Si in {cells}, centre of mass apart, pixels", value=float(moved), most=0.02)


def scattering_matrix() -> Iterator[Row]:
    """The same patterns from beams of the same soft aperture as from probes, over their largest."""
    spec = specification(
        cubic("Si"), sampling={"semiangle_mrad": 10, "thickness_A": 50}, scan={"shape": [2, 2], "step_A": 0.5}
    )
    for precision in ("float32", "float64"):
        pairs = (SMatrixSimulator(precision=precision), simulator("fast", precision))  # type: ignore[arg-type]
        matrix, probes = (next(iter(one.simulate([spec]))).arrays["cbed"] for one in pairs)
        value = float(np.abs(matrix - probes).max() / probes.max())
        yield Row(name=f"scattering matrix against multislice, {precision}", value=value, most=5e-6)


GATES: dict[str, Callable[[], Iterator[Row]]] = {
    gate.__name__: gate
    for gate in (
        full_detector_sum,
        friedel,
        kinematic_limit,
        vanishing_specimen,
        pendelloesung,
        fourfold,
        bloch_waves,
        mean_inner_potential,
        defocus_is_propagation,
        reciprocity,
        supercells,
        scattering_matrix,
    )
}


def main(names: Sequence[str]) -> int:
    rows, targets = [], []
    for name in names or GATES:
        began = time.perf_counter()
        found = list(GATES[name]())
        seconds = round(time.perf_counter() - began, 2)
        rows.append({"gate": name, "rows": len(found), "seconds": seconds})
        targets += [
            {"name": row.name, "value": float(f"{row.value:.6g}"), "target": row.required, "holds": row.holds}
            for row in found
        ]
    machine = {"machine": platform.machine(), "python": platform.python_version(), "numpy": np.__version__}
    print(json.dumps({"bench": "physics", "machine": machine, "rows": rows, "targets": targets}, indent=1))
    return 0 if all(target["holds"] for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
