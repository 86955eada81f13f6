"""The label is the Fourier sum of the grid, evaluated where its pixels lie."""

from __future__ import annotations

import math

import numpy as np
import pytest

from exitwave.simulate.label import label_bandlimit, lattice_points, project_label

EXTENT = (9.0, 12.0)


def waves(y: np.ndarray, x: np.ndarray, damp: float = 0.0) -> np.ndarray:
    """A mean and three plane waves that are periodic in the cell, each damped as a Gaussian of width `damp` does."""
    out = np.full(np.broadcast(y, x).shape, 5.0)
    for amplitude, hy, hx, phase in ((1.0, 1, 2, 0.3), (0.7, -3, 1, 1.1), (0.4, 0, 4, 2.0)):
        ky, kx = hy / EXTENT[0], hx / EXTENT[1]
        factor = math.exp(-2 * math.pi**2 * damp**2 * (ky**2 + kx**2))
        out += amplitude * factor * np.cos(2 * math.pi * (ky * y + kx * x) + phase)
    return out


GRID = waves(np.arange(45)[:, None] * EXTENT[0] / 45, np.arange(60)[None, :] * EXTENT[1] / 60)


@pytest.mark.parametrize("rotation", [0.0, 30.0, -75.0])
@pytest.mark.parametrize("blur", [0.0, 0.4])
def test_the_sum_is_exact_at_every_pixel(rotation: float, blur: float) -> None:
    label = project_label(
        GRID,
        EXTENT,
        shape=(16, 24),
        sampling_A=0.17,
        origin_yx_A=(3.21, -1.7),
        rotation_deg=rotation,
        blur_A=blur,
        bandlimit_per_A=2.0,
    )
    points = lattice_points((16, 24), 0.17, (3.21, -1.7), rotation)
    assert label == pytest.approx(waves(points[..., 0], points[..., 1], blur), abs=1e-10)


def test_the_band_limit_removes_what_lies_beyond() -> None:
    label = project_label(
        GRID, EXTENT, shape=(8, 8), sampling_A=0.5, origin_yx_A=(0, 0), rotation_deg=0, blur_A=0, bandlimit_per_A=0.05
    )
    assert label == pytest.approx(np.full((8, 8), 5.0))


def test_rotation_turns_the_x_axis_towards_y() -> None:
    points = lattice_points((2, 2), 1.0, (10.0, 20.0), 90.0)
    assert points[0, 0] == pytest.approx([10, 20])
    assert points[0, 1] == pytest.approx([11, 20])  # one step along the scan's x now goes along y
    assert points[1, 0] == pytest.approx([10, 19])


def test_the_label_carries_no_more_than_its_pixels_and_the_grid() -> None:
    assert label_bandlimit(0.25, 0.15, 2 / 3) == pytest.approx(2 / 3 / 0.5)
    assert label_bandlimit(0.05, 0.5, 2 / 3) == 1.0
