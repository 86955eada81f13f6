"""The classical reconstructions against an analytic phase object: sign, axes, unit and size."""

from __future__ import annotations

import numpy as np
import pytest
import train_data as fake

from exitwave.train.classical import (
    centre_of_mass,
    coarsest_step_A,
    integrate_gradient,
    interaction_parameter_rad_per_VA,
    probe_diameter_A,
    quadrant_dpc,
    reconstruct,
    to_label_grid,
    wavelength_A,
)


def test_constants_against_the_textbook():
    # Kirkland, table of chapter 2 and 5: 100 keV, 200 keV, 300 keV
    assert [wavelength_A(e) for e in (100, 200, 300)] == pytest.approx([0.03701, 0.02508, 0.01969], abs=1e-5)
    sigma = [interaction_parameter_rad_per_VA(e) for e in (100, 200, 300)]
    assert sigma == pytest.approx([0.0009244, 0.0007288, 0.0006526], abs=2e-7)
    assert probe_diameter_A(200, 20) == pytest.approx(1.22 * 0.02508 / 0.020, rel=1e-3)
    assert coarsest_step_A(100, 15) == pytest.approx(0.617, abs=1e-3)


def _weak_sample(energy_keV: float = 100.0, semiangle_mrad: float = 20.0):
    """Patterns over a whole period of a smooth weak potential: no edge, so the theory is exact to first order."""
    n, extent = fake.GRID, fake.EXTENT_A
    at = np.arange(n) * fake.SAMPLING_A
    y, x = np.meshgrid(at, at, indexing="ij")
    field = 20 * np.sin(2 * np.pi * 2 * y / extent + 0.3) + 12 * np.cos(2 * np.pi * (x - 2 * y) / extent)
    probes = np.stack([y[::4, ::4].ravel(), x[::4, ::4].ravel()], axis=1)
    cbed = fake.diffract(field, probes, energy_keV=energy_keV, semiangle_mrad=semiangle_mrad)
    return field, cbed.reshape(n // 4, n // 4, fake.DETECTOR, fake.DETECTOR)


def _blurred_gradient(field: np.ndarray, energy_keV: float, semiangle_mrad: float):
    """∇(|P|² ⋆ V) by Fourier transforms: (2, n, n) [V]."""
    q = np.fft.fftfreq(fake.GRID, fake.SAMPLING_A)
    qy, qx = q[:, None], q[None, :]
    aperture = np.hypot(qy, qx) * wavelength_A(energy_keV) <= semiangle_mrad * 1e-3
    intensity = np.abs(np.fft.ifft2(aperture)) ** 2
    blurred = np.fft.fft2(field) * np.fft.fft2(intensity / intensity.sum())
    return np.stack([np.fft.ifft2(2j * np.pi * k * blurred).real for k in (qy, qx)])


def test_centre_of_mass_is_the_blurred_gradient_times_sigma_over_two_pi():
    field, cbed = _weak_sample()
    q = 1 / fake.EXTENT_A
    com = centre_of_mass(cbed, (q, q))
    expected = interaction_parameter_rad_per_VA(100) / (2 * np.pi) * _blurred_gradient(field, 100, 20)[:, ::4, ::4]
    assert np.abs(com - expected).max() < 0.01 * np.abs(expected).max()


def test_quadrants_estimate_the_centre_of_mass():
    _, cbed = _weak_sample()
    q = 1 / fake.EXTENT_A
    com = centre_of_mass(cbed, (q, q))
    dpc = quadrant_dpc(cbed, (q, q), disc_radius_per_A=0.020 / wavelength_A(100))
    slope = float((dpc * com).sum() / (com * com).sum())
    assert 0.7 < slope < 1.4  # a disc of seven pixels' radius, cut into coarse halves
    assert np.corrcoef(dpc.ravel(), com.ravel())[0, 1] > 0.97


def test_a_probe_beside_an_atom_is_drawn_towards_it():
    at = np.arange(fake.GRID) * fake.SAMPLING_A
    middle = fake.EXTENT_A / 2
    field = fake.potential(np.array([[middle, middle]]), np.array([300.0]), at, at)
    cbed = fake.diffract(field, np.array([[middle, middle - 0.5]]), energy_keV=100, semiangle_mrad=20)
    y, x = centre_of_mass(cbed[None], (1.0, 1.0))[:, 0, 0]
    assert x > 0.1
    assert abs(y) < 1e-3 * x


def test_integration_is_exact_for_what_the_trapezoid_integrates():
    y, x = np.meshgrid(np.arange(7) * 0.5, np.arange(9) * 0.8, indexing="ij")
    image = 1.5 * y**2 - 0.7 * x * y + 2 * x + 0.3 * x**2
    gradient = np.stack([3.0 * y - 0.7 * x, -0.7 * y + 2 + 0.6 * x])
    assert np.allclose(integrate_gradient(gradient, (0.5, 0.8)), image - image.mean())


def test_integration_is_the_least_squares_solution():
    rng = np.random.default_rng(0)
    gradient = rng.normal(size=(2, 4, 5))
    rows, rhs = [], []
    for i in range(4):
        for j in range(5):
            for axis, (a, b) in enumerate(((i + 1, j), (i, j + 1))):
                if a < 4 and b < 5:
                    row = np.zeros((4, 5))
                    row[a, b], row[i, j] = 1, -1
                    rows.append(row.ravel())
                    rhs.append(0.5 * (gradient[axis, a, b] + gradient[axis, i, j]))
    solution = np.linalg.lstsq(np.array(rows), np.array(rhs), rcond=None)[0].reshape(4, 5)
    assert np.allclose(integrate_gradient(gradient, (1.0, 1.0)), solution - solution.mean())


def test_label_grid_shares_the_origin():
    ramp = np.arange(8.0)[:, None] + np.zeros((1, 8))
    out = to_label_grid(ramp, (32, 32))
    assert np.allclose(out[:29:4, 0], np.arange(8), atol=1e-6)


@pytest.mark.parametrize("rotation_deg", [0.0, 30.0, -75.0])
@pytest.mark.parametrize("method", ["com", "idpc"])
def test_reconstruction_resembles_the_label_in_place_and_size(method, rotation_deg):
    sample = fake.sample(2, 0, rotation_deg=rotation_deg)
    got = reconstruct(sample["cbed"], sample["params"], (32, 32), method=method)
    truth = sample["potential"] - sample["potential"].mean()
    inside = (slice(0, 29), slice(0, 29))
    assert np.corrcoef(got[inside].ravel(), truth[inside].ravel())[0, 1] > 0.85
    transposed = np.corrcoef(got[inside].T.ravel(), truth[inside].ravel())[0, 1]
    assert transposed < 0.8
    slope = float((got * truth).sum() / (got * got).sum())
    assert 0.5 < slope < 3.0  # the probe blurs peaks away, nothing else


def test_an_unknown_method_is_refused():
    sample = fake.sample(0, 0)
    with pytest.raises(ValueError, match="expected com or idpc"):
        reconstruct(sample["cbed"], sample["params"], (32, 32), method="magic")
