"""The multislice loop beside its floor and abTEM: prints the benchmark as JSON. `--full` adds 512 x 512."""

from __future__ import annotations

import json
import sys

from exitwave.simulate.bench import bench_simulate

if __name__ == "__main__":
    print(json.dumps(bench_simulate(full="--full" in sys.argv[1:], note=lambda t: print(t, file=sys.stderr)), indent=2))
