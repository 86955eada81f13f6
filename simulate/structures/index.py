"""A prebuilt index of crystals: read and judged once, for campaigns of tens of thousands of structures.

One JSON object a line, in a plain file or one that ends in `.gz`:

    {"source": "…", "licence": "…", "formula": "MgO", "space_group": 225, "prototype_group": 4711,
     "numbers": [12, 8], "cell_A": [[…], […], […]], "positions_A": [[…], …]}

`formula` is reduced, `prototype_group` the number that crystals of one structure type share. The key of a crystal is
the sha256 of numbers, cell and positions.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import UsageError

__all__ = ["IndexLine", "read_index"]


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexLine:
    """One crystal. `content` is the line's JSON of numbers, cell (Å) and positions (Å), parsed when asked for."""

    source: str
    licence: str
    formula: str
    space_group: int
    prototype_group: int
    content: str

    @property
    def key(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()

    def atoms(self) -> Any:
        """The crystal as ASE's Atoms."""
        from ase import Atoms

        numbers, cell, positions = json.loads(self.content)
        return Atoms(numbers=numbers, cell=cell, positions=positions, pbc=True)


def read_index(path: Path, *, where: str) -> Iterator[IndexLine]:
    """The crystals of an index, in their order. UsageError, beginning with `where`, for what is none."""
    if not path.is_file():
        raise UsageError(f"{where}: {path} does not exist")
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for text in file:
                number += 1
                if text.strip():
                    yield _line(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, OSError) as error:
        told = f"{type(error).__name__}: {error}"
        raise UsageError(f"{where}: {path}:{number}: no line of an index ({told})") from None


def _line(told: dict[str, Any]) -> IndexLine:
    content = [told["numbers"], told["cell_A"], told["positions_A"]]
    if len(content[0]) != len(content[2]) or len(content[1]) != 3:
        raise ValueError("a number for each position, and three vectors of the cell expected")
    return IndexLine(
        source=str(told["source"]),
        licence=str(told.get("licence", "")),
        formula=str(told["formula"]),
        space_group=int(told["space_group"]),
        prototype_group=int(told["prototype_group"]),
        content=json.dumps(content, separators=(",", ":")),
    )
