"""What a pass costs on each fast route, predicted from its specification alone, and which route `auto` takes.

The choice decides on bits, so that it must be the same on any machine and in any plan: it knows no measurement made
here and no neighbours. The recipe tells how many settings one pass serves (`fan_out`) and how thick specimens get; a
few nanoseconds, measured once on one core, are part of this file:

    multislice   settings x probes x slices x points of the grid            4 ns, growing a little as the grid leaves
                                                                            the cache
    matrix       beams x slices x points of the grid                        the same
                 + planes x settings x probes x points of the window
                   x beams                                                  0.094 ns (a product of matrices)
    detector     once for each probe and exit plane, on either route        0.09 ns an element of two products
    Bloch        beams x slices x points of one cell, lines rounded up      2 ns while a cell stays in the cache
                 + planes x settings x probes x points of the window        0.6 ns, and 0.11 ns for each beam of a class
                 + the same x pixels of the detector                        1 ns a point of the grid that a pixel sees

The Bloch route exists where a crystal repeats (`repeats`), and is taken there unless another is cheaper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from exitwave.simulate.distributions import bounds
from exitwave.simulate.scanning import probe_count
from exitwave.simulate.tasks import SampleSpec

__all__ = [
    "FAST_ROUTES",
    "MATRIX_BYTES",
    "PassCost",
    "beam_count",
    "pass_cost",
    "repeats",
    "route",
    "settings_per_pass",
    "window_points",
]

FAST_ROUTES = ("auto", "fast", "smatrix", "bloch")

_SLICE, _SLICE_GROWTH = 4.0e-9, 0.06  # at 128 squared, and by which power of the number of points it grows beyond
_PRODUCT, _DETECT, _INTENSITY = 0.094e-9, 0.09e-9, 2.0e-9
_CELL, _CELL_POINTS, _BEAM = 2.0e-9, 96**2, 15e-6
_POINT, _POINT_BEAM, _LINE, _PIXEL = 0.6e-9, 0.11e-9, 0.3e-9, 1.0e-9
# Of a scattering matrix that is held at a time: a larger one is made in several passes.
MATRIX_BYTES = 512 * 2**20


@dataclass(frozen=True, kw_only=True)
class PassCost:
    """Seconds of one pass on one core, without the potential: all of its samples, for one phonon configuration."""

    fast: float
    smatrix: float
    samples: int
    matrix_bytes: float
    bloch: float = math.inf
    bloch_bytes: float = 0.0

    def of(self, route: str) -> float:
        """Seconds by the route of this name."""
        return {"fast": self.fast, "smatrix": self.smatrix, "bloch": self.bloch}[route]


def beam_count(spec: SampleSpec) -> float:
    """Points of diffraction space within the soft aperture, nearly: an ellipse, half a point wider."""
    wavelength, alpha = spec.wavelength_A, spec.values["semiangle_mrad"] * 1e-3
    ly, lx = spec.structure.extent_yx_A
    return math.pi * (alpha / wavelength * ly + 0.5) * (alpha / wavelength * lx + 0.5)


def repeats(spec: SampleSpec) -> bool:
    """Whether the specimen is the same from cell to cell on the grid itself: whole points in each cell, and every atom
    at its place. Then multislice falls into as many classes as there are cells, which do not mix (bloch.py).

    Not with finite projections: these reach a cutoff around the point nearest to an atom. Where an atom is midway
    between two points, rounding decides which it is, cell by cell, and at the cutoff cells differ by parts of 10^7.
    """
    (nx, ny), grid, recipe = spec.structure.repeat_xy, spec.grid_yx, spec.recipe
    still = not recipe.phonons.count and recipe.grid.projection == "infinite"
    return still and grid[0] % ny == 0 and grid[1] % nx == 0


def window_points(spec: SampleSpec) -> tuple[float, float]:
    """Rows and columns of the grid in diffraction space that fall onto the detector, nearly."""
    q, extent, grid = spec.q_sampling_yx_per_A, spec.structure.extent_yx_A, spec.grid_yx
    rows, columns = (
        min((pixels + 1) * q[axis] * extent[axis] + 1.0, 2.0 / 3.0 * grid[axis])
        for axis, pixels in enumerate(spec.recipe.detector.shape)
    )
    return rows, columns


def settings_per_pass(spec: SampleSpec) -> tuple[int, int]:
    """(exit planes, other settings) that one pass serves by the recipe's `fan_out`."""
    fan_out = dict(spec.recipe.fan_out.counts())
    planes = fan_out.pop("thickness_A", 1)
    return planes, math.prod(fan_out.values())


def pass_cost(spec: SampleSpec, *, slices: float | None = None) -> PassCost:
    """Predicted for the pass that the recipe makes of samples like this one.

    `slices` to the deepest exit plane; unless told, as many as may be expected of the deepest of its thicknesses.
    """
    planes, settings = settings_per_pass(spec)
    if spec.recipe.grid.projection == "finite":  # there every thickness is a pass of its own
        planes = 1
    if slices is None:
        least, most = bounds(spec.recipe.sampling.thickness_A)
        slices = max(1.0, (least + (most - least) * planes / (planes + 1)) / spec.structure.slice_thickness_A)
    probes = probe_count(spec)
    (ny, nx), (qy, qx) = spec.grid_yx, spec.recipe.detector.shape
    points = ny * nx
    through = slices * points * _SLICE * max(1.0, points / 128**2) ** _SLICE_GROWTH
    seen = planes * settings * probes
    beams, (rows, columns) = beam_count(spec), window_points(spec)
    detected = _DETECT * qy * nx * (2.0 / 3.0 * ny + qx) + _INTENSITY * 2.0 / 3.0 * points
    reduced = rows * columns * (_PRODUCT * beams + _INTENSITY + _DETECT * (qx + qy * qx / columns))
    matrix_bytes = 8.0 * planes * beams * rows * columns
    bands = max(1.0, matrix_bytes / MATRIX_BYTES)
    bloch, bloch_bytes = math.inf, 0.0
    if repeats(spec):
        columns_of_cells, rows_of_cells = spec.structure.repeat_xy
        classes = columns_of_cells * rows_of_cells
        one = _through_cell(ny // rows_of_cells, nx // columns_of_cells)
        bloch = beams * (slices * one + planes * _BEAM) + seen * _combined(spec, beams, classes)
        bloch_bytes = 3.0 * 8.0 * planes * beams * points / classes
    return PassCost(
        fast=settings * probes * through + seen * detected,
        smatrix=beams * through * bands + seen * reduced,
        samples=planes * settings,
        matrix_bytes=min(matrix_bytes, MATRIX_BYTES),
        bloch=bloch,
        bloch_bytes=bloch_bytes,
    )


def _through_cell(rows: int, columns: int) -> float:
    """Seconds of one beam through one slice of a cell of so many points; lines are transformed eight at a time."""
    points = -(-rows // 8) * 8 * (-(-columns // 8) * 8)
    if points <= _CELL_POINTS:
        return points * _CELL
    return points * _SLICE * max(1.0, points / 128**2) ** _SLICE_GROWTH


def _combined(spec: SampleSpec, beams: float, classes: int) -> float:
    """Seconds of one pattern on the Bloch route, from the matrix to the detector."""
    rows, columns = window_points(spec)
    reached = min(1.0, beams / classes)  # of the classes
    combined = rows * columns * (reached * _POINT + beams / classes * _POINT_BEAM)
    of_a_pixel = []  # points of the grid along either axis; each spreads over a whole number of pixels
    for extent, q in zip(spec.structure.extent_yx_A, spec.q_sampling_yx_per_A, strict=True):
        of_a_pixel.append(extent * q * (1 + max(1, math.ceil(1.0 / (extent * q) - 1e-9))))
    qy, qx = spec.recipe.detector.shape
    return combined + qy * of_a_pixel[0] * columns * _LINE + qy * qx * of_a_pixel[1] * _PIXEL


def route(spec: SampleSpec) -> Literal["fast", "smatrix", "bloch"]:
    """The route predicted to be cheaper, by a tenth at least: equal for all samples of a pass."""
    cost = pass_cost(spec)
    matrix = cost.smatrix < 0.9 * cost.fast
    if cost.bloch < 0.9 * (cost.smatrix if matrix else cost.fast) and math.prod(spec.structure.repeat_xy) > 1:
        return "bloch"
    return "smatrix" if matrix else "fast"
