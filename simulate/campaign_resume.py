"""What is left of a campaign on a data set that exists, and why anything of it would run again.

The manifest says what is committed; a committed shard whose file is gone, or is not as long as it was, is no longer
there, whatever the manifest says: it is taken out of it and made again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import UsageError
from exitwave.ingest.events import read_events
from exitwave.ingest.manifest import MANIFEST_NAME, ManifestWriter, load_manifest
from exitwave.ingest.records import ShardRecord
from exitwave.simulate.attempts import replay_histories
from exitwave.simulate.campaign_files import EVENTS_NAME, plan_rows
from exitwave.simulate.state import replay
from exitwave.simulate.work import CampaignPlan

__all__ = ["lost_shards", "take_out_lost", "what_is_left"]

QUARANTINE_NAME = "quarantine"
_FEW = 8


def lost_shards(dataset: Path, shards: Sequence[ShardRecord]) -> Iterator[tuple[ShardRecord, str]]:
    """The committed shards that are not there, each with what is wrong. Sizes are compared, nothing is read."""
    for shard in shards:
        try:
            nbytes = (dataset / shard.path).stat().st_size
        except OSError:
            yield shard, "its file is gone"
            continue
        if nbytes != shard.nbytes:
            yield shard, f"its file has {nbytes} bytes, {shard.nbytes} expected"


def take_out_lost(dataset: Path, manifest: ManifestWriter) -> list[tuple[str, str]]:
    """Take what is lost out of the manifest, so that it is made again; shard and reason of each.

    A file of another length is moved into `quarantine/`. UsageError where nearly everything is gone: a file system that
    is not mounted must not make a campaign begin from nothing.
    """
    shards = manifest.manifest.shards
    lost = list(lost_shards(dataset, shards))
    if len(lost) > _FEW and len(lost) > 0.9 * len(shards):
        raise UsageError(
            f"{dataset}: {len(lost)} of {len(shards)} committed shards are not there, {lost[0][0].path} for one: is a "
            "file system not mounted? If they are gone for good, begin anew in another folder"
        )
    for shard, why in lost:
        path = dataset / shard.path
        if path.exists():
            (dataset / QUARANTINE_NAME).mkdir(exist_ok=True)
            path.rename(dataset / QUARANTINE_NAME / path.name)
        manifest.tombstone(shard.shard_id, why)
    if lost:
        manifest.reload()
    return [(shard.shard_id, why) for shard, why in lost]


def what_is_left(plan: CampaignPlan, dataset: Path) -> dict[str, Any] | None:
    """Of `plan` on a data set: {committed, left, again: [{task, why}], reasons: {why: shards}} in shards.

    `again` lists what was begun or even committed before. None where there is no data set.
    """
    if not (dataset / MANIFEST_NAME).exists():
        return None
    manifest = load_manifest(dataset)
    lost = {shard.shard_id: why for shard, why in lost_shards(dataset, manifest.shards)}
    committed = {shard.shard_id for shard in manifest.shards} - set(lost)
    taken_out = {stone.shard_id: stone.why for stone in manifest.tombstones}
    events = read_events(dataset / EVENTS_NAME)
    histories = replay_histories(events)
    again, fresh = [], 0
    for state in replay(plan_rows(plan), committed, events, alive=True):
        if state.state == "committed":
            continue
        history = histories.get(state.task)
        if state.shard_id in lost:
            why = lost[state.shard_id]
        elif state.shard_id in taken_out:
            why = f"taken out of the manifest: {taken_out[state.shard_id]}"
        elif history is not None and history.failed is not None:
            why = f"it failed ({state.failure}); `exitwave retry` runs it again"
        elif state.failure:
            why = f"its last attempt failed ({state.failure}): {state.why}"
        elif state.attempts:
            why = "it was begun and not committed"
        else:
            fresh += 1
            continue
        again.append({"task": state.task, "why": why})
    return {
        "committed": len(plan.tasks) - len(again) - fresh,
        "left": len(again) + fresh,
        "again": again,
        "reasons": dict(Counter(row["why"] for row in again).most_common(20)),
    }
