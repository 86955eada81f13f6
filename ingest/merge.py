"""Several data sets as one.

1. Their fields and parameters must be the same; the first difference is named.
2. A sample that stands in several of them (one uid, the same bytes) is taken once; one uid for different samples is
   refused.
3. A composition that one data set trains on and another tests on would make the test worthless: refused, naming it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.building import build_beside, refuse_existing, refuse_inside
from exitwave.ingest.dataset import Dataset, open_dataset
from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import byte_view, crc32c
from exitwave.ingest.reading import ShardFiles
from exitwave.ingest.rebuild import ShardJob, build_dataset, new_header, rows_id
from exitwave.ingest.records import ShardRecord
from exitwave.ingest.schema import TABLES
from exitwave.ingest.subset import ViewReport, report_of

__all__ = ["composition", "merge_datasets"]

Array = np.ndarray[Any, Any]
# Where a sample stands, not what it is.
_PLACE = ("structure", "split", "sample_index")


def merge_datasets(
    sources: Sequence[Path],
    out: Path,
    *,
    emit: Callable[..., Any] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> ViewReport:
    """Makes `out` of all samples of `sources`. UsageError as the module says; else as `subset_dataset`."""
    if len(sources) < 2:
        raise UsageError("merge: expected at least two data sets.")
    refuse_inside(out, {f"the data set {source}": source for source in sources})
    refuse_existing(out)
    sets = [open_dataset(source) for source in sources]
    for other in sets[1:]:
        _same_fields(sets[0], other)
    _splits_agree(sets)
    jobs, dropped = _plan(sets)
    step = {"verb": "merge", "samples": sum(job.n for job in jobs), "twice": dropped}
    header = new_header([data.manifest.header for data in sets], step)
    key = {"merge": [job.shard_id for job in jobs], "from": [data.dataset_id for data in sets]}
    with build_beside(out, key) as folder:
        build_dataset(folder, header, jobs, label="merge", emit=emit, stopped=stopped)
    return report_of(out, jobs, dropped)


def _same_fields(first: Dataset, other: Dataset) -> None:
    mine, theirs = ({f.name: f for f in data.fields} for data in (first, other))
    if [*mine] != [*theirs]:
        raise UsageError(f"{first.root} holds the fields {', '.join(mine)}, {other.root} {', '.join(theirs)}.")
    for name, field in mine.items():
        for what in ("shape", "dtype", "axes", "unit", "encoding", "scale"):
            a, b = getattr(field, what), getattr(theirs[name], what)
            if what == "dtype":
                a, b = field.stored_dtype, theirs[name].stored_dtype
            if a != b:
                raise UsageError(f"{name}: {what} is {a} in {first.root}, {b} in {other.root}; they must be the same.")
    dtypes = [data.params.dtype for data in (first, other) if len(data)]
    if len(dtypes) == 2 and dtypes[0] != dtypes[1]:
        names = [set(dtype.names or ()) for dtype in dtypes]
        apart = sorted(names[0] ^ names[1]) or ["types"]
        raise UsageError(
            f"{first.root} and {other.root} have other parameters ({', '.join(apart[:6])}). If one is of an older "
            "version, `exitwave migrate DATASET` brings it to the present one."
        )


def composition(formula: str) -> str:
    """The reduced formula, elements in order: Au4 and Au are one, so are GaAs and AsGa."""
    counts: dict[str, int] = {}
    for element, number in re.findall(r"([A-Z][a-z]?)(\d*)", formula):
        counts[element] = counts.get(element, 0) + int(number or 1)
    common = reduce(gcd, counts.values(), 0) or 1
    return "".join(f"{e}{counts[e] // common if counts[e] // common > 1 else ''}" for e in sorted(counts)) or formula


def _splits_agree(sets: Sequence[Dataset]) -> None:
    """UsageError where a composition is of one split in one data set and of another in the next.

    A data set that itself has a composition in several splits divides by sample, and asks for nothing.
    """
    asked: dict[str, tuple[str, Dataset, str]] = {}
    for data in sets:
        mine: dict[str, set[str]] = {}
        told: dict[str, str] = {}
        for shard in data.shards:
            for info in shard.structures:
                name = composition(info.formula)
                mine.setdefault(name, set()).add(shard.split)
                told[name] = info.formula
        for name, splits in mine.items():
            if len(splits) > 1 or name == "unknown":
                continue
            (split,) = splits
            before = asked.setdefault(name, (split, data, told[name]))
            if before[0] != split:
                raise UsageError(
                    f"{told[name]} is in {split} of {data.root} and in {before[0]} of {before[1].root}: together, a "
                    f"network would be tested on what it was trained on. Leave it out of one first: exitwave subset "
                    f"{data.root} --where \"formula != '{told[name]}'\" --out …"
                )


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a sample stands."""

    data: Dataset
    files: ShardFiles
    record: ShardRecord
    row: int


def _plan(sets: Sequence[Dataset]) -> tuple[list[ShardJob], int]:
    """Every shard, without the rows that stand in an earlier one already; and how many rows these are."""
    jobs: list[ShardJob] = []
    known: dict[int, _Place] = {}
    whole: dict[str, ShardRecord] = {}  # by the hash of the file
    names: set[str] = set()
    dropped = 0
    for data in sets:
        files = ShardFiles(data.root, staged=None, verify=True)
        for record in data.shards:
            twin = whole.setdefault(record.xxh3_128, record)
            if twin is not record and twin.split == record.split:
                dropped += record.n
                continue
            rows = []
            for row, uid in enumerate(files.read_table(record, "uid").tolist()):
                place = _Place(data=data, files=files, record=record, row=row)
                if uid in known:
                    _same_sample(known[uid], place, uid)
                else:
                    known[uid] = place
                    rows.append(row)
            dropped += record.n - len(rows)
            if len(rows) == record.n and record.shard_id not in names:
                jobs.append(ShardJob(root=data.root, record=record, shard_id=record.shard_id))
            elif rows:
                name = rows_id(f"{data.dataset_id} {record.shard_id}", rows)
                jobs.append(ShardJob(root=data.root, record=record, shard_id=name, rows=tuple(rows)))
            names.add(record.shard_id)
    return jobs, dropped


def _same_sample(a: _Place, b: _Place, uid: int) -> None:
    prints = [_print_of(place) for place in (a, b)]
    differing = [name for name in prints[0] if prints[0][name] != prints[1][name]]
    if differing:
        raise UsageError(
            f"uid {uid:016x} stands in {a.data.root} (shard {a.record.shard_id}) and {b.data.root} (shard "
            f"{b.record.shard_id}) for different samples: {', '.join(differing)} differ. They cannot be merged."
        )
    if a.record.split != b.record.split:
        raise UsageError(
            f"uid {uid:016x} is in {a.record.split} of {a.data.root} and in {b.record.split} of {b.data.root}. Leave "
            "it out of one first (`exitwave subset`)."
        )


def _print_of(place: _Place) -> dict[str, int]:
    """Checksums of a sample by field, its parameters without what tells only its place."""
    names = [extent.field for extent in place.record.extents if extent.field not in TABLES]
    sums = place.files.read_table(place.record, "crc32c")[place.row]
    params = place.files.read_table(place.record, "params")[place.row : place.row + 1].copy()
    for name in _PLACE:
        if name in (params.dtype.names or ()):
            params[name] = np.zeros((), params.dtype[name])
    return {**dict(zip(names, sums.tolist(), strict=True)), "params": crc32c(byte_view(params, params.dtype))}
