"""Small data sets of through-focal series and volumes, cheap: rows of blurred columns, each slab with its own focus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from train_data import add_gold

from exitwave.ingest.manifest import ManifestWriter, create_dataset
from exitwave.ingest.records import Header
from exitwave.ingest.schema import PARAMS_DTYPE, FieldSpec
from exitwave.ingest.shard import ShardWriter


def sample(index: int, *, foci: int, slabs: int, side: int) -> dict[str, Any]:
    """Columns of random height and place; image f sees the slab at its focus sharply, the others blurred."""
    rng = np.random.default_rng(index)
    thickness, tilt = rng.uniform(20, 80), rng.uniform(-8, 8, size=2)
    y, x = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    volume = np.zeros((slabs, side, side))
    for _ in range(6):
        cy, cx = rng.uniform(0, side, size=2)
        for z in range(slabs):
            dy, dx = y - cy - z * tilt[1] / 8, x - cx - z * tilt[0] / 8
            volume[z] += thickness / slabs * np.exp(-(dy**2 + dx**2) / 4)
    images = np.ones((foci, side, side))
    for f in range(foci):
        for z in range(slabs):
            images[f] -= volume[z] * 0.02 / (1 + abs(f / foci - z / slabs) * 4)
    params = np.zeros((), dtype=PARAMS_DTYPE)
    params["energy_keV"], params["thickness_A"] = 300.0, thickness
    params["tilt_x_mrad"], params["tilt_y_mrad"] = tilt
    return {
        "uid": index + 1,
        "params": params,
        "images": images.astype(np.float32),
        "volume": volume.astype(np.float32),
    }


def make_series(
    root: Path,
    *,
    train: int = 12,
    val: int = 3,
    test: int = 0,
    per_shard: int = 6,
    foci: int = 4,
    slabs: int = 4,
    side: int = 16,
) -> Path:
    """A committed data set with so many samples in each split."""
    fields = (
        FieldSpec(name="images", dtype="<f4", shape=(foci, side, side)),
        FieldSpec(name="volume", dtype="<f4", shape=(slabs, side, side)),
    )
    create_dataset(root, Header(dataset_id="fake-series", campaign_hash="fake", fields=fields))
    number = task = 0
    with ManifestWriter(root, epoch=1) as manifest:
        for split, count in (("train", train), ("val", val), ("test", test)):
            for first in range(0, count, per_shard):
                n = min(per_shard, count - first)
                with ShardWriter(
                    root,
                    shard_id=f"{task:016x}",
                    task=task,
                    campaign_hash="fake",
                    simulator="columns",
                    n=n,
                    fields=fields,
                    params_dtype=PARAMS_DTYPE,
                ) as shard:
                    add_gold(shard, index=0)
                    for row in range(n):
                        one = sample(number, foci=foci, slabs=slabs, side=side)
                        number += 1
                        arrays = {"images": one["images"], "volume": one["volume"]}
                        shard.write(row, uid=one["uid"], params=one["params"], arrays=arrays)
                    published = shard.publish()
                manifest.commit(published, split=split, producer={})
                task += 1
    return root
