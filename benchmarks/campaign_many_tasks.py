"""A campaign of very many tasks that do nothing: memory of controller and scheduler, overhead a task, the status.

    python benchmarks/campaign_many_tasks.py [--tasks 100000] [--workers 2]

See `exitwave/simulate/bench_tasks.py`. Prints the benchmark's JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from exitwave.simulate.bench_tasks import run_many


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # in order: the scheduler and the workers end, too
    with tempfile.TemporaryDirectory(prefix="exitwave-bench-") as folder:
        found = run_many(Path(folder), tasks=arguments.tasks, workers=arguments.workers)
    rows = [
        {"share": share, "controller_MB": round(mine / 1e6, 1), "scheduler_MB": round(other / 1e6, 1), "status_s": took}
        for share, mine, other, took in found.rows
    ]
    targets = [
        {
            "name": "controller's growth from 10 % on, MB",
            "value": round(found.controller_growth / 1e6, 1),
            "target": 50,
        },
        {"name": "scheduler's growth from 10 % on, MB", "value": round(found.scheduler_growth / 1e6, 1), "target": 50},
        {"name": "overhead, ms a task", "value": found.ms_per_task, "target": 5},
        {"name": "status from the counters, s (slowest)", "value": found.status_s, "target": 0.2},
        {"name": "`exitwave status`, s (slowest)", "value": max(found.command_s, default=math.nan), "target": 1.5},
    ]
    document = {
        "bench": "campaign of many tasks",
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "tasks": {key: value for key, value in asdict(found).items() if key != "rows"},
        "rows": rows,
        "targets": [{**target, "holds": target["value"] <= target["target"]} for target in targets],
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
