"""Images of the exit wave against abTEM's plane waves and lenses: propagation, aberrations, focus, registration."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sim_samples import four_atoms, sample, single_atom

from exitwave.simulate.abtem_backend import AbtemSimulator
from exitwave.simulate.imaging import focal_images, plane_wave
from exitwave.simulate.multislice import FastSimulator
from exitwave.simulate.tasks import SampleSpec

ABERRATED = {
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
ABTEM, FAST = AbtemSimulator(precision="float64"), FastSimulator(precision="float64")


def crystal(thickness: float, **sampling: Any) -> SampleSpec:
    return sample(
        four_atoms(x_A=12.0, y_A=12.0), grid={"sampling_A": 0.25}, sampling={"thickness_A": thickness, **sampling}
    )


def abtem_wave(spec: SampleSpec) -> Any:
    """abTEM's own plane wave behind the specimen, with the sample's tilt."""
    import abtem

    y, x = spec.structure.extent_yx_A
    wave = abtem.PlaneWave(
        energy=spec.values["energy_keV"] * 1e3,
        tilt=(spec.values["tilt_x_mrad"], spec.values["tilt_y_mrad"]),
        extent=(x, y),
        gpts=spec.grid_yx[::-1],
        normalize=False,
    )
    return wave.multislice(ABTEM._potential_array(spec.structure, ABTEM.static_slices(spec).stacked()), lazy=False)


@pytest.mark.parametrize("tilt", [0.0, 7.0])
def test_the_wave_is_abtems(tilt: float) -> None:
    spec = sample(
        four_atoms(y_A=15.0),
        grid={"sampling_A": 0.25},
        sampling={"thickness_A": 24, "tilt_x_mrad": tilt, "tilt_y_mrad": -tilt / 2},
    )
    for simulator in (ABTEM, FAST):
        with simulator.configured():
            slices = simulator.static_slices(spec)
            thinner, spectrum = simulator.plane_waves(spec, slices, [4, spec.exit_plane])
            theirs = np.fft.fft2(np.asarray(abtem_wave(spec).array)).T / np.prod(spec.grid_yx)
            assert np.abs(spectrum - theirs).max() < 1e-12
            assert np.array_equal(thinner, simulator.plane_waves(spec, slices, [4])[0])
            nothing = simulator.plane_waves(spec, slices, [0])[0]
            assert nothing[0, 0] == 1 and np.abs(nothing).sum() == 1


@pytest.mark.parametrize("shape", [(48, 48), (60, 56), (54, 49)])
def test_slices_in_single_precision_are_passed_in_double(shape: tuple[int, int]) -> None:
    """240 slices that only turn phases; transforms in single precision were off by up to 2e-5."""
    generator = np.random.default_rng(1)
    slices, propagator = (np.exp(1j * generator.uniform(-most, most, shape)) for most in (0.5, np.pi))
    single = slices.astype(np.complex64), propagator.astype(np.complex64)
    found = plane_wave([single[0]], [0] * 240, single[1], [240])[0]
    exact = plane_wave([single[0].astype(complex)], [0] * 240, single[1].astype(complex), [240])[0]
    assert np.abs(found - exact).max() <= 1e-12 * np.abs(exact).max()


def imaged(spec: SampleSpec, spectrum: np.ndarray, focus: list[float], **changes: Any) -> np.ndarray:
    (ly, _), (ny, nx) = spec.structure.extent_yx_A, spec.grid_yx
    where: dict[str, Any] = {
        "shape": (ny, nx),
        "sampling_A": ly / ny,
        "origin_yx_A": (0.0, 0.0),
        "rotation_deg": 0.0,
    }
    return focal_images(spectrum, spec.structure.extent_yx_A, spec.values, focus, **(where | changes))


def test_the_lens_is_abtems() -> None:
    """Every aberration of the convention, with an aperture: on the grid's own points, the same intensities."""
    spec = sample(
        four_atoms(), grid={"sampling_A": 0.25}, sampling={"thickness_A": 24, "semiangle_mrad": 20, **ABERRATED}
    )
    with ABTEM.configured():
        (spectrum,) = ABTEM.plane_waves(spec, ABTEM.static_slices(spec), [spec.exit_plane])
        probe = ABTEM._probe(spec)
        for focus in (-70.0, 110.0):
            import abtem

            aberrations = {**dict(probe.aberrations.aberration_coefficients), "C10": -focus}
            lens = abtem.CTF(semiangle_cutoff=20, aberration_coefficients=aberrations, soft=True)
            theirs = np.abs(np.asarray(abtem_wave(spec).apply_ctf(lens).array).T) ** 2
            (ours,) = imaged(spec, spectrum, [focus], aperture_mrad=20.0)
            assert theirs.std() > 0.01 * theirs.mean()
            assert np.abs(ours - theirs).max() < 1e-6 * theirs.max()


def test_positive_focus_looks_upstream() -> None:
    """Behind 60 Å of vacuum, at focus 60 Å, the image is that of the thin specimen in focus."""
    near = sample(single_atom(), sampling={"scan_origin": [8, 8]})
    with ABTEM.configured():
        slices = ABTEM.static_slices(near)
        optics = ABTEM.optics(near)
        transmissions = list(ABTEM.bandlimited(near, slices, optics.aperture))
        vacuum = np.ones_like(transmissions[0])
        waves = plane_wave([*transmissions, vacuum], [0] + 15 * [1], optics.propagator, [1, 16])
    here, there = np.swapaxes(waves, -1, -2)
    (focused,) = imaged(near, here, [0.0], aperture_mrad=30.0)
    downstream, upstream = imaged(near, there, [-60.0, 60.0], aperture_mrad=30.0)
    assert focused.std() > 1e-3
    assert np.abs(upstream - focused).max() < 1e-6
    assert np.abs(downstream - focused).max() > 1e-3


def test_focal_spread_is_a_mean_over_focus() -> None:
    spec = crystal(12)
    with ABTEM.configured():
        (spectrum,) = ABTEM.plane_waves(spec, ABTEM.static_slices(spec), [spec.exit_plane])
    where = {"shape": (6, 6), "sampling_A": 1.0, "aperture_mrad": 15.0}
    steps = np.linspace(-4, 4, 81)
    weights = np.exp(-(steps**2) / 2)
    series = imaged(spec, spectrum, list(50.0 + 20.0 * steps), **where)
    expected = np.tensordot(weights / weights.sum(), series, 1)
    (spread,) = imaged(spec, spectrum, [50.0], focal_spread_A=20.0, **where)
    (sharp,) = imaged(spec, spectrum, [50.0], **where)
    assert np.abs(spread - expected).max() < 1e-3 * np.abs(sharp - expected).max()


def test_without_a_specimen_an_image_is_the_beam() -> None:
    spec = sample(single_atom())
    nothing = np.zeros(spec.grid_yx, complex)
    nothing[0, 0] = 1.0
    images = imaged(spec, nothing, [0.0, 300.0], aperture_mrad=10.0, shape=(5, 7), rotation_deg=20.0)
    assert images.shape == (2, 5, 7) and np.abs(images - 1).max() < 1e-12
