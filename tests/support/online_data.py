"""A data set of the trainer's tests that grows: shards of columns, committed one after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from train_data import DETECTOR, add_gold, sample

from exitwave.ingest.growing import held_back
from exitwave.ingest.manifest import ManifestWriter, create_dataset
from exitwave.ingest.records import Header
from exitwave.ingest.schema import PARAMS_DTYPE, FieldSpec
from exitwave.ingest.shard import ShardWriter

SCAN, LABEL = 4, 16
FIELDS = (
    FieldSpec(name="cbed", dtype="<f4", shape=(SCAN, SCAN, DETECTOR, DETECTOR)),
    FieldSpec(name="potential", dtype="<f4", shape=(LABEL, LABEL)),
)


def begin(root: Path) -> Path:
    create_dataset(root, Header(dataset_id="growing-columns", campaign_hash="fake", fields=FIELDS))
    return root


def commit(root: Path, materials: Sequence[int], *, split: str = "train", n: int = 4, pause_s: float = 0.0) -> None:
    """One shard of `n` samples for each material; waits before each while a trainer holds producers back."""
    with ManifestWriter(root, epoch=1) as manifest:
        for material in materials:
            while held_back(root) is not None:
                time.sleep(0.02)
            with ShardWriter(
                root, shard_id=f"{material:016x}", task=material, campaign_hash="fake", simulator="columns", n=n,
                fields=FIELDS, params_dtype=PARAMS_DTYPE,
            ) as shard:  # fmt: skip
                add_gold(shard, index=material)
                for row in range(n):
                    one = sample(material, row, scan=SCAN, label=LABEL)
                    arrays = {"cbed": one["cbed"], "potential": one["potential"]}
                    shard.write(row, uid=one["uid"], params=one["params"], arrays=arrays)
                published = shard.publish()
            manifest.commit(published, split=split, producer={})
            time.sleep(pause_s)


def growing(work: Callable[[], None]) -> threading.Thread:
    """`work` beside the test."""
    thread = threading.Thread(target=work)
    thread.start()
    return thread
