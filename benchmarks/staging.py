"""Staging beside `cp`, and a cluster's reads from shared storage: prints the benchmark as JSON.

    python benchmarks/staging.py [--work DIR] [--rounds N] [--shards N] [--samples N] [--nodes N]

`stage` reads, hashes, verifies, writes and syncs; `cp && sync` reads, writes and syncs: that pair is compared, in one
run, interleaved. `cp` alone, which leaves its bytes in memory, stands beside them. All files are warm in the page cache
when a round begins. The nodes are processes on this host, each with its own cache, over loopback.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.manifest import ManifestWriter, create_dataset, load_manifest
from exitwave.ingest.peers_staging import PeerOptions
from exitwave.ingest.records import Header
from exitwave.ingest.schema import PARAMS_DTYPE, FieldSpec
from exitwave.ingest.shard import ShardWriter
from exitwave.ingest.staging import stage
from exitwave.ingest.staging_run import Limits

FIELDS = (FieldSpec(name="cbed", dtype="float32", shape=(8, 8, 32, 64)),)  # 512 KiB a sample


def make(root: Path, shards: int, samples: int) -> None:
    create_dataset(root, Header(dataset_id="bench", campaign_hash="bench", fields=FIELDS))
    rng = np.random.default_rng(0)
    with ManifestWriter(root, epoch=1) as manifest:
        for task in range(shards):
            with ShardWriter(
                root,
                shard_id=f"{task:016x}",
                task=task,
                campaign_hash="bench",
                simulator="none",
                n=samples,
                fields=FIELDS,
                params_dtype=PARAMS_DTYPE,
            ) as writer:
                for row in range(samples):
                    arrays = {"cbed": rng.random(FIELDS[0].shape, np.float32)}
                    writer.write(row, uid=(task << 32) + row, params=np.zeros((), PARAMS_DTYPE)[()], arrays=arrays)
                manifest.commit(writer.publish(), split="train", producer={})


def copying(root: Path, work: Path, rounds: int) -> list[dict[str, Any]]:
    paths = [str(root / shard.path) for shard in load_manifest(root).shards]
    nbytes = load_manifest(root).nbytes

    def cp(into: Path, *, sync: bool) -> None:
        into.mkdir()
        subprocess.run(["cp", *paths, str(into)], check=True)
        if sync:
            subprocess.run(["sync", *map(str, into.iterdir())], check=True)

    ways: dict[str, Callable[[Path], object]] = {
        "stage": lambda into: stage(root, into),
        "stage, one copy at a time": lambda into: stage(root, into, limits=Limits(in_flight=1)),
        "cp && sync": lambda into: cp(into, sync=True),
        "cp": lambda into: cp(into, sync=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for k in range(rounds):
        for name in names[k % len(names) :] + names[: k % len(names)]:
            os.sync()
            began = time.perf_counter()
            ways[name](work / "copy")
            seconds[name].append(time.perf_counter() - began)
            shutil.rmtree(work / "copy")
    return [
        {
            "what": name,
            "MB_per_s": round(nbytes / 1e6 / statistics.median(times), 1),
            "seconds": [round(t, 3) for t in times],
            "of_cp_and_sync": round(
                statistics.median(b / t for b, t in zip(seconds["cp && sync"], times, strict=True)), 3
            ),
        }
        for name, times in seconds.items()
    ]


def nodes(root: Path, work: Path, n: int) -> dict[str, Any]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    names = tuple(f"127.0.0.1:{s.getsockname()[1]}" for s in sockets)
    for s in sockets:
        s.close()

    def one(k: int) -> Any:
        return stage(root, work / f"node{k}", peers=PeerOptions(me=names[k], nodes=names, secret=b"s" * 32))

    began = time.perf_counter()
    with ThreadPoolExecutor(n) as pool:
        reports = list(pool.map(one, range(n)))
    seconds = time.perf_counter() - began
    for k in range(n):
        shutil.rmtree(work / f"node{k}")
    return {
        "what": f"{n} nodes",
        "seconds": round(seconds, 3),
        "from_storage_over_unique": round(sum(r.bytes_from_source for r in reports) / load_manifest(root).nbytes, 4),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--nodes", type=int, default=4)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.work) as folder:
        work = Path(folder)
        print("writing the data set", file=sys.stderr)
        make(work / "data", asked.shards, asked.samples)
        rows = copying(work / "data", work, asked.rounds)
        cluster = nodes(work / "data", work, asked.nodes)
    ratio, reads = rows[0]["of_cp_and_sync"], cluster["from_storage_over_unique"]
    machine = {"cpus": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()}
    of_cp = round(rows[0]["MB_per_s"] / rows[3]["MB_per_s"], 3)
    targets = [
        {"name": "stage, checked and synced, of cp", "value": of_cp, "target": ">= 0.9", "holds": of_cp >= 0.9},
        {"name": "stage, checked, of cp && sync", "value": ratio, "target": ">= 0.9", "holds": ratio >= 0.9},
        {"name": "bytes from shared storage / unique", "value": reads, "target": "<= 1.02", "holds": reads <= 1.02},
    ]
    print(json.dumps({"bench": "staging", "machine": machine, "rows": [*rows, cluster], "targets": targets}, indent=2))
