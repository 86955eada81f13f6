"""Fourier transforms of lines by FFTW: plans that are the same in every process. The only place that imports pyfftw.

A measured plan depends on what else the machine did while it was measured, and another plan rounds differently. Plans
here are estimated, unless the data set that is written carries what a patient search has found once (see wisdom.py).
Lines lie one behind the other, eight at a time, which keeps them in the first cache and makes one pair of plans for
each length serve every grid. Nanoseconds a line and direction, one core, complex64, least of seven:

    points                                     128     256     512
    estimated                                  102     198     431
    after a patient search                      76     164     365

An estimate too may follow what other code in this process has planned before (FFTW's wisdom), so that wisdom is put
aside while planning. FFTW is called in the library that pyfftw itself has loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pyfftw
from numpy.typing import NDArray

__all__ = ["LinePlans", "empty", "library_version", "line_length", "line_plans", "planned_with", "search", "set_wisdom"]

LINES = 8
_FORWARD, _BACKWARD = -1, 1
_ESTIMATE, _PATIENT, _WISDOM_ONLY = 1 << 6, 1 << 5, 1 << 21
_wisdom = b""


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A zeroed buffer aligned for vector instructions: plans for differently aligned buffers round differently."""
    buffer: NDArray[Any] = pyfftw.zeros_aligned(shape, dtype=dtype, n=64)
    return buffer


def line_length(points: int) -> int:
    """Numbers from one line to the next: whole cache lines, and one more, since powers of two fall onto one another."""
    return -(-points // 8) * 8 + 8


@dataclass(frozen=True, kw_only=True)
class LinePlans:
    """Addresses: FFTW's function that runs a plan on any arrays, and the plans of LINES lines in either direction."""

    call: int
    forward: int
    backward: int


def line_plans(points: int, dtype: np.dtype[Any]) -> LinePlans:
    """Plans for LINES lines of `points`, `line_length(points)` apart, from one aligned buffer into another; kept."""
    return _line_plans(points, np.dtype(dtype), _wisdom if dtype == np.complex64 else b"")


def set_wisdom(wisdom: bytes) -> bool:
    """Plan single precision by this wisdom from now on, none being b""; False, and nothing changes, if FFTW refuses."""
    global _wisdom
    with _wisdom_aside():
        if wisdom and not _library().fftwf_import_wisdom_from_string(ctypes.c_char_p(wisdom)):
            return False
    _wisdom = wisdom
    return True


def planned_with() -> bytes:
    """The wisdom in use: part of the key of whatever holds plans."""
    return _wisdom


def search(lengths: list[int], *, limit_s: float) -> bytes:
    """Wisdom of a patient search for the plans of these lengths, at most `limit_s` seconds for each plan."""
    library = _library()
    with _wisdom_aside():
        library.fftwf_set_timelimit(ctypes.c_double(limit_s))
        for points in lengths:
            for direction in (_FORWARD, _BACKWARD):
                _plan(points, np.dtype(np.complex64), direction, _PATIENT)
        library.fftwf_set_timelimit(ctypes.c_double(-1.0))
        library.fftwf_export_wisdom_to_string.restype = ctypes.c_void_p
        text = library.fftwf_export_wisdom_to_string()
        found = ctypes.string_at(text)
        ctypes.CDLL(None).free(ctypes.c_void_p(text))
    return found


def library_version() -> str:
    """FFTW's own name and version: `fftw-3.3.10-sse2-avx…`."""
    return ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(_library(), "fftwf_version"))).decode()


@cache
def _library() -> Any:
    # Symbols of what a library depends on are found through it.
    library = ctypes.CDLL(pyfftw.pyfftw.__file__)
    for name in ("fftwf_plan_many_dft", "fftw_plan_many_dft"):
        getattr(library, name).restype = ctypes.c_void_p
    return library


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


@cache
def _line_plans(points: int, dtype: np.dtype[Any], wisdom: bytes) -> LinePlans:
    library = _library()
    with _wisdom_aside():
        if wisdom:
            library.fftwf_import_wisdom_from_string(ctypes.c_char_p(wisdom))
        made = []
        for direction in (_FORWARD, _BACKWARD):
            plan = _plan(points, dtype, direction, _PATIENT | _WISDOM_ONLY) if wisdom else None
            if not plan:
                pyfftw.forget_wisdom()
                plan = _plan(points, dtype, direction, _ESTIMATE)
            if not plan:
                raise RuntimeError(f"FFTW made no plan for lines of {points} points")
            made.append(int(plan))
    run = library.fftwf_execute_dft if dtype == np.complex64 else library.fftw_execute_dft
    call = ctypes.cast(run, ctypes.c_void_p).value
    assert call is not None
    return LinePlans(call=call, forward=made[0], backward=made[1])


def _plan(points: int, dtype: np.dtype[Any], direction: int, flags: int) -> Any:
    library, apart = _library(), line_length(points)
    source, target = empty((LINES, apart), dtype), empty((LINES, apart), dtype)
    lengths = (ctypes.c_int * 1)(points)
    single = dtype == np.complex64
    (library.fftwf_plan_with_nthreads if single else library.fftw_plan_with_nthreads)(1)
    plan_many = library.fftwf_plan_many_dft if single else library.fftw_plan_many_dft
    layout = (None, 1, apart)
    at = [ctypes.c_void_p(buffer.ctypes.data) for buffer in (source, target)]
    return plan_many(1, lengths, LINES, at[0], *layout, at[1], *layout, direction, ctypes.c_uint(flags))


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
