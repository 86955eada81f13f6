"""A campaign in small: commits shards one after the other, waiting while the trainer holds it back."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from ingest_samples import write_shard

from exitwave.ingest.growing import held_back
from exitwave.ingest.manifest import ManifestWriter


def main(root: Path, first: int, last: int, pause_s: float) -> None:
    with ManifestWriter(root, epoch=1) as writer:
        for task in range(first, last):
            while held_back(root) is not None:
                time.sleep(0.01)
            writer.commit(write_shard(root, task), split="train", producer={}, generation=task)
            time.sleep(pause_s)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
