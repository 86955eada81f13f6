"""A fresh process for `exitwave bench ingest`: the time to the first batch, and what reading takes in memory.

Called as `python -m exitwave.ingest.bench_probe ROOT BATCHES`; prints one line of JSON. `growth_bytes` is the memory
that is this process's alone after so many shuffled batches of 32, less that before the data set was opened.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import psutil
from torch.utils.data import DataLoader

from exitwave.ingest.batches import GlobalSampler, ShardDataset, collate


def main(root: str, batches: int) -> None:
    before = psutil.Process().memory_full_info().uss
    start = time.perf_counter()
    data: Any = ShardDataset(root, fields=("cbed",))
    sampler = GlobalSampler(data, rank=0, world_size=1, global_batch=32, seed=0)
    first = 0.0
    for k, _ in enumerate(DataLoader(data, batch_sampler=sampler, collate_fn=collate)):
        if k == 0:
            first = time.perf_counter() - start
        if k + 1 == batches:
            break
    growth = psutil.Process().memory_full_info().uss - before
    print(json.dumps({"first_batch_s": first, "growth_bytes": growth, "samples": len(data)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
