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
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Resampling",
    "flat_field_ripple",
    "overlap_matrix",
    "pixel_frequencies",
    "resample",
    "resampling",
    "turned_overlap",
]


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


def flat_field_ripple(extent_A: float, sampling_per_A: float, pixels: int) -> float:
    """How unevenly a flat field comes out along one axis: (brightest pixel - darkest) / mean.

    Depends on the points of the grid in a pixel, n = extent * sampling. It is 0 at any whole n: exactly where
    1 / extent = sampling / 2, too. Between 1 and 2 it reaches 0.22 (n = 1.5; 0.14 at 1.2), between 2 and 3 it still
    reaches 0.08 (n = 2.5), beyond 3 it stays below 0.041 and falls with 1 / n^2 (Poisson's sum of the triangle in which
    a point and a pixel overlap). At most 128 pixels about the centre are looked at: it repeats.
    """
    shown = min(pixels, 128)
    # A grid that reaches beyond the detector by the widest spread on either side.
    points = 2 * math.ceil((shown / 2 + 2) * max(1.0, extent_A * sampling_per_A)) + 2
    field = overlap_matrix(points, extent_A, shown, sampling_per_A).sum(axis=1)
    return float((field.max() - field.min()) / field.mean())


def resample(
    intensity: NDArray[np.floating], rows: NDArray[np.float64], columns: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Patterns on the grid, (..., Ny, Nx) with zero frequency first -> on the detector, (..., Qy, Qx).

    `rows` (Qy, Ny) and `columns` (Qx, Nx) come from `overlap_matrix`.
    """
    return np.matmul(np.matmul(rows, intensity), columns.T)


def turned_overlap(
    grid_yx: tuple[int, int],
    extent_yx_A: tuple[float, float],
    shape: tuple[int, int],
    sampling_yx_per_A: tuple[float, float],
    rotation_deg: float,
) -> Any:
    """As the product of two `overlap_matrix`, for a grid that is turned against the detector: (Qy Qx, Ny Nx), sparse.

    A point of the grid at q (x, y) lies at R(rotation) q on the detector, x turning towards y, and spreads there over a
    square along the detector's own axes: sum and centre of mass are kept as without a rotation.
    """
    from scipy.sparse import csr_array

    (ny, nx), (ly, lx) = grid_yx, extent_yx_A
    angle = math.radians(rotation_deg)
    qy = np.fft.fftfreq(ny, d=ly / ny)[:, None]
    qx = np.fft.fftfreq(nx, d=lx / nx)[None, :]
    places = (qy * math.cos(angle) + qx * math.sin(angle), qx * math.cos(angle) - qy * math.sin(angle))
    # Along each axis: the first of the pixels that a point's square touches, and its parts of those (points, touched).
    firsts, parts = [], []
    for place, pixels, sampling in zip(places, shape, sampling_yx_per_A, strict=True):
        spread = max(1, math.ceil(1.0 / (min(extent_yx_A) * sampling) - 1e-9))  # in pixels
        low = place.ravel() / sampling + pixels // 2 + 0.5 - spread / 2.0  # pixel p reaches from p to p + 1
        first = np.floor(low)
        edges = first[:, None] + np.arange(spread + 2)
        inside = np.clip(edges, low[:, None], low[:, None] + spread)
        firsts.append(first.astype(np.int64))
        parts.append(np.diff(inside, axis=1) / spread)
    rows = firsts[0][:, None, None] + np.arange(parts[0].shape[1])[None, :, None]
    columns = firsts[1][:, None, None] + np.arange(parts[1].shape[1])[None, None, :]
    weights = parts[0][:, :, None] * parts[1][:, None, :]  # (points, touched rows, touched columns)
    points = np.broadcast_to(np.arange(ny * nx)[:, None, None], weights.shape)
    hit = (rows >= 0) & (rows < shape[0]) & (columns >= 0) & (columns < shape[1]) & (weights > 0)
    pixel = (rows * shape[1] + columns)[hit]
    return csr_array((weights[hit], (pixel, points[hit])), shape=(shape[0] * shape[1], ny * nx))


@dataclass(frozen=True, kw_only=True, eq=False)
class Resampling:
    """From patterns on a grid, (..., Ny, Nx) with zero frequency first, to a detector, (..., Qy, Qx).

    Either `rows` (Qy, Ny) and `columns` (Qx, Nx), or `turned` (Qy Qx, Ny Nx), sparse.
    """

    shape: tuple[int, int]
    rows: NDArray[np.float64] | None = None
    columns: NDArray[np.float64] | None = None
    turned: Any = None
    grid_yx: tuple[int, int] = (0, 0)

    def __call__(self, intensity: NDArray[np.floating]) -> NDArray[np.float64]:
        if self.rows is not None and self.columns is not None:
            if intensity.ndim == 2:
                return self.rows @ intensity @ self.columns.T
            # Columns first, in one product for all patterns: (..., Ny, Nx) -> (..., Ny, Qx) -> (..., Qy, Qx)
            across = intensity.reshape(-1, intensity.shape[-1]) @ self.columns.T
            return np.matmul(self.rows, across.reshape(*intensity.shape[:-1], -1))
        flat = intensity.reshape(-1, intensity.shape[-2] * intensity.shape[-1])
        made: NDArray[np.float64] = (self.turned @ flat.T).T  # (patterns, Qy Qx)
        return made.reshape(*intensity.shape[:-2], *self.shape)

    def of_rows(self, take: Callable[[NDArray[Any]], NDArray[Any]]) -> Resampling:
        """For grids of which only those rows are held that `take` takes, along its first axis."""
        if self.rows is not None:
            return replace(self, rows=np.ascontiguousarray(take(self.rows.T).T))
        points = np.arange(self.turned.shape[1]).reshape(self.grid_yx)
        kept = take(points)
        return replace(self, turned=self.turned[:, kept.ravel()], grid_yx=kept.shape)

    def bands(self) -> tuple[Any, Any] | None:
        """`rows` and `columns` as what is not zero in them, each (starts, places, weights); None where turned."""
        if self.rows is None or self.columns is None:
            return None
        from scipy.sparse import csr_array

        rows, columns = csr_array(self.rows), csr_array(self.columns)
        return (rows.indptr, rows.indices, rows.data), (columns.indptr, columns.indices, columns.data)

    def seen(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which rows and which columns of the grid the detector sees anything of."""
        if self.rows is not None and self.columns is not None:
            return np.any(self.rows != 0, axis=0), np.any(self.columns != 0, axis=0)
        weight = self.turned.sum(axis=0).reshape(self.grid_yx)
        return np.any(weight != 0, axis=1), np.any(weight != 0, axis=0)

    def of_part(self, rows: NDArray[np.intp], columns: NDArray[np.intp], height: int) -> Resampling:
        """For a part of the grid, these rows and columns; rows that are missing up to `height` count nothing."""
        empty = height - len(rows)
        if self.rows is not None and self.columns is not None:
            part = np.pad(self.rows[:, rows], ((0, 0), (0, empty)))
            return replace(self, rows=part, columns=np.ascontiguousarray(self.columns[:, columns]))
        points = np.arange(self.turned.shape[1]).reshape(self.grid_yx)[np.ix_(rows, columns)].ravel()
        held = self.turned[:, points]
        held.resize((held.shape[0], height * len(columns)))
        return replace(self, turned=held, grid_yx=(height, len(columns)))


def resampling(
    grid_yx: tuple[int, int],
    extent_yx_A: tuple[float, float],
    shape: tuple[int, int],
    sampling_yx_per_A: tuple[float, float],
    rotation_deg: float = 0.0,
) -> Resampling:
    """The resampling from a cell's grid to a detector against which the cell is turned by `rotation_deg`."""
    if rotation_deg == 0.0:
        rows, columns = (overlap_matrix(grid_yx[a], extent_yx_A[a], shape[a], sampling_yx_per_A[a]) for a in (0, 1))
        return Resampling(shape=shape, rows=rows, columns=columns, grid_yx=grid_yx)
    turned = turned_overlap(grid_yx, extent_yx_A, shape, sampling_yx_per_A, rotation_deg)
    return Resampling(shape=shape, turned=turned, grid_yx=grid_yx)
