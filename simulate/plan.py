"""From a campaign to its tasks: read, check, orient and divide the structures, draw and check every sample.

Nothing is simulated and nothing is written. The plan is the same on any machine, and everything after it, a resume
included, compares itself with it.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import UsageError
from exitwave.ingest.schema import PARAMS_DTYPE, SHARD_VERSION, FieldSpec
from exitwave.simulate.advice import advice
from exitwave.simulate.bundle import Task, bundled
from exitwave.simulate.cost import Calibration, estimate_seconds, sample_bytes, worker_memory_bytes
from exitwave.simulate.fitness import unfit
from exitwave.simulate.simulator import resolve_simulator
from exitwave.simulate.spec import MAX_SAMPLES, CampaignSpec, StrongestAxes
from exitwave.simulate.splits import SplitUnit, assign_splits, without_small_classes
from exitwave.simulate.structures.orient import OrientationError, orient
from exitwave.simulate.structures.preflight import check_crystal, reduced_formula, rotations_of, symmetry_of
from exitwave.simulate.structures.reflections import Axis, AxisError, strongest_axes
from exitwave.simulate.structures.sources import Crystal, Rejected, read_sources
from exitwave.simulate.tasks import (
    SampleSpec,
    StructureSpec,
    TaskSpec,
    canonical_json,
    draw_sample,
    fields_of,
    reject_sample,
    shard_id_of,
)

__all__ = ["Plan", "make_plan", "prepare_crystal"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All tasks of a campaign, what was rejected, and what it is likely to cost."""

    spec: CampaignSpec
    campaign_hash: str
    simulator: str
    structures: tuple[StructureSpec, ...]
    rejected: tuple[Rejected, ...]
    rejected_samples: int
    tasks: tuple[Task, ...]
    warnings: tuple[str, ...]
    core_seconds: float
    bytes: int
    memory_per_worker_bytes: int

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def fields(self) -> tuple[FieldSpec, ...]:
        return fields_of(self.spec.recipe())

    def resolved(self) -> dict[str, Any]:
        """The campaign with every default written out, as plain values."""
        return self.spec.model_dump(mode="json")

    def prepare(self, dataset: Path) -> None:
        """Before the first task: wisdom for the transforms, where the campaign is long enough to gain by it."""
        from exitwave.simulate.wisdom import make_wisdom

        make_wisdom(self, dataset)

    @property
    def n_samples(self) -> int:
        return sum(len(task.sample_indices) for task in self.tasks)

    def samples(self) -> Iterator[SampleSpec]:
        """Every sample of the plan, task by task."""
        for task in self.tasks:
            yield from task.samples()

    def by_split(self) -> dict[str, int]:
        """Samples per split."""
        counts: Counter[str] = Counter()
        for task in self.tasks:
            counts[task.split] += len(task.sample_indices)
        return dict(counts)

    def summary(self, *, workers: int = 1, calibration: Calibration | None = None) -> dict[str, Any]:
        """The plan as JSON; core hours from the calibration where there is one, else from a model of the cost."""
        seconds = calibration.core_seconds if calibration is not None else self.core_seconds
        return {
            "samples": self.n_samples,
            "shards": len(self.tasks),
            "structures": len({structure.index for structure in self.structures}),
            "rejected": [{"source": r.source, "why": r.why} for r in self.rejected],
            "rejected_samples": self.rejected_samples,
            "splits": self.by_split(),
            "bytes": self.bytes,
            "core_hours": seconds / 3600.0,
            "eta_s": seconds / max(1, workers),
            "workers": workers,
            "calibrated": calibration is not None,
            "memory_per_worker_bytes": self.memory_per_worker_bytes,
            "campaign_hash": self.campaign_hash,
            "warnings": list(self.warnings),
        }


Feed = Callable[[Mapping[str, Any]], None]


def _tell_nobody(event: Mapping[str, Any]) -> None: ...


def make_plan(spec: CampaignSpec, *, base_dir: Path, feed: Feed = _tell_nobody) -> Plan:
    """Plan `spec`; relative paths in it start at `base_dir`. `feed` hears how far it is, for a person who waits:
    `plan_structures` with the structures read, `plan_samples` with the samples drawn.

    Raises UsageError for a source that does not exist, splits that cannot be made, samples that are one experiment
    twice, and where no structure remains.
    """
    rejected: list[Rejected] = []
    found: list[StructureSpec] = []
    fixed: list[str | None] = []
    known: set[tuple[str, tuple[int, int, int]]] = set()
    for number, crystal in enumerate(read_sources(spec.structures, base_dir=base_dir, seed=spec.seed)):
        feed({"kind": "plan_structures", "done": number, "rejected": len(rejected)})
        if isinstance(crystal, Rejected):
            rejected.append(crystal)
            continue
        for outcome in prepare_crystal(crystal, spec):
            if isinstance(outcome, Rejected):
                rejected.append(outcome)
            elif (outcome.key, outcome.zone_axis) in known:
                rejected.append(
                    Rejected(source=outcome.source, why="it stands in the campaign twice; the first counts")
                )
            else:
                known.add((outcome.key, outcome.zone_axis))
                found.append(outcome)
                fixed.append(crystal.split)
    if not found:
        raise UsageError(f"structures: none remains of {len(rejected)}: {_reasons(rejected)}")
    units = [SplitUnit.of(s, f) for s, f in zip(found, fixed, strict=True)]
    try:
        assigned = assign_splits(units, spec.split, spec.seed)
        kept = without_small_classes(units, assigned, spec.split)
    except UsageError as error:
        if not rejected:
            raise
        raise UsageError(f"{error}\n{len(rejected)} structures were rejected: {_reasons(rejected)}") from None
    structures: list[StructureSpec] = []
    splits: list[str] = []
    for structure, asked, split in zip(found, assigned, kept, strict=True):
        if split is None:
            why = f"it shares its composition {structure.formula} with the test set and is of another prototype"
            if asked is not None:
                least = spec.split.least_compositions
                why = f"space group {structure.space_group} has fewer than {least} compositions in training"
            rejected.append(Rejected(source=structure.source, why=why))
        else:
            structures.append(replace(structure, index=len(structures)))
            splits.append(split)
    return _with_tasks(spec, structures, splits, rejected, feed)


def _reasons(rejected: list[Rejected]) -> str:
    rows = [f"{r.source}: {r.why}" for r in rejected[:5]]
    more = f"; and {len(rejected) - 5} more" if len(rejected) > 5 else ""
    return "; ".join(rows) + more


def prepare_crystal(crystal: Crystal, spec: CampaignSpec) -> Iterator[StructureSpec | Rejected]:
    """A crystal as one StructureSpec per zone axis, or the reasons against it."""
    reason = check_crystal(crystal)
    if reason is not None:
        yield Rejected(source=crystal.source, why=reason)
        return
    if len(crystal.atoms) > spec.cell.max_atoms:
        why = f"its cell holds {len(crystal.atoms)} atoms, cell.max_atoms is {spec.cell.max_atoms}"
        yield Rejected(source=crystal.source, why=why)
        return
    named_by = crystal.atoms if crystal.parent is None else crystal.parent
    symmetry = symmetry_of(named_by)
    for axis in _axes(crystal, named_by):
        if isinstance(axis, AxisError):
            yield Rejected(source=crystal.source, why=str(axis))
            continue
        zone = axis.zone
        label = f"{crystal.source} along [{zone[0]} {zone[1]} {zone[2]}]"
        thickness = spec.grid.slice_thickness_A
        try:
            cell = orient(
                crystal.atoms,
                zone,
                max_strain=spec.cell.max_strain,
                slice_thickness_A=axis.d_A if thickness == "d_hkl" else thickness,
                max_atoms=spec.cell.max_atoms,
                index_cell=named_by.cell.array,
            )
        except OrientationError as error:
            yield Rejected(source=label, why=str(error))
            continue
        nx, ny = (max(1, math.ceil(spec.cell.min_extent_A / length - 1e-9)) for length in cell.lengths_A[:2])
        structure = StructureSpec(
            index=0,
            key=crystal.key,
            source=crystal.source,
            licence=crystal.licence,
            formula=reduced_formula(crystal.atoms),
            space_group=symmetry.space_group,
            wyckoff=symmetry.wyckoff,
            prototype_group=symmetry.prototype_group,
            zone_axis=zone,
            inplane_axis=cell.inplane_axis,
            strain=cell.strain,
            numbers=cell.numbers,
            positions_A=cell.positions_A,
            lengths_A=cell.lengths_A,
            repeat_xy=(nx, ny),
            slices=cell.slices,
            reflection=axis.reflection,
            reflection_d_A=axis.d_A,
        )
        reason = _check_size(structure, spec)
        yield structure if reason is None else Rejected(source=label, why=reason)


def _axes(crystal: Crystal, named_by: Any) -> Iterator[Axis | AxisError]:
    """The zone axes as given, or those of the strongest reflections, or why there are none."""
    asked = crystal.zone_axes
    if not isinstance(asked, StrongestAxes):
        yield from (Axis(zone=zone) for zone in asked)
        return
    try:
        yield from strongest_axes(
            crystal.atoms,
            index_cell=named_by.cell.array,
            rotations=rotations_of(named_by),
            count=asked.strongest,
            d_A=asked.d_A,
        )
    except AxisError as error:
        yield error


def _check_size(structure: StructureSpec, spec: CampaignSpec) -> str | None:
    from exitwave.simulate.distributions import bounds

    thickest = bounds(spec.sampling.thickness_A)[1]
    periods = math.ceil(thickest / structure.lengths_A[2] - 1e-9)
    atoms = len(structure.numbers) * structure.repeat_xy[0] * structure.repeat_xy[1] * max(1, periods)
    if atoms > spec.cell.max_atoms:
        return f"{atoms} atoms at {thickest:g} Å, cell.max_atoms is {spec.cell.max_atoms}"
    points = max(structure.grid_yx(spec.grid))
    if points > spec.grid.max_gpts:
        y, x = structure.extent_yx_A
        return (
            f"its supercell of {x:.1f} x {y:.1f} Å needs {points} grid points at {spec.grid.sampling_A:g} Å, "
            f"grid.max_gpts is {spec.grid.max_gpts}"
        )
    return None


def _with_tasks(
    spec: CampaignSpec, structures: list[StructureSpec], splits: list[str], rejected: list[Rejected], feed: Feed
) -> Plan:
    asked = len(structures) * spec.samples_per_structure
    if asked > MAX_SAMPLES:
        raise UsageError(
            f"samples_per_structure: {spec.samples_per_structure} samples of {len(structures)} structures are {asked}, "
            f"at most {MAX_SAMPLES} expected in one campaign; ask for fewer, or divide it into several campaigns"
        )
    recipe = spec.recipe()
    simulator = resolve_simulator(spec.simulator)
    campaign_hash = _campaign_hash(spec, structures, splits, simulator)
    fields = fields_of(recipe)
    tasks: list[TaskSpec] = []
    used: list[StructureSpec] = []
    seen: dict[int, tuple[StructureSpec, int]] = {}  # no samples: a large campaign's would fill the memory
    seconds = 0.0
    lost = 0
    memory = 0
    for structure, split in zip(structures, splits, strict=True):
        feed({"kind": "plan_samples", "done": len(used) * spec.samples_per_structure, "total": asked})
        reasons: Counter[str] = Counter()
        good: list[tuple[int, int]] = []  # index and uid
        for k in range(spec.samples_per_structure):
            sample = draw_sample(structure, recipe, k, split)
            reason = reject_sample(sample) or unfit(sample, simulator)
            if reason is not None:
                reasons[reason] += 1
                continue
            if _is_twin_in_pass(good, sample):
                reasons[f"the pass has a sample of {sample.thickness_A:.4g} Å and the same aberrations already"] += 1
                continue
            _refuse_twins(seen, sample)
            good.append((k, sample.uid))
            seconds += estimate_seconds(sample, simulator)
            memory = max(memory, worker_memory_bytes(sample, simulator))
        if reasons:
            lost += sum(reasons.values())
            part = f"{sum(reasons.values())} of {spec.samples_per_structure} samples: {reasons.most_common(1)[0][0]}"
            rejected.append(Rejected(source=structure.source, why=part))
        if good:
            used.append(structure)
        for chunk in _whole_passes(good, recipe.fan_out.width, spec.samples_per_shard):
            index = len(tasks)
            shard_id = shard_id_of(
                index=index,
                campaign_hash=campaign_hash,
                simulator=simulator,
                split=split,
                fields=fields,
                uids=tuple(uid for _, uid in chunk),
            )
            tasks.append(
                TaskSpec(
                    index=index,
                    campaign_hash=campaign_hash,
                    simulator=simulator,
                    structure=structure,
                    recipe=recipe,
                    split=split,
                    sample_indices=tuple(k for k, _ in chunk),
                    shard_id=shard_id,
                )
            )
    if not tasks:
        raise UsageError(f"sampling: no sample remains: {_reasons(rejected)}")
    shards: tuple[Task, ...] = tuple(tasks)
    if spec.structures_per_shard > 1:
        shards = bundled(tasks, structures=spec.structures_per_shard, samples=spec.samples_per_shard)
    return Plan(
        spec=spec,
        campaign_hash=campaign_hash,
        simulator=simulator,
        structures=tuple(used),
        rejected=tuple(rejected),
        rejected_samples=lost,
        tasks=shards,
        warnings=tuple(advice(spec, used)),
        core_seconds=seconds,
        bytes=sum(len(t.sample_indices) for t in tasks) * (sample_bytes(fields) + PARAMS_DTYPE.itemsize + 12)
        + 64_000 * len(shards),
        memory_per_worker_bytes=memory,
    )


def _is_twin_in_pass(good: list[tuple[int, int]], sample: SampleSpec) -> bool:
    """Whether a sample before it in its own pass is the same: two thicknesses may fall on one exit plane."""
    width = sample.recipe.fan_out.width
    first = sample.sample_index // width * width
    return width > 1 and any(uid == sample.uid for k, uid in good[-width:] if k >= first)


def _whole_passes(good: list[tuple[int, int]], width: int, most: int) -> Iterator[list[tuple[int, int]]]:
    """The samples (index, uid) of one structure in shards of at most `most`; no pass is divided between two."""
    chunk: list[tuple[int, int]] = []
    for _, samples in groupby(good, key=lambda sample: sample[0] // width):
        passed = list(samples)
        if len(chunk) + len(passed) > most:
            yield chunk
            chunk = []
        chunk += passed
    if chunk:
        yield chunk


def _refuse_twins(seen: dict[int, tuple[StructureSpec, int]], sample: SampleSpec) -> None:
    """One uid, one sample. Two samples of one structure that are the same experiment are a slip of the campaign."""
    structure, index = seen.setdefault(sample.uid, (sample.structure, sample.sample_index))
    if structure is sample.structure and index == sample.sample_index:
        return
    other = draw_sample(structure, sample.recipe, index, sample.split)
    if other.structure.key == sample.structure.key and other.values == sample.values:
        raise UsageError(
            f"samples {other.sample_index} and {sample.sample_index} of {sample.structure.source} are the same "
            "experiment: give a distribution to at least one parameter (scan_origin: random is one), or ask for "
            "samples_per_structure: 1"
        )
    raise UsageError(
        f"uid {sample.uid} belongs to two different samples ({other.structure.source} number {other.sample_index}, "
        f"{sample.structure.source} number {sample.sample_index}); change `seed`"
    )


def _if_several(structures: int) -> list[int]:
    return [structures] if structures > 1 else []


def _campaign_hash(spec: CampaignSpec, structures: list[StructureSpec], splits: list[str], simulator: str) -> str:
    """sha256 of what is asked for and of the content of the structures; names of files and the title take no part."""
    content = {
        "version": SHARD_VERSION,
        "recipe": spec.recipe().model_dump(mode="json"),
        "samples": [spec.samples_per_structure, spec.samples_per_shard, *_if_several(spec.structures_per_shard)],
        "simulator": simulator,
        "structures": [[s.key, list(s.zone_axis), split] for s, split in zip(structures, splits, strict=True)],
    }
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()
