"""Shards, the manifest that commits them, staging to local disks, and their order: the lowest layer of exitwave.

It imports no other part of exitwave. What training uses is named here and loaded on first use, so that a simulation
worker never pays for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exitwave.ingest.batches import GlobalSampler, ShardDataset, collate
    from exitwave.ingest.dataset import Dataset, open_dataset
    from exitwave.ingest.growing import GrowingDataset, ReservoirSampler
    from exitwave.ingest.manifest import load_manifest
    from exitwave.ingest.staging import stage
    from exitwave.ingest.verify import verify_dataset
    from exitwave.ingest.windows import Window

__all__ = [
    "Dataset",
    "GlobalSampler",
    "GrowingDataset",
    "ReservoirSampler",
    "ShardDataset",
    "Window",
    "collate",
    "load_manifest",
    "open_dataset",
    "stage",
    "verify_dataset",
]

_HOME = {
    "Dataset": "dataset",
    "GlobalSampler": "batches",
    "GrowingDataset": "growing",
    "ReservoirSampler": "growing",
    "ShardDataset": "batches",
    "Window": "windows",
    "collate": "batches",
    "load_manifest": "manifest",
    "open_dataset": "dataset",
    "stage": "staging",
    "verify_dataset": "verify",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"exitwave.ingest.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
