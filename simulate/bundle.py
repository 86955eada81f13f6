"""Several structures in one shard, where a shard of one would be too small, and such a task fallen apart again.

The unit of retry is a shard; so that one bad structure fails alone, a task of several that fails is replaced by one
task for each of its structures. These have numbers and names of their own, which follow from the plan alone: a
controller that comes later finds the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from exitwave.ingest.schema import FieldSpec
from exitwave.simulate.tasks import SampleSpec, TaskSpec, shard_id_of

if TYPE_CHECKING:
    from exitwave.ingest.shard import ShardWriter
    from exitwave.simulate.simulator import Sample

__all__ = ["BundleTask", "bundled", "fallen_apart"]


@dataclass(frozen=True, kw_only=True)
class BundleTask:
    """The work of one shard that holds several structures of one split. `parts`: what it falls apart into."""

    index: int
    shard_id: str
    parts: tuple[TaskSpec, ...]

    @property
    def task_id(self) -> str:
        return f"task-{self.index:06d}"

    @property
    def campaign_hash(self) -> str:
        return self.parts[0].campaign_hash

    @property
    def simulator(self) -> str:
        return self.parts[0].simulator

    @property
    def split(self) -> str:
        return self.parts[0].split

    @property
    def sample_indices(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(part.sample_indices for part in self.parts))

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(chain.from_iterable(part.sources for part in self.parts)))

    @property
    def fields(self) -> tuple[FieldSpec, ...]:
        return self.parts[0].fields

    @property
    def params_dtype(self) -> np.dtype[Any]:
        return self.parts[0].params_dtype

    @property
    def compression(self) -> str:
        return self.parts[0].compression

    def uids(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(part.uids() for part in self.parts))

    def estimated_seconds(self) -> float:
        return sum(part.estimated_seconds() for part in self.parts)

    def prepare(self, dataset: Path) -> dict[str, str]:
        return self.parts[0].prepare(dataset)

    def simulate(self) -> Iterator[Sample]:
        return chain.from_iterable(part.simulate() for part in self.parts)

    def add_structures(self, writer: ShardWriter) -> None:
        for part in {part.structure.index: part for part in self.parts}.values():
            part.add_structures(writer)

    def samples(self) -> tuple[SampleSpec, ...]:
        return tuple(chain.from_iterable(part.samples() for part in self.parts))


Task = TaskSpec | BundleTask


def bundled(tasks: Sequence[TaskSpec], *, structures: int, samples: int, first: int = 0) -> tuple[Task, ...]:
    """Neighbours of one split in one shard: at most `structures` of them, with at most `samples` samples together.

    Their order stays. A task that remains alone stays what it is but for its number; numbers begin with `first`.
    """
    groups: list[list[TaskSpec]] = []
    for task in tasks:
        last = groups[-1] if groups else []
        together = len({part.structure.index for part in last} | {task.structure.index})
        count = sum(len(part.sample_indices) for part in last) + len(task.sample_indices)
        if last and last[0].split == task.split and together <= structures and count <= samples:
            last.append(task)
        else:
            groups.append([task])
    made: list[Task] = []
    number = first + len(groups)  # of the next part: after all shards of the plan
    for index, group in enumerate(groups, first):
        if len(group) == 1:
            made.append(_numbered(group[0], index))
            continue
        parts = tuple(_numbered(part, number + k) for k, part in enumerate(group))
        number += len(parts)
        uids = tuple(chain.from_iterable(part.uids() for part in parts))
        made.append(BundleTask(index=index, shard_id=_shard_id(parts[0], index, uids), parts=parts))
    return tuple(made)


def fallen_apart(tasks: Sequence[Any], split: Collection[str]) -> tuple[Any, ...]:
    """The tasks with the parts of those whose ids are in `split` in their places."""
    made: list[Any] = []
    for task in tasks:
        made += task.parts if task.task_id in split and hasattr(task, "parts") else (task,)
    return tuple(made)


def _numbered(task: TaskSpec, index: int) -> TaskSpec:
    if task.index == index:
        return task
    return dataclasses.replace(task, index=index, shard_id=_shard_id(task, index, task.uids()))


def _shard_id(like: TaskSpec, index: int, uids: tuple[int, ...]) -> str:
    return shard_id_of(
        index=index,
        campaign_hash=like.campaign_hash,
        simulator=like.simulator,
        split=like.split,
        fields=like.fields,
        uids=uids,
    )
