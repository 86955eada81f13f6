"""The multislice loop itself: waves through slices, on one grid.

One step is transmit, then propagate: psi <- F^-1 [ P F [ t psi ] ] (Kirkland, "Advanced Computing in Electron
Microscopy", eq. 6.92). Two facts make it cheaper than two whole transforms.

1. The antialias aperture in P zeroes everything beyond two thirds of the Nyquist frequency. After the transform along
   y, a third of the lines is never looked at again: it is neither transformed along x, nor multiplied, nor transformed
   back. Of four passes of N lines, two need only two thirds.
2. FFTW's estimated plans, the only ones that are the same in every process, are poor for whole planes (twenty times
   slower than measured ones at 256 x 256, whose columns lie 2 KiB apart), and good for lines that lie one behind the
   other. So only such lines are transformed, from one buffer into another, and two transpositions stand between.

Layout: (x, y) in real space, y contiguous; (kept ky, kx) in diffraction space, kx contiguous. For one wave:

    wave (x, y)  * t  ->  F_y  ->  (x, ky)  fold  (kept ky, x)  ->  F_x  ->  (kept ky, kx)  * P
    ->  F_x^-1  ->  (kept ky, x)  unfold  (x, ky)  ->  F_y^-1  ->  wave (x, y)

At every step one buffer is read and the other written: two are enough, the wave's own and a plane that all waves share.
The fewer bytes a step touches, the more of them are still in the cache.

Each wave is transformed by itself, with plans of its own, so that no result depends on which waves share a batch. A
batch only keeps a slice in the cache while several waves pass through it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["KeptRows", "Propagation", "batch_waves", "kept_rows", "propagation_bytes"]

_LINES = 16  # lines that vector instructions take together; the number of kept rows is rounded up to it
_MOST_WAVES = 4
_CACHE_BYTES = 2**20


def batch_waves(grid_yx: tuple[int, int], itemsize: int = 8) -> int:
    """Waves that pass through a slice together: about 1 MiB of them, 1 to 4."""
    return max(1, min(_MOST_WAVES, _CACHE_BYTES // (grid_yx[0] * grid_yx[1] * itemsize)))


def propagation_bytes(grid_yx: tuple[int, int], itemsize: int = 8) -> int:
    """Most bytes that a Propagation's buffers take: waves, a plane of complex numbers, an intensity."""
    points = grid_yx[0] * grid_yx[1]
    return points * (itemsize * (batch_waves(grid_yx, itemsize) + 1) + 8)


@dataclass(frozen=True, kw_only=True)
class KeptRows:
    """Which frequencies along y are carried: the first `low` and the last `high` of `points`, in `fftfreq`'s order."""

    points: int
    low: int
    high: int

    def __len__(self) -> int:
        return self.low + self.high

    def take(self, array: NDArray[Any]) -> NDArray[Any]:
        """The kept part of the first axis."""
        return np.concatenate([array[: self.low], array[self.points - self.high :]])

    def spread(self, array: NDArray[Any]) -> NDArray[Any]:
        """The opposite of `take` along the second last axis: zeros where nothing was kept."""
        out = np.zeros((*array.shape[:-2], self.points, array.shape[-1]), dtype=array.dtype)
        out[..., : self.low, :] = array[..., : self.low, :]
        out[..., self.points - self.high :, :] = array[..., self.low :, :]
        return out


def kept_rows(used: NDArray[np.bool_]) -> KeptRows:
    """The fewest rows that hold all used frequencies, as many of either sign, rounded up to whole vectors.

    `used` (points,) says of each frequency along y, in `fftfreq`'s order, whether anything is ever there.
    """
    points = len(used)
    order = np.abs(np.fft.fftfreq(points, 1 / points))
    reach = int(order[used].max()) if used.any() else 0
    kept = min(points, -(-(2 * reach + 1) // _LINES) * _LINES)
    return KeptRows(points=points, low=kept - kept // 2, high=kept // 2)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Lane:
    """One wave of a batch: its buffer, as it is and as lines to transpose into and from, and its four transforms."""

    wave: NDArray[np.complexfloating]  # flat
    lines_moved: NDArray[Any]
    forward_y: Callable[[], None]
    forward_x: Callable[[], None]
    backward_x: Callable[[], None]
    backward_y: Callable[[], None]


class Propagation:
    """Buffers and plans for one grid, one set of kept rows and one precision; made once, used for any potential.

    Not for use by two threads at a time.
    """

    def __init__(self, grid_yx: tuple[int, int], rows: KeptRows, dtype: np.dtype[Any], *, batch: int) -> None:
        # Imported here, so that a planner that only asks for sizes pays neither for numba nor for FFTW.
        from exitwave.simulate import kernels
        from exitwave.simulate.transforms import empty, line_plans

        self._kernels = kernels
        ny, nx = grid_yx
        self.rows, self.dtype = rows, dtype
        self._spectrum_shape = (len(rows), nx)
        plane = empty((nx, ny), dtype)
        waves = [empty((nx, ny), dtype) for _ in range(batch)]
        plans = line_plans([step for wave in waves for step in self._steps(wave, plane)])
        # Transpositions move whole complex numbers: eight bytes are moved as one float64.
        moved = np.dtype(np.float64) if dtype == np.complex64 else dtype
        self._spectrum = self._folded(plane)
        self._plane_moved = plane.view(moved)
        self._lanes = [
            _Lane(
                wave=wave.reshape(-1),
                lines_moved=self._folded(wave).view(moved),
                forward_y=plans[4 * b],
                forward_x=plans[4 * b + 1],
                backward_x=plans[4 * b + 2],
                backward_y=plans[4 * b + 3],
            )
            for b, wave in enumerate(waves)
        ]

    def _folded(self, buffer: NDArray[Any]) -> NDArray[Any]:
        """The beginning of a buffer (x, y) as (kept ky, x)."""
        return buffer.reshape(-1)[: math.prod(self._spectrum_shape)].reshape(self._spectrum_shape)

    def _steps(self, wave: NDArray[Any], plane: NDArray[Any]) -> list[tuple[NDArray[Any], NDArray[Any], bool]]:
        """(from, into, forward) of the four transforms: from the wave into the plane and back, twice."""
        lines, spectrum = self._folded(wave), self._folded(plane)
        return [(wave, plane, True), (lines, spectrum, True), (spectrum, lines, False), (plane, wave, False)]

    def run(
        self,
        *,
        probe: NDArray[np.complexfloating],
        shifts: Sequence[tuple[NDArray[np.complexfloating], NDArray[np.complexfloating]]],
        transmissions: NDArray[np.complexfloating],
        order: NDArray[np.intp],
        propagator: NDArray[np.complexfloating],
        exit_planes: Sequence[int],
        exit_weight: NDArray[np.floating],
        detect: Callable[[int, int, NDArray[np.float64]], None],
    ) -> None:
        """Send probes through a specimen and detect what leaves it.

        probe (kept ky, kx) is the transform of the probe at the origin, over the number of points of the grid;
        shifts are, for each position, the phases along kept ky and along kx that move it there; transmissions
        (different slices, x, y) in the order `order`; propagator (kept ky, kx) is over the number of points too.

        exit_planes are numbers of slices passed, rising, at least 1; at each, `detect(position, which exit plane,
        intensity)` is called with |F psi|^2 exit_weight, (kept ky, kx): a buffer that is used again.
        """
        kernels = self._kernels
        found = np.empty(self._spectrum_shape, dtype=np.float64)
        flat = transmissions.reshape(len(transmissions), -1)
        propagator_flat = np.ascontiguousarray(propagator).reshape(-1)
        exits = {plane: which for which, plane in enumerate(exit_planes)}
        last = max(exit_planes)
        spectrum_flat = self._spectrum.reshape(-1)
        for start in range(0, len(shifts), len(self._lanes)):
            lanes = list(enumerate(self._lanes[: len(shifts) - start], start=start))
            for position, lane in lanes:
                kernels.place(self._spectrum, probe, *shifts[position])
                self._to_real_space(lane)
            for plane, piece in enumerate(order[:last], start=1):
                transmission = flat[piece]
                for position, lane in lanes:
                    kernels.multiply(lane.wave, transmission)
                    lane.forward_y()
                    kernels.fold(self._plane_moved, lane.lines_moved, self.rows.low)
                    lane.forward_x()
                    if plane in exits:
                        kernels.intensity(self._spectrum, exit_weight, found)
                        detect(position, exits[plane], found)
                    if plane < last:
                        kernels.multiply(spectrum_flat, propagator_flat)
                        self._to_real_space(lane)

    def _to_real_space(self, lane: _Lane) -> None:
        lane.backward_x()
        self._kernels.unfold(lane.lines_moved, self._plane_moved, self.rows.low)
        lane.backward_y()
