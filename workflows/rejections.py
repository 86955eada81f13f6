"""What a plan rejected, in few lines: one for each reason, with the structures that it concerns. Pure.

A plan lists rejections structure by structure: whole structures (`why` is the reason), and draws of a structure
(`24 of 48 samples: reason`). One wrong number in a configuration makes the same reason many times over, with slightly
different figures; here such rows become one, and a figure that differs becomes a range.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Rejection", "grouped", "rejected_structures"]

_DRAWS = re.compile(r"(\d+) of (\d+) samples: (.*)", flags=re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?!\w)")


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """One reason. `samples` of the `asked` draws of `sources` fell to it; both 0 where whole structures did."""

    why: str
    sources: tuple[str, ...]
    samples: int = 0
    asked: int = 0


def grouped(rows: Iterable[Mapping[str, Any]]) -> list[Rejection]:
    """The rows {source, why} of a plan by their reason: samples first, then structures, in the order of the plan."""
    found: dict[tuple[bool, str], list[tuple[str, str, int, int]]] = {}
    for row in rows:
        source, why = str(row["source"]), str(row["why"])
        draws = _DRAWS.fullmatch(why)
        lost, asked, reason = (int(draws[1]), int(draws[2]), draws[3]) if draws else (0, 0, why)
        key = (draws is None, _NUMBER.sub("#", reason))
        found.setdefault(key, []).append((source, reason, lost, asked))
    return [
        Rejection(
            why=_ranges([reason for _, reason, _, _ in rows_]),
            sources=tuple(dict.fromkeys(source for source, _, _, _ in rows_)),
            samples=sum(lost for _, _, lost, _ in rows_),
            asked=sum(asked for _, _, _, asked in rows_),
        )
        for _, rows_ in sorted(found.items(), key=lambda item: item[0][0])
    ]


def rejected_structures(rows: Iterable[Mapping[str, Any]]) -> int:
    """How many structures were rejected as a whole."""
    return sum(_DRAWS.fullmatch(str(row["why"])) is None for row in rows)


def _ranges(reasons: list[str]) -> str:
    """Reasons that differ in figures alone as one: `12.1 Å` and `14.5 Å` become `12.1…14.5 Å`."""
    columns = zip(*(_NUMBER.findall(reason) for reason in reasons), strict=True)
    spans = []
    for column in columns:
        low, high = min(column, key=float), max(column, key=float)
        spans.append(low if float(low) == float(high) else f"{low}…{high}")
    parts = iter(spans)
    return _NUMBER.sub(lambda _: next(parts), reasons[0])
