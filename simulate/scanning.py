"""Where the probe stands, as seen by the cell, and what a finite source makes of the patterns. Pure.

The microscope's axes are those of the detector. The crystal may be turned against them by `crystal_rotation_deg`, the
scan by `scan_rotation_deg`; both turn x towards y. A periodic cell cannot be turned on its own grid, so the microscope
is turned the other way instead: in the cell's axes the scan lies at scan_rotation - crystal_rotation, tilts and the
azimuths of aberrations are turned back, and detected patterns are turned forward again (`detector`). `scan_origin` is a
point of the cell.

A source whose image has full width `source_fwhm_A` makes each pattern a mean over neighbouring positions, weighted by a
Gaussian: patterns are simulated on the scan's lattice and as far beyond it as the Gaussian reaches, and mixed. The sum
over a lattice equals the integral to one part in 10^5 as long as the step is at most half the width. Jitter moves each
position by Gaussian steps of its own: without a source the probe stands there, with one the Gaussian is centred there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from exitwave.simulate.label import lattice_points

if TYPE_CHECKING:
    from exitwave.simulate.tasks import SampleSpec

__all__ = [
    "in_cell_axes",
    "lattice_rotation_deg",
    "probe_count",
    "probe_positions",
    "reach_steps",
    "scan_patterns",
    "source_sigma_A",
]

_REACH = 3.0  # standard deviations of the source


def source_sigma_A(fwhm_A: float) -> float:
    """Standard deviation of a Gaussian of this full width at half maximum."""
    return fwhm_A / (2.0 * math.sqrt(2.0 * math.log(2.0)))


def lattice_rotation_deg(values: Mapping[str, float]) -> float:
    """The angle of the scan's lattice in the cell's axes."""
    return values["scan_rotation_deg"] - values["crystal_rotation_deg"]


def in_cell_axes(values: Mapping[str, float]) -> dict[str, float]:
    """The values with tilts and azimuths as the cell sees them: turned back by the crystal's rotation."""
    turn = values["crystal_rotation_deg"]
    if turn == 0.0:
        return dict(values)
    cosine, sine = math.cos(math.radians(turn)), math.sin(math.radians(turn))
    turned = {name: value - turn for name, value in values.items() if name.startswith("phi")}
    x, y = values["tilt_x_mrad"], values["tilt_y_mrad"]
    tilts = {"tilt_x_mrad": x * cosine + y * sine, "tilt_y_mrad": y * cosine - x * sine}
    return {**values, **turned, **tilts}


def reach_steps(spec: SampleSpec) -> int:
    """How many steps beyond the scan, on every side, the source needs patterns; 0 without a source."""
    sigma = source_sigma_A(spec.values["source_fwhm_A"])
    if sigma == 0.0:
        return 0
    # Jitter of four deviations stays within what is simulated.
    return math.ceil((_REACH * sigma + 4.0 * spec.values["scan_jitter_A"]) / spec.recipe.scan.step_A)


def probe_count(spec: SampleSpec) -> int:
    """How many positions `probe_positions` has."""
    rows, columns = spec.recipe.scan.shape
    return (rows + 2 * reach_steps(spec)) * (columns + 2 * reach_steps(spec))


def probe_positions(spec: SampleSpec) -> NDArray[np.float64]:
    """Where the probe stands, (positions, 2) as (y, x) in Å of the cell; not folded into it.

    Without a source, the jittered points of the scan; with one, its lattice and the points around it.
    """
    scan, reach = spec.recipe.scan, reach_steps(spec)
    rotation = lattice_rotation_deg(spec.values)
    if reach:
        shape = (scan.shape[0] + 2 * reach, scan.shape[1] + 2 * reach)
        diagonal = lattice_points((2, 2), scan.step_A, (0.0, 0.0), rotation)[1, 1]
        y, x = np.asarray(spec.scan_origin_yx_A) - reach * diagonal
        return lattice_points(shape, scan.step_A, (float(y), float(x)), rotation).reshape(-1, 2)
    points = lattice_points(scan.shape, scan.step_A, spec.scan_origin_yx_A, rotation).reshape(-1, 2)
    return points + _jitter(spec)


def _jitter(spec: SampleSpec) -> NDArray[np.float64]:
    """Steps of the positions of the scan (positions, 2) in Å, keyed by the sample's own seed."""
    count = math.prod(spec.recipe.scan.shape)
    if spec.values["scan_jitter_A"] == 0.0:
        return np.zeros((count, 2))
    generator = np.random.Generator(np.random.Philox(key=np.array([spec.scan_jitter_seed, 0x6A697474], np.uint64)))
    drawn = generator.standard_normal((count, 2)).clip(-4.0, 4.0)
    return spec.values["scan_jitter_A"] * drawn


def scan_patterns(spec: SampleSpec, patterns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Patterns at `probe_positions` (positions, …) -> of the scan's points (Ry, Rx, …), mixed by the source."""
    shape, reach = spec.recipe.scan.shape, reach_steps(spec)
    if not reach:
        return patterns.reshape(*shape, *patterns.shape[1:])
    places = probe_positions(spec)
    wide = (shape[0] + 2 * reach, shape[1] + 2 * reach)
    # (rows, columns, 2) -> the scan's own points (positions, 2)
    centres = places.reshape(*wide, 2)[reach : reach + shape[0], reach : reach + shape[1]].reshape(-1, 2)
    centres = centres + _jitter(spec)
    apart = ((centres[:, None] - places[None]) ** 2).sum(axis=-1)  # (positions of the scan, positions)
    weights = np.exp(-apart / (2.0 * source_sigma_A(spec.values["source_fwhm_A"]) ** 2))
    weights /= weights.sum(axis=1, keepdims=True)
    return np.tensordot(weights, patterns, axes=1).reshape(*shape, *patterns.shape[1:])
