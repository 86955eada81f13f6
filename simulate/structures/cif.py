"""One CIF file -> one crystal, or the reason against it.

ASE's reader is lenient where a simulation may not be: it drops an atom that stands on another's place, takes the last
of several crystals, turns a negative length around. So the tags are judged first, and what ASE made of them after.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

__all__ = ["CifError", "parse_formula", "read_cif"]

_CELL_TAGS = ("length_a", "length_b", "length_c", "angle_alpha", "angle_beta", "angle_gamma")
_UNSAID = (".", "?")  # not applicable, unknown


class CifError(ValueError):
    """Why a file is not one crystal whose atoms all have a place."""


def read_cif(text: str) -> Any:
    """The crystal of a CIF as `ase.Atoms`. Raises CifError with the reason where it is none, or more than one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        block = _only_crystal(text)
        _check_cell(block)
        _check_sites(block)
        try:
            atoms = block.get_atoms()
        except Exception as error:  # ASE raises anything from KeyError to AssertionError on odd files
            raise CifError(_ase_says(error)) from None
    _check_places(block, atoms)
    _check_formula(block, atoms)
    return atoms


def _ase_says(error: Exception) -> str:
    words = str(error) or "it is not laid out as CIF prescribes"
    return f"ASE cannot read it as CIF: {type(error).__name__}: {words}"


def _only_crystal(text: str) -> Any:
    from ase.io.cif import parse_cif

    if re.search(r"^\s*data_", text, flags=re.IGNORECASE | re.MULTILINE) is None:
        raise CifError("no line begins with data_: this is not a CIF file")
    try:
        blocks = [block for block in parse_cif(io.StringIO(text)) if block.has_structure()]
    except Exception as error:
        raise CifError(_ase_says(error)) from None
    if not blocks:
        raise CifError("it holds no atoms: a loop of _atom_site_label and _atom_site_fract_x, _y, _z is expected")
    if len(blocks) > 1:
        names = ", ".join(block.name for block in blocks[:5])
        raise CifError(f"it holds {len(blocks)} crystals (data blocks {names}): give each a file of its own")
    return blocks[0]


def _check_cell(block: Any) -> None:
    for tag in _CELL_TAGS:
        value = block.get(f"_cell_{tag}")
        number = _number(value)
        if number is None or not 0 < number < (180 if tag.startswith("angle") else math.inf):
            came = "nothing" if value is None else value
            wanted = "an angle between 0 and 180" if tag.startswith("angle") else "a positive length"
            raise CifError(f"_cell_{tag}: {wanted} expected, came {came}")


def _check_sites(block: Any) -> None:
    """Every site is wholly there, and somewhere."""
    for k, value in enumerate(_column(block, "_atom_site_occupancy")):
        number = 1.0 if value in _UNSAID else _number(value)
        if number is None or not 0 <= number <= 1.001:
            raise CifError(f"occupancy {value} of {_site(block, k)}: a number from 0 to 1 expected")
        if number < 0.999:
            raise CifError(
                f"partial occupancy {number:g} of {_site(block, k)}: the file describes an average, not a crystal"
            )
    for k, value in enumerate(_column(block, "_atom_site_disorder_group")):
        if value not in (*_UNSAID, "", 0):
            raise CifError(
                f"{_site(block, k)} belongs to disorder group {value}: the file describes an average, not a crystal"
            )
    for axis in "xyz":
        for k, value in enumerate(_column(block, f"_atom_site_fract_{axis}")):
            number = _number(value)
            if number is None or abs(number) > 1000:
                raise CifError(f"_atom_site_fract_{axis} of {_site(block, k)}: a number expected, came {value}")


def _check_places(block: Any, atoms: Any) -> None:
    """Each site of the file is in the crystal: ASE leaves out what falls on a site before it, or on its images."""
    kept = set(np.asarray(atoms.arrays.get("spacegroup_kinds", ())).tolist())
    for k in range(len(block.get_symbols())):
        if kept and k not in kept:
            raise CifError(f"{_site(block, k)} stands where another site or its image by symmetry stands already")


def _check_formula(block: Any, atoms: Any) -> None:
    declared = block.get("_chemical_formula_sum")
    wanted = parse_formula(declared) if isinstance(declared, str) else None
    found: dict[str, Fraction] = {}
    for symbol in atoms.get_chemical_symbols():
        found[symbol] = found.get(symbol, Fraction(0)) + 1
    if wanted is not None and _ratios(wanted) != _ratios(found):
        came = " ".join(e + ("" if n == 1 else str(n)) for e, n in sorted(found.items()))
        raise CifError(
            f"_chemical_formula_sum says {str(declared).strip()}, ASE read {came}: a species is missing or misread"
        )


def _column(block: Any, tag: str) -> list[Any]:
    value = block.get(tag)
    return [] if value is None else value if isinstance(value, list) else [value]


def _site(block: Any, k: int) -> str:
    labels = _column(block, "_atom_site_label")
    return f"site {labels[k]}" if k < len(labels) else f"site number {k}"


def _number(value: Any) -> float | None:
    """A finite CIF number, `0.5(2)` included; None for anything else."""
    try:
        number = float(re.sub(r"\(\d+\)$", "", str(value)))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


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


def _ratios(counts: Mapping[str, Fraction]) -> dict[str, float]:
    total = sum(counts.values())
    return {element: round(float(n / total), 3) for element, n in sorted(counts.items()) if n}
