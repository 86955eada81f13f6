"""A campaign that only adds to one that exists: what is committed keeps its place, the rest is to be done.

A shard's name is a hash of its place in its plan among other things, so in a larger plan the same samples would get
another one. Here the two are matched by what they are, the samples' own hashes: a task whose samples are those of a
committed shard, in the same split, takes that shard's name. Where every committed shard finds its task, the new plan
only adds.

A sample's hash tells which sample it is, not how it was made: everything else that was asked for, the simulator and the
content of its file included, must be as it was, or samples of two kinds would be mixed under one name.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.errors import UsageError
from exitwave.ingest.manifest import load_manifest
from exitwave.ingest.records import ShardRecord
from exitwave.simulate.bundle import fallen_apart
from exitwave.simulate.work import CampaignPlan

__all__ = ["extended", "makes_others"]

# How many samples of what there are, and how they lie in shards: nothing of this changes a sample.
MAY_DIFFER = frozenset(
    {"name", "structures", "split", "samples", "samples_per_structure", "samples_per_shard", "structures_per_shard"}
)


def makes_others(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What of two resolved configurations differs so that equal samples of them need not be made in the same way."""
    keys = {*there, *here} - MAY_DIFFER
    return sorted(key for key in keys if there.get(key) != here.get(key))


def extended(plan: CampaignPlan, dataset: Path, there: Mapping[str, Any]) -> CampaignPlan:
    """`plan` with the names of the shards that `dataset` holds, which was made of the resolved configuration `there`.

    UsageError, saying why, where it does not only add.
    """
    if others := makes_others(there, json.loads(json.dumps(plan.resolved()))):
        raise UsageError(f"samples are made in another way ({', '.join(others)})")
    manifest = load_manifest(dataset)
    if manifest.header.fields != plan.fields:
        raise UsageError("its samples have other fields")
    held = {_uids(dataset, shard): shard for shard in manifest.shards}
    names = {shard.shard_id for shard in manifest.shards}
    found: set[str] = set()
    moved: Counter[str] = Counter()
    # What fell apart stays apart: of its structures some are committed, each in a shard of its own.
    apart = {t.task_id for t in plan.tasks if any(part.uids() in held for part in getattr(t, "parts", ()))}
    tasks = []
    for task in fallen_apart(plan.tasks, apart):
        shard = held.get(task.uids())
        if shard is not None and shard.split != task.split:
            moved[f"{shard.split} to {task.split}"] += 1
        elif shard is not None:
            found.add(shard.shard_id)
            renamed: Any = task
            task = dataclasses.replace(renamed, shard_id=shard.shard_id)
        tasks.append(task)
    if moved:
        told = ", ".join(f"{count} from {what}" for what, count in moved.items())
        raise UsageError(f"shards that are committed would change their split: {told}")
    if found != names:
        why = f"{len(names - found)} committed shards have no place in it"
        if any(hasattr(task, "parts") for task in plan.tasks):
            why += (
                " (where structures share shards, a shard that was not full would be filled up; simulate what is new "
                "into a data set of its own and join the two by `exitwave merge`)"
            )
        raise UsageError(why)
    whole: Any = plan
    made: CampaignPlan = dataclasses.replace(whole, tasks=tuple(tasks))
    return made


def _uids(dataset: Path, shard: ShardRecord) -> tuple[int, ...]:
    extent = shard.extent("uid")
    try:
        uids = np.fromfile(dataset / shard.path, dtype="<u8", count=shard.n, offset=extent.offset)
    except OSError:
        raise UsageError(f"{shard.path} cannot be read") from None
    return tuple(uids.tolist())
