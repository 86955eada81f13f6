"""What is sent to a worker, and what it makes of it: structure, task, sample.

A `TaskSpec` makes exactly one shard. It carries one structure, the recipe and the indices of its samples; the samples
themselves are drawn where they are simulated, by the same pure function that the planner used to count them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from exitwave.ingest.schema import PARAMS_DTYPE, SHARD_VERSION, FieldSpec
from exitwave.simulate.draw import draw_sample, reject_sample, rounded, whole_slices
from exitwave.simulate.outputs import fields_of
from exitwave.simulate.samples import SampleSpec, StructureSpec, canonical_json
from exitwave.simulate.spec import Recipe

if TYPE_CHECKING:
    from exitwave.ingest.shard import ShardWriter
    from exitwave.simulate.simulator import Sample

__all__ = [
    "SampleSpec",
    "StructureSpec",
    "TaskSpec",
    "canonical_json",
    "draw_sample",
    "fields_of",
    "reject_sample",
    "rounded",
    "whole_slices",
]


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """The work of one shard. `index` is its place in the plan; `shard_id` is the hash of what it makes."""

    index: int
    campaign_hash: str
    simulator: str
    structure: StructureSpec
    recipe: Recipe
    split: str
    sample_indices: tuple[int, ...]
    shard_id: str

    @property
    def task_id(self) -> str:
        return f"task-{self.index:06d}"

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.structure.source,)

    @property
    def fields(self) -> tuple[FieldSpec, ...]:
        return fields_of(self.recipe)

    @property
    def params_dtype(self) -> np.dtype[Any]:
        return PARAMS_DTYPE

    @property
    def compression(self) -> str:
        return self.recipe.storage.compression

    def uids(self) -> tuple[int, ...]:
        return tuple(sample.uid for sample in self.samples())

    def estimated_seconds(self) -> float:
        """On one core, by the model of the cost."""
        from exitwave.simulate.cost import estimate_seconds

        return sum(estimate_seconds(sample, self.simulator) for sample in self.samples())

    def prepare(self, dataset: Path) -> dict[str, str]:
        """Import the simulator, take the data set's wisdom. Returns versions."""
        from exitwave.simulate.simulator import prepared_simulator
        from exitwave.simulate.wisdom import use_wisdom

        simulator = prepared_simulator(self.simulator)
        use_wisdom(dataset)
        return {"simulator": self.simulator, "simulator_version": simulator.version}

    def simulate(self) -> Iterator[Sample]:
        """The samples, simulated, in order."""
        from exitwave.simulate.simulator import prepared_simulator

        return prepared_simulator(self.simulator).simulate(self.samples())

    def add_structures(self, writer: ShardWriter) -> None:
        """The crystal as simulated."""
        structure = self.structure
        numbers, positions, lengths = structure.tiled(1)
        writer.add_structure(
            structure.info(),
            numbers=numbers,
            positions_A=positions,
            cell_A=np.diag(lengths),
            pbc=np.ones(3, dtype=bool),
            wyckoff=structure.wyckoff,
        )

    def samples(self) -> tuple[SampleSpec, ...]:
        """The samples of this task, drawn anew; the same wherever this runs."""
        return tuple(draw_sample(self.structure, self.recipe, k, self.split) for k in self.sample_indices)


def shard_id_of(
    *,
    index: int,
    campaign_hash: str,
    simulator: str,
    split: str,
    fields: tuple[FieldSpec, ...],
    uids: tuple[int, ...],
) -> str:
    """128-bit hash (32 hex digits) of all that decides on the bytes of a shard."""
    content = {
        "version": SHARD_VERSION,
        "task": index,
        "campaign": campaign_hash,
        "simulator": simulator,
        "split": split,
        "fields": [[f.name, f.dtype, list(f.shape), f.encoding, f.scale] for f in fields],
        "uids": list(uids),
    }
    return hashlib.blake2b(canonical_json(content).encode(), digest_size=16).hexdigest()
