"""Can this crystal be simulated? Reject with the reason; never repair silently."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import reduce
from math import gcd
from typing import Any

import numpy as np

from exitwave.simulate.structures.sources import Crystal

__all__ = ["MAX_SYMMETRY_ATOMS", "Symmetry", "check_crystal", "reduced_formula", "rotations_of", "symmetry_of"]

MIN_DISTANCE_A = 0.7
MIN_VOLUME_PER_ATOM_A3 = 1.0
MAX_NUMBER = 103

# spglib's time grows with the square of the atoms: seconds for so many, hours for a hundred thousand.
MAX_SYMMETRY_ATOMS = 1500

# The elements from the most electropositive on: the order in which formulas are written (IUPAC, Nomenclature of
# Inorganic Chemistry, Recommendations 2005, table VI, read backwards). NaCl, GaAs, SiC and NH3 all follow from it.
_ELEMENT_ORDER = (
    "Rn Xe Kr Ar Ne He Fr Cs Rb K Na Li Ra Ba Sr Ca Mg Be "
    "Lr No Md Fm Es Cf Bk Cm Am Pu Np U Pa Th Ac Lu Yb Tm Er Ho Dy Tb Gd Eu Sm Pm Nd Pr Ce La Y Sc "
    "Hf Zr Ti Ta Nb V W Mo Cr Re Tc Mn Os Ru Fe Ir Rh Co Pt Pd Ni Au Ag Cu Hg Cd Zn "
    "Tl In Ga Al B Pb Sn Ge Si C Bi Sb As P N H Po Te Se S O At I Br Cl F"
)
_PLACE = {element: place for place, element in enumerate(_ELEMENT_ORDER.split())}


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
    if (atoms.numbers <= 0).any():
        return "it holds an atom without a known chemical element"
    if (atoms.numbers > MAX_NUMBER).any():
        return f"it holds an atom of number {atoms.numbers.max()}: scattering factors end at {MAX_NUMBER}"
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


def rotations_of(atoms: Any, *, symprec: float = 1e-2) -> np.ndarray:
    """Rotations (m, 3, 3) of the crystal in its fractional coordinates; the identity where spglib finds none."""
    import spglib

    found = None
    cell = (atoms.cell.array, atoms.get_scaled_positions(), atoms.numbers)
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        if len(atoms) <= MAX_SYMMETRY_ATOMS:
            found = spglib.get_symmetry(cell, symprec=symprec)
    return np.eye(3, dtype=int)[None] if found is None else np.unique(found["rotations"], axis=0)


def _counts(atoms: Any) -> Counter[str]:
    return Counter(atoms.get_chemical_symbols())


def reduced_formula(atoms: Any) -> str:
    """Composition with the smallest integers, electropositive elements first: `As4 Ga4` -> `GaAs`.

    One composition has one formula, whatever the order and the number of its atoms.
    """
    counts = _counts(atoms)
    divisor = reduce(gcd, counts.values())
    elements = sorted(counts, key=lambda element: (_PLACE.get(element, -1), element))
    return "".join(e + ("" if counts[e] == divisor else str(counts[e] // divisor)) for e in elements)


def _anonymous(atoms: Any) -> str:
    counts = sorted(_counts(atoms).values())
    divisor = reduce(gcd, counts)
    return "-".join(str(n // divisor) for n in counts)


def symmetry_of(atoms: Any, *, symprec: float = 1e-2) -> Symmetry:
    """Space group and prototype: (space group, anonymous formula, Wyckoff sequence) hashed to 64 bits.

    Cells of more than MAX_SYMMETRY_ATOMS are not searched; they count as of no known space group (0).
    """
    import spglib

    cell = (atoms.cell.array, atoms.get_scaled_positions(), atoms.numbers)
    dataset = None
    with warnings.catch_warnings(), contextlib.suppress(Exception):  # newer spglib raises where older ones gave None
        warnings.simplefilter("ignore")
        if len(atoms) <= MAX_SYMMETRY_ATOMS:
            dataset = spglib.get_symmetry_dataset(cell, symprec=symprec)
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
