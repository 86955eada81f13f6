"""Which samples of a data set a verb means: by split, by uid, by a condition on their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from exitwave.ingest.dataset import Dataset
from exitwave.ingest.errors import UsageError
from exitwave.ingest.where import columns_of, select_rows

__all__ = ["parse_uid", "sample_columns", "select_samples"]

Array = np.ndarray[Any, Any]


def parse_uid(text: str, data: Dataset, uids: Array) -> int:
    """The number of the sample that `text` names: `#N`, or its uid in hexadecimal (0x may stand before) or decimal."""
    if text.startswith("#"):
        if not (text[1:].isascii() and text[1:].isdigit()) or len(text) > 19 or int(text[1:]) >= len(data):
            raise UsageError(f"{text}: expected #0 to #{len(data) - 1}; there are {len(data)} samples.")
        return int(text[1:])
    for base in (16, 10):
        try:
            wanted = int(text, base)
        except ValueError:
            continue
        if 0 <= wanted < 2**64 and (found := np.flatnonzero(uids == np.uint64(wanted))).size:
            return int(found[0])
    raise UsageError(
        f"{text}: no sample with this uid in {data.root}; `exitwave inspect {data.root}` lists some, #0 is the first."
    )


def sample_columns(data: Dataset) -> dict[str, Array]:
    """The columns (n,) or (n, k) that a condition may name, for all samples of `data`."""
    n = len(data)
    formula = np.full(n, "", dtype=object)
    group, space, source = np.zeros(n, "<u8"), np.zeros(n, "<i4"), np.full(n, "", dtype=object)
    params = data.params
    numbers = params["structure"] if "structure" in (params.dtype.names or ()) else np.zeros(n, int)
    at = 0
    for shard in data.shards:
        rows = slice(at, at + shard.n)
        for info in shard.structures:
            mine = np.arange(at, at + shard.n)[numbers[rows] == info.index]
            formula[mine], source[mine] = info.formula, info.source
            group[mine], space[mine] = info.prototype_group, info.space_group
        at += shard.n
    extra: dict[str, Array] = {
        "uid": data.uids,
        "formula": formula.astype(str),
        "source": source.astype(str),
        "prototype_group": group,
        "space_group": space,
    }
    return columns_of(params, extra)


def select_samples(
    data: Dataset, *, uids: Sequence[str] = (), split: str | None = None, where: str | None = None
) -> tuple[Dataset, list[int]]:
    """The data set (or its split) and the numbers in it of the samples that fulfil all that is given.

    UsageError: unknown split, uid or column, a condition that cannot be read, or nothing left.
    """
    if split is not None:
        data = data.split(split)
    chosen = np.ones(len(data), dtype=bool)
    if where is not None:
        chosen &= select_rows(where, sample_columns(data), len(data))
    numbers = np.flatnonzero(chosen).tolist()
    if uids:
        known = data.uids
        named = [parse_uid(text, data, known) for text in uids]
        numbers = [i for i in dict.fromkeys(named) if chosen[i]]
    if not numbers:
        given = [f"--split {split}"] * (split is not None) + [f"--where {where!r}"] * (where is not None)
        raise UsageError(f"{data.root}: no sample is chosen by {' and '.join([*given, *uids]) or 'an empty data set'}.")
    return data, numbers
