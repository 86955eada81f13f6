"""Rounds of a steered campaign: which samples each adds to the plan, why, and the files that say so.

    DATASET/steering/round-0000.json   the samples that only judge (split `steer`); everything else of round 0 is the
                                       campaign itself, drawn as it says
            steering/round-0001.json   what round 1 adds to `train`: regions, errors, shares, and the samples

1. A structure has endless samples, each a pure function of its number (`tasks.draw_sample`). A campaign takes the
   first ones. Rounds choose among later numbers, of a block that is theirs alone: a sample of round k is one that the
   campaign might have drawn, and is the same sample, uid and all, whatever was chosen before.
2. Within its cell, a round takes samples as they come: the distribution inside a region stays the campaign's own.
3. A round is decided before its first sample is simulated, and written whole. From then on it is part of the data set:
   every command that plans this campaign for this data set has its tasks, after all others. A killed run goes on with
   the same plan, a controller that comes later finds the same shards.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import DamagedDataError, UsageError
from exitwave.ingest.files import read_plain_text, write_atomic
from exitwave.ingest.schema import PARAMS_DTYPE
from exitwave.simulate.bundle import bundled
from exitwave.simulate.campaign_files import STEERING_NAME
from exitwave.simulate.cost import estimate_seconds, sample_bytes
from exitwave.simulate.distributions import uniform_stream
from exitwave.simulate.fitness import unfit
from exitwave.simulate.plan import Plan
from exitwave.simulate.spec import MAX_SAMPLES, Recipe
from exitwave.simulate.steer import Axis, Cell
from exitwave.simulate.tasks import SampleSpec, StructureSpec, TaskSpec, draw_sample, reject_sample, shard_id_of
from exitwave.simulate.work import CampaignPlan

__all__ = [
    "STEER_SPLIT",
    "CellRow",
    "Census",
    "Pick",
    "Round",
    "cell_of",
    "census",
    "choose",
    "held_out",
    "mean_atomic_number",
    "read_rounds",
    "steered",
    "trained_structures",
    "write_round",
]

STEER_SPLIT = "steer"
_FORMAT = "exitwave-steering"
_CENSUS, _CENSUS_EACH = 20_000, (8, 128)  # draws in all; least and most of each structure
_SWEEPS = 400  # over all structures, for one more sample of the rarest region: then it is given up


@dataclass(frozen=True, kw_only=True)
class Pick:
    """Samples of one structure, by their numbers."""

    structure: str
    zone_axis: tuple[int, int, int]
    source: str
    indices: tuple[int, ...]
    uids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class CellRow:
    """Why a region got what it got. `error`: mean over the `n` samples that judged it, None where there was none;
    `relative`: smoothed, over the mean of all; `share` of this round's samples, `planned` and `taken` of them."""

    cell: Cell
    natural: float
    cost_s: float
    n: int = 0
    error: float | None = None
    relative: float | None = None
    share: float = 0.0
    planned: int = 0
    taken: int = 0


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round, whole. `judge`: who judged (steps, split, samples), empty for round 0."""

    number: int
    split: str
    axes: tuple[Axis, ...]
    cells: tuple[CellRow, ...]
    picks: tuple[Pick, ...]
    budget_s: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    judge: Mapping[str, Any] = field(default_factory=dict)

    @property
    def n_samples(self) -> int:
        return sum(len(pick.indices) for pick in self.picks)

    def to_json(self) -> dict[str, Any]:
        return {"format": _FORMAT, "version": 1, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Round:
        made = cls._of(data)
        if any(len(row.cell) != len(made.axes) for row in made.cells):
            raise ValueError("a region has not as many numbers as there are axes")
        if any(not pick.indices or len(pick.indices) != len(pick.uids) for pick in made.picks):
            raise ValueError("a structure was picked without samples, or with more or fewer uids")
        return made

    @classmethod
    def _of(cls, data: Mapping[str, Any]) -> Round:
        return cls(
            number=int(data["number"]),
            split=str(data["split"]),
            axes=tuple(Axis(name=a["name"], labels=tuple(a["labels"]), edges=tuple(a["edges"])) for a in data["axes"]),
            cells=tuple(CellRow(**{**row, "cell": tuple(row["cell"])}) for row in data["cells"]),
            picks=tuple(
                Pick(
                    structure=p["structure"],
                    zone_axis=(p["zone_axis"][0], p["zone_axis"][1], p["zone_axis"][2]),
                    source=p["source"],
                    indices=tuple(p["indices"]),
                    uids=tuple(p["uids"]),
                )
                for p in data["picks"]
            ),
            budget_s=float(data["budget_s"]),
            options=dict(data["options"]),
            judge=dict(data["judge"]),
        )


# --- files ----------------------------------------------------------------------------------------------------------


def write_round(dataset: Path, made: Round) -> None:
    """Under its name only when whole. What a round is stays as it is: one that is there is not written again."""
    path = _path(dataset, made.number)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        raise UsageError(f"{path}: this round is decided already")
    write_atomic(path, json.dumps(made.to_json(), separators=(",", ":"), allow_nan=False).encode() + b"\n")


def read_rounds(dataset: Path) -> tuple[Round, ...]:
    """The rounds of a data set in order; none where it is not steered.

    Raises DamagedDataError for a file that cannot be read, and where one is missing between others.
    """
    paths = sorted((dataset / STEERING_NAME).glob("round-*.json"))
    rounds = []
    for number, path in enumerate(paths):
        try:
            made = Round.from_json(json.loads(read_plain_text(path)))
        except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise DamagedDataError(
                f"{path}: expected a round of a steered campaign, could not read it ({error})"
            ) from error
        if made.number != number:
            raise DamagedDataError(f"{_path(dataset, number)}: this round is missing, later ones are there")
        rounds.append(made)
    return tuple(rounds)


def _path(dataset: Path, number: int) -> Path:
    return dataset / STEERING_NAME / f"round-{number:04d}.json"


# --- regions --------------------------------------------------------------------------------------------------------


def trained_structures(plan: Plan) -> tuple[StructureSpec, ...]:
    """The structures that training samples are made of, in the plan's order."""
    found = {part.structure.index: part.structure for part in _parts(plan) if part.split == "train"}
    return tuple(found[index] for index in sorted(found))


def cell_of(axes: Sequence[Axis], sample: SampleSpec, number: int = 0) -> Cell:
    """The region of a sample; `number`: of its structure among those that are trained on."""
    values: dict[str, float] = {**sample.values, "thickness_A": sample.thickness_A, "structure": number}
    if any(axis.name == "atomic_number" for axis in axes):
        values["atomic_number"] = mean_atomic_number(sample.structure)
    return tuple(axis.bin(values[axis.name]) for axis in axes)


def mean_atomic_number(structure: StructureSpec) -> float:
    """Over the atoms of the cell."""
    return sum(structure.numbers) / len(structure.numbers)


@dataclass(frozen=True, kw_only=True)
class Census:
    """The regions that a campaign's own draws fall into: each one's part of them, and core-seconds of one sample."""

    natural: Mapping[Cell, float]
    cost_s: Mapping[Cell, float]

    @property
    def mean_cost_s(self) -> float:
        return math.fsum(self.natural[cell] * self.cost_s[cell] for cell in self.natural)


def census(plan: Plan, axes: Sequence[Axis]) -> Census:
    """Counted over draws of every structure, none of which is simulated."""
    structures = trained_structures(plan)
    each = min(max(_CENSUS // len(structures), _CENSUS_EACH[0]), _CENSUS_EACH[1])
    counts: Counter[Cell] = Counter()
    seconds: Counter[Cell] = Counter()
    for number, structure in enumerate(structures):
        for k in range(each):
            sample = _fit(plan, structure, _first(0) + k, "train")
            if sample is not None:
                cell = cell_of(axes, sample, number)
                counts[cell] += 1
                seconds[cell] += estimate_seconds(sample, plan.simulator)  # type: ignore[assignment]
    if not counts:
        raise UsageError("adaptive: no draw of this campaign can be simulated")
    total = counts.total()
    return Census(
        natural={cell: n / total for cell, n in sorted(counts.items())},
        cost_s={cell: seconds[cell] / n for cell, n in sorted(counts.items())},
    )


# --- choosing samples -----------------------------------------------------------------------------------------------


def held_out(plan: Plan, each: int) -> tuple[Pick, ...]:
    """`each` samples of every structure that is trained on, drawn as the campaign draws: none is ever trained on."""
    return _picks(
        (structure, sample)
        for structure in (trained_structures(plan) if each else ())
        for k in range(each)
        if (sample := _fit(plan, structure, _first(1) + k, STEER_SPLIT)) is not None
    )


def choose(plan: Plan, axes: Sequence[Axis], wanted: Mapping[Cell, int], *, number: int) -> tuple[Pick, ...]:
    """So many samples of each region for round `number` (from 1), as they come: sweep after sweep over the structures,
    in an order that is drawn anew for each. A region that is too rare to be met gets fewer.
    """
    structures = trained_structures(plan)
    left = Counter({cell: n for cell, n in wanted.items() if n})
    seen = {uid for task in plan.tasks for uid in task.uids()}
    by_structure = next((k for k, axis in enumerate(axes) if axis.name == "structure"), None)
    found: list[tuple[StructureSpec, SampleSpec]] = []
    idle = sweep = 0
    while left and idle < _SWEEPS and sweep < MAX_SAMPLES:
        idle += 1
        stream = uniform_stream(plan.spec.seed, "steer", number, f"sweep {sweep}")
        order = sorted((next(stream), k) for k in range(len(structures)))
        open_ = None if by_structure is None else {cell[by_structure] for cell in left}
        for _, k in order:
            if open_ is not None and k not in open_:
                continue
            sample = _fit(plan, structures[k], _first(number + 1) + sweep, "train")
            if sample is None or sample.uid in seen or not left[cell := cell_of(axes, sample, k)]:
                continue
            left[cell] -= 1
            seen.add(sample.uid)
            found.append((structures[k], sample))
            idle = 0
        left = +left
        sweep += 1
    return _picks(iter(found))


def _picks(samples: Iterator[tuple[StructureSpec, SampleSpec]]) -> tuple[Pick, ...]:
    grouped: dict[int, tuple[StructureSpec, list[SampleSpec]]] = {}
    for structure, sample in samples:
        grouped.setdefault(structure.index, (structure, []))[1].append(sample)
    return tuple(
        Pick(
            structure=structure.key,
            zone_axis=structure.zone_axis,
            source=structure.source,
            indices=tuple(sample.sample_index for sample in some),
            uids=tuple(sample.uid for sample in some),
        )
        for _, (structure, some) in sorted(grouped.items())
    )


def _first(block: int) -> int:
    """Blocks of numbers that no campaign reaches: 0 for the census, 1 for what judges, k + 1 for round k."""
    return (block + 1) * MAX_SAMPLES


def _fit(plan: Plan, structure: StructureSpec, index: int, split: str) -> SampleSpec | None:
    sample = draw_sample(structure, _recipe(plan), index, split)
    return sample if reject_sample(sample) is None and unfit(sample, plan.simulator) is None else None


def _recipe(plan: Plan) -> Recipe:
    return next(_parts(plan)).recipe


def _parts(plan: Plan) -> Iterator[TaskSpec]:
    """Every task, and the parts of those that hold several structures."""
    for task in plan.tasks:
        if isinstance(task, TaskSpec):
            yield task
        else:
            yield from task.parts


# --- the plan with its rounds ---------------------------------------------------------------------------------------


def steered(plan: CampaignPlan, dataset: Path) -> Any:
    """`plan` with the tasks of all rounds that `dataset` holds; as it is where it has them already.

    UsageError where a round's structures or samples are not those of this campaign.
    """
    for made in read_rounds(dataset):
        if not isinstance(plan, Plan):
            raise UsageError(f"{dataset}: its campaign is of crystals under a beam, this one of an own simulator")
        plan = _with_round(plan, made, dataset)
    return plan


def _with_round(plan: Plan, made: Round, dataset: Path) -> Plan:
    blocks = {number // MAX_SAMPLES for part in _parts(plan) for number in part.sample_indices}
    if not made.picks or made.picks[0].indices[0] // MAX_SAMPLES in blocks:
        return plan
    by_key = {(s.key, s.zone_axis): s for s in trained_structures(plan)}
    spec, recipe = plan.spec, _recipe(plan)
    tasks: list[TaskSpec] = []
    seconds, first = 0.0, _next_index(plan)
    for pick in made.picks:
        structure = by_key.get((pick.structure, pick.zone_axis))
        if structure is None:
            raise UsageError(
                f"{_path(dataset, made.number)}: round {made.number} has samples of {pick.source}, which this campaign "
                "does not train on: give back the campaign that the data set was made with, or another folder"
            )
        samples = [draw_sample(structure, recipe, k, made.split) for k in pick.indices]
        if tuple(sample.uid for sample in samples) != pick.uids:
            raise UsageError(
                f"{_path(dataset, made.number)}: the samples of {pick.source} are others in this campaign: give back "
                "the campaign that the data set was made with, or another folder"
            )
        seconds += sum(estimate_seconds(sample, plan.simulator) for sample in samples)
        for start in range(0, len(samples), spec.samples_per_shard):
            end = start + spec.samples_per_shard
            index = first + len(tasks)
            tasks.append(
                TaskSpec(
                    index=index,
                    campaign_hash=plan.campaign_hash,
                    simulator=plan.simulator,
                    structure=structure,
                    recipe=recipe,
                    split=made.split,
                    sample_indices=pick.indices[start:end],
                    shard_id=shard_id_of(
                        index=index,
                        campaign_hash=plan.campaign_hash,
                        simulator=plan.simulator,
                        split=made.split,
                        fields=plan.fields,
                        uids=pick.uids[start:end],
                    ),
                )
            )
    most = spec.samples_per_shard  # a round takes few samples of each structure
    shards = bundled(tasks, structures=most, samples=most, first=first)
    return dataclasses.replace(
        plan,
        tasks=(*plan.tasks, *shards),
        core_seconds=plan.core_seconds + seconds,
        bytes=plan.bytes
        + made.n_samples * (sample_bytes(plan.fields) + PARAMS_DTYPE.itemsize + 12)
        + 64_000 * len(shards),
    )


def _next_index(plan: Plan) -> int:
    """After all tasks and all parts that they may fall into."""
    return 1 + max(max(task.index for task in plan.tasks), max(part.index for part in _parts(plan)))
