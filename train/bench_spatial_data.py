"""A data set of series and volumes without physics, to count what is read of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from exitwave.ingest.manifest import ManifestWriter, create_dataset
from exitwave.ingest.records import Header, StructureInfo
from exitwave.ingest.schema import PARAMS_DTYPE, FieldSpec
from exitwave.ingest.shard import ShardWriter

__all__ = ["make_volumes"]


def make_volumes(root: Path, *, samples: int, shape: tuple[int, int, int]) -> Path:
    """One committed shard of random `images` and `volume`, both of `shape`, in split train."""
    fields = tuple(FieldSpec(name=name, dtype="<f4", shape=shape) for name in ("images", "volume"))
    create_dataset(root, Header(dataset_id="bench-spatial", campaign_hash="bench", fields=fields))
    rng = np.random.default_rng(0)
    structure = StructureInfo(
        index=0, formula="Si", space_group=227, prototype_group=0, source="bench", licence="", sha256="0" * 64,
        zone_axis=(0, 0, 1),
    )  # fmt: skip
    with ManifestWriter(root, epoch=1) as manifest:
        with ShardWriter(
            root, shard_id="0" * 16, task=0, campaign_hash="bench", simulator="bench", n=samples, fields=fields,
            params_dtype=PARAMS_DTYPE,
        ) as shard:  # fmt: skip
            shard.add_structure(
                structure, numbers=np.array([14]), positions_A=np.zeros((1, 3)), cell_A=np.eye(3) * 5,
                pbc=np.ones(3, dtype=bool), wyckoff="a",
            )  # fmt: skip
            for row in range(samples):
                arrays = {field.name: rng.normal(size=shape).astype(np.float32) for field in fields}
                shard.write(row, uid=row + 1, params=np.zeros(1, dtype=PARAMS_DTYPE)[0], arrays=arrays)
            published = shard.publish()
        manifest.commit(published, split="train", producer={})
    return root
