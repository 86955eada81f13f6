"""Zone axes from diffraction: the directions whose planes scatter most strongly.

Kinematic theory (Williams and Carter, "Transmission Electron Microscopy", chapter 13; Kirkland, "Advanced Computing in
Electron Microscopy", section 5.1): planes (hkl) of spacing d diffract with an intensity of |F|², where

    F(g) = sum over atoms of f(|g|) exp(2 pi i g r),    |g| = 1 / d,

and f is the electron scattering factor of Lobato and Van Dyck (Acta Crystallographica A 70, 636, 2014). The strongest
reflections within a range of d give the axes: for each, the beam goes along the normal of (hkl), or along the lattice
direction [uvw] next to it where the normal is none (a low crystal's normals seldom are).

Of reflections that are equal by symmetry, or orders of one another, one is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Axis", "AxisError", "strongest_axes"]

_MAX_WORK = 4e9  # atoms x reflections: half a minute
_MAX_INDEX = 12
_EXACT_DEG = 0.05
_MAX_ASTRAY_DEG = 3.0
_NEGLIGIBLE = 1e-4  # of the strongest


class AxisError(ValueError):
    """Why a reflection, or a crystal, gives no zone axis."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A zone axis [uvw] and the reflection (hkl) that it belongs to, of spacing `d_A`; intensity over the strongest."""

    zone: tuple[int, int, int]
    reflection: tuple[int, int, int] = (0, 0, 0)
    d_A: float = 0.0
    intensity: float = 0.0


def strongest_axes(
    atoms: Any, *, index_cell: np.ndarray, rotations: np.ndarray, count: int, d_A: tuple[float, float]
) -> Iterator[Axis | AxisError]:
    """The axes of the `count` strongest families of reflections with `d_A[0]` <= d <= `d_A[1]`, strongest first.

    `index_cell` (rows, Å) is the cell that indices refer to, `rotations` (m, 3, 3) its symmetry in fractional
    coordinates. Where the lattice has no direction next to a normal, the reason stands in place of the axis.
    """
    hkl, spacing, intensity = _intensities(atoms, np.asarray(index_cell), d_A)
    # Sixteen digits of a sum depend on its order: equal ones are told apart by their indices.
    rank = np.lexsort((*(-np.abs(hkl)).T, np.abs(hkl).sum(1), -np.round(intensity, 6)))
    taken: set[tuple[int, ...]] = set()
    found = 0
    for k in rank:
        if found == count or intensity[k] < _NEGLIGIBLE:
            return
        family = _equivalent(hkl[k], rotations)
        direction = _reduced(hkl[k])
        if direction in taken:
            continue
        taken |= {_reduced(np.asarray(member)) for member in family}
        found += 1
        chosen = max(family, key=lambda member: (-sum(index < 0 for index in member), member))
        try:
            zone = _nearest_direction(np.asarray(chosen), np.asarray(index_cell))
        except AxisError as error:
            yield error
            continue
        yield Axis(zone=zone, reflection=chosen, d_A=float(spacing[k]), intensity=float(intensity[k]))
    if not found:
        raise AxisError(f"no reflection has a spacing of {d_A[0]:g} to {d_A[1]:g} Å")


def _intensities(atoms: Any, cell: np.ndarray, d_A: tuple[float, float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Indices (n, 3), spacings (n,) and intensities (n,) over the strongest; one of each pair ±(hkl)."""
    from exitwave.simulate.abtem_backend import scattering_factor

    most = np.floor(np.linalg.norm(cell, axis=1) / d_A[0] + 1e-9).astype(int)
    axes = [np.arange(-m, m + 1) for m in most]
    if float(np.prod(2 * most + 1)) * len(atoms) > _MAX_WORK:
        raise AxisError(f"too many reflections of d >= {d_A[0]:g} Å for {len(atoms)} atoms; a larger d_A would do")
    fractional = atoms.positions @ np.linalg.inv(cell)
    hkl = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3)
    length = np.linalg.norm(hkl @ np.linalg.inv(cell).T, axis=1)
    with np.errstate(divide="ignore"):
        spacing = 1.0 / length
    total = np.zeros(len(hkl), dtype=complex)
    for number in np.unique(atoms.numbers):
        there = fractional[atoms.numbers == number]
        phases = [np.exp(2j * np.pi * np.outer(axis, there[:, k])) for k, axis in enumerate(axes)]
        # (h, k, l): sum over atoms of three factors, the last one as a matrix product
        pairs = phases[0][:, None] * phases[1][None]
        total += (pairs @ phases[2].T).ravel() * scattering_factor(int(number), length)
    lead = np.where(hkl[:, 0] != 0, hkl[:, 0], np.where(hkl[:, 1] != 0, hkl[:, 1], hkl[:, 2]))
    keep = (lead > 0) & (spacing >= d_A[0] - 1e-9) & (spacing <= d_A[1] + 1e-9)
    intensity = np.abs(total[keep]) ** 2
    if not keep.any() or intensity.max() <= 0:
        raise AxisError(f"no reflection has a spacing of {d_A[0]:g} to {d_A[1]:g} Å")
    return hkl[keep], spacing[keep], intensity / intensity.max()


def _equivalent(hkl: np.ndarray, rotations: np.ndarray) -> set[tuple[int, int, int]]:
    """All (hkl) that symmetry and Friedel's law make of one: rows turn as h R, R acting on fractional coordinates."""
    turned = np.rint(hkl @ rotations).astype(int)
    return {(int(h), int(k), int(m)) for h, k, m in np.concatenate([turned, -turned, [hkl]])}


def _reduced(hkl: np.ndarray) -> tuple[int, ...]:
    """The lowest order along its normal, one for each pair ±."""
    lowest = hkl // np.gcd.reduce(np.abs(hkl))
    lead = next(v for v in lowest if v)
    return tuple(int(v) for v in (lowest if lead > 0 else -lowest))


def _nearest_direction(hkl: np.ndarray, cell: np.ndarray) -> tuple[int, int, int]:
    """The lattice direction [uvw] along the normal of (hkl): the lowest that is exact, else the nearest."""
    normal = np.linalg.inv(cell) @ hkl
    along = normal @ np.linalg.inv(cell)
    along = along / np.abs(along).max()
    best: tuple[float, np.ndarray] | None = None
    for multiple in range(1, _MAX_INDEX + 1):
        uvw = np.rint(multiple * along).astype(int)
        vector = uvw @ cell
        cosine = vector @ normal / (np.linalg.norm(vector) * np.linalg.norm(normal))
        astray = float(np.degrees(np.arccos(np.clip(cosine, -1.0, 1.0))))
        if best is None or astray < best[0] - 1e-6:
            best = (astray, uvw)
        if astray <= _EXACT_DEG:
            break
    assert best is not None
    if best[0] > _MAX_ASTRAY_DEG:
        raise AxisError(
            f"reflection ({' '.join(map(str, hkl))}): no lattice direction within {_MAX_ASTRAY_DEG:g}° of its normal, "
            f"the nearest is {best[0]:.1f}° away"
        )
    u, v, w = (int(x) for x in best[1] // np.gcd.reduce(np.abs(best[1])))
    return u, v, w
