"""A process to be killed: does one piece of ingest's work, and sends itself SIGKILL at a chosen point of it.

    python ingest_child.py write DATASET TASK POINT       publishes and commits one shard
    python ingest_child.py stage DATASET CACHE POINT      stages the data set
    python ingest_child.py trim DATASET CACHE POINT       makes the cache hold half of it

POINT is `never`, or `<call>:<k>:<when>`: at the k-th call of os.<call>, `before` it, `after` it, or `half` (a write of
half of the bytes). The signal is a real one: nothing is cleaned up, no handler runs.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from exitwave.ingest import staging, staging_copy
from exitwave.ingest.events import EventLog
from exitwave.ingest.files import sweep_parts
from exitwave.ingest.manifest import ManifestWriter, load_manifest


def die_at(point: str) -> None:
    if point == "never":
        return
    name, k, when = point.split(":")
    real, left = getattr(os, name), int(k)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left:
            return real(*args, **kwargs)
        if when == "half":
            fd, data, *rest = args
            real(fd, bytes(data)[: len(data) // 2], *rest)
        elif when == "after":
            real(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(os, name, wrapped)


def write(dataset: Path, task: int) -> None:
    from ingest_samples import shard_id, write_shard

    from exitwave.ingest.shard_check import find_published

    sweep_parts(dataset / "shards")
    if any(shard.task == task for shard in load_manifest(dataset).shards):
        return
    published = find_published(dataset, shard_id(task)) or write_shard(dataset, task)
    with ManifestWriter(dataset, epoch=1) as writer:
        writer.commit(published, split="train", producer={"host": "here"})
    EventLog(dataset / "events.jsonl").emit("shard_committed", task=task)


if __name__ == "__main__":
    verb, dataset, argument, point = sys.argv[1:]
    staging_copy.CHUNK = 4096
    print("ready", flush=True)  # imports are done: who kills at a random time begins to count now
    if verb == "write":
        die_at(point)
        write(Path(dataset), int(argument))
    else:
        die_at(point)
        half = None if verb == "stage" else load_manifest(Path(dataset)).nbytes // 2
        staging.stage(dataset, argument, capacity_bytes=half, partial=half is not None)
