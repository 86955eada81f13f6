"""The reference simulator: abTEM, called eagerly. The only place that imports abTEM.

abTEM's arrays have axes (x, y) and exitwave's have (y, x): coordinates are the same, arrays are transposed on their way
out. One period of the crystal is sliced and laid one behind the other up to the exit plane, so that slice boundaries
repeat with the crystal. Each sample is one multislice run per phonon configuration, in batches of probe positions.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from exitwave.simulate.detector import Resampling, resampling
from exitwave.simulate.gpu import cupy_with_gpu, on_host
from exitwave.simulate.imaging import plane_wave
from exitwave.simulate.passes import passes
from exitwave.simulate.sample_fields import focal_series, potential_fields
from exitwave.simulate.scanning import in_cell_axes, lattice_rotation_deg, probe_positions, scan_patterns
from exitwave.simulate.simulator import MOST_EXCESS, Sample, UnphysicalError
from exitwave.simulate.slices import Slices, once
from exitwave.simulate.tasks import SampleSpec, StructureSpec
from exitwave.simulate.threads import single_threaded

__all__ = ["AbtemSimulator", "Optics", "batch_positions", "configure_abtem", "scattering_factor"]

# abTEM's names of the aberration coefficients; angles are given to it in radians.
_COEFFICIENTS = ("C12", "C21", "C23", "C30", "C32", "C34", "C50")
_ANGLES = ("phi12", "phi21", "phi23", "phi32", "phi34")


@cache
def configure_abtem() -> Any:
    """Import abTEM and set its process-wide configuration; once per process. Returns the module.

    `FFTW_ESTIMATE` is what makes the same bits in every process: a measured plan depends on the moment.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import abtem
    abtem.config.set(
        {
            "device": "cpu",
            "fft": "fftw",
            "precision": "float32",
            "fftw.planning_effort": "FFTW_ESTIMATE",
            "fftw.threads": 1,
            "num-workers": 1,
            "mkl.threads": 1,
            "dask.lazy": False,
            "diagnostics.progress_bar": False,
        }
    )
    return abtem


def scattering_factor(number: int, g_per_A: NDArray[np.floating]) -> NDArray[np.float64]:
    """Electron scattering factor f(g) of an element in Å, g = 1 / d in 1/Å (Lobato and Van Dyck 2014, eq. 16)."""
    from ase.data import chemical_symbols

    table = configure_abtem().parametrizations.LobatoParametrization().parameters
    a, b = np.asarray(table[chemical_symbols[number]], dtype=np.float64)
    square = np.asarray(g_per_A, dtype=np.float64)[..., None] ** 2
    factor: NDArray[np.float64] = (a * (2.0 + b * square) / (1.0 + b * square) ** 2).sum(-1)
    return factor


def batch_positions(grid_yx: tuple[int, int]) -> int:
    """Probe positions propagated together: about 4 MiB of waves, 8 to 32."""
    return max(8, min(32, 2**19 // (grid_yx[0] * grid_yx[1])))


@dataclass(frozen=True, kw_only=True, eq=False)
class Optics:
    """What the fast routes take from abTEM, (x, y); the last two in diffraction space, zero frequency first."""

    probe: NDArray[np.complexfloating]  # at the origin, before the specimen
    propagator: NDArray[np.complexfloating]  # Fresnel propagation over one slice, with tilt and antialias aperture
    aperture: NDArray[np.floating]  # antialias


class AbtemSimulator:
    """abTEM's multislice with its own probes and potentials."""

    name = "abtem"

    def __init__(
        self, *, precision: Literal["float32", "float64"] = "float32", device: Literal["cpu", "gpu"] = "cpu"
    ) -> None:
        """`device="gpu"`: abTEM's potentials and waves by CuPy, one process for each GPU; arrays come back to the host.

        Raises UsageError where CuPy or a GPU is missing.
        """
        self._abtem = configure_abtem()
        self.device = device
        self._cupy = cupy_with_gpu() if device == "gpu" else None
        self.version = f"{self._abtem.__version__}"
        self.precision = precision
        self.real = np.dtype(precision)
        self.complex = np.result_type(self.real, np.complex64)
        self._period: tuple[Any, NDArray[np.floating]] | None = None
        self._labelled: tuple[Any, dict[str, NDArray[np.float64]]] | None = None
        self._between: tuple[Any, NDArray[np.complexfloating], NDArray[np.floating]] | None = None

    def configured(self, planning: str = "FFTW_ESTIMATE") -> AbstractContextManager[Any]:
        """Within it, one thread and abTEM in this simulator's precision; `simulate` enters it itself.

        Benchmarks give abTEM its own way of `planning`, which is faster and not the same in every process.
        """
        stack = ExitStack()
        stack.enter_context(single_threaded())
        chosen = {"precision": self.precision, "fftw.planning_effort": planning, "device": self.device}
        stack.enter_context(self._abtem.config.set(chosen))
        return stack

    def simulate(self, specs: Sequence[SampleSpec]) -> Iterator[Sample]:
        for members in passes(specs):
            with self.configured():
                samples = self._simulate(members)
            if self._cupy is not None:  # blocks of one grid's size are of no use to another's
                self._cupy.get_default_memory_pool().free_all_blocks()
            yield from samples

    def _simulate(self, members: Sequence[SampleSpec]) -> list[Sample]:
        """The samples of one pass: means over its configurations; without phonons there is one, with atoms at rest."""
        deepest = max(members, key=lambda spec: spec.exit_plane)
        count = deepest.recipe.phonons.count
        sums: list[dict[str, NDArray[np.float64]]] = [{} for _ in members]
        for configuration in range(max(1, count)):
            slices = self.displaced_slices(deepest, configuration) if count else self.static_slices(deepest)
            for total, new in zip(sums, self._outputs(members, slices), strict=True):
                for name, values in new.items():
                    total[name] = total[name] + values if name in total else values
        made = []
        for spec, total in zip(members, sums, strict=True):
            arrays = {name: values / count for name, values in total.items()} if count > 1 else dict(total)
            if spec.recipe.label.atoms == "static":
                arrays |= self._static_potentials(spec)
            captured = float(arrays["captured"])
            if spec.recipe.images is not None:
                arrays["focus_A"] = np.array(spec.focus_A)
            named = {name: arrays[name].astype(np.float32) for name in spec.recipe.array_fields}
            params = spec.params(captured_fraction=captured)
            params["simulator"] = self.route(spec).encode()
            made.append(Sample(uid=spec.uid, params=params, arrays=named))
        return made

    def _static_potentials(self, spec: SampleSpec) -> dict[str, NDArray[np.float64]]:
        """The label's fields of the undisplaced crystal; neighbours often have the same, which is made once."""
        slices = self.static_slices(spec)
        recipe, turn = spec.recipe, lattice_rotation_deg(spec.values)
        where = (recipe.label, recipe.volume, recipe.fields, recipe.label_sampling_A, spec.scan_origin_yx_A, turn)
        key = (slices.key, spec.exit_plane, *where)
        if slices.key is None or self._labelled is None or self._labelled[0] != key:
            self._labelled = (key, potential_fields(spec, slices))
        return self._labelled[1]

    def route(self, spec: SampleSpec) -> str:
        """The name of the simulator that makes this sample."""
        return self.name

    def _outputs(self, members: Sequence[SampleSpec], slices: Slices) -> Iterator[dict[str, NDArray[np.float64]]]:
        """What each sample of a pass takes from one configuration, as fields; `captured`: of the beam, the part seen.

        That is the mean over the patterns' sums, or where no patterns are asked for, what the plane wave has left.
        """
        recipe = members[0].recipe
        patterns = self.pass_patterns(members, slices) if "cbed" in recipe.fields or recipe.images is None else None
        for place, spec in enumerate(members):
            cut = slices.up_to(spec.exit_plane)
            made: dict[str, NDArray[np.float64]] = {}
            if recipe.images is not None:
                (spectrum,) = self.plane_waves(spec, cut, [spec.exit_plane])
                made["images"] = focal_series(spec, spectrum)
                made["captured"] = (np.abs(spectrum.astype(np.complex128)) ** 2).sum()
            if patterns is not None:
                made["cbed"] = patterns[place]
                made["captured"] = self._captured(spec, patterns[place])
            if recipe.label.atoms == "phonon-mean":
                made |= potential_fields(spec, cut)
            yield made

    def _captured(self, spec: SampleSpec, patterns: NDArray[np.float64]) -> NDArray[np.float64]:
        """The part of the beam that patterns (…, Qy, Qx) hold, in the mean.

        Raises UnphysicalError where one holds more than entered, beyond what single precision rounds.
        """
        sums = patterns.sum(axis=(-2, -1))
        if not sums.max() <= 1.0 + MOST_EXCESS + 2.0 * spec.exit_plane * float(np.finfo(self.real).eps):
            raise UnphysicalError(
                f"{spec.structure.source}, sample {spec.sample_index}: a pattern holds {sums.max():.6f} of the beam, "
                f"at most {1 + MOST_EXCESS:g} expected: the grid of {spec.grid_sampling_A:.3g} Å is too coarse for "
                f"these atoms; grid.sampling_A of {0.8 * spec.grid_sampling_A:.2g} or less may do"
            )
        return np.asarray(sums.mean(), dtype=np.float64)

    # -- potential ---------------------------------------------------------------------------------------------------

    def static_slices(self, spec: SampleSpec) -> Slices:
        """Slices of the undisplaced crystal up to the exit plane."""
        structure, grid = spec.structure, spec.recipe.grid
        if grid.projection == "finite":  # the tails of an atom reach into neighbouring slices: no period stands alone
            repeat_z = math.ceil(spec.exit_plane / structure.slices)
            return once(self._build(spec, *structure.tiled(repeat_z))[: spec.exit_plane])
        key = (structure.key, structure.zone_axis, structure.repeat_xy, structure.slices, grid)
        if self._period is None or self._period[0] != key:
            self._period = (key, self._build(spec, *structure.tiled(1)))
        return Slices(different=self._period[1], order=np.arange(spec.exit_plane) % structure.slices, key=key)

    def displaced_slices(self, spec: SampleSpec, configuration: int) -> Slices:
        """Slices of one frozen-phonon configuration: each atom moved by independent Gaussians along x, y and z.

        Atoms are drawn period by period from the entrance surface on, so that the slices of a thinner specimen are the
        first of a thicker one's, to the bit; with finite projections that holds for the atoms alone.
        """
        structure = spec.structure
        finite = spec.recipe.grid.projection == "finite"
        # Behind the exit surface, further than an atom moves: from there atoms move into the last slices.
        numbers, positions, lengths = structure.tiled(1)
        rms = spec.phonon_rms_A(numbers)[:, None]
        beyond = 0 if finite else math.ceil(8.0 * float(rms.max()) / structure.lengths_A[2])
        periods = math.ceil(spec.exit_plane / structure.slices) + beyond
        generator = np.random.Generator(np.random.Philox(key=np.array([spec.phonon_seed, configuration], np.uint64)))
        moved = np.stack([positions + rms * generator.standard_normal(positions.shape) for _ in range(periods)])
        moved[..., 2] += lengths[2] * np.arange(periods)[:, None]
        moved, numbers = moved.reshape(-1, 3), np.tile(numbers, periods)
        box = lengths * np.array([1, 1, math.ceil(spec.exit_plane / structure.slices)])
        if not finite:  # those that left the specimen belong to its first slice
            moved[:, 2] = np.clip(moved[:, 2], 0.0, None)
            inside = moved[:, 2] < box[2]
            moved, numbers = moved[inside], numbers[inside]
        return once(self._build(spec, numbers, np.mod(moved, box), box)[: spec.exit_plane])

    def _build(self, spec: SampleSpec, numbers: Any, positions: Any, lengths: Any) -> NDArray[np.floating]:
        from ase import Atoms

        grid = spec.recipe.grid
        thickness = spec.structure.slice_thickness_A
        count = round(float(lengths[2]) / thickness)
        rows, columns = spec.grid_yx
        potential = self._abtem.Potential(
            Atoms(numbers=numbers, positions=positions, cell=np.diag(lengths), pbc=True),
            gpts=(columns, rows),
            slice_thickness=(thickness,) * count,
            parametrization=grid.parametrization,
            projection=grid.projection,
        )
        slices = on_host(potential.build(lazy=False).array)
        shape = (count, columns, rows)
        if slices.shape != shape or slices.dtype != self.real:
            raise RuntimeError(f"abTEM gave a potential of {slices.shape} {slices.dtype}, {shape} {self.real} expected")
        return slices

    # -- waves -------------------------------------------------------------------------------------------------------

    def pass_patterns(self, members: Sequence[SampleSpec], slices: Slices) -> list[NDArray[np.float64]]:
        """As `patterns`, of all samples of a pass; `slices` reach to the exit plane of the thickest."""
        return [self.patterns(spec, slices.up_to(spec.exit_plane)) for spec in members]

    def patterns(self, spec: SampleSpec, slices: Slices) -> NDArray[np.float64]:
        """Patterns on the detector (Ry, Rx, Qy, Qx), as parts of the incident beam."""
        detect = self.detector(spec)
        points = self.positions(spec)
        incident = self._incident_norm(spec)
        step = batch_positions(spec.grid_yx)
        stacked = slices.stacked()
        shape = spec.recipe.detector.shape
        out = np.empty((len(points), *shape))
        for start in range(0, len(points), step):
            intensity = self._exit_intensity(spec, stacked, points[start : start + step])
            out[start : start + step] = detect(intensity) / incident
        return scan_patterns(spec, out)

    def detector(self, spec: SampleSpec) -> Resampling:
        """From the cell's grid to the detector, against which the crystal may be turned."""
        rotation = spec.values["crystal_rotation_deg"]
        shape, q = spec.recipe.detector.shape, spec.q_sampling_yx_per_A
        return resampling(spec.grid_yx, spec.structure.extent_yx_A, shape, q, rotation)

    def positions(self, spec: SampleSpec) -> NDArray[np.float64]:
        """Probe positions (positions, 2) as (y, x) in Å, folded into the cell; see `probe_positions`."""
        return np.mod(probe_positions(spec), np.asarray(spec.structure.extent_yx_A))

    def exit_intensity(self, spec: SampleSpec, slices: Slices, points_yx: NDArray[np.float64]) -> NDArray[np.float64]:
        """Diffraction intensity on the whole grid, (positions, Ny, Nx), zero frequency first; not normalised."""
        return self._exit_intensity(spec, slices.stacked(), points_yx)

    def _exit_intensity(
        self, spec: SampleSpec, stacked: NDArray[np.floating], points_yx: NDArray[np.float64], *, lazy: bool = False
    ) -> NDArray[np.float64]:
        waves = self._probe(spec).multislice(
            self._potential_array(spec.structure, stacked), scan=self._scan(points_yx), lazy=lazy
        )
        if lazy:
            waves = waves.compute(scheduler="synchronous", progress_bar=False)
        return self._intensity(waves.array)

    def lazy_intensity(self, spec: SampleSpec, slices: Slices, points_yx: NDArray[np.float64]) -> NDArray[np.float64]:
        """As `exit_intensity`, by abTEM's lazy way on Dask's synchronous scheduler: for benchmarks only."""
        return self._exit_intensity(spec, slices.stacked(), points_yx, lazy=True)

    def plane_waves(self, spec: SampleSpec, slices: Slices, exit_planes: Sequence[int]) -> NDArray[np.complexfloating]:
        """Spectra of a plane wave of the sample's energy and tilt behind exit planes, (exit planes, Ny, Nx).

        Zero frequency first; the incident beam is 1 there. Exit planes count slices, ascending.
        """
        optics = self.optics(spec)
        transmissions = self.bandlimited(spec, slices, optics.aperture)
        spectra = plane_wave(list(transmissions), slices.order, optics.propagator, exit_planes)
        return np.swapaxes(spectra, -1, -2)

    def smatrix_patterns(self, members: Sequence[SampleSpec], slices: Slices) -> list[NDArray[np.floating]]:
        """Patterns of a pass by abTEM's own scattering matrix, eager, on its own detector: for benchmarks only."""
        spec = members[0]
        potential = self._potential_array(spec.structure, slices.up_to(spec.exit_plane).stacked())
        angle, energy = spec.values["semiangle_mrad"], spec.values["energy_keV"] * 1e3
        matrix = self._abtem.SMatrix(semiangle_cutoff=angle, energy=energy, potential=potential).build(lazy=False)
        reach = 1e3 * spec.recipe.detector.max_q(spec.wavelength_A) * spec.wavelength_A
        found = []
        for member in members:
            lens = self._abtem.CTF(energy=energy, semiangle_cutoff=angle, defocus=member.values["defocus_A"], soft=True)
            detector = self._abtem.PixelatedDetector(max_angle=reach)
            found.append(matrix.reduce(self._scan(self.positions(member)), ctf=lens, detectors=detector).array)
        return found

    def _potential_array(self, structure: StructureSpec, slices: NDArray[np.floating]) -> Any:
        y, x = structure.extent_yx_A
        return self._abtem.PotentialArray(
            slices if self._cupy is None else self._cupy.asarray(slices),
            slice_thickness=(structure.slice_thickness_A,) * len(slices),
            extent=(x, y),
        )

    def _scan(self, points_yx: NDArray[np.float64]) -> Any:
        return self._abtem.CustomScan(points_yx[:, ::-1])

    def _incident_norm(self, spec: SampleSpec) -> float:
        """Total intensity of the probe before the specimen: what patterns are fractions of."""
        waves = self._probe(spec).build(self._scan(np.zeros((1, 2))), lazy=False)
        return float(self._intensity(waves.array).sum())

    def _probe(self, spec: SampleSpec) -> Any:
        values = in_cell_axes(spec.values)
        aberrations = {name: values[f"{name}_A"] for name in _COEFFICIENTS}
        aberrations |= {name: math.radians(values[f"{name}_deg"]) for name in _ANGLES}
        aberrations["C10"] = -values["defocus_A"]
        y, x = spec.structure.extent_yx_A
        return self._abtem.Probe(
            energy=values["energy_keV"] * 1e3,
            semiangle_cutoff=values["semiangle_mrad"],
            soft=True,
            aberrations=aberrations,
            tilt=(values["tilt_x_mrad"], values["tilt_y_mrad"]),
            extent=(x, y),
            gpts=spec.grid_yx[::-1],
        )

    def _intensity(self, waves: Any) -> NDArray[np.float64]:
        """abTEM's waves (positions, x, y) -> intensity of their transform, (positions, y, x)."""
        import scipy.fft

        if waves.dtype != self.complex:
            raise RuntimeError(f"abTEM gave waves of {waves.dtype}, {self.complex} expected: its configuration changed")
        if self._cupy is not None:
            transformed = self._cupy.asnumpy(self._cupy.fft.fft2(waves, axes=(-2, -1)))
        else:
            transformed = scipy.fft.fft2(np.asarray(waves), axes=(-2, -1), workers=1)
        intensity = transformed.real.astype(np.float64) ** 2 + transformed.imag.astype(np.float64) ** 2
        return np.swapaxes(intensity, -1, -2)

    # -- what the fast multislice takes from abTEM -------------------------------------------------------------------

    def optics(self, spec: SampleSpec) -> Optics:
        """Probe, propagator and aperture of a sample, by abTEM's own formulas."""
        from abtem.antialias import antialias_aperture
        from abtem.multislice import FresnelPropagator

        (ly, lx), (ny, nx) = spec.structure.extent_yx_A, spec.grid_yx
        thickness, values = spec.structure.slice_thickness_A, in_cell_axes(spec.values)
        waves = self._probe(spec).build(self._scan(np.zeros((1, 2))), lazy=False)
        key = (ly, lx, ny, nx, thickness, *(values[name] for name in ("energy_keV", "tilt_x_mrad", "tilt_y_mrad")))
        if self._between is None or self._between[0] != key:  # samples often share it
            propagator = on_host(FresnelPropagator().get_array(waves, thickness))
            aperture = np.asarray(antialias_aperture((nx, ny), (lx / nx, ly / ny), np))
            self._between = (key, propagator, aperture)
        _, propagator, aperture = self._between
        return Optics(probe=on_host(waves.array)[0], propagator=propagator, aperture=aperture)

    def transmission(self, spec: SampleSpec, slices: NDArray[np.floating]) -> NDArray[np.complexfloating]:
        """exp(i sigma V) of each slice (slices, x, y); not yet band-limited."""
        potential = self._potential_array(spec.structure, slices)
        return on_host(potential.transmission_function(spec.values["energy_keV"] * 1e3).array)

    def bandlimited(
        self, spec: SampleSpec, slices: Slices, aperture: NDArray[np.floating]
    ) -> NDArray[np.complexfloating]:
        """Band-limited exp(i sigma V) of the different slices, (slices, x, y).

        The transforms' factor, one over the number of points, is rounded in single precision, and by it every slice
        would be wrong in the same direction: of 15 slices an intensity was off by 4e-6. A power of two stands in its
        place, which is exact, and what remains is divided in double precision.
        """
        import scipy.fft

        made = np.empty(slices.different.shape, dtype=self.complex)
        points = made[0].size
        power = 2.0 ** -(points.bit_length() - 1)
        passed, rest = aperture * self.real.type(power), np.float64(points * power)
        for index in range(len(made)):  # one by one: a whole stack would be held several times over
            plane = scipy.fft.fft2(self.transmission(spec, slices.different[index : index + 1])[0], workers=1)
            made[index] = scipy.fft.ifft2(plane * passed, norm="forward", workers=1) / rest
        return made
