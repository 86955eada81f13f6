"""One CIF file -> one crystal, or the reason against it.

ASE's reader is lenient where a simulation may not be: it drops an atom that stands on another's place, takes the last
of several crystals, turns a negative length around, applies a space group to a cell that does not have its symmetry,
and needs minutes for a few thousand sites. So ASE parses tags, species and operations; what they say is judged here,
and the sites are multiplied here.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, SupportsFloat

import numpy as np

from exitwave.simulate.structures.occupancy import AverageCrystal, SharedPlaceError, expand_sites

__all__ = ["CifError", "parse_formula", "read_average", "read_cif"]

_CELL_TAGS = ("length_a", "length_b", "length_c", "angle_alpha", "angle_beta", "angle_gamma")
_UNSAID = (".", "?")  # not applicable, unknown
_SYMMETRY_TAGS = (
    "_space_group.it_number",
    "_space_group_it_number",
    "_symmetry_int_tables_number",
    "_space_group_name_h-m_alt",
    "_symmetry_space_group_name_h-m",
    "_space_group.patterson_name_h-m",
    "_space_group_symop_operation_xyz",
    "_space_group_symop.operation_xyz",
    "_symmetry_equiv_pos_as_xyz",
)
_METRIC_TOLERANCE = 0.01  # files round their lengths to three digits at worst


class CifError(ValueError):
    """Why a file is not one crystal whose atoms all have a place."""


def read_cif(text: str) -> Any:
    """The crystal of a CIF as `ase.Atoms`. Raises CifError with the reason where it is none, or more than one."""
    return read_average(text, partial=False).ordered()


def read_average(text: str, *, partial: bool) -> AverageCrystal:
    """The places of a CIF and who occupies them; `partial` lets a place be occupied in part, or by several species.

    Raises CifError with the reason where the file is no crystal, or more than one.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        block = _only_crystal(text)
        _check_cell(block)
        _check_sites(block, partial)
        try:
            symbols = _symbols(block)
            unsymmetrised = block.get_unsymmetrized_structure()
            operations = _operations(block)
        except CifError:
            raise
        except Exception as error:  # ASE raises anything from KeyError to AssertionError on odd files
            raise CifError(_ase_says(error)) from None
    cell = np.asarray(unsymmetrised.cell.array)
    _check_metric(cell, operations[0])
    values = _column(block, "_atom_site_occupancy")
    occupancies = [1.0 if v in _UNSAID else float(_number(v) or 0.0) for v in values] or [1.0] * len(symbols)
    try:
        average = expand_sites(
            cell, np.linalg.solve(cell.T, unsymmetrised.positions.T).T, symbols, occupancies, operations
        )
    except SharedPlaceError as error:
        where = "stands where another site or its image by symmetry stands already"
        more = "" if error.total is None else f", and together they occupy it {error.total:g} times"
        raise CifError(f"{_site(block, error.site)} {where}{more}") from None
    _check_formula(block, average)
    _check_count(block, average)
    return average


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
    a, b, c = (math.cos(math.radians(float(_number(block.get(f"_cell_{tag}")) or 0.0))) for tag in _CELL_TAGS[3:])
    if 1.0 - a * a - b * b - c * c + 2.0 * a * b * c < 1e-9:  # the square of the volume over the edges' product
        raise CifError("no three axes have the angles of its cell, or they lie in a plane: it has no volume")


def _operations(block: Any) -> tuple[np.ndarray, np.ndarray]:
    """Rotations (m, 3, 3) and translations (m, 3) in fractional coordinates, centrings and inversion included."""
    from ase.spacegroup.spacegroup import parse_sitesym

    if not any(block.get(tag) is not None for tag in _SYMMETRY_TAGS):
        raise CifError(
            "it names no symmetry, neither a space group nor a loop of operations; "
            "'P 1' expected where the file lists every atom"
        )
    listed = _listed_operations(block)
    if listed:
        return parse_sitesym(listed)
    rotations, translations = zip(*block.get_spacegroup(True).get_symop(), strict=True)
    return np.asarray(rotations, dtype=float), np.asarray(translations, dtype=float)


def _listed_operations(block: Any) -> list[str]:
    """`x,y,z` and its like, where the file lists them: they hold whatever setting its space group is written in."""
    for tag in _SYMMETRY_TAGS[-3:]:
        found = [str(v) for v in _column(block, tag) if v not in _UNSAID]
        if found:
            return found
    return []


def _symbols(block: Any) -> list[str]:
    from ase.data import atomic_numbers

    symbols: list[str] = block.get_symbols()
    for k, symbol in enumerate(symbols):
        if not atomic_numbers.get(symbol):
            raise CifError(f"{symbol!r} of {_site(block, k)} is not a chemical element")
    return symbols


def _check_metric(cell: np.ndarray, rotations: np.ndarray) -> None:
    """Every symmetry operation keeps lengths and angles: otherwise cell and space group are of different settings."""
    metric = cell @ cell.T
    turned = np.swapaxes(rotations, 1, 2) @ metric @ rotations
    worst = float(np.abs(turned - metric).max() / metric.max())
    if worst > _METRIC_TOLERANCE:
        raise CifError(
            f"its cell does not have the symmetry of its space group (lengths and angles change by {100 * worst:.3g} % "
            "under an operation): they belong to different settings, or one of them is misread"
        )


def _check_sites(block: Any, partial: bool) -> None:
    """Every site is wholly there unless `partial`, and somewhere."""
    for k, value in enumerate(_column(block, "_atom_site_occupancy")):
        number = 1.0 if value in _UNSAID else _number(value)
        if number is None or not 0 <= number <= 1.001:
            raise CifError(f"occupancy {value} of {_site(block, k)}: a number from 0 to 1 expected")
        if number < 0.999 and not partial:
            raise CifError(
                f"partial occupancy {number:g} of {_site(block, k)}: the file describes an average, not a crystal; "
                "`partial_occupancy: sample` would draw one"
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


def _check_formula(block: Any, average: AverageCrystal) -> None:
    declared = block.get("_chemical_formula_sum")
    wanted = parse_formula(declared) if isinstance(declared, str) else None
    found = average.composition()
    # Files round occupancies and formulas as they like: of an average only the species are compared.
    same = wanted is None or (
        _ratios(wanted) == _ratios(found) if average.is_ordered else {e for e, n in wanted.items() if n} == set(found)
    )
    if not same:
        came = " ".join(e + ("" if n == 1 else f"{n:g}") for e, n in sorted(found.items()))
        raise CifError(
            f"_chemical_formula_sum says {str(declared).strip()}, ASE read {came}: a species is missing or misread"
        )


def _check_count(block: Any, average: AverageCrystal) -> None:
    """As many atoms as the file says, where it says it: a list of operations without centrings makes too few."""
    declared, units = block.get("_chemical_formula_sum"), _number(block.get("_cell_formula_units_z"))
    wanted = parse_formula(declared) if isinstance(declared, str) else None
    if wanted is None or units is None or not average.is_ordered:
        return
    expected, came = units * float(sum(wanted.values())), len(average.places)
    if abs(expected - came) > 0.01 * expected:
        raise CifError(
            f"_cell_formula_units_Z {units:g} of {str(declared).strip()} are {expected:g} atoms, its sites and "
            f"operations make {came}"
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


def _ratios(counts: Mapping[str, SupportsFloat]) -> dict[str, float]:
    total = sum(float(n) for n in counts.values())
    return {element: round(float(n) / total, 3) for element, n in sorted(counts.items()) if n}
