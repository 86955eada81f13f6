"""The epochs of mosaicml-streaming for `exitwave bench ingest`: a script for an environment of its own.

Called as `python bench_mosaic.py PLAIN WORK BATCH`; it imports nothing of exitwave. It writes the samples of PLAIN as
MDS shards under WORK, prints one line of JSON, and then answers each line "epoch" or "check" with another.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from pathlib import Path
from typing import Any


def main(plain: Path, work: Path, batch: int) -> None:
    import numpy as np
    import streaming
    from torch.utils.data import DataLoader

    shape = tuple(json.loads((plain / "shape.json").read_text()))
    uids = np.fromfile(plain / "uids.u8", "<u8")
    values = np.fromfile(plain / "samples.f4", "<f4").reshape(len(uids), *shape)
    columns = {"uid": "int", "cbed": f"ndarray:float32:{','.join(map(str, shape))}"}
    with streaming.MDSWriter(out=str(work / "mds"), columns=columns) as writer:
        for uid, value in zip(uids.tolist(), values, strict=True):
            writer.write({"uid": uid, "cbed": value})
    del values
    data = streaming.StreamingDataset(local=str(work / "mds"), shuffle=True, batch_size=batch)
    loader: Any = DataLoader(data, batch_size=batch, num_workers=0)
    print(json.dumps({"version": streaming.__version__}), flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        sums = []
        for got in loader:
            if line.strip() == "check":
                for uid, value in zip(got["uid"].tolist(), got["cbed"].numpy(), strict=True):
                    sums.append((uid, zlib.crc32(value.tobytes())))
        print(json.dumps({"seconds": time.perf_counter() - start, "sums": sums}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
