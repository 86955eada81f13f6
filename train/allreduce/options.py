"""The engine's options: which exist, which go together, and what they mean in numbers."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from exitwave.ingest.errors import UsageError
from exitwave.train.allreduce.wire import COMPRESSIONS

__all__ = ["OVERLAPS", "PROTOCOLS", "check_options", "divisor_of", "group_size", "refuse_ranks_that_never_met"]

PROTOCOLS = ("static", "bitvector", "coordinator")
OVERLAPS = ("backward", "step")


def refuse_ranks_that_never_met() -> None:
    """Started by torchrun, without a process group: every rank would train a model of its own, without a word."""
    if dist.is_available() and dist.is_torchelastic_launched() and not dist.is_initialized():
        raise UsageError(
            "this process was started by torchrun, but the ranks have not met: call "
            'torch.distributed.init_process_group("gloo") before GroupedAllreduce'
        )


def check_options(
    protocol: str, overlap: str, compression: str | None, timeout_s: float, node_size: int | None
) -> None:
    if protocol not in PROTOCOLS:
        raise UsageError(f"protocol {protocol!r} does not exist: choose {', '.join(PROTOCOLS)}")
    if overlap not in OVERLAPS:
        raise UsageError(f"overlap {overlap!r} does not exist: choose {', '.join(OVERLAPS)}")
    if overlap == "step" and protocol != "static":
        raise UsageError(f"overlap='step' follows the plan's order (protocol='static'), not protocol={protocol!r}")
    if compression is not None and compression not in COMPRESSIONS:
        raise UsageError(f"compression {compression!r} does not exist: choose {', '.join(COMPRESSIONS)}, or None")
    if compression is not None and (overlap == "step" or node_size is not None):
        raise UsageError("compression serves overlap='backward' in one level (without node_size)")
    if node_size is not None and overlap == "step":
        raise UsageError("node_size serves overlap='backward'")
    if not timeout_s > 0:
        raise UsageError(f"timeout_s must be positive, got {timeout_s}")


def group_size(process_group: Any) -> int:
    return dist.get_world_size(process_group if process_group is not None else dist.group.WORLD)


def divisor_of(average_over: Any, world_size: int) -> int:
    if average_over is None:
        return world_size
    divisor = average_over if isinstance(average_over, int) else group_size(average_over)
    if not 1 <= divisor <= world_size or world_size % divisor:
        raise UsageError(f"average_over={divisor}: expected a divisor of the world size {world_size}")
    return divisor
