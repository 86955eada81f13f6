"""Shuffled batches beside raw reads and other loaders: prints the benchmark as JSON; `python benchmarks/ingest.py`.

The same as `exitwave bench ingest --json`; a first argument names an interpreter that has mosaicml-streaming.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from exitwave.ingest.bench import bench_ingest

if __name__ == "__main__":
    python = Path(sys.argv[1]) if sys.argv[1:] else None
    print(json.dumps(bench_ingest(mds_python=python, note=lambda text: print(text, file=sys.stderr)), indent=2))
