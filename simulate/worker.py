"""What runs in a worker: one task becomes one published shard, and a receipt of less than 4 kB goes back.

1. If the shard is already there under its final name (an earlier attempt published it and died, or its controller did,
   before it was committed), it is read and checked from end to end and adopted: nothing is simulated twice.
2. Otherwise the samples are drawn, simulated one by one and written; the file gets its name only when whole.
3. The receipt says what was published, by whom and how long it took. Arrays never travel.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exitwave.ingest.compress import shard_writer
from exitwave.ingest.encoding import encode_sample
from exitwave.ingest.files import sweep_parts
from exitwave.ingest.processes import keep_freed_memory
from exitwave.ingest.shard_check import find_published
from exitwave.simulate.simulator import prepared_simulator, simulator_names
from exitwave.simulate.threads import limit_threads
from exitwave.simulate.work import CampaignTask
from exitwave.simulate.worker_guard import Guard, Limits

__all__ = ["prepare_worker", "run_guarded", "run_task", "start_guard"]


def prepare_worker(simulator: str) -> None:
    """Once per process, before its first task: one thread, memory kept, our own simulators imported and configured.

    A simulator of the user is imported by its first task, so that what goes wrong there is a failure with a reason.
    """
    keep_freed_memory()
    if ":" in simulator and simulator not in simulator_names():
        limit_threads()
    else:
        prepared_simulator(simulator)


_guards: list[Guard] = []


def start_guard(simulator: str, *, memory_bytes: int = 0) -> None:
    """In a worker: start the process in which its tasks will run (`worker_guard`). `memory_bytes`: of the worker."""
    while _guards:
        _guards.pop().close()
    _guards.append(Guard(simulator=simulator, memory_bytes=memory_bytes))
    _guards[0].start()


def run_guarded(task: CampaignTask, dataset: str, limits: Limits) -> dict[str, Any]:
    """`run_task` in the worker's guarded process: its receipt, or a report of the failure (`failure_report`)."""
    return run_guarded_call(run_task, task, dataset, limits)


def run_guarded_call(
    function: Callable[[Any, str], dict[str, Any]], task: CampaignTask, dataset: str, limits: Limits
) -> dict[str, Any]:
    """As `run_guarded`, for another function than `run_task`."""
    if not _guards:
        start_guard(task.simulator)
    report: dict[str, Any] = _guards[0].call(function, (task, dataset), limits)
    if report.get("failed", {}).get("state") in ("memory", "timeout", "killed"):
        sweep_parts(Path(dataset) / "shards" / ".part")  # what it had half-written
    return report


def run_task(task: CampaignTask, dataset: str) -> dict[str, Any]:
    """Make (or adopt) the shard of `task` in the data set folder; the receipt as plain JSON types."""
    began = time.perf_counter()
    root = Path(dataset)
    versions = task.prepare(root)
    published = find_published(root, task.shard_id)
    adopted = published is not None
    simulated = 0.0  # of the seconds, those within the simulator
    if published is None:
        fields = task.fields
        with shard_writer(
            root,
            compression=task.compression,
            shard_id=task.shard_id,
            task=task.index,
            campaign_hash=task.campaign_hash,
            simulator=task.simulator,
            n=len(task.sample_indices),
            fields=fields,
            params_dtype=task.params_dtype,
        ) as writer:
            entered = time.perf_counter()
            for row, sample in enumerate(task.simulate()):
                simulated += time.perf_counter() - entered
                writer.write(row, uid=sample.uid, params=sample.params, arrays=encode_sample(fields, sample.arrays))
                entered = time.perf_counter()
            task.add_structures(writer)
            published = writer.publish()
    return {
        "published": published.to_json(),
        "split": task.split,
        "adopted": adopted,
        "seconds": round(time.perf_counter() - began, 4),
        "simulated_s": round(simulated, 4),
        "producer": {**versions, "host": socket.gethostname(), "pid": str(os.getpid())},
    }
