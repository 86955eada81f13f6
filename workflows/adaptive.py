"""Rounds: simulate, judge, steer, and simulate what that adds.

    DATASET/steering/round-NNNN.json   what round NNNN adds, and why (simulate/steer_rounds.py)
    RUN/rounds/round-NNNN/             the network that judges after round NNNN: a training's folder
    RUN/rounds/round-NNNN/errors.json  what it gets wrong, sample by sample
    RUN/rounds/final.json              what the trained network gets wrong on the same samples

1. Round 0 is the campaign itself and the samples that only judge.
2. All samples of the rounds that are decided are simulated.
3. Where another round is to come: a network is trained on all training samples so far, from its beginning. Going on
   with the last one would judge a network that has seen the first samples more often than the later ones, and that
   generalises worse than one trained afresh (Ash and Adams, NeurIPS 2020); and what it learnt would hang on when it
   was killed.
4. Its errors on the held-out samples decide on the next round (simulate/steer.py), which is written down; on to 2.

No state of our own says how far it is: a round is decided once its file is there, simulated once the manifest lists its
shards, judged once errors.json is there. What a kill leaves undone, and only that, is done by the same command.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import DamagedDataError, UsageError
from exitwave.ingest.files import read_plain_text, write_atomic
from exitwave.simulate.plan import Plan
from exitwave.simulate.steer import Axis, Cell, Tally, quotas, samples_for, shares, smoothed, tallies
from exitwave.simulate.steer_rounds import (
    STEER_SPLIT,
    CellRow,
    Pick,
    Round,
    cell_of,
    census,
    choose,
    held_out,
    read_rounds,
    steered,
    trained_structures,
    write_round,
)
from exitwave.simulate.tasks import draw_sample
from exitwave.train.judge import Judged, judge
from exitwave.train.spec import TrainSpec
from exitwave.workflows.adaptive_spec import AdaptiveSection, axes_of

__all__ = ["FOLDER", "Hands", "judge_final", "judging_spec", "next_round", "read_errors", "run_rounds"]

FOLDER = "rounds"


@dataclass(frozen=True, kw_only=True)
class Hands:
    """What the rounds need done. `simulate` returns how many shards failed for good; `train(spec, folder)` trains on
    what is there; `note` tells a person."""

    simulate: Callable[[Plan], int]
    train: Callable[[TrainSpec, Path], None]
    note: Callable[[str], None]


def run_rounds(
    base: Plan, dataset: Path, folder: Path, section: AdaptiveSection, spec: TrainSpec, hands: Hands
) -> tuple[Plan, int]:
    """All rounds; the plan with all of them, and how many shards failed. `folder`: RUN/rounds."""
    plan, failed = base, 0
    if not trained_structures(base):
        raise UsageError("adaptive: the campaign has no sample for training, so there is nothing to steer")
    split = _judged_split(section, spec)
    if section.uniform_share < 1 and split != STEER_SPLIT and split not in {task.split for task in base.tasks}:
        raise UsageError(
            f"adaptive.pool: 0 judges on split {split!r}, of which the campaign has no sample: give a pool"
        )
    for number in range(section.rounds + 1):
        decided = len(read_rounds(dataset))
        if number < decided - 1:  # with the one that was decided last
            continue
        if number == decided:
            made = _first_round(base, section) if number == 0 else None
            if made is None:
                errors = _errors(dataset, folder, number - 1, section, spec, hands)
                made = next_round(plan, section, errors, number=number, split=split)
            write_round(dataset, made)
            if number:
                hands.note(f"round {number} of {section.rounds}: {_told(made)}")
            if lost := made.judge.get("no_numbers"):
                hands.note(
                    f"round {number} of {section.rounds}: the loss of {lost} of {made.judge['n']} samples that judge "
                    "is no number; they count as the worst of the others"
                )
        plan = steered(base, dataset)
        failed = hands.simulate(plan)
    return plan, failed


def _first_round(base: Plan, section: AdaptiveSection) -> Round:
    axes = axes_of(section, base)
    counted = census(base, axes)
    return Round(
        number=0,
        split=STEER_SPLIT,
        axes=axes,
        cells=tuple(
            CellRow(cell=cell, natural=part, cost_s=counted.cost_s[cell]) for cell, part in counted.natural.items()
        ),
        picks=held_out(base, section.pool if section.uniform_share < 1 else 0),
        options=section.model_dump(mode="json"),
    )


def next_round(plan: Plan, section: AdaptiveSection, errors: Sequence[Judged], *, number: int, split: str) -> Round:
    """Round `number` (from 1) of a campaign of which `plan` holds all rounds before: a pure function of these.

    `errors`: those of samples of `plan` of the split `split`.
    """
    axes = axes_of(section, plan)
    counted = census(plan, axes)
    try:
        judged = _judged(plan, axes, _as_the_worst(errors), split)
    except ValueError as error:
        raise UsageError(
            f"adaptive: round {number} cannot be steered: {error}. Lower train.optimizer.lr and remove RUN/{FOLDER}: "
            "the same command goes on with the samples that are there"
        ) from None
    share = shares(
        counted.natural,
        judged,
        uniform_share=section.uniform_share,
        sharpness=section.sharpness,
        most=section.most_often,
    )
    budget = section.samples_per_round * counted.mean_cost_s
    total = samples_for(budget, share, counted.cost_s)
    wanted = quotas(share, total, seed=plan.spec.seed, number=number)
    picks = choose(plan, axes, wanted, number=number)
    taken = _taken(plan, axes, picks)
    relative = smoothed(list(counted.natural), judged)
    return Round(
        number=number,
        split="train",
        axes=axes,
        cells=tuple(
            CellRow(
                cell=cell,
                natural=part,
                cost_s=counted.cost_s[cell],
                n=judged[cell].n if cell in judged else 0,
                error=judged[cell].total / judged[cell].n if cell in judged else None,
                relative=relative[cell],
                share=share[cell],
                planned=wanted[cell],
                taken=taken.get(cell, 0),
            )
            for cell, part in counted.natural.items()
        ),
        picks=picks,
        budget_s=budget,
        options=section.model_dump(mode="json"),
        judge={
            "split": split,
            "n": len(errors),
            "steps": section.judge_steps if errors else 0,
            "no_numbers": len(errors) - len(_numbered(errors)),
        },
    )


def _numbered(errors: Sequence[Judged]) -> list[float]:
    return [row.loss for row in errors if math.isfinite(row.loss)]


def _as_the_worst(errors: Sequence[Judged]) -> list[Judged]:
    """A loss that overflowed or is no number counts as the worst of the others: there is nothing that the network can
    do less. ValueError where there are no others.
    """
    if errors and not _numbered(errors):
        raise ValueError(f"the losses of all {len(errors)} samples that judge are no numbers")
    worst = max(_numbered(errors), default=0.0)
    return [row if math.isfinite(row.loss) else dataclasses.replace(row, loss=worst) for row in errors]


def _judged(plan: Plan, axes: Sequence[Axis], errors: Sequence[Judged], split: str) -> dict[Cell, Tally]:
    """Errors by region. ValueError for one that is no number."""
    numbers = _numbers(plan)
    cells = {
        sample.uid: cell_of(axes, sample, numbers.get((sample.structure.key, sample.structure.zone_axis), 0))
        for task in plan.tasks
        if task.split == split
        for sample in task.samples()
    }
    strange = [row.uid for row in errors if row.uid not in cells]
    if strange:
        raise UsageError(
            f"adaptive: {len(strange)} of {len(errors)} samples that were judged are none of this campaign's split "
            f"{split!r} (uid {strange[0]}); remove errors.json of the last of RUN/{FOLDER}, it is made again"
        )
    return tallies([(cells[row.uid], row.loss) for row in sorted(errors, key=lambda row: row.uid)])


def _taken(plan: Plan, axes: Sequence[Axis], picks: Sequence[Pick]) -> Counter[Cell]:
    """How many samples of each region were found."""
    structures, numbers, recipe = trained_structures(plan), _numbers(plan), plan.spec.recipe()
    taken: Counter[Cell] = Counter()
    for pick in picks:
        number = numbers[pick.structure, pick.zone_axis]
        for index in pick.indices:
            taken[cell_of(axes, draw_sample(structures[number], recipe, index, "train"), number)] += 1
    return taken


def _numbers(plan: Plan) -> dict[tuple[str, tuple[int, int, int]], int]:
    return {(s.key, s.zone_axis): k for k, s in enumerate(trained_structures(plan))}


def _judged_split(section: AdaptiveSection, spec: TrainSpec) -> str:
    return STEER_SPLIT if section.pool else spec.val_split


def _errors(
    dataset: Path, folder: Path, number: int, section: AdaptiveSection, spec: TrainSpec, hands: Hands
) -> tuple[Judged, ...]:
    """What the network after round `number` gets wrong; nothing where all is drawn uniformly anyway."""
    if section.uniform_share >= 1:
        return ()
    run = folder / f"round-{number:04d}"
    path = run / "errors.json"
    if not path.exists():
        hands.train(judging_spec(section, spec), run)
        rows = [_no_number_is_null(row) for row in judge(run, dataset, _judged_split(section, spec))]
        write_atomic(path, json.dumps(rows, separators=(",", ":"), allow_nan=False).encode() + b"\n")
    return read_errors(path)


def _no_number_is_null(row: Judged) -> dict[str, Any]:
    return {key: value if math.isfinite(value) else None for key, value in dataclasses.asdict(row).items()}


def _null_is_no_number(row: dict[str, Any]) -> dict[str, Any]:
    return {key: math.nan if value is None else value for key, value in row.items()}


def judging_spec(section: AdaptiveSection, spec: TrainSpec) -> TrainSpec:
    """The training of a network that judges: as the training itself, for so many steps."""
    return spec.model_copy(
        update={
            "steps": section.judge_steps,
            "epochs": None,
            "max_seconds": None,
            "eval_every_steps": None,
            "trackers": (),
        }
    )


def judge_final(
    plan: Plan, dataset: Path, folder: Path, train: Path, section: AdaptiveSection, spec: TrainSpec
) -> None:
    """What the trained network gets wrong on the samples that judged, by region and by sample: rounds/final.json.

    Nothing is decided by it: a sample whose loss is no number is named, and left out.
    """
    path = folder / "final.json"
    done = path.exists() and path.stat().st_mtime_ns >= (train / "model.pt").stat().st_mtime_ns
    if section.uniform_share >= 1 or done:
        return
    split = _judged_split(section, spec)
    errors = judge(train, dataset, split)
    content = {"split": split, **_by_region(plan, axes_of(section, plan), errors, split)}
    folder.mkdir(exist_ok=True)
    write_atomic(path, json.dumps(content, separators=(",", ":"), allow_nan=False).encode() + b"\n")


def _by_region(plan: Plan, axes: Sequence[Axis], errors: Sequence[Judged], split: str) -> dict[str, Any]:
    """`cells`, `errors` sample by sample, and the uids of those that are `no_numbers`."""
    numbers = [row for row in errors if math.isfinite(row.loss) and math.isfinite(row.mse_VA2)]
    cells = _judged(plan, axes, numbers, split)
    return {
        "cells": [{"cell": c, "n": found.n, "error": found.total / found.n} for c, found in sorted(cells.items())],
        "errors": [dataclasses.asdict(row) for row in numbers],
        "no_numbers": sorted({row.uid for row in errors} - {row.uid for row in numbers}),
    }


def read_errors(path: Path) -> tuple[Judged, ...]:
    """What a network that judged a round got wrong, sample by sample.

    Raises DamagedDataError for a file that is none of this.
    """
    try:
        found = json.loads(read_plain_text(path))
        rows = tuple(Judged(**_null_is_no_number(row)) for row in found)
        if not all(isinstance(row.uid, int) and isinstance(row.loss, float | int) for row in rows):
            raise ValueError("a uid or a loss is no number")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedDataError(
            f"{path}: expected the errors of a network that judged, could not read them ({error}). Remove the file: "
            "the same command makes it again"
        ) from error
    return rows


def _told(made: Round) -> str:
    """The most and the least favoured region, for a person."""
    rows = sorted((row for row in made.cells if row.natural), key=lambda row: row.share / row.natural)
    if not rows or rows[0].share == rows[-1].share:
        return f"{made.n_samples} samples"
    most, least = (
        f"{', '.join(axis.labels[k] for axis, k in zip(made.axes, row.cell, strict=True))} "
        f"{row.share / row.natural:.2g} times"
        for row in (rows[-1], rows[0])
    )
    return f"{made.n_samples} samples; of their natural share, {most}, {least}"
