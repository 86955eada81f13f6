"""The multislice loop itself: waves through slices, on one grid.

One step is transmit, then propagate: psi <- F^-1 [ P F [ t psi ] ] (Kirkland, "Advanced Computing in Electron
Microscopy", eq. 6.92). Three facts make it cheaper than two whole transforms.

1. The antialias aperture in P zeroes everything beyond two thirds of the Nyquist frequency. After the transform along
   y, a third of the lines is never looked at again: it is neither transformed along x, nor multiplied, nor transformed
   back. Of four passes of N lines, two need only two thirds.
2. Of a step's four transforms, two and two follow one another along the same axis, with a product between them. Eight
   lines at a time go back, through the product and forth while they lie in the first cache.
3. FFTW's estimated plans, the only ones that are the same in every process without further ado, are poor for whole
   planes (twenty times slower than measured ones at 256 x 256, whose columns lie 2 KiB apart), and good for lines that
   lie one behind the other.

The state between two such steps is (kept ky, x), x contiguous. For one wave:

    (kept ky, x)  eight columns, turned  ->  F_y^-1  ->  (8 x, y)  * t  ->  F_y  ->  the kept ky back in their columns
    (kept ky, x)  eight rows  ->  F_x  ->  (8 ky, kx)  * P  ->  F_x^-1  ->  back in their rows

Each wave is transformed by itself, so that no result depends on which waves share a batch. A batch only keeps a slice
in the cache while several waves pass through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["KeptRows", "Propagation", "Scales", "batch_waves", "kept_rows", "propagation_bytes", "scales"]

_LINES = 8  # lines that are transformed together; the number of kept rows is rounded up to it
_MOST_WAVES = 4
_CACHE_BYTES = 2**20


def batch_waves(grid_yx: tuple[int, int], itemsize: int = 8) -> int:
    """Waves that pass through a slice together: about 1 MiB of them, 1 to 4."""
    return max(1, min(_MOST_WAVES, _CACHE_BYTES // (grid_yx[0] * grid_yx[1] * itemsize)))


def propagation_bytes(grid_yx: tuple[int, int], itemsize: int = 8) -> int:
    """Most bytes that a Propagation's buffers take: waves, a spectrum, an intensity."""
    points = (grid_yx[0] + 16) * (grid_yx[1] + 16)
    return points * (itemsize * (batch_waves(grid_yx, itemsize) + 1) + 8)


@dataclass(frozen=True, kw_only=True, eq=False)
class Scales:
    """Powers of two that stand for 1 / points, by which a wave is divided before each slice.

    A propagator over the number of points would be rounded, at every slice in the same way: after a hundred slices of
    float32 intensities are off by 1e-5. Multiplied by a power of two it is exact. Two powers, one below and one above
    1 / points, are taken in turn such that the wave stays within a factor of two of its size; what remains is known
    and made good in float64 where a wave is detected.
    """

    larger: float  # 2^-k >= 1 / points; the other power is half of it
    halved: NDArray[np.intp]  # before each slice, 0: the larger power, 1: the smaller
    made_good: NDArray[np.float64]  # (slices + 1,): factor of an intensity behind so many slices


def scales(points: int, slices: int) -> Scales:
    """For a grid of so many points. The first power, always the larger, belongs to the probe."""
    larger = 2.0 ** -(points.bit_length() - 1)
    size, halved, sizes = 1.0, np.zeros(slices, dtype=np.intp), [1.0]
    for index in range(slices):
        halved[index] = index > 0 and size > 1.0
        size *= points * larger / (2.0 if halved[index] else 1.0)
        sizes.append(size)
    return Scales(larger=larger, halved=halved, made_good=np.array(sizes) ** -2.0)


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
        from exitwave.simulate.transforms import empty, line_length, line_plans

        self._kernels = kernels
        ny, nx = grid_yx
        self.rows = rows
        # Transpositions move whole complex numbers: eight bytes are moved as one float64.
        moved = np.dtype(np.float64) if dtype == np.complex64 else dtype
        kept = -(-len(rows) // _LINES) * _LINES  # a grid smaller than that is padded with rows of zeros
        self._planes = empty((batch, kept, line_length(nx)), dtype)
        self._planes_moved = self._planes.view(moved)
        self._whole = empty((kept, line_length(nx)), dtype)
        self._spectrum = self._whole[: len(rows), :nx]
        lines, other = (empty((_LINES, line_length(ny)), dtype) for _ in range(2))
        self._along_y = (lines, lines.view(moved), other)
        self._along_x = empty((_LINES, line_length(nx)), dtype)
        y, x = line_plans(ny, dtype), line_plans(nx, dtype)
        self._call = np.uint64(y.call)
        self._plans = tuple(np.uint64(plan) for plan in (y.forward, y.backward, x.forward, x.backward))

    def run(
        self,
        *,
        probe: NDArray[np.complexfloating],
        shifts: Sequence[tuple[NDArray[np.complexfloating], NDArray[np.complexfloating]]],
        transmissions: NDArray[np.complexfloating],
        order: NDArray[np.intp],
        propagator: NDArray[np.complexfloating],
        scales: Scales,
        exit_planes: Sequence[int],
        observe: Callable[[int, int, NDArray[np.complexfloating]], None],
    ) -> None:
        """Send probes through a specimen and look at what leaves it.

        probe (kept ky, kx) is the transform of the probe at the origin, times `scales.larger`;
        shifts are, for each position, the phases along kept ky and along kx that move it there; transmissions
        (different slices, x, y) in the order `order`; propagator (kept ky, kx) as it is; scales for all of its slices.

        exit_planes are numbers of slices passed, rising, at least 1; at each, `observe(position, which exit plane,
        F psi)` is called with the transform of the wave behind that slice, (kept ky, kx): a buffer that is used again,
        not yet cut by the antialias aperture, and of a size that `scales.made_good` tells.
        """
        kernels, rows = self._kernels, self.rows
        padded = np.zeros((2, self._planes.shape[1], propagator.shape[1]), dtype=propagator.dtype)
        for index, power in enumerate((scales.larger, scales.larger / 2.0)):
            padded[index, : len(rows)] = propagator * propagator.real.dtype.type(power)
        _, _, forward_x, backward_x = self._plans
        self._whole[:] = 0
        for start in range(0, len(shifts), len(self._planes)):
            waves = min(len(self._planes), len(shifts) - start)
            for wave in range(waves):
                kernels.place(self._spectrum, probe, *shifts[start + wave])
                kernels.enter(self._whole, self._planes[wave], self._call, backward_x)
            passed = 0
            for which, plane in enumerate(exit_planes):
                kernels.advance(
                    self._planes[:waves],
                    self._planes_moved[:waves],
                    transmissions,
                    order[passed:plane],
                    padded,
                    scales.halved[passed:plane],
                    passed > 0,
                    (rows.low, rows.high),
                    self._along_y,
                    self._along_x,
                    self._call,
                    self._plans,
                )
                passed = plane
                for wave in range(waves):
                    kernels.leave(self._planes[wave], self._whole, self._call, forward_x)
                    observe(start + wave, which, self._spectrum)
