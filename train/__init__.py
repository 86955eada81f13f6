"""Distributed training. Names that others rely on are loaded when first used, so that importing this costs no torch."""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "GroupedAllreduce": "exitwave.train.allreduce",
    "RankInfo": "exitwave.train.mesh",
    "TrainResult": "exitwave.train.trainer",
    "TrainSpec": "exitwave.train.spec",
    "read_curve": "exitwave.train.run",
    "train": "exitwave.train.trainer",
}

__all__ = ["GroupedAllreduce", "RankInfo", "TrainResult", "TrainSpec", "read_curve", "train"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
