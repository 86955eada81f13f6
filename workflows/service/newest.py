"""The newest sample of a data set as pictures, drawn once for each shard that is committed."""

from __future__ import annotations

import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.errors import ExitwaveError
from exitwave.ingest.manifest import MANIFEST_NAME, load_manifest

__all__ = ["newest_pictures"]

_drawing = threading.Lock()  # one picture at a time: a page must not take the cores of a campaign


def newest_pictures(dataset: Path) -> dict[str, Any]:
    """`{uid, formula, pictures: [{caption, src}]}` of the shard committed last; empty where there is none."""
    if not (dataset / MANIFEST_NAME).exists():
        return {}
    try:
        shards = load_manifest(dataset).shards
        if not shards:
            return {}
        with _drawing:
            return dict(_draw(str(dataset), len(shards), shards[-1].shard_id))
    except (ExitwaveError, OSError, KeyError, ValueError):
        return {}


@lru_cache(maxsize=64)
def _draw(dataset: str, count: int, shard_id: str) -> dict[str, Any]:
    from exitwave.ingest.dataset import open_dataset
    from exitwave.workflows.figures import image_png

    data = open_dataset(dataset, threads=1)
    index = len(data) - 1
    sample = data[index]
    pictures = []
    if "cbed" in sample:
        pattern = np.asarray(sample["cbed"], dtype=float)
        centre = np.sqrt(np.maximum(pattern[tuple(n // 2 for n in pattern.shape[:-2])], 0))
        pictures.append(
            ("Diffraction pattern", centre, "inferno", float(sample["params"]["Q_sampling_y_per_A"]), "Å⁻¹")
        )
    if "potential" in sample:
        pixel = float(sample["params"]["potential_sampling_A"])
        pictures.append(("Projected potential", np.asarray(sample["potential"], dtype=float), "viridis", pixel, "Å"))
    drawn = []
    for caption, image, cmap, step, unit in pictures:
        limits = (float(image.min()), float(image.max()) or 1.0)
        drawn.append({"caption": caption, "src": image_png(image, pixel=step, unit=unit, limits=limits, cmap=cmap)})
    return {"uid": str(int(sample["uid"])), "index": index, "pictures": drawn}
