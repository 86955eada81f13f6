"""What the scheduler holds of campaigns: the last snapshot of each, in its metadata, of the newest few alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["METADATA_KEY", "campaigns", "chosen", "without_pictures"]

METADATA_KEY = "exitwave"
_MOST = 8

Snapshot = Mapping[str, Any]


def campaigns(metadata: dict[str, Any]) -> list[Snapshot]:
    """The snapshots in a scheduler's metadata, the newest first; those that are too many are thrown away."""
    found = metadata.get(METADATA_KEY)
    if not isinstance(found, dict):
        return []
    rows = [s for s in found.values() if isinstance(s, Mapping) and "samples" in s and "shards" in s]
    rows.sort(key=lambda s: -float(s.get("updated") or 0.0))
    for old in rows[_MOST:]:
        found.pop(str(old.get("dataset", "")), None)
    return rows[:_MOST]


def chosen(metadata: dict[str, Any], dataset: str | None = None) -> Snapshot | None:
    """The snapshot of one data set, or the newest of those that run, or the newest; None where there is none."""
    rows = campaigns(metadata)
    if dataset:
        return next((s for s in rows if s.get("dataset") == dataset), None)
    return next((s for s in rows if s.get("activity") == "running"), rows[0] if rows else None)


def without_pictures(snapshot: Snapshot) -> dict[str, Any]:
    """The numbers alone."""
    return {key: value for key, value in snapshot.items() if key != "pictures"}
