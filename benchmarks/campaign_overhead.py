"""What a campaign costs beyond its simulations: planning, pickling, HDF5, checksums, fsync, manifest, events.

    python benchmarks/campaign_overhead.py [--rounds 3] [--samples 72] [--only overhead|workers]

Two parts, whose targets stand in one document. The first: each round simulates the same samples twice, in turn: bare (a
loop over the simulator, nothing kept) and as a campaign on the inline cluster, which pickles every task and result. One
core, one process, so that both do the same work. Also measured: one epoch of the shards through `ShardDataset` against
bare sequential reads of the same files. What a campaign costs once is in it (planning, the index, the first events:
about 0.15 s), so that campaigns of few samples cost more: see `--samples`.

The second: what a second worker brings. Two bare processes of the simulation against one, and two
workers of a campaign (Dask, guarded processes, shards, manifest) against one, in turn. All samples are of one
structure, so that any part of them costs the same. A worker's rate is that between its first shard and its last: what
it imports and compiles is in neither. Two processes share caches and memory, so that twice is not reached by either;
the campaign should gain at least 0.95 of what the bare processes gain. Also shown is what a worker spends outside the
simulator, in its task (`shard_s`: HDF5, checksums, fsync) and between two tasks (`between_s`: pickling, the guarded
process, the scheduler, the controller), both in seconds for each shard.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exitwave.ingest import GlobalSampler, ShardDataset, open_dataset
from exitwave.simulate import CampaignSpec, make_cluster, make_plan, run_campaign
from exitwave.simulate.simulator import get_simulator
from exitwave.simulate.threads import limit_threads

LIBRARY = ("Si", "Au", "GaAs")


def campaign(samples: int, *, per_shard: int | None = None, library: Sequence[str] = LIBRARY) -> CampaignSpec:
    return CampaignSpec.model_validate(
        {
            "name": "overhead",
            "structures": [{"library": list(library)}],
            "samples_per_structure": samples,
            "samples_per_shard": per_shard or samples,
            "cell": {"min_extent_A": 26},
            "sampling": {"energy_keV": {"choice": [100, 200]}, "thickness_A": {"uniform": [20, 60]}},
            "grid": {"sampling_A": 0.25, "max_gpts": 128},
            "detector": {"shape": [32, 32], "max_q_per_A": 1.2},
        }
    )


def bare(plan: Any) -> float:
    simulator = get_simulator(plan.simulator)
    began = time.perf_counter()
    for task in plan.tasks:
        for _ in simulator.simulate(list(task.samples())):
            pass
    return time.perf_counter() - began


def as_campaign(spec: CampaignSpec, folder: Path) -> float:
    began = time.perf_counter()
    plan = make_plan(spec, base_dir=Path())
    run_campaign(plan, folder, make_cluster("inline", workers=1))
    return time.perf_counter() - began


def _bare_process(samples: int, start: Any, told: Any) -> None:
    limit_threads()  # as a worker does
    plan = make_plan(campaign(3 * samples, library=LIBRARY[1:2]), base_dir=Path())
    list(get_simulator(plan.simulator).simulate(list(plan.tasks[0].samples())[: _per_shard(samples)]))
    start.wait()
    told.put(bare(plan))


def bare_processes(samples: int, count: int) -> float:
    """Samples per second of so many processes, each simulating all samples, begun at the same moment."""
    context = multiprocessing.get_context("spawn")
    start, told = context.Barrier(count), context.Queue()
    started = [context.Process(target=_bare_process, args=(samples, start, told)) for _ in range(count)]
    for process in started:
        process.start()
    seconds = [told.get(timeout=600) for _ in started]
    for process in started:
        process.join()
    return sum(3 * samples / s for s in seconds)


def _per_shard(samples: int) -> int:
    return max(1, samples // 4)


def campaign_workers(samples: int, folder: Path, count: int) -> dict[str, float]:
    """Samples per second of a campaign with so many workers, and what each shard cost besides its simulation."""
    ended: dict[str, tuple[float, dict[str, Any]]] = {}

    def listen(event: dict[str, Any]) -> None:
        if event["kind"] == "shard_committed":
            ended[event["shard_id"]] = (time.perf_counter(), event)

    plan = make_plan(campaign(3 * samples, per_shard=_per_shard(samples), library=LIBRARY[1:2]), base_dir=Path())
    run_campaign(plan, folder, make_cluster("local", workers=count), listeners=[listen])
    by_worker: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for shard in open_dataset(folder).manifest.shards:
        by_worker.setdefault(shard.producer["pid"], []).append(ended[shard.shard_id])
    rate, between, outside = 0.0, [], []
    for shards in by_worker.values():
        shards.sort(key=lambda each: each[0])
        took = shards[-1][0] - shards[0][0]
        rate += sum(event["n"] for _, event in shards[1:]) / took
        between.append((took - sum(event["seconds"] for _, event in shards[1:])) / (len(shards) - 1))
        outside += [event["seconds"] - event["simulated_s"] for _, event in shards[1:]]
    return {"per_s": rate, "between_s": statistics.mean(between), "shard_s": statistics.mean(outside)}


def second_worker(rounds: int, samples: int, folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and the target of what a second worker brings."""
    rows = []
    for round_ in range(rounds):
        row: dict[str, Any] = {"round": round_}
        for count in (1, 2):
            row[f"bare_{count}_per_s"] = bare_processes(samples, count)
            found = campaign_workers(samples, folder / f"{round_}-{count}", count)
            row |= {f"campaign_{count}_{name}": value for name, value in found.items()}
        row["bare_gain"] = row["bare_2_per_s"] / row["bare_1_per_s"]
        row["campaign_gain"] = row["campaign_2_per_s"] / row["campaign_1_per_s"]
        rows.append(row)
    value = statistics.median(row["campaign_gain"] / row["bare_gain"] for row in rows)
    name = "gain of a second worker / gain of a second bare process"
    return rows, [{"name": name, "value": value, "target": 0.95, "holds": value >= 0.95}]


def raw_read(folder: Path) -> float:
    """Bytes per second of reading every shard from end to end."""
    total, began = 0, time.perf_counter()
    for path in sorted(folder.glob("shards/*/*.h5")):
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(4 << 20):
                total += len(chunk)
    return total / (time.perf_counter() - began)


def shuffled_epoch(folder: Path, *, verify: bool) -> float:
    """Bytes per second of one shuffled epoch of patterns and labels, in batches, by this process alone."""
    dataset = ShardDataset(folder, verify=verify)
    sampler = GlobalSampler(dataset, rank=0, world_size=1, global_batch=8, seed=0)
    total, began = 0, time.perf_counter()
    for batch in sampler:
        total += sum(s["cbed"].nbytes + s["potential"].nbytes for s in dataset.__getitems__(batch))
    return total / (time.perf_counter() - began)


def overhead(rounds: int, samples: int, folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and targets of what a campaign costs beyond its simulations, and of reading its shards."""
    spec = campaign(samples)
    plan = make_plan(spec, base_dir=Path())
    list(get_simulator(plan.simulator).simulate(list(plan.tasks[0].samples())[:1]))  # imports and compiles
    rows = []
    for round_ in range(rounds):
        data = folder / str(round_)
        row = {"round": round_, "bare_s": bare(plan), "campaign_s": as_campaign(spec, data)}
        row |= {"raw_B_per_s": raw_read(data), "epoch_B_per_s": shuffled_epoch(data, verify=False)}
        row |= {"epoch_verified_B_per_s": shuffled_epoch(data, verify=True)}
        rows.append(row)
    found = statistics.median(r["campaign_s"] / r["bare_s"] - 1 for r in rows)
    reading = statistics.median(r["epoch_B_per_s"] / r["raw_B_per_s"] for r in rows)
    return rows, [
        {"name": "campaign overhead over bare simulation", "value": found, "target": 0.03, "holds": found <= 0.03},
        {"name": "shuffled epoch / raw sequential read", "value": reading, "target": 0.8, "holds": reading >= 0.8},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=72, help="of each of three structures")
    parser.add_argument("--only", choices=("overhead", "workers"), help="one of the two parts; by default both")
    arguments = parser.parse_args()
    machine = {"cores": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()}
    document: dict[str, Any] = {"bench": "campaign", "machine": machine, "rows": [], "targets": []}
    parts = {"overhead": overhead, "workers": second_worker}
    for name, part in parts.items():
        if arguments.only in (None, name):
            began = time.perf_counter()
            with tempfile.TemporaryDirectory(prefix="exitwave-bench-") as folder:
                rows, targets = part(arguments.rounds, arguments.samples, Path(folder))
            document["rows"] += [{"part": name, **row} for row in rows]
            document["targets"] += targets
            document[f"{name}_s"] = round(time.perf_counter() - began, 1)
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
