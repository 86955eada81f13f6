"""The passes between the transforms of the fast multislice, compiled by numba.

Each is one sweep over memory. They run in one thread, without fused or reordered arithmetic (no `fastmath`), so that
the same input gives the same bits wherever they run; `cache=True` keeps the compiled code beside this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

__all__ = ["fold", "intensity", "multiply", "place", "unfold"]

_Function = TypeVar("_Function", bound=Callable[..., None])


def _compiled(function: _Function) -> _Function:
    """Compiled at the first call; from then on read from a cache on disk, where there is a folder for one."""
    try:
        made: _Function = njit(cache=True, nogil=True)(function)
    except RuntimeError:  # neither this folder nor the user's is writable
        made = njit(nogil=True)(function)
    return made


_BLOCK = 8  # elements of 8 bytes in a cache line: what a transposition moves together


@_compiled
def multiply(wave: Any, factor: Any) -> None:
    """wave *= factor; both contiguous and flat."""
    for i in range(wave.size):
        wave[i] *= factor[i]


@_compiled
def place(out: Any, probe: Any, along_y: Any, along_x: Any) -> None:
    """out = probe moved to its position: (kept ky, kx), the phase being a part of ky times a part of kx."""
    for j in range(out.shape[0]):
        for i in range(out.shape[1]):
            out[j, i] = probe[j, i] * (along_y[j] * along_x[i])


@_compiled
def fold(wave: Any, out: Any, low: int) -> None:
    """(x, ky) -> (kept ky, x): transpose, leaving out the frequencies that the aperture zeroes.

    Of ky, the first `low` and the last `len(out) - low` are kept.
    """
    kept = out.shape[0]
    _transpose(wave[:, :low], out[:low])
    _transpose(wave[:, wave.shape[1] - (kept - low) :], out[low:])


@_compiled
def unfold(folded: Any, out: Any, low: int) -> None:
    """(kept ky, x) -> (x, ky): the opposite of `fold`, with zeros where nothing was kept."""
    high = folded.shape[0] - low
    end = out.shape[1] - high
    for i in range(out.shape[0]):
        for j in range(low, end):
            out[i, j] = 0
    _transpose(folded[:low], out[:, :low])
    _transpose(folded[low:], out[:, end:])


@_compiled
def _transpose(source: Any, target: Any) -> None:
    """target = source.T, in tiles of one cache line squared; loops of a fixed length are unrolled."""
    rows, columns = source.shape
    whole_rows, whole_columns = rows - rows % _BLOCK, columns - columns % _BLOCK
    for i0 in range(0, whole_rows, _BLOCK):
        for j0 in range(0, whole_columns, _BLOCK):
            for j in range(_BLOCK):
                for i in range(_BLOCK):
                    target[j0 + j, i0 + i] = source[i0 + i, j0 + j]
    for i in range(rows):
        for j in range(whole_columns if i < whole_rows else 0, columns):
            target[j, i] = source[i, j]


@_compiled
def intensity(spectrum: Any, weight: Any, out: Any) -> None:
    """out = |spectrum|^2 weight, in float64."""
    for j in range(out.shape[0]):
        for i in range(out.shape[1]):
            real, imag = float(spectrum[j, i].real), float(spectrum[j, i].imag)
            out[j, i] = (real * real + imag * imag) * weight[j, i]
