"""Is this crystal what its file says, and can it be simulated? Reject with the reason; never repair silently."""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from math import gcd
from typing import Any

import numpy as np

from exitwave.simulate.structures.sources import Crystal

__all__ = ["Symmetry", "check_crystal", "reduced_formula", "symmetry_of"]

MIN_DISTANCE_A = 0.7
MIN_VOLUME_PER_ATOM_A3 = 1.0


@dataclass(frozen=True, kw_only=True)
class Symmetry:
    """What spglib says: space group number (0 where it finds none), Wyckoff sequence, and the prototype's number."""

    space_group: int
    wyckoff: str
    prototype_group: int


def check_crystal(crystal: Crystal) -> str | None:
    """The first reason to reject this crystal, or None where there is none."""
    atoms = crystal.atoms
    if len(atoms) == 0:
        return "it has no atoms"
    if crystal.cif_text is not None:
        reason = _check_cif(crystal.cif_text, atoms)
        if reason is not None:
            return reason
    if (atoms.numbers <= 0).any() or (atoms.numbers > 103).any():
        return "it holds an atom without a known chemical element"
    if not np.isfinite(atoms.positions).all() or not np.isfinite(atoms.cell.array).all():
        return "a coordinate or a cell vector is not a finite number"
    if not atoms.pbc.all():
        return "it is not periodic along all three axes: a crystal is expected (give the builder a bulk cell)"
    volume = abs(float(np.linalg.det(atoms.cell.array)))
    if volume < MIN_VOLUME_PER_ATOM_A3 * len(atoms):
        return f"its cell is singular or too small: {volume:.3g} Å³ for {len(atoms)} atoms"
    return _check_overlap(atoms)


def _check_overlap(atoms: Any) -> str | None:
    from ase.neighborlist import neighbor_list

    first, second, distance = neighbor_list("ijd", atoms, MIN_DISTANCE_A)
    if len(distance) == 0:
        return None
    k = int(np.argmin(distance))
    names = atoms.get_chemical_symbols()
    return (
        f"atoms {first[k]} ({names[first[k]]}) and {second[k]} ({names[second[k]]}) are {distance[k]:.3f} Å apart, "
        f"at least {MIN_DISTANCE_A} Å expected"
    )


def _check_cif(text: str, atoms: Any) -> str | None:
    from ase.io.cif import parse_cif

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        block = next(iter(parse_cif(io.StringIO(text))), None)
    if block is None:
        return "the CIF holds no data block"
    occupancies = block.get("_atom_site_occupancy")
    labels = block.get("_atom_site_label") or []
    for k, value in enumerate(occupancies or []):
        number = _cif_number(value)
        if number is not None and number < 0.999:
            label = labels[k] if k < len(labels) else f"number {k}"
            return f"partial occupancy {number:g} of site {label}: the file describes an average, not a crystal"
    declared = block.get("_chemical_formula_sum")
    if isinstance(declared, str):
        wanted = parse_formula(declared)
        found = _counts(atoms)
        if wanted is not None and _ratios(wanted) != _ratios(found):
            return (
                f"_chemical_formula_sum says {declared.strip()}, ASE read {_hill(found)}: "
                "a species is missing or misread"
            )
    return None


def _cif_number(value: Any) -> float | None:
    """A CIF number, `0.5(2)` included; None for '.' and '?'."""
    try:
        return float(re.sub(r"\(\d+\)$", "", str(value)))
    except ValueError:
        return None


def parse_formula(text: str) -> dict[str, Fraction] | None:
    """`'Ba O3 Ti'` -> counts; None where it is not a plain formula. Deuterium counts as hydrogen."""
    counts: dict[str, Fraction] = {}
    words = text.replace(",", " ").split()
    for word in words:
        parts = re.findall(r"([A-Z][a-z]?)(\d+(?:\.\d+)?)?", word)
        if not parts or "".join(a + b for a, b in parts) != word:
            return None
        for element, number in parts:
            element = "H" if element == "D" else element
            counts[element] = counts.get(element, Fraction(0)) + Fraction(number or "1")
    return counts or None


def _counts(atoms: Any) -> dict[str, Fraction]:
    counts: dict[str, Fraction] = {}
    for symbol in atoms.get_chemical_symbols():
        counts[symbol] = counts.get(symbol, Fraction(0)) + 1
    return counts


def _ratios(counts: Mapping[str, Fraction]) -> dict[str, float]:
    total = sum(counts.values())
    return {element: round(float(n / total), 3) for element, n in sorted(counts.items()) if n}


def _hill(counts: Mapping[str, Fraction]) -> str:
    return " ".join(e + ("" if n == 1 else str(n)) for e, n in sorted(counts.items()))


def reduced_formula(atoms: Any) -> str:
    """Composition with the smallest integers, elements in alphabetical order: `As Ga` -> `AsGa`."""
    counts = {e: int(n) for e, n in _counts(atoms).items()}
    divisor = reduce(gcd, counts.values())
    return "".join(e + ("" if n == divisor else str(n // divisor)) for e, n in sorted(counts.items()))


def _anonymous(atoms: Any) -> str:
    counts = sorted(int(n) for n in _counts(atoms).values())
    divisor = reduce(gcd, counts)
    return "-".join(str(n // divisor) for n in counts)


def symmetry_of(atoms: Any, *, symprec: float = 1e-2) -> Symmetry:
    """Space group and prototype: (space group, anonymous formula, Wyckoff sequence) hashed to 64 bits."""
    import spglib

    cell = (atoms.cell.array, atoms.get_scaled_positions(), atoms.numbers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dataset = spglib.get_symmetry_dataset(cell, symprec=symprec)
        except Exception:  # newer spglib raises where older ones gave None
            dataset = None
    if dataset is None:
        group, wyckoff = 0, ""
    else:
        group = int(dataset.number)
        # One letter per orbit, so that a supercell and its primitive cell have one sequence.
        orbits = {int(o): str(w) for o, w in zip(dataset.crystallographic_orbits, dataset.wyckoffs, strict=True)}
        wyckoff = "".join(sorted(orbits.values()))
    words = f"{group}|{_anonymous(atoms)}|{wyckoff}".encode()
    number = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")
    return Symmetry(space_group=group, wyckoff=wyckoff, prototype_group=number)
