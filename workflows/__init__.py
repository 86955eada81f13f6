"""Campaigns, pipelines, reports and the service. Names that others rely on are loaded when first used."""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {"Run": "exitwave.workflows.opened", "open_run": "exitwave.workflows.opened"}

__all__ = ["Run", "open_run"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
