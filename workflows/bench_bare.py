"""A pipeline's samples simulated by a bare loop, nothing kept: `python -m exitwave.workflows.bench_bare PIPELINE.yaml`.

Prints JSON: the seconds of all samples, and the rate after the first task, in which kernels are compiled and transforms
planned.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from exitwave.simulate.plan import Plan
from exitwave.simulate.simulator import get_simulator
from exitwave.simulate.threads import limit_threads
from exitwave.workflows.campaigns import read_campaign

__all__ = ["bare_simulation"]


def bare_simulation(pipeline: Path) -> dict[str, Any]:
    """All tasks of the plan, one after the other, on one thread."""
    limit_threads()  # as a worker does
    plan = read_campaign(pipeline, ()).plan
    assert isinstance(plan, Plan)
    simulator = get_simulator(plan.simulator)
    ends, counts = [time.perf_counter()], []
    for task in plan.tasks:
        counts.append(len(list(simulator.simulate(list(task.samples())))))
        ends.append(time.perf_counter())
    return {"seconds": ends[-1] - ends[0], "samples_per_s": sum(counts[1:]) / (ends[-1] - ends[1])}


if __name__ == "__main__":
    print(json.dumps(bare_simulation(Path(sys.argv[1]))))
