"""Patterns of any detector and scan onto the grids that a network was trained on.

Detector: each pixel is cut into 4 x 4 parts, whose counts go to the pixel of the new grid that they fall into. Area is
so respected, counts inside the new grid are kept, a turn or a mirror is no special case, and where both grids are the
same nothing changes at all. As a matrix: one sparse product for many patterns.

Scan: linear interpolation between positions, which a scan needs only if its step lies outside of what was trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix

from exitwave.train.classical import rotated

__all__ = ["DetectorMap", "scan_positions", "scan_rows"]

Array = npt.NDArray[np.floating[Any]]

_PARTS = 4


@dataclass(frozen=True, kw_only=True)
class DetectorMap:
    """From detector pixels to the network's, whose axes lie along the scan.

    source, target: shapes (Qy, Qx). source_q, target_q: 1/Å a pixel, (y, x). center: the source's pixel of the zero
    frequency. transposed, flip (y, x): what the detector's rows and columns mean, undone before the rotation.
    """

    source: tuple[int, int]
    source_q: tuple[float, float]
    center: tuple[float, float]
    target: tuple[int, int]
    target_q: tuple[float, float]
    rotation_deg: float = 0.0
    transposed: bool = False
    flip: tuple[bool, bool] = (False, False)

    def matrix(self) -> csr_matrix:
        """(target pixels, source pixels); columns add up to at most one."""
        part = (np.arange(_PARTS) + 0.5) / _PARTS - 0.5
        fine = [(np.arange(n)[:, None] + part).ravel() for n in self.source]
        iy, ix = np.meshgrid(*fine, indexing="ij")
        ky, kx = (iy - self.center[0]) * self.source_q[0], (ix - self.center[1]) * self.source_q[1]
        ky, kx = (-ky if self.flip[0] else ky), (-kx if self.flip[1] else kx)
        if self.transposed:
            ky, kx = kx, ky
        ky, kx = rotated(np.stack([ky, kx]), self.rotation_deg)
        # a pixel reaches half its width to either side; the tiny shift keeps parts on a border from straddling it
        y = np.floor(ky / self.target_q[0] + self.target[0] // 2 + 0.5 + 1e-9).astype(np.int64)
        x = np.floor(kx / self.target_q[1] + self.target[1] // 2 + 0.5 + 1e-9).astype(np.int64)
        source = (np.rint(iy - 1e-9).astype(np.int64) * self.source[1] + np.rint(ix - 1e-9).astype(np.int64)).ravel()
        inside = ((y >= 0) & (y < self.target[0]) & (x >= 0) & (x < self.target[1])).ravel()
        rows = (y * self.target[1] + x).ravel()[inside]
        weights = np.full(rows.shape, 1.0 / _PARTS**2, dtype=np.float32)
        size = (self.target[0] * self.target[1], self.source[0] * self.source[1])
        return csr_matrix((weights, (rows, source[inside])), shape=size)

    def apply(self, matrix: csr_matrix, patterns: Array) -> npt.NDArray[np.float32]:
        """(…, Qy, Qx) -> (…, *target) float32."""
        flat = np.ascontiguousarray(patterns, dtype=np.float32).reshape(-1, self.source[0] * self.source[1])
        out = (matrix @ flat.T).T  # (target, source) @ (source, n) -> (n, target)
        return np.ascontiguousarray(out, dtype=np.float32).reshape(*patterns.shape[:-2], *self.target)


def scan_positions(length: int, step_A: float, wanted_A: float) -> Array:
    """Positions, in units of the old step, of a new scan of step `wanted_A` over the same line; it begins at 0."""
    count = int(np.floor((length - 1) * step_A / wanted_A + 1e-6)) + 1
    positions: Array = np.arange(count) * wanted_A / step_A
    return np.minimum(positions, length - 1)


def scan_rows(cube: Array, positions: tuple[Array, Array]) -> npt.NDArray[np.float32]:
    """Linear interpolation over both scan axes: (Ry, Rx, …) -> (len(positions[0]), len(positions[1]), …)."""
    for axis, at in enumerate(positions):
        low = np.minimum(np.floor(at).astype(np.int64), max(cube.shape[axis] - 2, 0))
        high = np.minimum(low + 1, cube.shape[axis] - 1)
        shape = [1] * cube.ndim
        shape[axis] = len(at)
        fraction = (at - low).astype(np.float32).reshape(shape)
        cube = np.take(cube, low, axis=axis) * (1 - fraction) + np.take(cube, high, axis=axis) * fraction
    return cube.astype(np.float32)
