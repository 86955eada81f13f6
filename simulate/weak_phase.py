"""A second simulator, in NumPy alone: one thin phase object, without propagation inside the specimen.

It is no substitute for multislice. It is the oracle of the tests: a few lines of textbook optics, independent of abTEM,
in float64, by which axes, signs, registration and normalisation of the reference are checked, and the proof that the
seam carries more than one implementation.

The exit wave is psi(r - r_p) exp(i sigma V(r)) (Kirkland, "Advanced Computing in Electron Microscopy", eq. 5.25), and V
is the sum of the atoms' projected potentials in Wentzel's model, a screened Coulomb potential with radius
R = a_0 Z^(-1/3), whose transform is analytic (Reimer and Kohl, "Transmission Electron Microscopy", eq. 5.16):

    V_atom(k) = (e Z / epsilon_0) / (4 pi^2 k^2 + 1 / R^2)        in V Å^3
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exitwave.ingest.errors import UsageError
from exitwave.simulate.detector import resampling
from exitwave.simulate.fitness import conflict
from exitwave.simulate.imaging import focal_images, objective
from exitwave.simulate.label import project_label
from exitwave.simulate.physics import ANTIALIAS_CUTOFF, ANTIALIAS_TAPER, interaction_parameter
from exitwave.simulate.scanning import in_cell_axes, lattice_rotation_deg, probe_positions, scan_patterns
from exitwave.simulate.simulator import Sample
from exitwave.simulate.tasks import SampleSpec
from exitwave.simulate.threads import single_threaded

__all__ = ["WeakPhaseSimulator", "probe_spectrum", "wentzel_projected"]

_BOHR_A = 0.529177210903
_E_OVER_EPSILON0_V_A = 180.95128  # e / epsilon_0 in V Å


def probe_spectrum(
    values: Mapping[str, float], grid_yx: tuple[int, int], extent_yx_A: tuple[float, float]
) -> NDArray[np.complex128]:
    """The probe at the origin in diffraction space, (Ny, Nx), zero frequency first; its intensity sums to 1."""
    spectrum = objective(values, grid_yx, extent_yx_A, values["semiangle_mrad"])
    return spectrum / math.sqrt(float((np.abs(spectrum) ** 2).sum()))


def wentzel_projected(spec: SampleSpec) -> NDArray[np.float64]:
    """Projected potential of the atoms up to the exit plane, (Ny, Nx) in V Å, on the grid of the sample."""
    (ny, nx), (ly, lx) = spec.grid_yx, spec.structure.extent_yx_A
    repeat_z = math.ceil(spec.exit_plane / spec.structure.slices)
    numbers, positions, _ = spec.structure.tiled(repeat_z)
    inside = positions[:, 2] < spec.thickness_A
    ky = np.fft.fftfreq(ny, d=ly / ny)
    kx = np.fft.fftfreq(nx, d=lx / nx)
    k2 = ky[:, None] ** 2 + kx[None, :] ** 2
    spectrum = np.zeros((ny, nx), dtype=np.complex128)
    for number in np.unique(numbers):
        x, y = positions[inside & (numbers == number), :2].T
        shifts = np.exp(-2j * np.pi * ky[:, None] * y) @ np.exp(-2j * np.pi * kx[:, None] * x).T
        radius = _BOHR_A * float(number) ** (-1.0 / 3.0)
        spectrum += shifts * (_E_OVER_EPSILON0_V_A * number / (4.0 * np.pi**2 * k2 + radius**-2))
    cutoff = (ANTIALIAS_CUTOFF - ANTIALIAS_TAPER) * min(ny / ly, nx / lx) / 2.0
    return np.fft.ifft2(np.where(k2 <= cutoff**2, spectrum, 0.0)).real * (ny * nx) / (ly * lx)


class WeakPhaseSimulator:
    """The oracle as a Simulator. It knows neither propagation inside the specimen nor phonons nor tilt."""

    name = "weak-phase"
    version = "1"

    def simulate(self, specs: Sequence[SampleSpec]) -> Iterator[Sample]:
        for spec in specs:
            with single_threaded():
                sample = self._simulate(spec)
            yield sample

    def _simulate(self, spec: SampleSpec) -> Sample:
        recipe, extent, grid = spec.recipe, spec.structure.extent_yx_A, spec.grid_yx
        if (reason := conflict(recipe, self.name)) is not None:
            raise UsageError(reason)
        values = in_cell_axes(spec.values)
        rotation = lattice_rotation_deg(spec.values)
        projected = wentzel_projected(spec)
        transmission = np.exp(1j * interaction_parameter(values["energy_keV"]) * projected)
        spectrum = probe_spectrum(values, grid, extent)
        turn = values["crystal_rotation_deg"]
        detect = resampling(grid, extent, recipe.detector.shape, spec.q_sampling_yx_per_A, turn)
        ky = np.fft.fftfreq(grid[0], d=extent[0] / grid[0])[:, None]
        kx = np.fft.fftfreq(grid[1], d=extent[1] / grid[1])[None, :]
        points = probe_positions(spec)
        patterns = np.empty((len(points), *recipe.detector.shape))
        for pattern, (y, x) in zip(patterns, points, strict=True):
            probe = np.fft.ifft2(spectrum * np.exp(-2j * np.pi * (ky * y + kx * x)))
            pattern[...] = detect(np.abs(np.fft.fft2(probe * transmission)) ** 2)
        cbed = scan_patterns(spec, patterns)
        where: dict[str, Any] = {"origin_yx_A": spec.scan_origin_yx_A, "rotation_deg": rotation}
        label = project_label(
            projected,
            extent,
            shape=recipe.label.shape,
            sampling_A=recipe.label_sampling_A,
            blur_A=recipe.label.blur_A,
            bandlimit_per_A=spec.label_bandlimit_per_A,
            **where,
        )
        arrays = {"cbed": cbed, "potential": label}
        if recipe.images is not None:
            arrays["focus_A"] = np.array(spec.focus_A)
            arrays["images"] = focal_images(
                np.fft.fft2(transmission) / transmission.size,
                extent,
                values,
                spec.focus_A,
                shape=recipe.images_shape,
                sampling_A=recipe.images_sampling_A,
                aperture_mrad=recipe.images.aperture_mrad,
                focal_spread_A=recipe.images.focal_spread_A,
                **where,
            )
        params = spec.params(captured_fraction=float(cbed.sum(axis=(-2, -1)).mean()))
        params["simulator"] = self.name.encode()
        return Sample(
            uid=spec.uid,
            params=params,
            arrays={name: arrays[name].astype(np.float32) for name in recipe.array_fields},
        )
