"""How the ranks share the work of a step: the one place where a mesh enters the trainer.

A trainer asks three things. Which samples does this rank read, whole or in tiles (`DataPlan`)? What becomes of the
module between its construction and that of the optimizer (`parallelize`)? Over how many ranks that hold different
samples are gradients averaged (`DataPlan.size`)? `Parallel` answers as plain data parallelism does: every rank reads
whole samples of its own, and the module stays what it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from exitwave.ingest import ShardDataset
from exitwave.train.mesh import Ranks

__all__ = ["DataPlan", "Parallel"]


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """This rank's place along the mesh's data axis. Ranks of equal `rank` here share their samples."""

    rank: int
    size: int

    @property
    def reads_alone(self) -> bool:
        """Whether this rank reads without the others' help, so that a thread may read while a step runs."""
        return True

    def view(self, dataset: ShardDataset) -> Any:
        """What the loader reads from, map-style and of the same length: whole samples here, tiles in a subclass."""
        return dataset


class Parallel:
    """Data parallelism: each rank its own samples, whole. A spatial mesh overrides both methods."""

    def data_plan(self, ranks: Ranks) -> DataPlan:
        """Asked once, before anything is opened."""
        return DataPlan(rank=ranks.info.rank, size=ranks.info.world_size)

    def parallelize(self, module: nn.Module, ranks: Ranks) -> nn.Module:
        """Between model and optimizer, on every rank; the result has the same names in its `state_dict`."""
        return module
