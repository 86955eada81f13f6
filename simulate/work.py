"""What a campaign needs to know of a plan and of its tasks, whatever is simulated.

The loop, the leases, the retries, the receipts, the shards and the manifest are one code for every kind of campaign.
Two kinds keep to these protocols: crystals under a beam (`plan.Plan`, `tasks.TaskSpec`), and any other simulator of a
user (`parametric.ParametricPlan`, `parametric.ParametricTask`). A task is pickled and sent to a worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from exitwave.ingest.schema import FieldSpec

if TYPE_CHECKING:
    from exitwave.ingest.shard import ShardWriter
    from exitwave.simulate.simulator import Sample
    from exitwave.simulate.structures.sources import Rejected

__all__ = ["CampaignPlan", "CampaignTask"]


class CampaignTask(Protocol):
    """The work of one shard."""

    @property
    def index(self) -> int: ...

    @property
    def task_id(self) -> str: ...

    @property
    def shard_id(self) -> str: ...

    @property
    def campaign_hash(self) -> str: ...

    @property
    def simulator(self) -> str:
        """The name that stands in the shard."""
        ...

    @property
    def split(self) -> str: ...

    @property
    def sample_indices(self) -> tuple[int, ...]: ...

    @property
    def sources(self) -> tuple[str, ...]:
        """The structures that its samples are made from."""
        ...

    @property
    def fields(self) -> tuple[FieldSpec, ...]: ...

    @property
    def params_dtype(self) -> np.dtype[Any]: ...

    @property
    def compression(self) -> str: ...

    def uids(self) -> tuple[int, ...]:
        """Of its samples, in order; what they are depends on nothing else of the plan."""
        ...

    def estimated_seconds(self) -> float:
        """On one core; infinite where nobody knows."""
        ...

    def prepare(self, dataset: Path) -> dict[str, str]:
        """Make this process ready; the versions that stand in the receipt."""
        ...

    def simulate(self) -> Iterator[Sample]:
        """One sample for each index, in order."""
        ...

    def add_structures(self, writer: ShardWriter) -> None: ...


class CampaignPlan(Protocol):
    """All tasks of a campaign and what is known of them beforehand."""

    @property
    def name(self) -> str: ...

    @property
    def campaign_hash(self) -> str: ...

    @property
    def simulator(self) -> str: ...

    @property
    def fields(self) -> tuple[FieldSpec, ...]: ...

    @property
    def tasks(self) -> Sequence[CampaignTask]: ...

    @property
    def rejected(self) -> Sequence[Rejected]: ...

    @property
    def rejected_samples(self) -> int: ...

    @property
    def n_samples(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    def resolved(self) -> dict[str, Any]:
        """The campaign with every default written out, as plain values."""
        ...

    def prepare(self, dataset: Path) -> None:
        """What the controller does once, before the first task."""
        ...
