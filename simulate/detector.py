"""From the grid of a simulation to a detector of fixed shape, keeping what a detector measures.

A grid of N points over a cell of length L samples diffraction space at q = n / L, and every material has its own L. A
network wants one and the same detector. Here each point of the grid spreads evenly over a square as wide as a
detector pixel, and each pixel receives the overlapping area. Because the spread is a whole number of pixels wide, the
sum *and* the centre of mass of a pattern are kept exactly, wherever a point lies between two pixels; a narrower
spread would round the centre of mass, and the nearest pixel alone would print the supercell's own lattice onto the
data.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["overlap_matrix", "pixel_frequencies", "resample"]


def pixel_frequencies(pixels: int, sampling_per_A: float) -> NDArray[np.float64]:
    """Centre of each detector pixel along one axis, 1/Å; zero frequency at [pixels // 2]. Shape (pixels,)."""
    return (np.arange(pixels, dtype=np.float64) - pixels // 2) * sampling_per_A


def overlap_matrix(points: int, extent_A: float, pixels: int, sampling_per_A: float) -> NDArray[np.float64]:
    """What part of each grid point falls into each pixel, along one axis. Shape (pixels, points).

    Columns follow the order of `fftfreq` (zero first), so that a transform needs no shift. A column sums to 1 where its
    point lies inside the detector. Where the grid is coarser than the pixels (1 / extent > sampling), the spread widens
    to the next whole number of pixels.
    """
    frequencies = np.fft.fftfreq(points, d=extent_A / points)  # (points,)
    spread = max(1, math.ceil(1.0 / (extent_A * sampling_per_A) - 1e-9)) * sampling_per_A
    centres = pixel_frequencies(pixels, sampling_per_A)[:, None]  # (pixels, 1)
    low = np.maximum(centres - sampling_per_A / 2, frequencies - spread / 2)
    high = np.minimum(centres + sampling_per_A / 2, frequencies + spread / 2)
    return np.clip(high - low, 0.0, None) / spread


def resample(
    intensity: NDArray[np.floating], rows: NDArray[np.float64], columns: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Patterns on the grid, (..., Ny, Nx) with zero frequency first -> on the detector, (..., Qy, Qx).

    `rows` (Qy, Ny) and `columns` (Qx, Nx) come from `overlap_matrix`.
    """
    return np.matmul(np.matmul(rows, intensity), columns.T)
