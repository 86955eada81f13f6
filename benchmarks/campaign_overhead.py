"""What a campaign costs beyond its simulations: planning, pickling, HDF5, checksums, fsync, manifest, events.

    python benchmarks/campaign_overhead.py [--rounds 3] [--samples 12]

Each round simulates the same samples twice, in turn: bare (a loop over the simulator, nothing kept) and as a campaign
on the inline cluster, which pickles every task and result. One core, one process, so that both do the same work. Also
measured: one epoch of the shards through `ShardDataset` against bare sequential reads of the same files.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from exitwave.ingest import GlobalSampler, ShardDataset
from exitwave.simulate import CampaignSpec, make_cluster, make_plan, run_campaign
from exitwave.simulate.simulator import get_simulator


def campaign(samples: int) -> CampaignSpec:
    return CampaignSpec.model_validate(
        {
            "name": "overhead",
            "structures": [{"library": ["Si", "Au", "GaAs"]}],
            "samples_per_structure": samples,
            "samples_per_shard": samples,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=12, help="of each of three structures")
    arguments = parser.parse_args()
    spec = campaign(arguments.samples)
    plan = make_plan(spec, base_dir=Path())
    list(get_simulator(plan.simulator).simulate(list(plan.tasks[0].samples())[:1]))  # imports and compiles
    rows: list[dict[str, Any]] = []
    folder = Path(tempfile.mkdtemp(prefix="exitwave-bench-"))
    try:
        for round_ in range(arguments.rounds):
            data = folder / str(round_)
            row = {"round": round_, "bare_s": bare(plan), "campaign_s": as_campaign(spec, data)}
            row |= {"raw_B_per_s": raw_read(data), "epoch_B_per_s": shuffled_epoch(data, verify=False)}
            row |= {"epoch_verified_B_per_s": shuffled_epoch(data, verify=True)}
            rows.append(row)
    finally:
        shutil.rmtree(folder)
    overhead = statistics.median(r["campaign_s"] / r["bare_s"] - 1 for r in rows)
    reading = statistics.median(r["epoch_B_per_s"] / r["raw_B_per_s"] for r in rows)
    targets = [
        {
            "name": "campaign overhead over bare simulation",
            "value": overhead,
            "target": 0.03,
            "holds": overhead <= 0.03,
        },
        {"name": "shuffled epoch / raw sequential read", "value": reading, "target": 0.8, "holds": reading >= 0.8},
    ]
    machine = {"cores": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()}
    print(json.dumps({"bench": "campaign", "machine": machine, "rows": rows, "targets": targets}, indent=1))


if __name__ == "__main__":
    main()
