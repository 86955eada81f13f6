"""A crystal seen along a zone axis, as an orthogonal cell that repeats.

Multislice needs a periodic cell with its c axis along the beam and a and b across it. Such a cell is looked for among
the vectors of the crystal's own lattice:

1. w, the shortest lattice vector along the zone axis [uvw]; it becomes the z axis.
2. p and q, two lattice vectors across w and across each other. Where the crystal has no such pair exactly, the pair is
   taken that needs the least deformation, and that deformation is reported as a strain: it is never applied unseen.
3. the cell (p, q, w) is turned onto (x, y, z), right-handed, and atoms are moved along z by a constant so that the
   boundaries between slices fall into the widest gaps between atomic planes: no atom sits on a boundary, where
   rounding would decide on its slice.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np

from exitwave.simulate.physics import slices_per_period
from exitwave.simulate.structures.preflight import MAX_SYMMETRY_ATOMS

__all__ = ["OrientationError", "OrientedCell", "orient"]

_SEARCH_LENGTH_A = 40.0
_MAX_AREA_A2 = 3000.0  # both more for a crystal whose own cell is larger
_EXACT = 1e-4  # files round angles to a hundredth of a degree
_MAX_PERIOD_A = 1000.0
_MAX_MULTIPLE = 400  # a sampled supercell repeats the cell at most so often along two of its edges
_MAX_ASTRAY = 2e-3  # radians; what a cell found by spglib may differ from the given one


class OrientationError(ValueError):
    """No orthogonal cell within the allowed strain."""


@dataclass(frozen=True, kw_only=True)
class OrientedCell:
    """One orthogonal period: lengths along (x, y, z) in Å, atoms with 0 <= position < length (columns x, y, z)."""

    numbers: tuple[int, ...]
    positions_A: tuple[tuple[float, float, float], ...]
    lengths_A: tuple[float, float, float]
    inplane_axis: tuple[int, int, int]
    strain: float
    slices: int


def orient(
    atoms: Any,
    zone_axis: tuple[int, int, int],
    *,
    max_strain: float,
    slice_thickness_A: float,
    max_atoms: int,
    index_cell: np.ndarray | None = None,
) -> OrientedCell:
    """The orthogonal cell of `atoms` along `zone_axis` (direct-lattice indices of `index_cell`, the given cell unless
    told: a sampled supercell is named by the cell that it was made from).

    Raises OrientationError naming the least strain found, or the size of a period that is too long or holds more than
    `max_atoms`.
    """
    primitive = _primitive(atoms)
    given = np.asarray(atoms.cell.array if index_cell is None else index_cell)
    lattice = np.asarray(primitive.cell.array)  # rows a, b, c
    w = _along(lattice, np.asarray(zone_axis) @ given)
    length = float(np.linalg.norm(w @ lattice))
    if length > _MAX_PERIOD_A:
        raise OrientationError(f"its period along this axis is {length:.4g} Å, at most {_MAX_PERIOD_A:g} Å expected")
    matrix, strain = _across(lattice, w, max_strain)
    period = len(primitive) * abs(round(float(np.linalg.det(matrix))))
    if period > max_atoms:
        raise OrientationError(f"one period along this axis holds {period} atoms, cell.max_atoms is {max_atoms}")
    return _assemble(primitive, matrix, strain, given, slice_thickness_A)


def _primitive(atoms: Any) -> Any:
    """The primitive cell in the same orientation: its lattice holds every translation of the crystal.

    A cell too large to be searched counts as primitive.
    """
    import spglib
    from ase import Atoms

    if len(atoms) > MAX_SYMMETRY_ATOMS:
        return atoms
    cell = (atoms.cell.array, atoms.get_scaled_positions(), atoms.numbers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = spglib.standardize_cell(cell, to_primitive=True, no_idealize=True, symprec=1e-3)
        except Exception:
            found = None
    if found is None or len(atoms) % len(found[2]):
        return atoms
    # Only accepted where the given cell is a supercell of it: the zone axis then means the same direction.
    ratio = atoms.cell.array @ np.linalg.inv(found[0])
    if np.abs(ratio - np.rint(ratio)).max() > 1e-3:
        return atoms
    return Atoms(numbers=found[2], scaled_positions=found[1], cell=found[0], pbc=True)


def _along(lattice: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """Integer coordinates of the shortest lattice vector along a direction, some multiple of which is one."""
    exact = direction @ np.linalg.inv(lattice)
    for multiple in range(1, _MAX_MULTIPLE + 1):
        coordinates = np.rint(multiple * exact).astype(int)
        astray = np.linalg.norm((coordinates - multiple * exact) @ lattice) / np.linalg.norm(multiple * direction)
        if coordinates.any() and astray < _MAX_ASTRAY:
            return coordinates // gcd(*(int(c) for c in coordinates))
    raise OrientationError("no lattice vector lies along this axis")


def _across(lattice: np.ndarray, w: np.ndarray, max_strain: float) -> tuple[np.ndarray, float]:
    """Rows p, q, w (integer coordinates, right-handed) of the best orthogonal cell, and its strain.

    Of all cells that are exact to the digits of a file the smallest; failing that, of those within `max_strain`.
    """
    axis = w @ lattice
    axis = axis / np.linalg.norm(axis)
    edges = np.sort(np.linalg.norm(lattice, axis=1))
    within = max(_SEARCH_LENGTH_A, 1.01 * edges[-1])
    max_area = max(_MAX_AREA_A2, 1.01 * edges[-1] * edges[-2])
    candidates = _near_perpendicular(lattice, axis, max(3.0 * max_strain, 1e-6), within)
    if len(candidates) < 2:
        raise OrientationError(f"no lattice vectors across the zone axis within {within:.0f} Å")
    vectors = candidates @ lattice
    lengths = np.linalg.norm(vectors, axis=1)
    cosines = np.abs(vectors @ vectors.T) / np.outer(lengths, lengths)
    areas = np.outer(lengths, lengths)
    first, second = np.nonzero((cosines <= max(3.0 * max_strain, 1e-6)) & (areas <= max_area))
    forward = first < second
    first, second = first[forward], second[forward]
    order = np.lexsort((second, first, np.round(areas[first, second], 6)))
    best: tuple[np.ndarray, float] | None = None
    least = np.inf
    for k in order[:4000]:
        matrix = _right_handed(np.array([candidates[first[k]], candidates[second[k]], w]), lattice)
        strain = _strain(matrix @ lattice)
        least = min(least, strain)
        if strain <= min(_EXACT, max(max_strain, 1e-6)):
            return matrix, strain if strain > 1e-6 else 0.0
        if best is None and strain <= max_strain:
            best = (matrix, strain)
    if best is None:
        found = f"the least strain found is {100 * least:.2f} %" if np.isfinite(least) else "none was found"
        raise OrientationError(f"no orthogonal cell within a strain of {100 * max_strain:g} %: {found}")
    return best


def _near_perpendicular(lattice: np.ndarray, axis: np.ndarray, tolerance: float, within: float) -> np.ndarray:
    """Integer coordinates of lattice vectors across `axis`, shortest first, one of each pair ±v. Shape (m, 3)."""
    reach = np.ceil(within * np.linalg.norm(np.linalg.inv(lattice), axis=0)).astype(int)
    reach = np.minimum(reach, 40)
    grids = np.meshgrid(*(np.arange(-r, r + 1) for r in reach), indexing="ij")
    coordinates = np.stack([g.ravel() for g in grids], axis=1)
    vectors = coordinates @ lattice
    lengths = np.linalg.norm(vectors, axis=1)
    keep = (lengths > 1e-9) & (lengths <= within)
    keep &= np.abs(vectors @ axis) <= tolerance * np.maximum(lengths, 1e-9)
    coordinates, vectors, lengths = coordinates[keep], vectors[keep], lengths[keep]
    # Of v and -v keep the one whose first non-zero coordinate is positive.
    lead = np.where(coordinates[:, 0] != 0, coordinates[:, 0], coordinates[:, 1])
    lead = np.where(lead != 0, lead, coordinates[:, 2])
    coordinates, lengths = coordinates[lead > 0], lengths[lead > 0]
    order = np.lexsort((coordinates[:, 2], coordinates[:, 1], coordinates[:, 0], np.round(lengths, 6)))
    # A multiple of a shorter vector never makes a smaller cell than that vector.
    primitive = np.gcd.reduce(np.abs(coordinates), axis=1) == 1
    return coordinates[order][primitive[order]][:400]


def _right_handed(matrix: np.ndarray, lattice: np.ndarray) -> np.ndarray:
    if np.linalg.det(matrix @ lattice) < 0:
        matrix = matrix * np.array([[1], [-1], [1]])
    return matrix


def _target(cell: np.ndarray) -> np.ndarray:
    """The orthogonal cell with the same lengths: diag(|p|, |q|, |w|)."""
    return np.diag(np.linalg.norm(cell, axis=1))


def _strain(cell: np.ndarray) -> float:
    """Largest stretch or squeeze of the map from `cell` to its orthogonal target (singular values of it, minus 1)."""
    stretches = np.linalg.svd(np.linalg.inv(cell) @ _target(cell), compute_uv=False)
    return float(np.abs(stretches - 1.0).max())


def _assemble(
    primitive: Any, matrix: np.ndarray, strain: float, given_cell: np.ndarray, slice_thickness_A: float
) -> OrientedCell:
    from ase.build import make_supercell

    supercell = make_supercell(primitive, matrix)
    wanted = len(primitive) * abs(round(float(np.linalg.det(matrix))))
    if len(supercell) != wanted:
        raise OrientationError(f"{wanted} atoms expected in the orthogonal cell, {len(supercell)} came")
    lengths = np.linalg.norm(supercell.cell.array, axis=1)
    fractional = supercell.get_scaled_positions(wrap=True)
    positions = fractional * lengths
    slices = slices_per_period(float(lengths[2]), slice_thickness_A)
    positions[:, 2] -= _boundary(positions[:, 2], float(lengths[2]) / slices)
    positions = np.round(np.mod(positions, lengths), 8)
    positions = np.where(positions >= lengths - 1e-6, 0.0, positions)
    order = np.lexsort((np.round(positions[:, 0], 4), np.round(positions[:, 1], 4), np.round(positions[:, 2], 4)))
    inplane = np.rint((matrix[0] @ primitive.cell.array) @ np.linalg.inv(given_cell) * 12).astype(int)
    inplane = inplane // max(1, gcd(*(int(c) for c in inplane)))
    x, y, z = (float(length) for length in lengths)
    return OrientedCell(
        numbers=tuple(int(n) for n in supercell.numbers[order]),
        positions_A=tuple((float(p[0]), float(p[1]), float(p[2])) for p in positions[order]),
        lengths_A=(x, y, z),
        inplane_axis=(int(inplane[0]), int(inplane[1]), int(inplane[2])),
        strain=strain,
        slices=slices,
    )


def _boundary(z: np.ndarray, slice_thickness_A: float) -> float:
    """The height in [0, slice) in the middle of the widest gap that atoms leave, modulo one slice."""
    heights = np.round(np.mod(z, slice_thickness_A), 5)
    heights = np.unique(np.where(heights < slice_thickness_A - 1e-5, heights, 0.0))  # a slice on is the same place
    gaps = np.diff(np.append(heights, heights[0] + slice_thickness_A))
    widest = int(np.argmax(np.round(gaps, 4)))
    return float(np.mod(heights[widest] + gaps[widest] / 2.0, slice_thickness_A))
