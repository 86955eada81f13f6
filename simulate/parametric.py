"""Campaigns of a user's own simulator: parameters in, named arrays out, sample by sample.

What it shares with a campaign of crystals is all that matters: keyed draws, splits, shards, leases, retries, resume,
verification. What it lacks is structures: a sample is its parameters and a seed.

The plan imports the simulator, takes its fields, and simulates two samples, the first of them twice: equal parameters
must give equal bits, also after another sample, or a shard made again would not be the one that was lost.
"""

from __future__ import annotations

import hashlib
import math
import resource
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, Field, field_validator

from exitwave.ingest.errors import UsageError
from exitwave.ingest.schema import SHARD_VERSION, FieldSpec
from exitwave.ingest.shard import ShardWriter
from exitwave.ingest.strict_model import StrictModel
from exitwave.simulate.cost import Calibration, sample_bytes
from exitwave.simulate.distributions import Distribution, draw, parse, uniform_stream
from exitwave.simulate.own import (
    OwnSimulator,
    SimulatorRef,
    call_simulator,
    declared_fields,
    find_simulator,
    infer_fields,
    largest_difference,
    load_simulator,
    same_bits,
    with_values,
)
from exitwave.simulate.simulator import Sample
from exitwave.simulate.spec import MAX_SAMPLES, StorageSpec
from exitwave.simulate.structures.sources import Rejected
from exitwave.simulate.tasks import canonical_json, rounded, shard_id_of

__all__ = ["ParametricPlan", "ParametricSpec", "ParametricTask", "make_parametric_plan"]

# What every sample has beside its parameters.
_OWN_COLUMNS = ("seed", "sample_index", "split")
# The first word of the keys of draws, where a crystal has its hash. The simulator takes no part: two of them, given
# the same parameters, are compared on the same samples.
_KEY = "parametric"
_WORKER_MEMORY = 150_000_000  # h5py, numba and distributed, which the planning process has not imported


class SimulatorUse(StrictModel):
    """Which simulator: `module:function`, or an entry point. `sha256`, where given, is what its file must have.

    `check: false` leaves out the samples that the plan simulates, for a simulator that takes very long: it must
    declare its fields then, nothing is known of its cost, and nothing compares its bits.
    """

    use: str = Field(min_length=1, max_length=500)
    sha256: str = ""
    check: bool = True


class SampleSplit(StrictModel):
    """How many samples are held out: a whole number counts them, a fraction takes that part; the rest is `train`."""

    val: int | float = 0
    test: int | float = 0

    @field_validator("val", "test")
    @classmethod
    def _part(cls, value: int | float) -> int | float:
        if value < 0 or (isinstance(value, float) and value >= 1):
            raise ValueError(f"a number of samples (integer >= 0) or a fraction (0 <= f < 1) expected, came {value}")
        return value


class ParametricSpec(StrictModel):
    """A campaign of an own simulator. `parameters`: each a constant or a distribution, its unit in its name."""

    name: str = Field(min_length=1, max_length=200)
    seed: int = Field(default=0, ge=0, lt=2**63)
    simulator: SimulatorUse
    parameters: dict[str, Annotated[Distribution, BeforeValidator(parse)]] = Field(default_factory=dict)
    samples: int = Field(ge=1, le=MAX_SAMPLES)
    samples_per_shard: int = Field(default=16, ge=1, le=100_000)
    split: SampleSplit = SampleSplit()
    storage: StorageSpec = StorageSpec()

    @field_validator("parameters")
    @classmethod
    def _names(cls, value: dict[str, Distribution]) -> dict[str, Distribution]:
        for name in value:
            if not (name.isascii() and name.isidentifier() and len(name) <= 64):
                raise ValueError(
                    f"{name!r}: a name of letters, digits and _ expected, its unit at its end (kappa_m2_s)"
                )
            if name in _OWN_COLUMNS:
                raise ValueError(f"{name!r} is given to every sample by exitwave: choose another name")
        return value


@dataclass(frozen=True, kw_only=True)
class ParametricRecipe:
    """What travels to a worker: how a sample is drawn, and how it is simulated."""

    seed: int
    parameters: dict[str, Distribution]
    ref: SimulatorRef
    version: str
    fields: tuple[FieldSpec, ...]
    compression: str
    seconds: float

    def values(self, index: int) -> dict[str, Any]:
        """What the simulator is called with for sample `index`."""
        drawn: dict[str, Any] = {
            name: rounded(draw(d, seed=self.seed, structure_key=_KEY, sample=index, name=name))
            for name, d in self.parameters.items()
        }
        return {**drawn, "seed": int(next(uniform_stream(self.seed, _KEY, index, "seed")) * 2**53)}

    def uid(self, values: dict[str, Any]) -> int:
        """64-bit hash of the simulator's name and version and of the values."""
        content = {"version": 1, "simulator": [self.ref.name, self.version], "values": values}
        digest = hashlib.blake2b(canonical_json(content).encode(), digest_size=8, person=b"exitwave-own-1").digest()
        return int.from_bytes(digest, "little")

    @property
    def params_dtype(self) -> np.dtype[Any]:
        own = [("seed", "<u8"), ("sample_index", "<i8"), ("split", "S16")]
        return np.dtype([*((name, "<f8") for name in self.parameters), *own])


@dataclass(frozen=True, kw_only=True)
class ParametricTask:
    """The work of one shard."""

    index: int
    campaign_hash: str
    recipe: ParametricRecipe
    split: str
    sample_indices: tuple[int, ...]
    shard_id: str
    sources: tuple[str, ...] = ()

    @property
    def task_id(self) -> str:
        return f"task-{self.index:06d}"

    @property
    def simulator(self) -> str:
        return self.recipe.ref.name

    @property
    def fields(self) -> tuple[FieldSpec, ...]:
        return self.recipe.fields

    @property
    def params_dtype(self) -> np.dtype[Any]:
        return self.recipe.params_dtype

    @property
    def compression(self) -> str:
        return self.recipe.compression

    def uids(self) -> tuple[int, ...]:
        return tuple(self.recipe.uid(self.recipe.values(index)) for index in self.sample_indices)

    def estimated_seconds(self) -> float:
        return self.recipe.seconds * len(self.sample_indices)

    def prepare(self, dataset: Path) -> dict[str, str]:
        """Import the simulator in this process."""
        load_simulator(self.recipe.ref)
        version = self.recipe.version or self.recipe.ref.sha256[:12]
        return {"simulator": self.simulator, "simulator_version": version}

    def simulate(self) -> Iterator[Sample]:
        """The samples of this task, drawn and simulated here."""
        simulator = load_simulator(self.recipe.ref)
        for index in self.sample_indices:
            values = self.recipe.values(index)
            arrays = call_simulator(simulator, self.simulator, values, self.fields)
            row = np.zeros(1, dtype=self.params_dtype)
            for name, value in {**values, "sample_index": index, "split": self.split.encode()}.items():
                row[name] = value
            yield Sample(uid=self.recipe.uid(values), params=row[0], arrays=arrays)

    def add_structures(self, writer: ShardWriter) -> None:
        """There are none."""


@dataclass(frozen=True, kw_only=True)
class ParametricPlan:
    """All tasks of a campaign, and what they are likely to cost: `calibration`, None where nothing was measured."""

    spec: ParametricSpec
    campaign_hash: str
    recipe: ParametricRecipe
    tasks: tuple[ParametricTask, ...]
    warnings: tuple[str, ...]
    calibration: Calibration | None
    bytes: int
    memory_per_worker_bytes: int
    rejected: tuple[Rejected, ...] = field(default=())
    rejected_samples: int = 0

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def simulator(self) -> str:
        return self.recipe.ref.name

    @property
    def fields(self) -> tuple[FieldSpec, ...]:
        return self.recipe.fields

    @property
    def n_samples(self) -> int:
        return self.spec.samples

    def resolved(self) -> dict[str, Any]:
        """The campaign with every default written out, and the hash of the simulator's file."""
        content = self.spec.model_dump(mode="json")
        content["simulator"] |= {"sha256": self.recipe.ref.sha256}
        return content

    def prepare(self, dataset: Path) -> None:
        """Nothing is to be done before the first task."""

    def summary(self, *, workers: int = 1, calibration: Calibration | None = None) -> dict[str, Any]:
        """The plan as JSON; nothing is said of the time where nothing was measured."""
        found = calibration or self.calibration
        seconds = found.core_seconds if found is not None else None
        splits = Counter({task.split: 0 for task in self.tasks})
        for task in self.tasks:
            splits[task.split] += len(task.sample_indices)
        return {
            "samples": self.n_samples,
            "shards": len(self.tasks),
            "structures": 0,
            "simulator": self.simulator,
            "fields": [[f.name, f.dtype, list(f.shape), f.unit] for f in self.fields],
            "rejected": [],
            "rejected_samples": 0,
            "splits": dict(splits),
            "bytes": self.bytes,
            "core_hours": None if seconds is None else seconds / 3600.0,
            "eta_s": None if seconds is None else seconds / max(1, workers),
            "workers": workers,
            "calibrated": found is not None,
            "memory_per_worker_bytes": self.memory_per_worker_bytes,
            "campaign_hash": self.campaign_hash,
            "warnings": list(self.warnings),
        }


def make_parametric_plan(spec: ParametricSpec, *, base_dir: Path) -> ParametricPlan:
    """Plan `spec`; a script is looked for in `base_dir`.

    Raises UsageError for a simulator that is not there, cannot be imported, fails, returns other fields than it
    declares or other bits for equal parameters, and for splits that cannot be made.
    """
    ref = find_simulator(spec.simulator.use, base_dir=base_dir)
    if spec.simulator.sha256 not in ("", ref.sha256):
        raise UsageError(
            f"simulator.sha256: {ref.file or ref.name} has {ref.sha256[:12] or 'none'}, expected "
            f"{spec.simulator.sha256[:12]}: it has changed; give back the old file, or leave sha256 away"
        )
    simulator = load_simulator(ref)
    splits = _split_samples(spec)
    version = str(getattr(simulator, "version", ""))
    fields = declared_fields(simulator, ref.name)
    recipe = ParametricRecipe(
        seed=spec.seed,
        parameters=dict(spec.parameters),
        ref=ref,
        version=version,
        fields=fields or (),
        compression=spec.storage.compression,
        seconds=math.inf,
    )
    calibration, warnings = None, []
    if spec.simulator.check:
        try:
            fields, seconds = _try(simulator, recipe, declared=fields)
        except MemoryError as error:
            raise UsageError(f"simulator {ref.name}: one sample needs more memory than there is ({error})") from error
        recipe = replace(recipe, fields=fields, seconds=seconds)
        measured = 3 if spec.samples > 1 else 2
        calibration = Calibration(
            core_seconds=seconds * spec.samples, measured_samples=measured, measured_seconds=seconds * measured
        )
    elif fields is None:
        raise UsageError(f"simulator.check: {ref.name} declares no fields, so a sample must be tried to know them")
    if not getattr(simulator, "deterministic", True):
        warnings.append(
            f"{ref.name} says that it is not deterministic: a shard that is lost cannot be made again bit for bit"
        )
    campaign_hash = _campaign_hash(spec, recipe)
    tasks = _tasks(spec, recipe, campaign_hash, splits)
    per_sample = sample_bytes(recipe.fields) + recipe.params_dtype.itemsize + 12
    return ParametricPlan(
        spec=spec,
        campaign_hash=campaign_hash,
        recipe=recipe,
        tasks=tasks,
        warnings=tuple(warnings),
        calibration=calibration,
        bytes=spec.samples * per_sample + (16_000 + 4096 * len(recipe.fields)) * len(tasks),
        # This process has imported the simulator and made samples: a worker needs as much, and its own libraries.
        memory_per_worker_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + _WORKER_MEMORY,
    )


def _try(
    simulator: OwnSimulator, recipe: ParametricRecipe, *, declared: tuple[FieldSpec, ...] | None
) -> tuple[tuple[FieldSpec, ...], float]:
    """Simulate sample 0, sample 1, and sample 0 again: the fields, and seconds per sample without the first run."""
    name, values = recipe.ref.name, recipe.values(0)
    made = call_simulator(simulator, name, values, declared)
    fields = declared if declared is not None else infer_fields(made, name)
    first = {key: array.copy() for key, array in made.items()}
    began = time.perf_counter()
    call_simulator(simulator, name, recipe.values(1), fields)
    again = call_simulator(simulator, name, values, fields)
    seconds = (time.perf_counter() - began) / 2
    if getattr(simulator, "deterministic", True) and (different := same_bits(first, again)) is not None:
        raise UsageError(
            f"simulator {name} ({with_values(values)}): {different} differs by up to "
            f"{largest_difference(first[different], again[different]):.3g} when it is simulated again, equal bits "
            "expected: draw what is random from numpy.random.default_rng(parameters['seed']), keep nothing from one "
            "sample for the next, or declare deterministic=False"
        )
    return fields, seconds


def _split_samples(spec: ParametricSpec) -> list[tuple[str, list[int]]]:
    """The numbers of the samples of each split: those that a keyed draw puts first are held out."""
    asked = {
        name: part if isinstance(part, int) else round(part * spec.samples)
        for name, part in (("test", spec.split.test), ("val", spec.split.val))
    }
    for name, count in asked.items():
        if getattr(spec.split, name) and not count:
            raise UsageError(f"split.{name}: {getattr(spec.split, name)} of {spec.samples} samples is none")
    if sum(asked.values()) >= spec.samples:
        raise UsageError(f"split: {asked['val']} + {asked['test']} of {spec.samples} samples leave none for training")
    order = sorted(range(spec.samples), key=lambda k: next(uniform_stream(spec.seed, _KEY, k, "split")))
    test, val = order[: asked["test"]], order[asked["test"] : asked["test"] + asked["val"]]
    rest = order[len(test) + len(val) :]
    return [(name, sorted(part)) for name, part in (("train", rest), ("val", val), ("test", test)) if part]


def _tasks(
    spec: ParametricSpec, recipe: ParametricRecipe, campaign_hash: str, splits: list[tuple[str, list[int]]]
) -> tuple[ParametricTask, ...]:
    tasks: list[ParametricTask] = []
    seen: dict[int, int] = {}
    for split, samples in splits:
        for start in range(0, len(samples), spec.samples_per_shard):
            chunk = tuple(samples[start : start + spec.samples_per_shard])
            uids = tuple(recipe.uid(recipe.values(k)) for k in chunk)
            for k, uid in zip(chunk, uids, strict=True):
                if seen.setdefault(uid, k) != k:
                    raise UsageError(f"uid {uid} belongs to two samples, {seen[uid]} and {k}; change `seed`")
            shard_id = shard_id_of(
                index=len(tasks),
                campaign_hash=campaign_hash,
                simulator=recipe.ref.name,
                split=split,
                fields=recipe.fields,
                uids=uids,
            )
            tasks.append(
                ParametricTask(
                    index=len(tasks),
                    campaign_hash=campaign_hash,
                    recipe=recipe,
                    split=split,
                    sample_indices=chunk,
                    shard_id=shard_id,
                )
            )
    return tuple(tasks)


def _campaign_hash(spec: ParametricSpec, recipe: ParametricRecipe) -> str:
    """sha256 of what is asked for and of the simulator's file; where the file lies and the title take no part."""
    content = {
        "version": SHARD_VERSION,
        "spec": spec.model_dump(mode="json", exclude={"name", "simulator"}),
        "simulator": [recipe.ref.name, recipe.ref.sha256, recipe.version],
        "fields": [[f.name, f.dtype, list(f.shape), list(f.axes), f.unit, f.meaning] for f in recipe.fields],
    }
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()
