"""A training step beside a plain PyTorch loop, and how long it waits for data: `python benchmarks/training.py [RANKS]`.

The plain loop is what one writes by hand: DistributedDataParallel, the same network, loss, AdamW and clipping, fed with
the very same batches. Both train in the same processes, a few steps of the one and then of the other, the order turned
each round. Two ratios are told: the median over rounds of the ratio of their times, and the ratio of the processor
times of all rounds, which other work on a shared machine hardly touches. Then a training reads the same shards from a
warm cache, noise and all, and its share of waiting for data is what its own events say.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from exitwave.ingest.manifest import ManifestWriter, create_dataset
from exitwave.ingest.records import Header, StructureInfo
from exitwave.ingest.schema import PARAMS_DTYPE, FieldSpec
from exitwave.ingest.shard import ShardWriter
from exitwave.train.build import build, open_samples
from exitwave.train.feed import feeding
from exitwave.train.loop import take_steps
from exitwave.train.mesh import RankInfo, open_ranks
from exitwave.train.optim import make_optimizer
from exitwave.train.parallel import Parallel
from exitwave.train.recorder import Recorder
from exitwave.train.run import claim_run, read_curve
from exitwave.train.spec import TrainSpec
from exitwave.train.task import task_of
from exitwave.train.trainer import train

ROUNDS, STEPS = 32, 5  # a turn of ours begins with an agreement of its own, which is no part of a step
SPEC: dict[str, Any] = {
    "model": {"preset": "tiny"},
    "batch": 16,
    "steps": 40,
    "deterministic": False,
    "optimizer": {"schedule": "constant", "warmup_steps": 0, "lr": 1e-4},
    "checkpoint": {"every_steps": 10**9},
    "engine": {"grouping": "bytes"},
}


def make_data(root: Path, n: int = 96) -> Path:
    """Patterns and labels of noise, of the quickstart's shapes."""
    fields = (
        FieldSpec(name="cbed", dtype="<f4", shape=(8, 8, 32, 32)),
        FieldSpec(name="potential", dtype="<f4", shape=(32, 32)),
    )
    create_dataset(root, Header(dataset_id="bench-training", campaign_hash="bench", fields=fields))
    params = np.zeros(1, PARAMS_DTYPE)
    for name, value in (("energy_keV", 200), ("semiangle_mrad", 20), ("thickness_A", 40), ("R_sampling_y_A", 0.5)):
        params[name] = value
    params["R_sampling_x_A"] = 0.5
    params["Q_sampling_y_per_A"] = params["Q_sampling_x_per_A"] = 0.08
    with ManifestWriter(root, epoch=1) as manifest:
        for task in range(n // 24):
            with ShardWriter(
                root, shard_id=f"{task:016x}", task=task, campaign_hash="bench", simulator="noise", n=24,
                fields=fields, params_dtype=PARAMS_DTYPE,
            ) as shard:  # fmt: skip
                structure = StructureInfo(
                    index=task, formula="Au", space_group=225, prototype_group=0, source="benchmark", licence="",
                    sha256="0" * 64, zone_axis=(0, 0, 1),
                )  # fmt: skip
                shard.add_structure(
                    structure, numbers=np.array([79]), positions_A=np.zeros((1, 3)), cell_A=np.eye(3) * 4,
                    pbc=np.ones(3, dtype=bool), wyckoff="a",
                )  # fmt: skip
                rng = np.random.default_rng(task)
                for row in range(24):
                    arrays = {
                        "cbed": rng.random((8, 8, 32, 32), dtype=np.float32) / 512,
                        "potential": 100 * rng.random((32, 32), dtype=np.float32),
                    }
                    shard.write(row, uid=task * 100 + row + 1, params=params[0], arrays=arrays)
                published = shard.publish()
            manifest.commit(published, split="train", producer={})
    return root


class PlainLoop:
    """What one writes by hand."""

    def __init__(self, module: nn.Module, spec: TrainSpec, loss: Any) -> None:
        self.module = nn.parallel.DistributedDataParallel(module)
        self.optimizer = make_optimizer(spec.optimizer, module.named_parameters())
        self.spec, self.loss = spec, loss

    def steps(self, batches: Any, n: int) -> float:
        self.module.train()
        total = 0.0
        for batch in itertools.islice(batches, n):
            loss = self.loss(self.module(batch.inputs), batch).mean()
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.module.parameters(), self.spec.optimizer.clip)
            self.optimizer.step()
            total += loss.item()
        return total


def rank_main(data: Path, out: Path) -> None:
    """One rank: both loops in turns, then a training from the warm cache; rank 0 writes out/rows.json."""
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    info = RankInfo(rank=rank, world_size=world, local_rank=rank)
    spec = TrainSpec.model_validate(SPEC)
    task, parallel = task_of(spec), Parallel()
    torch.distributed.init_process_group("gloo")
    from exitwave.ingest.events import EventLog

    with open_ranks(info, timeout_s=300) as ranks:
        plan = parallel.data_plan(ranks)
        dataset = open_samples(spec, task, data, None, ranks, plan)
        ranks.from_first(lambda: claim_run(out / "ours", spec, dataset_id=dataset.dataset_id, fresh=True))
        recorder = Recorder(EventLog(out / "ours" / "events.jsonl")) if rank == 0 else None
        training = build(
            spec, task, dataset, data=data, cache=None, out=out / "ours", ranks=ranks, parallel=parallel, plan=plan,
            recorder=recorder,
        )  # fmt: skip
        plain = PlainLoop(copy.deepcopy(task.make_model(training.measured)), spec, task.per_sample_loss)
        with feeding(training) as feed:
            batches = itertools.cycle(list(itertools.islice(feed, 5)))

        def ours() -> None:
            training.total_steps = training.step + STEPS
            take_steps(training, batches, lambda: False)

        turns = {"ours": ours, "plain": lambda: plain.steps(batches, STEPS)}
        times: dict[str, list[float]] = {name: [] for name in turns}
        processor: dict[str, float] = dict.fromkeys(turns, 0.0)
        for number in range(-1, ROUNDS):
            for name in list(turns) if number % 2 else reversed(list(turns)):
                ranks.barrier()
                began, used = time.perf_counter(), time.process_time()
                turns[name]()
                ranks.barrier()
                if number >= 0:
                    times[name].append((time.perf_counter() - began) / STEPS)
                    processor[name] += (time.process_time() - used) / STEPS / ROUNDS
        processor = {name: ranks.sum(used)[0] for name, used in processor.items()}
        training.engine.close()
        if recorder is not None:
            recorder.close()
        waits = []
        for run in range(2):  # the first one warms the page cache
            torch.set_num_threads(1)
            train(spec, data=data, out=out / f"read{run}", rank_info=info, threads=1)
            if rank == 0:
                curve = read_curve(out / f"read{run}")[1:]  # nothing is ready before the first step
                waits.append(sum(e["data_wait_s"] for e in curve) / sum(e["step_s"] for e in curve))
        if rank == 0:
            (out / "rows.json").write_text(json.dumps({"times": times, "processor": processor, "data_wait": waits[-1]}))
    torch.distributed.destroy_process_group()


def main(ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data, out = make_data(Path(folder) / "data"), Path(folder) / "out"
        out.mkdir()
        subprocess.run(
            [
                sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__,
                "--rank", str(data), str(out),
            ],
            check=True, stdout=sys.stderr, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        found = json.loads((out / "rows.json").read_text())
    times = found["times"]
    ratios = [a / b for a, b in zip(times["ours"], times["plain"], strict=True)]
    ratio, wait = statistics.median(ratios), found["data_wait"]
    processor = found["processor"]["ours"] / found["processor"]["plain"]
    rows = [
        {
            "what": name,
            "ranks": ranks,
            "step_s": statistics.median(each),
            "quartiles_s": statistics.quantiles(each),
            "processor_s": found["processor"][name],
        }
        for name, each in times.items()
    ]
    rows.append(
        {
            "what": "ours / plain",
            "ranks": ranks,
            "ratio": ratio,
            "quartiles": statistics.quantiles(ratios),
            "processor_ratio": processor,
        }
    )
    rows.append({"what": "waits for data, share of the step, warm cache", "ranks": ranks, "share": wait})
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    targets = [
        {"name": "step time over a plain DDP loop", "value": ratio, "target": "<= 1.02", "holds": ratio <= 1.02},
        {
            "name": "processor time over a plain DDP loop",
            "value": processor,
            "target": "<= 1.02",
            "holds": processor <= 1.02,
        },
        {"name": "data-wait share", "value": wait, "target": "< 0.02", "holds": wait < 0.02},
    ]
    document = {"bench": "training", "machine": machine, "rows": rows, "targets": targets}
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 2)
