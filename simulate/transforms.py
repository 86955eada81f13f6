"""Plans of Fourier transforms along lines, by FFTW; the same in every process. The only place that imports pyfftw.

A measured plan depends on what else the machine did while it was measured, and another plan rounds differently. Plans
here are estimated, and of lines: microseconds for a plane there and back, one core, complex64,

    points squared                                    64     96    128    192    240    256
    planes, FFTW measured (not reproducible)          11     39     94    174    300    390
    planes, FFTW estimated                            11     89     85    312    467   3357
    planes, pocketfft (scipy.fft)                     43     84    217    308    524    602
    lines, FFTW estimated, from buffer to buffer       9     26     72    103    176    194

and the last row has the frequencies left out that no wave carries. An estimate too may follow what other code in this
process has planned before (FFTW's wisdom), so wisdom is put aside while planning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyfftw
from numpy.typing import NDArray

__all__ = ["empty", "line_plans"]


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A zeroed buffer aligned for vector instructions: plans for differently aligned buffers round differently."""
    buffer: NDArray[Any] = pyfftw.zeros_aligned(shape, dtype=dtype, n=64)
    return buffer


@contextmanager
def _wisdom_aside() -> Iterator[None]:
    """Within it FFTW knows nothing; after it, what it knew before and no more."""
    wisdom = pyfftw.export_wisdom()
    pyfftw.forget_wisdom()
    try:
        yield
    finally:
        pyfftw.forget_wisdom()
        pyfftw.import_wisdom(wisdom)


def line_plans(pairs: Sequence[tuple[NDArray[Any], NDArray[Any], bool]]) -> list[Callable[[], None]]:
    """For each (from, into, forward): a call that transforms every line of one buffer into another, not normalised."""
    with _wisdom_aside():
        return [
            pyfftw.FFTW(
                source,
                target,
                axes=(-1,),
                direction="FFTW_FORWARD" if forward else "FFTW_BACKWARD",
                flags=("FFTW_ESTIMATE",),
                threads=1,
            ).execute
            for source, target, forward in pairs
        ]


def measured_plane_plans(shape: tuple[int, int, int], dtype: np.dtype[Any], *, planning_s: float) -> Callable[[], None]:
    """A whole transform and its inverse, in place, of a batch of planes, by plans found by measuring for at most
    `planning_s` seconds each: for benchmarks.

    Not for simulations: another process may measure other plans, which round differently.
    """
    planes = empty(shape, dtype)
    with _wisdom_aside():
        there, back = (
            pyfftw.FFTW(
                planes,
                planes,
                axes=(-2, -1),
                direction=direction,
                flags=("FFTW_PATIENT",),
                threads=1,
                planning_timelimit=planning_s,
            ).execute
            for direction in ("FFTW_FORWARD", "FFTW_BACKWARD")
        )
    planes[:] = 0  # planning leaves anything there

    def pair() -> None:
        there()
        back()

    return pair
