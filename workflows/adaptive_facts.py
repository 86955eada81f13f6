"""What the rounds of an adaptive campaign did, read from the data set's and the run's files, for status and report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.errors import DamagedDataError
from exitwave.ingest.files import read_plain_text
from exitwave.simulate.steer import Axis
from exitwave.simulate.steer_rounds import CellRow, Round, read_rounds
from exitwave.workflows.figures import heat_png
from exitwave.workflows.report_data import AdaptiveFacts, number

__all__ = ["adaptive_facts", "adaptive_status"]

_MOST_ROWS = 24


def adaptive_status(dataset: Path) -> dict[str, Any] | None:
    """Rounds that are decided, with what each added and the errors that decided on it; None where nothing steers."""
    rounds = _rounds(dataset)
    if not rounds:
        return None
    return {
        "rounds": int(rounds[0].options.get("rounds", len(rounds) - 1)),
        "decided": len(rounds) - 1,
        "by_round": [
            {
                "round": made.number,
                "samples": made.n_samples,
                "core_s": made.budget_s,
                "error": _mean(made.cells),
                "regions": [
                    {"axis": axis.name, "region": label, "error": error, "share": share, "natural": natural}
                    for axis, label, error, share, natural in _margins(made)
                ],
            }
            for made in rounds[1:]
        ],
    }


def adaptive_facts(dataset: Path, folder: Path | None) -> AdaptiveFacts | None:
    """For the report. `folder`: RUN/rounds, where the trained network's errors lie."""
    rounds = _rounds(dataset)
    if len(rounds) < 2:
        return None
    last = _final(folder)
    steered = rounds[1:]
    columns = [f"error before round {made.number}" for made in steered]
    columns += ["of the trained network"] if last else []
    columns += ["natural share", *(f"share of round {made.number}" for made in steered)]
    regions = []
    for k, axis in enumerate(steered[0].axes):
        for b, label in enumerate(axis.labels):
            here = _within(k, b)
            errors = [_mean(filter(here, made.cells)) for made in steered]
            errors += [_mean(filter(here, last))] if last else []
            cells = [number(error) for error in errors]
            cells.append(number(sum(row.natural for row in steered[0].cells if here(row))))
            cells += [number(sum(row.share for row in made.cells if here(row))) for made in steered]
            regions.append((_name(axis, label), cells))
    return AdaptiveFacts(
        sentence=_sentence(rounds, last),
        rounds=[
            (str(made.number), str(made.n_samples), number(made.budget_s), number(_mean(made.cells)), _favoured(made))
            for made in steered
        ],
        columns=columns,
        regions=regions,
        pictures=[*_pictures(steered)],
    )


def _rounds(dataset: Path) -> tuple[Round, ...]:
    try:
        return read_rounds(dataset)
    except DamagedDataError:  # whoever runs it is told; a look at it shows the rest
        return ()


def _final(folder: Path | None) -> tuple[CellRow, ...]:
    try:
        found = json.loads(read_plain_text((folder or Path()) / "final.json"))["cells"] if folder is not None else []
        return tuple(
            CellRow(cell=tuple(row["cell"]), natural=0.0, cost_s=0.0, n=int(row["n"]), error=float(row["error"]))
            for row in found
        )
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def _sentence(rounds: Sequence[Round], last: Sequence[CellRow]) -> str:
    added = sum(made.n_samples for made in rounds[1:])
    words = (
        f"{added} training samples were chosen in {len(rounds) - 1} rounds by the errors of a network trained on what "
        "was there: its training loss on held-out samples of the campaign's own distribution, by region. "
    )
    first, final = _mean(rounds[1].cells), _mean(last)
    if first and final:
        words += (
            "From the first network that judged, which was trained for fewer steps, to the trained one the mean error "
            f"went from {number(first)} to {number(final)}. What steering itself gains is told by a uniform campaign "
            "of equal cost beside it."
        )
    return words


def _margins(made: Round) -> Iterable[tuple[Axis, str, float | None, float, float]]:
    for k, axis in enumerate(made.axes):
        for b, label in enumerate(axis.labels):
            rows = [row for row in made.cells if row.cell[k] == b]
            yield axis, label, _mean(rows), sum(row.share for row in rows), sum(row.natural for row in rows)


def _within(axis: int, number: int) -> Callable[[CellRow], bool]:
    return lambda row: row.cell[axis] == number


def _mean(rows: Iterable[CellRow]) -> float | None:
    """The mean error over samples."""
    judged = [row for row in rows if row.error is not None and row.n]
    n = sum(row.n for row in judged)
    return sum(row.n * (row.error or 0.0) for row in judged) / n if n else None


def _favoured(made: Round) -> str:
    most = max((row for row in made.cells if row.natural), key=lambda row: row.share / row.natural, default=None)
    if most is None:
        return "–"
    where = ", ".join(_name(axis, axis.labels[k]) for axis, k in zip(made.axes, most.cell, strict=True))
    return f"{where}: {number(most.share / most.natural, 2)} times its natural share"


def _name(axis: Axis, label: str) -> str:
    if axis.name == "structure":
        return label
    name, _, unit = axis.name.rpartition("_")
    plain = {"A": "Å", "keV": "keV", "mrad": "mrad", "deg": "°"}.get(unit)
    return f"{name.replace('_', ' ')} {label} {plain}" if plain else f"{axis.name.replace('_', ' ')} {label}"


def _pictures(steered: Sequence[Round]) -> Iterable[tuple[str, str, str]]:
    """Each round as a table of colours: the first axis down, the second across, the others summed over."""
    for made in steered:
        if not any(row.natural for row in made.cells):
            continue
        down = made.axes[0]
        across = made.axes[1] if len(made.axes) > 1 else None
        shape = (len(down.labels), len(across.labels) if across else 1)
        share, natural = np.zeros(shape), np.zeros(shape)
        for row in made.cells:
            at = row.cell[0], row.cell[1] if across else 0
            share[at] += row.share
            natural[at] += row.natural
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.where(natural > 0, share / natural, np.nan)
        order = list(range(shape[0]))
        if len(order) > _MOST_ROWS:  # the most and the least favoured
            by = np.argsort(-share.sum(axis=1) / np.maximum(natural.sum(axis=1), 1e-12), kind="stable")
            order = sorted([*by[: _MOST_ROWS // 2], *by[-_MOST_ROWS // 2 :]])
        caption = f"Round {made.number}: how many times its natural share each region got"
        png = heat_png(
            ratio[order],
            rows=[down.labels[k] for k in order],
            columns=list(across.labels) if across else [""],
            limits=(0.25, 4.0),
            log=True,
        )
        yield caption, png, f"{caption}. {_favoured(made)}."
