"""What runs in a worker: one TaskSpec becomes one published shard, and a receipt of less than 4 kB goes back.

1. If the shard is already there under its final name (an earlier attempt published it and died, or its controller did,
   before it was committed), it is read and checked from end to end and adopted: nothing is simulated twice.
2. Otherwise the samples are drawn, simulated one by one and written; the file gets its name only when whole.
3. The receipt says what was published, by whom and how long it took. Arrays never travel.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.compress import shard_writer
from exitwave.ingest.encoding import encode_sample
from exitwave.ingest.records import StructureInfo
from exitwave.ingest.schema import PARAMS_DTYPE
from exitwave.ingest.shard_check import find_published
from exitwave.simulate.simulator import Simulator, get_simulator
from exitwave.simulate.tasks import StructureSpec, TaskSpec, fields_of
from exitwave.simulate.threads import limit_threads
from exitwave.simulate.wisdom import use_wisdom

__all__ = ["prepare_worker", "run_task", "structure_info"]

_simulators: dict[str, Simulator] = {}


def prepare_worker(simulator: str) -> dict[str, str]:
    """Once per process, before its first task: import and configure the simulator, one thread. Returns versions."""
    if simulator not in _simulators:
        _simulators[simulator] = get_simulator(simulator)
        limit_threads()
    return {"simulator": simulator, "simulator_version": _simulators[simulator].version}


def run_task(task: TaskSpec, dataset: str) -> dict[str, Any]:
    """Make (or adopt) the shard of `task` in the data set folder; the receipt as plain JSON types."""
    began = time.perf_counter()
    versions = prepare_worker(task.simulator)
    root = Path(dataset)
    use_wisdom(root)
    published = find_published(root, task.shard_id)
    adopted = published is not None
    simulated = 0.0  # of the seconds, those within the simulator
    if published is None:
        fields = fields_of(task.recipe)
        with shard_writer(
            root,
            compression=task.recipe.storage.compression,
            shard_id=task.shard_id,
            task=task.index,
            campaign_hash=task.campaign_hash,
            simulator=task.simulator,
            n=len(task.sample_indices),
            fields=fields,
            params_dtype=PARAMS_DTYPE,
        ) as writer:
            samples = _simulators[task.simulator].simulate(task.samples())
            for row in range(len(task.sample_indices)):
                entered = time.perf_counter()
                sample = next(samples)
                simulated += time.perf_counter() - entered
                writer.write(row, uid=sample.uid, params=sample.params, arrays=encode_sample(fields, sample.arrays))
            structure = task.structure
            numbers, positions, lengths = structure.tiled(1)
            writer.add_structure(
                structure_info(structure),
                numbers=numbers,
                positions_A=positions,
                cell_A=np.diag(lengths),
                pbc=np.ones(3, dtype=bool),
                wyckoff=structure.wyckoff,
            )
            published = writer.publish()
    return {
        "published": published.to_json(),
        "split": task.split,
        "adopted": adopted,
        "seconds": round(time.perf_counter() - began, 4),
        "simulated_s": round(simulated, 4),
        "producer": {**versions, "host": socket.gethostname(), "pid": str(os.getpid())},
    }


def structure_info(structure: StructureSpec) -> StructureInfo:
    """The structure as shard and manifest tell of it."""
    return StructureInfo(
        index=structure.index,
        formula=structure.formula,
        space_group=structure.space_group,
        prototype_group=structure.prototype_group,
        source=structure.source,
        licence=structure.licence,
        sha256=structure.key,
        zone_axis=structure.zone_axis,
    )
