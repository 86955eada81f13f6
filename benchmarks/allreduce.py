"""Step times of the grouped-allreduce engine beside DDP's: `python benchmarks/allreduce.py > allreduce.json`.

The same as `exitwave bench allreduce --json`.
"""

from __future__ import annotations

import json
import sys

from exitwave.train.allreduce.bench import run_bench

if __name__ == "__main__":
    print(json.dumps(run_bench(say=lambda line: print(line, file=sys.stderr)), indent=1))
