"""The label: the projected potential over the scanned field, evaluated exactly between the points of the grid.

The sum of slices is a periodic function that its grid samples, so it *is* a finite Fourier sum:

    V(r) = sum_k  F(k) exp(2 pi i k.r),    F = FFT(grid) / number of points

Blur and band limit multiply F, and the sum is evaluated at the label's own pixels, which may be shifted, finer and
turned against the grid. No interpolation takes place. Pixel [i, j] lies at

    scan_origin + R(scan_rotation) . (i, j) . potential_sampling

with (i, j) along (y, x): the same points as the probe positions where the two spacings are equal.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["label_bandlimit", "lattice_phases", "lattice_points", "project_label", "slab_weights"]


def label_bandlimit(grid_sampling_A: float, label_sampling_A: float, antialias_cutoff: float) -> float:
    """The largest frequency in a label, 1/Å: what the simulation's own aperture passes and the label's pixels carry."""
    return min(antialias_cutoff / (2.0 * grid_sampling_A), 1.0 / (2.0 * label_sampling_A))


def lattice_points(
    shape: tuple[int, int], step_A: float, origin_yx_A: tuple[float, float], rotation_deg: float
) -> NDArray[np.float64]:
    """Points of a turned square lattice, (rows, columns, 2) with the last axis (y, x), in Å.

    A positive rotation turns the x axis towards the y axis: x = x0 + j cos - i sin, y = y0 + j sin + i cos.
    """
    angle = math.radians(rotation_deg)
    i = np.arange(shape[0])[:, None] * step_A
    j = np.arange(shape[1])[None, :] * step_A
    y = origin_yx_A[0] + i * math.cos(angle) + j * math.sin(angle)
    x = origin_yx_A[1] - i * math.sin(angle) + j * math.cos(angle)
    return np.stack([y, x], axis=-1)


def project_label(
    projected: NDArray[np.floating],
    extent_yx_A: tuple[float, float],
    *,
    shape: tuple[int, int],
    sampling_A: float,
    origin_yx_A: tuple[float, float],
    rotation_deg: float,
    blur_A: float,
    bandlimit_per_A: float,
) -> NDArray[np.float64]:
    """Label (H, W) in V Å from the sum of slices (Ny, Nx) in V Å over one periodic cell.

    `blur_A` is the standard deviation of the Gaussian: its transform is exp(-2 pi^2 blur^2 k^2).
    """
    rows, columns = projected.shape
    spectrum = np.fft.rfft2(projected.astype(np.float64)) / (rows * columns)  # (Ny, Nx // 2 + 1), kx >= 0
    ky = np.fft.fftfreq(rows, d=extent_yx_A[0] / rows)[:, None]
    kx = np.fft.rfftfreq(columns, d=extent_yx_A[1] / columns)[None, :]
    k2 = kx**2 + ky**2
    spectrum = spectrum * np.exp(-2.0 * np.pi**2 * blur_A**2 * k2)
    # A real function: what kx < 0 would add is the conjugate of kx > 0. Nyquist frequencies lie outside the band limit.
    spectrum = spectrum * np.where(kx > 0, 2.0, 1.0)
    inside = k2 <= min(bandlimit_per_A, 0.999 * _nyquist(projected.shape, extent_yx_A)) ** 2
    ky, kx, spectrum = np.broadcast_to(ky, k2.shape)[inside], np.broadcast_to(kx, k2.shape)[inside], spectrum[inside]

    left, right = lattice_phases(ky, kx, shape, sampling_A, origin_yx_A, rotation_deg)
    left *= spectrum
    return left.real @ right.real.T - left.imag @ right.imag.T


def lattice_phases(
    ky: NDArray[np.float64],
    kx: NDArray[np.float64],
    shape: tuple[int, int],
    sampling_A: float,
    origin_yx_A: tuple[float, float],
    rotation_deg: float,
) -> tuple[NDArray[np.complex128], NDArray[np.complex128]]:
    """exp(2 pi i k.r) at the points of `lattice_points`, for frequencies (K,), as factors (H, K) and (W, K).

    k . r of pixel (i, j) is a part of i plus a part of j, so that a Fourier sum over k is one product of matrices:
    left (H, K), with the origin's phase in it, times the spectrum, times right (W, K) transposed.
    """
    angle = math.radians(rotation_deg)
    along_i = (ky * math.cos(angle) - kx * math.sin(angle)) * sampling_A
    along_j = (ky * math.sin(angle) + kx * math.cos(angle)) * sampling_A
    origin = ky * origin_yx_A[0] + kx * origin_yx_A[1]
    return _powers(along_i, shape[0]) * np.exp(2j * np.pi * origin), _powers(along_j, shape[1])


def _powers(turns: NDArray[np.float64], count: int) -> NDArray[np.complex128]:
    """exp(2 pi i n turns) for n = 0 .. count - 1, (count, K): few exponentials, and a product for each of the rest.

    n = 16 a + b, so that every value is one product of two exponentials: no rounding adds up.
    """
    step = 16
    fine = np.exp(2j * np.pi * np.arange(min(step, count))[:, None] * turns)
    coarse = np.exp(2j * np.pi * np.arange(0, count, step)[:, None] * turns)
    return (coarse[:, None] * fine[None]).reshape(-1, turns.size)[:count]


def slab_weights(slices: int, slabs: int) -> NDArray[np.float64]:
    """What part of each slice lies in each of `slabs` slabs of equal thickness, (slabs, slices); columns sum to 1."""
    edges = np.linspace(0.0, slices, slabs + 1)
    starts = np.arange(slices)
    low = np.maximum(edges[:-1, None], starts)
    high = np.minimum(edges[1:, None], starts + 1)
    return np.clip(high - low, 0.0, None)


def _nyquist(shape: tuple[int, ...], extent_yx_A: tuple[float, float]) -> float:
    return min(n / (2.0 * length) for n, length in zip(shape, extent_yx_A, strict=True))
