"""Which structures train, validate and test: by whole units, so that nothing of a test material is ever trained on.

A unit is a composition, a prototype (space group, anonymous formula, Wyckoff sequence) or a single structure. Units are
put in a seeded order that depends on their names alone; the first ones become the test set, the next ones validation,
the rest training. A structure whose source fixes its split takes its whole unit along. `stratify` spreads what is taken
over the crystal systems (or the classes) in proportion.

Two questions can be asked of a network, and one test set would mix their answers: does it know another composition of
a structure type that it was trained on, and does it know a structure type that it never saw? `new_prototype` and
`new_composition` make a test set of each:

1. So many prototypes are set aside whole: they are `new_prototype`. What shares a composition with them is dropped.
2. Of the rest so many compositions are set aside, each of prototypes that stay in training: `new_composition`.
3. Validation is taken from what is left, by composition; the rest trains.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from exitwave.ingest.errors import UsageError
from exitwave.simulate.spec import SplitSpec

__all__ = ["SplitUnit", "assign_splits", "without_small_classes"]

# First and last space group of each crystal system (International Tables, volume A).
_SYSTEMS = {
    "triclinic": (1, 2),
    "monoclinic": (3, 15),
    "orthorhombic": (16, 74),
    "tetragonal": (75, 142),
    "trigonal": (143, 167),
    "hexagonal": (168, 194),
    "cubic": (195, 230),
}


class _Told(Protocol):
    """What both know."""

    @property
    def key(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def formula(self) -> str: ...
    @property
    def prototype_group(self) -> int: ...
    @property
    def space_group(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class SplitUnit:
    """What the division needs to know of a structure. `fixed` is the split its source asks for."""

    key: str
    source: str
    formula: str
    prototype_group: int
    fixed: str | None
    space_group: int = 0

    @classmethod
    def of(cls, structure: _Told, fixed: str | None) -> SplitUnit:
        """Of a structure as planned, or as an index tells of it."""
        return cls(
            key=structure.key,
            source=structure.source,
            formula=structure.formula,
            prototype_group=structure.prototype_group,
            fixed=fixed,
            space_group=structure.space_group,
        )


def assign_splits(units: Sequence[SplitUnit], split: SplitSpec, seed: int) -> list[str | None]:
    """The split of each structure, in order; None for one that would train and shares a composition with the test.

    Raises UsageError where a unit is asked into two splits, where a split gets fewer units than it should, or where no
    unit would be left to train on.
    """
    if split.new_prototype or split.new_composition:
        splits = _two_tests(units, split, seed)
    else:
        splits = _one_test(units, split, seed)
    if "train" not in splits:
        raise UsageError(f"split: nothing is left to train on: {len(set(units))} structure(s), {_ask(split)}")
    _refuse_too_few(units, splits, split)
    return splits


def without_small_classes(
    units: Sequence[SplitUnit], splits: Sequence[str | None], split: SplitSpec
) -> list[str | None]:
    """The splits, None for structures of a class (space group) with too few compositions in training to be learnt."""
    if split.classes is None:
        return list(splits)
    trained: dict[int, set[str]] = {}
    for unit, part in zip(units, splits, strict=True):
        if part == "train":
            trained.setdefault(unit.space_group, set()).add(_name(unit, "composition"))
    kept = [
        None if len(trained.get(unit.space_group, ())) < split.least_compositions else part
        for unit, part in zip(units, splits, strict=True)
    ]
    if "train" not in kept:
        raise UsageError(
            f"split.classes: no space group has {split.least_compositions} compositions in training; add structures, "
            "or ask for a smaller split.least_compositions"
        )
    return kept


def _one_test(units: Sequence[SplitUnit], split: SplitSpec, seed: int) -> list[str | None]:
    names = [_name(unit, split.by) for unit in units]
    chosen = _fixed(units, names, split.by)
    every = _ordered(units, names, split, seed)
    free = [name for name in every if name not in chosen]
    for part in ("test", "val"):
        wanted = _count(getattr(split, part), len(every))
        missing = max(0, wanted - sum(1 for s in chosen.values() if s == part))
        if missing > len(free):
            raise UsageError(
                f"split.{part}: {wanted} of {len(every)} {split.by} units asked, {len(free)} not yet taken"
                f"{_takers(chosen)}; add structures or ask for fewer"
            )
        chosen.update(dict.fromkeys(free[:missing], part))
        free = free[missing:]
    chosen.update(dict.fromkeys(free, "train"))
    splits = [chosen[name] for name in names]
    held_out = {u.formula for u, s in zip(units, splits, strict=True) if s == "test"}
    return [
        None if s != "test" and u.formula in held_out and split.by == "prototype" else s
        for u, s in zip(units, splits, strict=True)
    ]


def _two_tests(units: Sequence[SplitUnit], split: SplitSpec, seed: int) -> list[str | None]:
    prototypes = [_name(unit, "prototype") for unit in units]
    compositions = [_name(unit, "composition") for unit in units]
    chosen = _fixed(units, compositions, "composition")
    bound = {p for p, c in zip(prototypes, compositions, strict=True) if c in chosen}
    every = _ordered(units, prototypes, split, seed)
    free = [name for name in every if name not in bound]
    wanted = _count(split.new_prototype, len(every))
    if wanted > len(free):
        raise UsageError(
            f"split.new_prototype: {wanted} of {len(every)} prototypes asked, {len(free)} not yet taken; add "
            "structures or ask for fewer"
        )
    apart = set(free[:wanted])
    held = {c for p, c in zip(prototypes, compositions, strict=True) if p in apart}
    left = [(p, c) for p, c in zip(prototypes, compositions, strict=True) if p not in apart and c not in held]
    # Compositions of each prototype that may still train: what is taken must leave one.
    training: dict[str, set[str]] = {}
    for p, c in left:
        training.setdefault(p, set()).add(c)
    names = _ordered(units, compositions, split, seed)
    total = len({c for _, c in left})
    for part, key in (("new_composition", split.new_composition), ("val", split.val)):
        wanted = _count(key, total)
        wanted -= min(wanted, sum(1 for s in chosen.values() if s == part))
        for name in (n for n in names if n not in chosen and n not in held):
            of = [p for p, c in left if c == name]
            if wanted and of and all(len(training[p] - {name}) >= 1 for p in of):
                chosen[name] = part
                wanted -= 1
                for p in of:
                    training[p].discard(name)
        if wanted:
            raise UsageError(
                f"split.{part}: {wanted} composition(s) too few: each must be of prototypes that another composition "
                "shows in training; add structures or ask for fewer"
            )
    return [
        "new_prototype" if p in apart else None if c in held else chosen.get(c, "train")
        for p, c in zip(prototypes, compositions, strict=True)
    ]


def _takers(chosen: dict[str, str]) -> str:
    """Which splits have taken units so far: ` (test has 4)`; nothing where none has."""
    parts = [f"{part} has {n}" for part, n in sorted(Counter(chosen.values()).items())]
    return f" ({', '.join(parts)})" if parts else ""


def _fixed(units: Sequence[SplitUnit], names: Sequence[str], by: str) -> dict[str, str]:
    """Unit -> the split that a source asks for. Raises UsageError where two ask for different ones."""
    chosen: dict[str, str] = {}
    asked_by: dict[str, str] = {}
    for unit, name in zip(units, names, strict=True):
        if unit.fixed is None:
            continue
        if chosen.setdefault(name, unit.fixed) != unit.fixed:
            raise UsageError(
                f"split: {asked_by[name]} asks for {chosen[name]} and {unit.source} for {unit.fixed}, but both are of "
                f"one {by} ({unit.formula}), which may not straddle splits"
            )
        asked_by.setdefault(name, unit.source)
    return chosen


def _ordered(units: Sequence[SplitUnit], names: Sequence[str], split: SplitSpec, seed: int) -> list[str]:
    """Each unit once, in the seeded order; stratified: any first k of them hold the strata in proportion."""
    order = sorted(set(names), key=lambda name: _rank(seed, name))
    if split.stratify is None and split.classes is None:
        return order
    first = dict(zip(reversed(names), reversed(units), strict=True))
    strata = {name: _stratum(first[name], split) for name in order}
    size, seen = Counter(strata.values()), Counter[str]()
    place: dict[str, float] = {}
    for name in order:
        place[name] = (seen[strata[name]] + 0.5) / size[strata[name]]
        seen[strata[name]] += 1
    return sorted(order, key=lambda name: (place[name], _rank(seed, name)))


def _stratum(unit: SplitUnit, split: SplitSpec) -> str:
    if split.classes is not None:
        return str(unit.space_group)
    return next((name for name, (low, high) in _SYSTEMS.items() if low <= unit.space_group <= high), "none")


def _refuse_too_few(units: Sequence[SplitUnit], splits: Sequence[str | None], split: SplitSpec) -> None:
    """Every split that was asked for holds at least `least_units` units."""
    asked = [part for part in ("val", "test", "new_composition", "new_prototype") if getattr(split, part)]
    for part in ("train", *asked):
        by = "prototype" if part == "new_prototype" else "composition" if "new" in part else split.by
        found = len({_name(u, by) for u, s in zip(units, splits, strict=True) if s == part})
        if found < split.least_units:
            raise UsageError(
                f"split.least_units: {part} holds {found} {by}(s), at least {split.least_units} asked; add structures "
                "or ask for less"
            )


def _name(unit: SplitUnit, by: str) -> str:
    if by == "composition":
        # By the alphabet: which side of the split a composition falls on hangs on no way of writing formulas.
        return "".join(sorted(re.findall(r"[A-Z][a-z]?\d*", unit.formula))) or unit.formula
    if by == "prototype":
        return f"{unit.prototype_group:016x}"
    return unit.key


def _rank(seed: int, name: str) -> bytes:
    return hashlib.blake2b(f"{seed}\x00{name}".encode(), digest_size=16, person=b"exitwave-split-1").digest()


def _count(part: int | float, units: int) -> int:
    if isinstance(part, int):
        return part
    return max(1, round(part * units)) if part > 0 else 0


def _ask(split: SplitSpec) -> str:
    if split.new_prototype or split.new_composition:
        return f"new_prototype {split.new_prototype}, new_composition {split.new_composition}, val {split.val} asked"
    return f"val {split.val} and test {split.test} asked"
