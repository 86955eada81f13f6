"""Small pictures of the newest sample, for whoever watches: a diffraction pattern, and what is to be learnt from it.

Bytes of grey levels, at most 128 a side, so that two of them fit into a message of some ten kilobytes. Whoever shows
them chooses the colours.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.shard_reader import ShardReader

__all__ = ["Picture", "grey", "newest_pictures"]

_MOST = 128  # pixels a side
_DECADES = 4.0  # of a diffraction pattern's brightness


@dataclass(frozen=True, kw_only=True)
class Picture:
    """`pixels` (h, w) uint8, row 0 at the top; `low` and `high` are the values of 0 and 255 in `unit`."""

    field: str
    title: str
    caption: str
    pixels: np.ndarray[Any, Any]
    low: float
    high: float
    unit: str

    def to_json(self) -> dict[str, Any]:
        return {
            "field": self.field,
            "title": self.title,
            "caption": self.caption,
            "shape": list(self.pixels.shape),
            "data": base64.b64encode(np.ascontiguousarray(self.pixels).tobytes()).decode(),
            "low": self.low,
            "high": self.high,
            "unit": self.unit,
        }


def newest_pictures(dataset: Path, shard_id: str) -> list[Picture]:
    """Pictures of the last sample of a shard: its patterns and labels; of other simulators, its first two fields."""
    with ShardReader(dataset / "shards" / shard_id[:2] / f"{shard_id}.h5") as shard:
        row = shard.n - 1
        known = [field for field in shard.fields if field.name in ("cbed", "potential")]
        chosen = known or [field for field in shard.fields if len(field.shape) >= 2][:2]
        uid = f"{int(shard.uids[row]):016x}"
        made = [_picture(field, shard.read(field.name, row)) for field in chosen]
        return [_named(picture, uid, _formula(shard, row)) for picture in made]


def _named(picture: Picture, uid: str, formula: str) -> Picture:
    caption = ", ".join(part for part in (formula, f"sample {uid}") if part)
    return Picture(**{**picture.__dict__, "caption": caption})


def _formula(shard: ShardReader, row: int) -> str:
    """Formula and zone axis where the sample is of a crystal."""
    params = shard.params
    if "structure" not in (params.dtype.names or ()):
        return ""
    info = shard.structure(int(params["structure"][row])).info
    return f"{info.formula} [{' '.join(map(str, info.zone_axis))}]" if info.formula else ""


def _picture(field: Any, values: np.ndarray[Any, Any]) -> Picture:
    """One plane of a field: of a scan the pattern in its middle, of a volume the slab in its middle."""
    for _ in range(values.ndim - 2):
        values = values[len(values) // 2]
    diffraction = field.name == "cbed"
    title = {"cbed": "Diffraction pattern", "potential": "Projected potential"}.get(field.name, field.name)
    plane = values.astype(np.float64)
    if not diffraction:
        pixels, low, high = grey(plane)
        return Picture(field=field.name, title=title, caption="", pixels=pixels, low=low, high=high, unit=field.unit)
    top = float(plane.max(initial=0.0)) or 1.0
    decades = np.log10(np.maximum(plane / top, 10.0**-_DECADES))
    pixels, low, high = grey(decades)
    unit = "decades of intensity"
    return Picture(field=field.name, title=title, caption="", pixels=pixels, low=low, high=high, unit=unit)


def grey(plane: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], float, float]:
    """(h, w) of any numbers as (≤128, ≤128) uint8, and the values of 0 and of 255. What is not finite is 0.

    Larger planes are averaged over whole blocks of pixels.
    """
    block = max(1, -(-max(plane.shape) // _MOST))
    rows, columns = (max(1, size // block) for size in plane.shape)
    if block > 1 and min(plane.shape) >= block:
        # (rows, block, columns, block) -> (rows, columns)
        cut = plane[: rows * block, : columns * block]
        plane = cut.reshape(rows, block, columns, block).mean(axis=(1, 3))
    finite = np.where(np.isfinite(plane), plane, np.nan)
    if not np.isfinite(finite).any():
        return np.zeros(plane.shape, np.uint8), 0.0, 0.0
    low, high = float(np.nanmin(finite)), float(np.nanmax(finite))
    scaled = (np.nan_to_num(finite, nan=low) - low) / ((high - low) or 1.0)
    return (255.0 * scaled).round().astype(np.uint8), low, high
