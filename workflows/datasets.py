"""Data sets as the verbs are given them: the folder itself or the RUN that holds it, and whether it is finished."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import read_plain_text
from exitwave.ingest.manifest import MANIFEST_NAME, load_manifest

__all__ = ["Completeness", "completeness", "find_dataset", "require_split"]


def find_dataset(folder: Path) -> Path:
    """The data set that `folder` is or, as the RUN of a pipeline, holds. UsageError when there is none."""
    if (folder / MANIFEST_NAME).exists():
        return folder
    if not folder.exists():
        raise UsageError(f"{folder}: no such folder.")
    if (folder / "pipeline.yaml").exists():
        if (folder / "dataset" / MANIFEST_NAME).exists():
            return folder / "dataset"
        raise UsageError(f"{folder}: nothing is simulated in this run yet; `exitwave run` goes on.")
    if (folder / "tune.yaml").exists() and (folder / "dataset" / MANIFEST_NAME).exists():
        return folder / "dataset"
    if (folder / "train.json").exists():
        raise UsageError(
            f"{folder}: this is the folder of a training, not a data set. `exitwave report {folder}` shows it."
        )
    raise UsageError(f"{folder}: is not an exitwave data set (or not yet): there is no {MANIFEST_NAME} in it.")


@dataclass(frozen=True, kw_only=True)
class Completeness:
    """How many samples the plan of a campaign has, and how many of them are committed."""

    planned: int
    committed: int
    how: str  # the command that goes on

    @property
    def sentence(self) -> str:
        """Nothing for a whole data set."""
        if self.committed >= self.planned:
            return ""
        return f"{self.committed} of {self.planned} samples are committed: the campaign is unfinished; {self.how}"


def completeness(dataset: Path) -> Completeness | None:
    """None where no plan is beside the data, so that nobody knows what is missing."""
    try:
        tasks = json.loads(read_plain_text(dataset / "plan.json"))["tasks"]
        samples = {str(task["shard_id"]): int(task["samples"]) for task in tasks}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    run = dataset.parent
    if dataset.name == "dataset" and (run / "pipeline.yaml").exists():
        how = f"`exitwave run … --out {run}` goes on."
    else:
        how = f"`exitwave simulate … --out {dataset}` goes on."
    committed = {shard.shard_id for shard in load_manifest(dataset).shards}
    return Completeness(
        planned=sum(samples.values()), committed=sum(n for key, n in samples.items() if key in committed), how=how
    )


def require_split(dataset: Path, split: str) -> None:
    """UsageError when the data set has no such split, with the likeliest reason: an unfinished campaign."""
    splits = load_manifest(dataset).splits
    if split in splits:
        return
    found = completeness(dataset)
    why = f" {found.sentence}" if found is not None and found.sentence else ""
    raise UsageError(f"{dataset}: no split {split!r}; there are {', '.join(splits) or 'none'}.{why}")
