"""The inner loops of the fast multislice, compiled by numba.

They run in one thread, without fused or reordered arithmetic (no `fastmath`), so that the same input gives the same
bits wherever they run; `cache=True` keeps the compiled code beside this file. Transforms of lines are FFTW's, called at
their address: a slice of a wave is a hundred short steps, and each would cost as much to call from Python as to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

__all__ = ["LINES", "advance", "combine", "enter", "intensity", "leave", "place", "resample"]

LINES = 8  # lines that are transformed together: 8 complex64 are a cache line, and 8 lines stay in the first cache

_Function = TypeVar("_Function", bound=Callable[..., None])


def _compiled(function: _Function) -> _Function:
    """Compiled at the first call; from then on read from a cache on disk, where there is a folder for one."""
    try:
        made: _Function = njit(cache=True, nogil=True)(function)
    except RuntimeError:  # neither this folder nor the user's is writable
        made = njit(nogil=True)(function)
    return made


@intrinsic
def _execute(typing: Any, function: Any, plan: Any, source: Any, target: Any) -> Any:
    """function(plan, source, target), all of them addresses: FFTW's execute_dft, on other arrays than were planned."""
    signature = types.void(types.uint64, types.uint64, types.uint64, types.uint64)

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        pointer = builder.inttoptr(arguments[0], ir.FunctionType(ir.VoidType(), [word] * 3).as_pointer())
        builder.call(pointer, arguments[1:])
        return context.get_dummy_value()

    return signature, generate


@_compiled
def place(out: Any, probe: Any, along_y: Any, along_x: Any) -> None:
    """out = probe moved to its position: (kept ky, kx), the phase being a part of ky times a part of kx."""
    for j in range(probe.shape[0]):
        for i in range(probe.shape[1]):
            out[j, i] = probe[j, i] * (along_y[j] * along_x[i])


@_compiled
def enter(spectrum: Any, plane: Any, call: Any, backward_x: Any) -> None:
    """A spectrum (kept ky, kx) -> the state between slices (kept ky, x)."""
    for row in range(0, plane.shape[0], LINES):
        _execute(call, backward_x, spectrum[row].ctypes.data, plane[row].ctypes.data)


@_compiled
def leave(plane: Any, spectrum: Any, call: Any, forward_x: Any) -> None:
    """The state between slices (kept ky, x) -> its spectrum (kept ky, kx); the state stays as it is."""
    for row in range(0, plane.shape[0], LINES):
        _execute(call, forward_x, plane[row].ctypes.data, spectrum[row].ctypes.data)


@_compiled
def advance(
    planes: Any,
    planes_moved: Any,
    transmissions: Any,
    order: Any,
    propagators: Any,
    halved: Any,
    propagate_first: Any,
    rows: Any,
    along_y: Any,
    along_x: Any,
    call: Any,
    plans: Any,
) -> None:
    """Send waves through the slices `order`: transmit, and propagate between any two (and before, if told).

    planes (waves, kept ky, x), padded to whole LINES, hold the state: transformed along y, not along x. transmissions
    are (different slices, x, y), propagators (2, kept ky padded, kx), of which halved tells the one before each slice;
    rows tells how many of ky are kept from the beginning and from the end. along_y and along_x are each a pair of
    buffers of LINES lines, the first of along_y twice: as numbers, and as in `planes_moved`, where a complex number
    moves as one word. plans are the addresses of (forward y, backward y, forward x, backward x), call that of FFTW's
    function.
    """
    waves = planes.shape[0]
    columns, ny = transmissions.shape[1], transmissions.shape[2]
    lines, lines_moved, other = along_y
    spectrum = along_x
    low, high = rows
    kept = low + high
    at_lines, at_other, at_spectrum = lines.ctypes.data, other.ctypes.data, spectrum.ctypes.data
    for step in range(order.size):
        if step > 0 or propagate_first:
            propagator = propagators[halved[step]]
            for wave in range(waves):
                plane = planes[wave]
                for row in range(0, plane.shape[0], LINES):
                    at = plane[row].ctypes.data
                    _execute(call, plans[2], at, at_spectrum)
                    for i in range(LINES):
                        for j in range(propagator.shape[1]):
                            spectrum[i, j] *= propagator[row + i, j]
                    _execute(call, plans[3], at_spectrum, at)
        transmission = transmissions[order[step]]
        for x in range(0, columns, LINES):
            for wave in range(waves):
                moved = planes_moved[wave]
                _from_columns(moved, x, 0, low, lines_moved, 0)
                for i in range(LINES):
                    for j in range(low, ny - high):
                        lines_moved[i, j] = 0
                _from_columns(moved, x, low, kept, lines_moved, ny - kept)
                _execute(call, plans[1], at_lines, at_other)
                for i in range(min(LINES, columns - x)):
                    for j in range(ny):
                        other[i, j] *= transmission[x + i, j]
                _execute(call, plans[0], at_other, at_lines)
                _to_columns(lines_moved, 0, moved, x, 0, low)
                _to_columns(lines_moved, ny - kept, moved, x, low, kept)


@_compiled
def _from_columns(plane: Any, x: Any, first: Any, last: Any, lines: Any, shift: Any) -> None:
    """lines[:, j + shift] = plane[j, x:x + LINES] for j from first to last, in tiles of a cache line squared."""
    whole = first + (last - first) // LINES * LINES
    for j0 in range(first, whole, LINES):
        for i in range(LINES):
            for j in range(LINES):
                lines[i, j0 + j + shift] = plane[j0 + j, x + i]
    for j in range(whole, last):
        for i in range(LINES):
            lines[i, j + shift] = plane[j, x + i]


@_compiled
def _to_columns(lines: Any, shift: Any, plane: Any, x: Any, first: Any, last: Any) -> None:
    """plane[j, x:x + LINES] = lines[:, j + shift] for j from first to last, in tiles of a cache line squared."""
    whole = first + (last - first) // LINES * LINES
    for j0 in range(first, whole, LINES):
        for j in range(LINES):
            for i in range(LINES):
                plane[j0 + j, x + i] = lines[i, j0 + j + shift]
    for j in range(whole, last):
        for i in range(LINES):
            plane[j, x + i] = lines[i, j + shift]


@_compiled
def intensity(spectrum: Any, weight: Any, scale: Any, out: Any) -> None:
    """out = |spectrum|^2 weight scale, in float64."""
    for j in range(out.shape[0]):
        for i in range(out.shape[1]):
            real, imag = float(spectrum[j, i].real), float(spectrum[j, i].imag)
            out[j, i] = (real * real + imag * imag) * (weight[j, i] * scale)


@_compiled
def combine(
    front: Any,
    beams: Any,
    points: Any,
    real: Any,
    imag: Any,
    values: Any,
    places: Any,
    weight: Any,
    room: Any,
    out: Any,
) -> None:
    """out[place] = |sum over the beams of its class of front S|^2 weight, in float64; other places stay as they are.

    Class c has the beams from beams[c] on, the points from points[c] on, and S (its beams, its points), flat, from
    values[c] on, as real and imag. `room` (2, most points of a class) is to work in.
    """
    for c in range(beams.size - 1):
        first, count = points[c], points[c + 1] - points[c]
        sum_real, sum_imag = room[0, :count], room[1, :count]
        sum_real[:] = 0
        sum_imag[:] = 0
        for b in range(beams[c + 1] - beams[c]):
            one = front[beams[c] + b]
            p, q, at = one.real, one.imag, values[c] + b * count
            part_real, part_imag = real[at : at + count], imag[at : at + count]
            for i in range(count):
                x, y = part_real[i], part_imag[i]
                sum_real[i] += p * x - q * y
                sum_imag[i] += p * y + q * x
        target, factor = places[first : first + count], weight[first : first + count]
        for i in range(count):
            x, y = float(sum_real[i]), float(sum_imag[i])
            out[target[i]] = (x * x + y * y) * factor[i]


@_compiled
def resample(intensity: Any, rows: Any, columns: Any, line: Any, over: Any, out: Any) -> None:
    """out (Qy, Qx) = R intensity C^T / over, with R (Qy, Ny) and C (Qx, Nx) each as (starts, places, weights).

    A pixel receives from a few points alone: those of pixel q are places[starts[q]:starts[q + 1]]. `line` (Nx,) is
    room to work in.
    """
    for q in range(out.shape[0]):
        for i in range(line.size):
            line[i] = 0.0
        for k in range(rows[0][q], rows[0][q + 1]):
            weight, source = rows[2][k], intensity[rows[1][k]]
            for i in range(line.size):
                line[i] += weight * source[i]
        for p in range(out.shape[1]):
            total = 0.0
            for k in range(columns[0][p], columns[0][p + 1]):
                total += columns[2][k] * line[columns[1][k]]
            out[q, p] = total / over
