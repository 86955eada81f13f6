"""Makes up the structure index that `seed-full.yaml` names: 31,000 crystals of common structure types.

    python examples/seed_full_index.py examples/seed-full-index.jsonl.gz

The crystals are combinations of elements in the structure types that exitwave knows, with lattice parameters from
atomic radii: good enough to plan a campaign with, and the same at every run. For a real campaign, write the lines from
a database of structures.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

from ase.data import atomic_numbers, chemical_symbols, covalent_radii

from exitwave.simulate.structures.prototypes import PROTOTYPES, build_prototype

COUNT = 31_000
SIZE = 5.0  # Å, of the templates
ELEMENTS = [
    symbol for symbol in chemical_symbols[3:84] if symbol not in ("He", "Ne", "Ar", "Kr", "Xe", "Rn", "Pm", "Tc")
]
# Edge of the conventional cell in sums of radii of the elements.
EDGE = {1: 2.83, 2: 2.2, 3: 2.1, 4: 2.0}


def formula(elements: tuple[str, ...], counts: list[int]) -> str:
    return "".join(f"{e}{n if n > 1 else ''}" for e, n in sorted(zip(elements, counts, strict=True)))


def template(name: str) -> tuple[list[int], Any]:
    """A type with an edge of SIZE: which of its elements stands at each place, and the atoms."""
    prototype = PROTOTYPES[name]
    elements = tuple(ELEMENTS[: len(prototype.sites)])
    lengths = (SIZE, SIZE * prototype.c_over_a) if prototype.hexagonal or prototype.tetragonal else (SIZE, None)
    atoms = build_prototype(name, elements, *lengths)
    return [elements.index(symbol) for symbol in atoms.get_chemical_symbols()], atoms


def lines() -> Any:
    """One object for each crystal."""
    rng = random.Random(20260101)
    types = sorted(PROTOTYPES)
    templates = {name: template(name) for name in types}
    seen: set[tuple[str, tuple[str, ...]]] = set()
    for number in itertools.count():
        if len(seen) >= COUNT:
            return
        name = types[number % len(types)]
        places, atoms = templates[name]
        elements = tuple(rng.sample(ELEMENTS, len(PROTOTYPES[name].sites)))
        if (name, elements) in seen:
            continue
        seen.add((name, elements))
        radii = [covalent_radii[atomic_numbers[e]] for e in elements]
        scale = EDGE.get(len(elements), 2.0) * sum(radii) * rng.uniform(0.95, 1.1) / SIZE
        counts = [places.count(k) for k in range(len(elements))]
        yield {
            "source": f"made-up:{name}({','.join(elements)})",
            "licence": "computed",
            "formula": formula(elements, [c // max(1, min(counts)) for c in counts]),
            "space_group": PROTOTYPES[name].group,
            "prototype_group": types.index(name) + 1,
            "numbers": [atomic_numbers[elements[k]] for k in places],
            "cell_A": [[round(x * scale, 6) for x in row] for row in atoms.cell.tolist()],
            "positions_A": [[round(x * scale, 6) for x in row] for row in atoms.positions.tolist()],
        }


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "seed-full-index.jsonl.gz")
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=6) as file:
        count = 0
        for line in lines():
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
            count += 1
    print(f"{count} crystals in {path}")


if __name__ == "__main__":
    main()
