"""A file larger than the memory that ingest may take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

CODE = """
import json, resource, sys
from pathlib import Path
from exitwave.ingest.foreign_ingest import ingest_files
from exitwave.ingest.foreign_map import MapSpec
spec = MapSpec.model_validate(json.loads(sys.argv[3]))
report = ingest_files([Path(sys.argv[1])], spec, Path(sys.argv[2]))
print(json.dumps([report.samples, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))
"""


def peak(path: Path, out: Path, spec: dict[str, object]) -> tuple[int, int]:
    """Samples, and the most memory that the process took (bytes)."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(path), str(out), json.dumps(spec)], capture_output=True, text=True, check=True
    )
    samples, kilobytes = json.loads(done.stdout)
    return samples, kilobytes * 1024


@pytest.mark.long
@pytest.mark.parametrize("chunks", [None, (1, 1, 64, 64)])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, chunks: tuple[int, ...] | None) -> None:
    tile = np.random.default_rng(0).random((16, 128, 64, 64)).astype("f4")
    spec: dict[str, object] = {
        "fields": {"cbed": {"array": "/c", "axes": ["Ry", "Rx", "Qx", "Qy"]}},
        "tile": {"Ry": 16, "Rx": 16},
        "shard_bytes": 32 << 20,
    }
    found = []
    for name, rows in (("small", 1), ("large", 8)):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            data = file.create_dataset("c", shape=(16 * rows, *tile.shape[1:]), dtype="f4", chunks=chunks)
            for i in range(rows):
                data[16 * i : 16 * (i + 1)] = tile
        found.append(peak(tmp_path / f"{name}.h5", tmp_path / name, spec))
    (few, small), (many, large) = found
    assert (few, many) == (8, 64)
    size = (tmp_path / "large.h5").stat().st_size
    assert size > 250e6 and large - small < 30e6, f"{(large - small) / 1e6:.0f} MB more for {size / 1e6:.0f} MB"
