"""Which structures train, validate and test: by whole units, so that nothing of a test material is ever trained on.

A unit is a composition, a prototype (space group, anonymous formula, Wyckoff sequence) or a single structure. Units are
put in a seeded order that depends on their names alone; the first ones become the test set, the next ones validation,
the rest training. A structure whose source fixes its split takes its whole unit along.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from exitwave.ingest.errors import UsageError
from exitwave.simulate.spec import SplitSpec

__all__ = ["SplitUnit", "assign_splits"]


@dataclass(frozen=True, kw_only=True)
class SplitUnit:
    """What the division needs to know of a structure. `fixed` is the split its source asks for."""

    key: str
    source: str
    formula: str
    prototype_group: int
    fixed: str | None


def assign_splits(units: Sequence[SplitUnit], split: SplitSpec, seed: int) -> list[str | None]:
    """The split of each structure, in order; None for a training structure that shares a composition with the test.

    Raises UsageError where a unit is asked into two splits, or where no unit would be left to train on.
    """
    names = [_name(unit, split.by) for unit in units]
    chosen: dict[str, str] = {}
    asked_by: dict[str, str] = {}
    for unit, name in zip(units, names, strict=True):
        if unit.fixed is None:
            continue
        if chosen.setdefault(name, unit.fixed) != unit.fixed:
            raise UsageError(
                f"split: {asked_by[name]} asks for {chosen[name]} and {unit.source} for {unit.fixed}, but both are of "
                f"one {split.by} ({unit.formula}), which may not straddle splits"
            )
        asked_by.setdefault(name, unit.source)
    every = sorted(set(names), key=lambda name: _rank(seed, name))
    free = [name for name in every if name not in chosen]
    for part in ("test", "val"):
        wanted = _count(getattr(split, part), len(every))
        missing = max(0, wanted - sum(1 for s in chosen.values() if s == part))
        if missing > len(free):
            raise UsageError(
                f"split.{part}: {wanted} of {len(every)} {split.by} units asked, {len(free)} not yet taken; "
                "add structures or ask for fewer"
            )
        chosen.update(dict.fromkeys(free[:missing], part))
        free = free[missing:]
    chosen.update(dict.fromkeys(free, "train"))
    splits: list[str | None] = [chosen[name] for name in names]
    held_out = {u.formula for u, s in zip(units, splits, strict=True) if s == "test"}
    splits = [
        None if s != "test" and u.formula in held_out and split.by == "prototype" else s
        for u, s in zip(units, splits, strict=True)
    ]
    if "train" not in splits:
        raise UsageError(f"split: nothing is left to train on: {len(every)} {split.by} unit(s), {_ask(split)}")
    return splits


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
    return f"val {split.val} and test {split.test} asked"
