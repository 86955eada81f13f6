"""The samples as a rank of a mesh sees them: its tile of each image and volume, and nothing else is read.

Fields of two axes or more are cut along their last two, (H, W): along H into the tiles of the spatial ranks, and along
both where only the middle is trained on (`crop`). Smaller fields, uid and parameters are read whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from exitwave.ingest import ShardDataset
from exitwave.ingest.errors import UsageError
from exitwave.train.tile_store import Sample, TileStore

__all__ = ["TileReader", "TileView", "field_slices", "tile_bounds"]


def tile_bounds(rows: int, parts: int, *, halvings: int) -> tuple[int, ...]:
    """Where the tiles of `rows` rows begin and end, (parts + 1,), as even as they can be.

    Tiles are multiples of 2^halvings rows, or of the highest power below that gives every rank some, so that poolings
    by two need no rows of a neighbour.
    """
    while halvings and (rows % (1 << halvings) or rows >> halvings < parts):
        halvings -= 1
    units, size = rows >> halvings, 1 << halvings
    if units < parts:
        raise UsageError(f"mesh: {rows} rows of a sample cannot be split over {parts} ranks")
    return tuple(units * k // parts * size for k in range(parts + 1))


def field_slices(
    shape: tuple[int, ...], *, crop: int | None, spatial_rank: int, spatial_size: int, halvings: int
) -> tuple[slice, ...]:
    """This rank's part of a field, one slice for each axis. UsageError where the crop is larger than the field."""
    if len(shape) < 2:
        return (slice(None),) * len(shape)
    height, width = shape[-2:]
    side_y, side_x = (height, width) if crop is None else (crop, crop)
    if side_y > height or side_x > width:
        raise UsageError(f"series.crop: expected at most the {height} x {width} pixels of a sample, got {crop}")
    top, left = (height - side_y) // 2, (width - side_x) // 2
    bounds = tile_bounds(side_y, spatial_size, halvings=halvings)
    rows = slice(top + bounds[spatial_rank], top + bounds[spatial_rank + 1])
    return (*(slice(None) for _ in shape[:-2]), rows, slice(left, left + side_x))


class TileReader:
    """Reads this rank's tiles of one data set; `[i]` is a sample: fields, uid, params, `tile` and `copies`.

    `tile`: (first row, first column) of it in the stored field. `copies`: how many ranks share the sample.
    """

    def __init__(
        self, dataset: ShardDataset, *, crop: int | None, spatial_rank: int, spatial_size: int, halvings: int
    ) -> None:
        self._dataset = dataset
        shapes = {spec.name: spec.shape for spec in dataset.data.fields}
        self._slices = {
            name: field_slices(
                shapes[name], crop=crop, spatial_rank=spatial_rank, spatial_size=spatial_size, halvings=halvings
            )
            for name in dataset.fields
        }
        self._copies = spatial_size

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Sample:
        rest = self._dataset.data.read([index], ())
        sample: Sample = {name: self._dataset.read_tile(index, name, cut) for name, cut in self._slices.items()}
        corner = next((cut[-2].start or 0, cut[-1].start or 0) for cut in self._slices.values() if len(cut) > 1)
        return {**sample, "uid": rest["uid"][0], "params": rest["params"][0], "tile": corner, "copies": self._copies}


class TileView:
    """What the loader reads from. Batches (`__getitems__`) go through the store, where there is one; single samples,
    as validation asks for, are kept by the rank that read them."""

    def __init__(self, reader: TileReader, store: TileStore | None) -> None:
        self._reader = reader
        self.store = store
        self._singles: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, index: int) -> Sample:
        if self.store is None:
            return self._reader[index]
        if index not in self._singles:
            self._singles[index] = self._reader[index]
        found: Sample = self._singles[index]
        return found

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        if self.store is None:
            return [self._reader[i] for i in indices]
        return self.store.batch(indices)
