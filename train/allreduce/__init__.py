"""The grouped-allreduce engine: gradients averaged over ranks, in tensor groups, without a coordinator.

`GroupedAllreduce` wraps a module; `allreduce`, `grouped_allreduce` and `broadcast_parameters` work on tensors. Reading
order, from a gradient to the wire: `engine` -> `reducer` -> `schedules` -> `readiness` -> `negotiation` -> `fusion` ->
`exitwave.train.transport`. `groups`, `optimal` and `cost` plan, from what `tuning` measured; `agreement` checks that
ranks match; `stall` names who is missing; `timeline` shows what happened when.
"""

from __future__ import annotations

from exitwave.train.allreduce.agreement import MismatchError
from exitwave.train.allreduce.engine import GroupedAllreduce
from exitwave.train.allreduce.functional import (
    Average,
    Max,
    Min,
    Op,
    Product,
    Sum,
    allreduce,
    broadcast_parameters,
    grouped_allreduce,
)
from exitwave.train.allreduce.groups import ByBytes, ByCount, ByLayerBlocks, GroupPlan, Optimal, TensorGroup
from exitwave.train.allreduce.reducer import Counters
from exitwave.train.allreduce.stall import StallError, StallWarning
from exitwave.train.allreduce.tuning import Planning

__all__ = [
    "Average",
    "ByBytes",
    "ByCount",
    "ByLayerBlocks",
    "Counters",
    "GroupPlan",
    "GroupedAllreduce",
    "Max",
    "Min",
    "MismatchError",
    "Op",
    "Optimal",
    "Planning",
    "Product",
    "StallError",
    "StallWarning",
    "Sum",
    "TensorGroup",
    "allreduce",
    "broadcast_parameters",
    "grouped_allreduce",
]
