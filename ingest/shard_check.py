"""A finished shard, read from end to end: what it holds, and whether each sample is what its checksum says.

The writer calls this before a shard gets its final name; a worker that finds its shard published by an earlier attempt
calls it to adopt that one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.codecs import decode
from exitwave.ingest.errors import DamagedDataError
from exitwave.ingest.extent_io import read_sample
from exitwave.ingest.files import byte_view, crc32c, hash_file, open_to_read, shard_path
from exitwave.ingest.records import PublishedShard
from exitwave.ingest.schema import TABLES

__all__ = ["describe_shard", "find_published"]


def describe_shard(path: Path, relative: str) -> PublishedShard:
    """Reads a finished shard from end to end, checks each sample against its checksum, and says what it holds.

    Raises DamagedDataError naming sample and field. The statistics are those of the bytes read back.
    """
    from exitwave.ingest.shard_reader import ShardReader  # the writer there ends by calling this check

    with ShardReader(path) as reader:
        extents, fields, uids, params, sums = reader.extents, reader.fields, reader.uids, reader.params, reader.crc32c
        params_sums = reader.params_crc32c
        structures, attrs = reader.structures, reader.attrs
    stats: dict[str, Any] = {"fields": {}, "tables_crc32c": {}}
    for name, table in zip(TABLES, (uids, params, sums, params_sums), strict=True):
        stats["tables_crc32c"][name] = crc32c(byte_view(table, table.dtype))
    fd = open_to_read(path)
    try:
        for column, (field, extent) in enumerate(zip(fields, extents, strict=False)):
            low, high, total = np.inf, -np.inf, 0.0
            for row, uid in enumerate(uids.tolist()):
                stored = np.empty(extent.sample_shape, dtype=extent.numpy_dtype)
                data = stored.reshape(-1).view(np.uint8)
                wrong = read_sample(fd, extent, row, data)
                if wrong or crc32c(data) != sums[row, column]:
                    why = wrong or "wrong checksum"
                    raise DamagedDataError(f"{path}: sample {row} (uid {uid:#018x}), {field.name}: {why}")
                sample = decode(field, stored)
                if sample.size:
                    low, high = min(low, float(sample.min())), max(high, float(sample.max()))
                    total += float(sample.mean(dtype=np.float64))
            stats["fields"][field.name] = {"min": low, "max": high, "mean": total / len(uids)}
    finally:
        os.close(fd)
    return PublishedShard(
        shard_id=str(attrs["shard_id"]),
        task=int(attrs["task"]),
        path=relative,
        nbytes=path.stat().st_size,
        n=len(uids),
        xxh3_128=hash_file(path),
        extents=extents,
        structures=structures,
        stats=stats,
    )


def find_published(dataset: Path, shard_id: str) -> PublishedShard | None:
    """The shard if an earlier attempt already published it (and died before it was committed), else None.

    DamagedDataError when the file is there but does not hold what its checksums say.
    """
    path = Path(dataset) / shard_path(shard_id)
    return describe_shard(path, shard_path(shard_id)) if path.exists() else None
