"""Structure types that need no file: a prototype, its elements and a lattice parameter make a crystal.

Each prototype is written as its space group and the fractional coordinates of its sites, as in the International
Tables and the usual textbooks (Wyckoff, "Crystal Structures").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from exitwave.ingest.errors import UsageError

__all__ = ["PROTOTYPES", "build_prototype"]


@dataclass(frozen=True, kw_only=True)
class _Prototype:
    group: int
    sites: tuple[tuple[float, float, float], ...]
    hexagonal: bool = False
    tetragonal: bool = False
    c_over_a: float = 1.0
    setting: int = 1


_O = (0.0, 0.0, 0.0)
_QUARTER = (0.25, 0.25, 0.25)
_HALF = (0.5, 0.5, 0.5)
_EIGHTH = (0.125, 0.125, 0.125)

# One site per element, in the order in which `elements` are given.
PROTOTYPES: dict[str, _Prototype] = {
    "fcc": _Prototype(group=225, sites=(_O,)),
    "bcc": _Prototype(group=229, sites=(_O,)),
    "hcp": _Prototype(group=194, sites=((1 / 3, 2 / 3, 0.25),), hexagonal=True, c_over_a=1.633),
    "diamond": _Prototype(group=227, sites=(_O,)),
    "rocksalt": _Prototype(group=225, sites=(_O, _HALF)),
    "zincblende": _Prototype(group=216, sites=(_O, _QUARTER)),
    "wurtzite": _Prototype(
        group=186, sites=((1 / 3, 2 / 3, 0.0), (1 / 3, 2 / 3, 0.375)), hexagonal=True, c_over_a=1.633
    ),
    "cesiumchloride": _Prototype(group=221, sites=(_O, _HALF)),
    "fluorite": _Prototype(group=225, sites=(_O, _QUARTER)),
    "perovskite": _Prototype(group=221, sites=(_O, _HALF, (0.5, 0.5, 0.0))),
    "rhenium-trioxide": _Prototype(group=221, sites=(_O, (0.5, 0.0, 0.0))),
    "hexaboride": _Prototype(group=221, sites=(_O, (0.1995, 0.5, 0.5))),
    "L12": _Prototype(group=221, sites=(_O, (0.0, 0.5, 0.5))),
    "A15": _Prototype(group=223, sites=(_O, (0.25, 0.0, 0.5))),
    "cuprite": _Prototype(group=224, sites=(_O, _QUARTER), setting=2),
    "heusler": _Prototype(group=225, sites=(_O, _HALF, _QUARTER)),
    "half-heusler": _Prototype(group=216, sites=(_O, _HALF, _QUARTER)),
    "laves": _Prototype(group=227, sites=(_EIGHTH, _HALF), setting=2),
    "spinel": _Prototype(group=227, sites=(_EIGHTH, _HALF, (0.2625, 0.2625, 0.2625)), setting=2),
    "pyrite": _Prototype(group=205, sites=(_O, (0.385, 0.385, 0.385))),
    "diboride": _Prototype(group=191, sites=(_O, (1 / 3, 2 / 3, 0.5)), hexagonal=True, c_over_a=1.1),
    "nickeline": _Prototype(group=194, sites=(_O, (1 / 3, 2 / 3, 0.25)), hexagonal=True, c_over_a=1.4),
    "rutile": _Prototype(group=136, sites=(_O, (0.305, 0.305, 0.0)), tetragonal=True, c_over_a=0.65),
}


def build_prototype(name: str, elements: tuple[str, ...], a_A: float, c_A: float | None = None) -> Any:
    """The conventional cell of a prototype as `ase.Atoms`. `c_A` only where the lattice is not cubic.

    Raises UsageError for an unknown prototype, a wrong number of elements, an unknown element.
    """
    from ase.data import atomic_numbers
    from ase.spacegroup import crystal

    prototype = PROTOTYPES.get(name)
    if prototype is None:
        raise UsageError(f"prototype {name!r} is unknown; known ones: {', '.join(sorted(PROTOTYPES))}")
    if len(elements) != len(prototype.sites):
        raise UsageError(
            f"prototype {name} has {len(prototype.sites)} site(s): as many elements expected, came {list(elements)}"
        )
    for element in elements:
        if element not in atomic_numbers or atomic_numbers[element] == 0:
            raise UsageError(f"prototype {name}: {element!r} is not a chemical element")
    if c_A is not None and not (prototype.hexagonal or prototype.tetragonal):
        raise UsageError(f"prototype {name} is cubic: only a_A expected, came c_A = {c_A:g} too")
    height_A = c_A if c_A is not None else prototype.c_over_a * a_A
    cellpar = [a_A, a_A, height_A, 90, 90, 120 if prototype.hexagonal else 90]
    return crystal(
        list(elements),
        basis=list(prototype.sites),
        spacegroup=prototype.group,
        setting=prototype.setting,
        cellpar=cellpar,
    )
