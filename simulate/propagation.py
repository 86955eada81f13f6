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

Each wave is transformed by itself, with plans of its own, so that no result depends on which waves share a batch. A
batch only keeps a slice in the cache while several waves pass through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["KeptRows", "Propagation", "batch_waves", "kept_rows", "propagation_bytes"]

_LINES = 16  # lines that vector instructions take together; the number of kept rows is rounded up to it
_MOST_WAVES = 8
_CACHE_BYTES = 4 * 2**20


def batch_waves(grid_yx: tuple[int, int], itemsize: int = 8) -> int:
    """Waves that pass through a slice together: about 4 MiB of them, 1 to 8."""
    return max(1, min(_MOST_WAVES, _CACHE_BYTES // (grid_yx[0] * grid_yx[1] * itemsize)))


def propagation_bytes(grid_yx: tuple[int, int], itemsize: int = 8) -> int:
    """Most bytes that a Propagation's buffers take: waves, three planes of complex numbers, an intensity."""
    points = grid_yx[0] * grid_yx[1]
    return points * (itemsize * (batch_waves(grid_yx, itemsize) + 3) + 8)


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
        self.grid_yx, self.rows, self.dtype, self.batch = grid_yx, rows, dtype, batch
        self._waves = [empty((nx, ny), dtype) for _ in range(batch)]
        self._plane = empty((nx, ny), dtype)  # (x, ky)
        self._lines = empty((len(rows), nx), dtype)  # (kept ky, x)
        self._spectrum = empty((len(rows), nx), dtype)  # (kept ky, kx)
        pairs: list[tuple[Any, Any, bool]] = [(self._lines, self._spectrum, True), (self._spectrum, self._lines, False)]
        for wave in self._waves:
            pairs += [(wave, self._plane, True), (self._plane, wave, False)]
        plans: list[Callable[[], None]] = line_plans(pairs)
        self._forward_x, self._backward_x = plans[:2]
        self._forward_y, self._backward_y = plans[2::2], plans[3::2]
        # Transpositions move whole complex numbers: eight bytes are moved as one float64.
        moved = np.dtype(np.float64) if dtype == np.complex64 else dtype
        self._plane_moved, self._lines_moved = self._plane.view(moved), self._lines.view(moved)
        self._waves_flat = [wave.reshape(-1) for wave in self._waves]
        self._spectrum_flat = self._spectrum.reshape(-1)

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
        found = np.empty(self._spectrum.shape, dtype=np.float64)
        flat = transmissions.reshape(len(transmissions), -1)
        propagator_flat = np.ascontiguousarray(propagator).reshape(-1)
        exits = {plane: which for which, plane in enumerate(exit_planes)}
        last = max(exit_planes)
        for start in range(0, len(shifts), self.batch):
            batch = range(min(self.batch, len(shifts) - start))
            for b in batch:
                kernels.place(self._spectrum, probe, *shifts[start + b])
                self._to_real_space(b)
            for plane, piece in enumerate(order[:last], start=1):
                transmission = flat[piece]
                for b in batch:
                    kernels.multiply(self._waves_flat[b], transmission)
                    self._forward_y[b]()
                    kernels.fold(self._plane_moved, self._lines_moved, self.rows.low)
                    self._forward_x()
                    if plane in exits:
                        kernels.intensity(self._spectrum, exit_weight, found)
                        detect(start + b, exits[plane], found)
                    if plane < last:
                        kernels.multiply(self._spectrum_flat, propagator_flat)
                        self._to_real_space(b)

    def _to_real_space(self, b: int) -> None:
        self._backward_x()
        self._kernels.unfold(self._lines_moved, self._plane_moved, self.rows.low)
        self._backward_y[b]()
