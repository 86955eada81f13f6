"""A part of a data set as a data set of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.building import build_beside, refuse_existing, refuse_inside
from exitwave.ingest.dataset import open_dataset
from exitwave.ingest.errors import UsageError
from exitwave.ingest.manifest import load_manifest
from exitwave.ingest.rebuild import ShardJob, build_dataset, new_header, rows_id
from exitwave.ingest.selection import select_samples

__all__ = ["ViewReport", "report_of", "subset_dataset"]


@dataclass(frozen=True, kw_only=True)
class ViewReport:
    """The data set that was made: `linked` shards were taken whole, `rewritten` ones hold some of their rows."""

    out: str
    samples: int
    shards: int
    linked: int
    rewritten: int
    dropped: int
    splits: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def report_of(out: Path, jobs: Sequence[ShardJob], dropped: int) -> ViewReport:
    """Counts what stands in `out` now."""
    manifest = load_manifest(out)
    splits: dict[str, int] = {}
    for shard in manifest.shards:
        splits[shard.split] = splits.get(shard.split, 0) + shard.n
    whole = sum(job.rows is None for job in jobs)
    return ViewReport(
        out=str(out),
        samples=manifest.n_samples,
        shards=len(manifest.shards),
        linked=whole,
        rewritten=len(jobs) - whole,
        dropped=dropped,
        splits=splits,
    )


def subset_dataset(
    dataset: Path,
    out: Path,
    *,
    where: str | None = None,
    split: str | None = None,
    uids: Sequence[str] = (),
    emit: Callable[..., Any] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> ViewReport:
    """Makes `out` of the samples of `dataset` that fulfil `where`, `split` and `uids` (all that are given).

    UsageError: nothing given, nothing left, `out` exists or lies inside; DamagedDataError naming shard, uid and field;
    InterruptedRunError: nothing stands under `out`, the same call goes on.
    """
    if where is None and split is None and not uids:
        raise UsageError("subset: give --where, --split or --uid; without one it would be the whole data set.")
    refuse_inside(out, {"the data set": dataset})
    refuse_existing(out)
    data = open_dataset(dataset)
    chosen, numbers = select_samples(data, where=where, split=split, uids=uids)
    by_shard: dict[str, list[int]] = {}
    for number in numbers:
        record, row = chosen.record_of(number)
        by_shard.setdefault(record.shard_id, []).append(row)
    jobs = []
    for record in chosen.shards:
        rows = tuple(sorted(by_shard.get(record.shard_id, ())))
        if len(rows) == record.n:
            jobs.append(ShardJob(root=dataset, record=record, shard_id=record.shard_id))
        elif rows:
            jobs.append(ShardJob(root=dataset, record=record, shard_id=rows_id(record.shard_id, rows), rows=rows))
    step: dict[str, Any] = {"verb": "subset", "samples": len(numbers), "of": len(data)}
    step |= {k: v for k, v in (("where", where), ("split", split), ("uids", list(uids))) if v}
    header = new_header([data.manifest.header], step)
    key = {"subset": [job.shard_id for job in jobs], "from": data.dataset_id, "step": step}
    with build_beside(out, key) as folder:
        build_dataset(folder, header, jobs, label="subset", emit=emit, stopped=stopped)
    return report_of(out, jobs, len(data) - int(np.sum([job.n for job in jobs])))
