"""A training process that only keeps a streaming cache filled: says `stager` once it is elected, and stays."""

from __future__ import annotations

import json
import signal
import sys
import time

from exitwave.ingest import GlobalSampler, ShardDataset
from exitwave.ingest.prefetch import Prefetcher
from exitwave.ingest.prefetch_order import AccessOrder

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    asked = json.loads(sys.argv[1])
    data = ShardDataset(asked["dataset"], cache=asked["cache"])
    sampler = GlobalSampler(data, rank=0, world_size=1, global_batch=8, seed=5)
    order = AccessOrder.of(data.data, sampler)
    with Prefetcher(asked["dataset"], asked["cache"], order, capacity_bytes=asked["capacity"]) as prefetcher:
        while not prefetcher.is_stager:
            time.sleep(0.01)
        print("stager", flush=True)
        for _ in range(1200):  # in pieces: a signal just before a sleep begins does not end it
            time.sleep(0.05)
