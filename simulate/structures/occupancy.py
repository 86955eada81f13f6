"""The places of a crystal and who occupies them; and, where a place is occupied in part, a crystal drawn from that.

A CIF describes an average over all cells. Where every place is full of one species, the average is the crystal. Where
not, a supercell is drawn, if somebody asked for it:

1. The cell is repeated until each edge is at least as long as asked.
2. For each orbit (the places that symmetry makes of one site) the species are dealt out in their proportions, as whole
   atoms by largest remainder, vacancies included: the composition is the file's as nearly as atoms can be counted.
3. Who gets which is a seeded permutation, a pure function of (seed, content of the file, orbit).

Correlations between places (a split site, of which only one half is ever occupied) are not in a CIF: what is drawn
apart from them may overlap, and is then rejected as any crystal with overlapping atoms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from exitwave.simulate.distributions import uniform_stream

__all__ = ["AverageCrystal", "SharedPlaceError", "expand_sites", "sample_supercell"]

SYMPREC = 1e-3  # fractional: nearer images of one site are one place, as for ASE

Occupants = tuple[tuple[str, float], ...]


class SharedPlaceError(ValueError):
    """Site number `site` falls on a place that is taken; `total`: how full they make it, where that is the slip."""

    def __init__(self, site: int, total: float | None) -> None:
        super().__init__(f"site {site} shares a place")
        self.site, self.total = site, total


@dataclass(frozen=True, kw_only=True)
class AverageCrystal:
    """Places (k, 3) in fractional coordinates, their orbits (k,), the occupants of each orbit, the cell (rows, Å)."""

    cell: np.ndarray
    places: np.ndarray
    orbit: np.ndarray
    occupants: tuple[Occupants, ...]

    @property
    def is_ordered(self) -> bool:
        """Whether every place is full of one species."""
        return all(len(who) == 1 and who[0][1] >= 0.999 for who in self.occupants)

    def composition(self) -> dict[str, float]:
        """Atoms of each species in the cell, on average."""
        counts: dict[str, float] = {}
        for orbit, who in enumerate(self.occupants):
            multiplicity = int((self.orbit == orbit).sum())
            for symbol, part in who:
                counts[symbol] = counts.get(symbol, 0.0) + multiplicity * (1.0 if self.is_ordered else part)
        return {symbol: n for symbol, n in counts.items() if n > 0}

    def ordered(self) -> Any:
        """The crystal as `ase.Atoms`, where `is_ordered`."""
        assert self.is_ordered
        return _atoms([self.occupants[o][0][0] for o in self.orbit], self.places, self.cell)

    def parent(self) -> Any:
        """The average as `ase.Atoms` with one made-up element for each set of occupants: for its symmetry only."""
        kinds = sorted(set(self.occupants))
        return _atoms([kinds.index(self.occupants[o]) + 1 for o in self.orbit], self.places, self.cell)


def _atoms(species: Sequence[Any], places: np.ndarray, cell: np.ndarray) -> Any:
    from ase import Atoms

    return Atoms(species, scaled_positions=places, cell=cell, pbc=True)


def expand_sites(
    cell: np.ndarray,
    sites: np.ndarray,
    symbols: Sequence[str],
    occupancies: Sequence[float],
    operations: tuple[np.ndarray, np.ndarray],
) -> AverageCrystal:
    """All places that the operations (m, 3, 3), (m, 3) make of the sites (n, 3), both fractional.

    Sites on one place are its occupants together. Raises SharedPlaceError where they would fill it more than once.
    """
    from scipy.spatial import cKDTree

    rotations, translations = operations
    # (n, m, 3): image of each site under each operation, within the cell
    images = np.einsum("mij,nj->nmi", rotations, sites) + translations[None]
    images = np.mod(images, 1.0)
    images[images >= 1.0] = 0.0
    orbits = [_distinct(image) for image in images]
    places = np.concatenate(orbits)
    site = np.repeat(np.arange(len(sites)), [len(o) for o in orbits])
    merged = np.arange(len(sites))
    for a, b in sorted(cKDTree(places, boxsize=1.0).query_pairs(SYMPREC, p=np.inf)):
        first, second = sorted((int(site[a]), int(site[b])))
        if first != second:
            merged[second] = min(merged[second], merged[first])
    keep = np.flatnonzero(merged == np.arange(len(sites)))
    occupants: list[Occupants] = []
    for first in keep.tolist():
        together = np.flatnonzero(merged == first).tolist()
        total = sum(occupancies[k] for k in together)
        if total > 1.001:
            whole = all(occupancies[k] >= 0.999 for k in together)
            raise SharedPlaceError(together[-1], None if whole else total)
        parts: dict[str, float] = {}
        for k in together:
            parts[symbols[k]] = parts.get(symbols[k], 0.0) + occupancies[k]
        occupants.append(tuple(sorted(parts.items())))
    chosen = np.isin(site, keep)
    return AverageCrystal(
        cell=cell, places=places[chosen], orbit=np.searchsorted(keep, site[chosen]), occupants=tuple(occupants)
    )


def _distinct(images: np.ndarray) -> np.ndarray:
    """The images (m, 3) of one site without those that lie on an earlier one."""
    if len(images) == 1:
        return images
    apart = images[:, None] - images[None]
    same = (np.abs(apart - np.rint(apart)) < SYMPREC).all(-1)
    return images[~np.tril(same, -1).any(1)]


def sample_supercell(
    average: AverageCrystal, *, extent_A: float, seed: int, key: str
) -> tuple[Any, tuple[int, int, int]]:
    """A supercell with edges of at least `extent_A`, its places dealt out; and how often the cell repeats in it."""
    edges = np.linalg.norm(average.cell, axis=1)
    na, nb, nc = (max(1, math.ceil(extent_A / edge - 1e-9)) for edge in edges)
    shifts = np.stack(np.meshgrid(np.arange(na), np.arange(nb), np.arange(nc), indexing="ij"), -1).reshape(-1, 1, 3)
    repeats = np.array([na, nb, nc])
    places = ((average.places[None] + shifts) / repeats).reshape(-1, 3)
    orbit = np.tile(average.orbit, len(shifts))
    species = np.full(len(places), "", dtype="<U2")
    for number, who in enumerate(average.occupants):
        members = np.flatnonzero(orbit == number)
        stream = uniform_stream(seed, key, number, "occupancy")
        order = np.argsort([next(stream) for _ in members], kind="stable")
        dealt = [symbol for symbol, count in _whole(who, len(members)) for _ in range(count)]
        species[members[order[: len(dealt)]]] = dealt
    there = species != ""
    return _atoms(species[there].tolist(), places[there], average.cell * repeats[:, None]), (na, nb, nc)


def _whole(who: Occupants, places: int) -> list[tuple[str, int]]:
    """Whole atoms of each species on so many places, by largest remainder; the rest stays vacant."""
    parts = [*who, ("", max(0.0, 1.0 - sum(part for _, part in who)))]
    exact = [part * places / sum(p for _, p in parts) for _, part in parts]
    counts = [math.floor(e + 1e-9) for e in exact]
    by_remainder = sorted(range(len(parts)), key=lambda k: (-(exact[k] - counts[k]), k))
    for k in by_remainder[: places - sum(counts)]:
        counts[k] += 1
    return [(symbol, count) for (symbol, _), count in zip(parts, counts, strict=True) if symbol]
