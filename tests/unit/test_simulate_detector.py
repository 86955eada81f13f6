"""Resampling to a detector keeps the sum and the centre of mass, wherever the points of the grid lie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitwave.simulate.detector import flat_field_ripple, overlap_matrix, pixel_frequencies, resample


@given(
    points=st.integers(16, 200),
    extent=st.floats(8, 80),
    pixels=st.integers(8, 65),
    sampling=st.floats(0.01, 0.2),
    seed=st.integers(0, 2**32 - 1),
)
def test_sum_and_centre_of_mass_are_kept(points: int, extent: float, pixels: int, sampling: float, seed: int) -> None:
    matrix = overlap_matrix(points, extent, pixels, sampling)
    q = np.fft.fftfreq(points, d=extent / points)
    spread = max(1, np.ceil(1 / (extent * sampling) - 1e-9)) * sampling
    edge = pixel_frequencies(pixels, sampling)
    inside = (q - spread / 2 >= edge[0] - sampling / 2) & (q + spread / 2 <= edge[-1] + sampling / 2)
    intensity = np.random.default_rng(seed).random(points) * inside
    out = matrix @ intensity
    assert out.sum() == pytest.approx(intensity.sum(), abs=1e-9)
    assert edge @ out == pytest.approx(q @ intensity, abs=1e-9)
    assert matrix.min() >= 0 and matrix.sum(axis=0).max() <= 1 + 1e-12


def test_zero_frequency_falls_on_the_middle_pixel() -> None:
    for pixels in (32, 33):
        matrix = overlap_matrix(64, 16.0, pixels, 0.07)
        assert matrix[:, 0].argmax() == pixels // 2 and matrix[pixels // 2, 0] == pytest.approx(1.0)


def test_axes_are_rows_then_columns() -> None:
    rows, columns = overlap_matrix(32, 16.0, 8, 0.1), overlap_matrix(48, 16.0, 10, 0.1)
    intensity = np.zeros((3, 32, 48))
    intensity[:, 0, 2] = 1.0  # two steps of 1/16 along x
    out = resample(intensity, rows, columns)
    assert out.shape == (3, 8, 10)
    assert out[0].sum(axis=1).argmax() == 4 and out[0].sum(axis=0).argmax() == 6


@pytest.mark.parametrize(("n", "ripple"), [(1.2, 0.14), (1.5, 0.22), (2.0, 0.0), (2.5, 0.08), (3.0, 0.0), (3.5, 0.041)])
def test_a_flat_field_ripples_where_points_are_coarse(n: float, ripple: float) -> None:
    """`n` points of the grid in a pixel: what is told equals what a flat pattern shows, and is what it says."""
    told = flat_field_ripple(n / 0.075, 0.075, 32)
    assert told == pytest.approx(ripple, abs=0.003)
    matrix = overlap_matrix(200, n / 0.075, 32, 0.075)
    line = resample(np.ones((200, 200)), matrix, matrix)[16]
    assert np.ptp(line) / line.mean() == pytest.approx(told, abs=1e-9)


def test_beyond_half_a_pixel_the_ripple_is_small() -> None:
    assert max(flat_field_ripple(n / 0.06, 0.06, 64) for n in np.arange(2, 3, 0.02)) <= 0.0801
    assert max(flat_field_ripple(n / 0.06, 0.06, 64) for n in np.arange(3, 8, 0.02)) <= 0.041


def test_two_cells_of_one_crystal_look_alike() -> None:
    """A disc sampled by cells of 27 and 54 Å, pixels of 0.075 /Å: within 0.05 of the maximum, centre kept."""
    patterns = []
    for extent in (27.0, 54.0):
        n = 128 * int(extent / 27)
        q = np.fft.fftfreq(n, d=extent / n)
        disc = np.clip((0.6 - np.hypot(q[:, None], q[None, :])) * 27.0 + 0.5, 0, 1)
        disc /= disc.sum()
        matrix = overlap_matrix(n, extent, 32, 0.075)
        patterns.append(resample(disc, matrix, matrix))
    assert np.abs(patterns[0] - patterns[1]).max() <= 0.05 * patterns[1].max()
