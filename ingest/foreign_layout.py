"""How a sample lies in a foreign array, and how it becomes one of ours (pure but for the reading itself).

An array has the axes that its `FieldMap` names, in the order of the file. Sample `index` of tile (y, x) is a selection
along these axes; what is read is brought to the order of the field, mirrored, centred and scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from exitwave.ingest.errors import UsageError
from exitwave.ingest.foreign import ForeignFile
from exitwave.ingest.foreign_map import FieldMap, ValueFrom, order_of

__all__ = ["FieldLayout", "Piece", "field_layout", "read_piece", "tile_counts"]

Array = np.ndarray[Any, Any]
_LABEL_OF = {"H": "Ry", "W": "Rx"}  # label axes are cut together with the scan's


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One sample to be: of file number `file`, its `index` there, and the tile (along Ry, along Rx)."""

    file: int
    index: int
    tile: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True)
class FieldLayout:
    """One field in one file. `sizes`: axis -> size in the file; `parts`: axis -> size of a sample along it."""

    name: str
    path: str
    sizes: Mapping[str, int]
    parts: Mapping[str, int]
    order: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample, as stored by us."""
        return tuple(self.parts[axis] for axis in self.order)


def field_layout(
    file: ForeignFile, name: str, field: FieldMap, tile: Mapping[str, int], scan: Mapping[str, int]
) -> FieldLayout:
    """Checks an array against its map. `scan`: axis -> positions of the file's whole scan, by which labels are cut.

    UsageError naming file and path: another number of axes, `_` longer than one, a tile that does not fit.
    """
    array = file.array(field.array)
    where = f"{file.path}: {array.path}"
    if len(array.shape) != len(field.axes):
        raise UsageError(
            f"{where} has {len(array.shape)} axes {array.shape}, the map names {len(field.axes)}: "
            f"{', '.join(field.axes)}. `exitwave inspect {file.path}` shows the arrays."
        )
    if array.dtype.kind not in "fiub":
        raise UsageError(f"{where} holds {array.dtype}, expected real numbers.")
    sizes: dict[str, int] = {}
    for axis, size in zip(field.axes, array.shape, strict=True):
        if axis == "_" and size != 1:
            raise UsageError(f"{where}: an axis of length {size} is named `_`, which drops axes of length 1 only.")
        if axis != "_":
            sizes[axis] = size
    if 0 in array.shape:
        raise UsageError(f"{where} is empty: shape {array.shape}.")
    for axis, centre in field.centre.items():
        if not 0 <= centre < sizes[axis]:
            raise UsageError(f"{where}: centre {axis}: {centre}: expected a pixel of 0 to {sizes[axis] - 1}.")
    parts = {axis: size for axis, size in sizes.items() if axis != "sample"}
    for axis in parts:
        along = _LABEL_OF.get(axis, axis)
        if along in tile and (axis == along or along in scan):
            whole = scan[along]
            if tile[along] > whole:
                raise UsageError(f"{where}: a tile of {tile[along]} along {along}, and the scan has {whole} positions.")
            if sizes[axis] * tile[along] % whole:
                raise UsageError(
                    f"{where}: {sizes[axis]} pixels along {axis} over {whole} positions cannot be cut into tiles of "
                    f"{tile[along]}: {sizes[axis] * tile[along] / whole:g} pixels each."
                )
            parts[axis] = sizes[axis] * tile[along] // whole
    return FieldLayout(name=name, path=field.array, sizes=sizes, parts=parts, order=order_of(name, field.axes))


def tile_counts(tile: Mapping[str, int], scan: Mapping[str, int]) -> tuple[int, int]:
    """How many tiles along Ry and Rx; what is left over at the far edges is dropped."""
    along_y = scan["Ry"] // tile["Ry"] if "Ry" in tile and "Ry" in scan else 1
    along_x = scan["Rx"] // tile["Rx"] if "Rx" in tile and "Rx" in scan else 1
    return along_y, along_x


def read_piece(file: ForeignFile, field: FieldMap, layout: FieldLayout, piece: Piece) -> Array:
    """The values of one sample of one field, in its stored order and dtype.

    UsageError naming file, path and sample: not finite, negative intensity, out of the range of the dtype.
    """
    selection: list[Any] = []
    for axis in field.axes:
        if axis == "sample":
            selection.append(piece.index)
        elif axis == "_":
            selection.append(0)
        else:
            selection.append(_along(axis, field, layout, piece))
    raw = file.read(field.array, tuple(selection))
    left = [axis for axis in field.axes if axis not in ("sample", "_")]
    # (the file's order) -> (our order)
    raw = raw.transpose([left.index(axis) for axis in layout.order])
    for axis in field.flip:
        raw = np.flip(raw, layout.order.index(axis))
    for axis, centre in field.centre.items():
        raw = _centred(raw, layout.order.index(axis), centre)
    where = f"{file.path}: {field.array}, sample {piece.index}"
    if raw.dtype.kind == "f" and not np.isfinite(raw).all():
        bad = tuple(int(i) for i in np.argwhere(~np.isfinite(raw))[0])
        raise UsageError(
            f"{where}: holds values that are not finite, the first at {dict(zip(layout.order, bad, strict=True))}."
        )
    return _in_units(raw, file, field, layout, where)


def _along(axis: str, field: FieldMap, layout: FieldLayout, piece: Piece) -> slice:
    part, size = layout.parts[axis], layout.sizes[axis]
    number = piece.tile[0] if axis in ("Ry", "H") else piece.tile[1] if axis in ("Rx", "W") else 0
    start = number * part
    if axis in field.flip:  # tiles are counted along the mirrored axis
        start = size - start - part
    return slice(start, start + part)


def _centred(array: Array, axis: int, centre: int) -> Array:
    """Moves pixel `centre` to the middle [n//2]; what leaves is lost, what comes in is zero."""
    size = array.shape[axis]
    shift = size // 2 - centre
    moved = np.zeros_like(array)
    source = [slice(None)] * array.ndim
    target = [slice(None)] * array.ndim
    source[axis] = slice(max(0, -shift), size - max(0, shift))
    target[axis] = slice(max(0, shift), size - max(0, -shift))
    moved[tuple(target)] = array[tuple(source)]
    return moved


def _in_units(raw: Array, file: ForeignFile, field: FieldMap, layout: FieldLayout, where: str) -> Array:
    scale = field.scale
    if isinstance(scale, ValueFrom):
        found = np.asarray(file.value(scale.place)).reshape(-1)
        if found.size < 1 or found.dtype.kind not in "fiub":
            raise UsageError(f"{where}: its scale ({scale.place}) is {found.tolist()!r}, expected a number.")
        place, scale = scale.place, float(found[0]) * scale.scale + scale.offset
        if not np.isfinite(scale) or scale == 0:
            raise UsageError(f"{where}: its scale ({place}) is {scale}.")
    dtype = np.dtype(field.dtype).newbyteorder("<")
    plain = scale == 1.0 and field.offset == 0.0 and not field.normalise
    value = raw if plain else raw.astype(np.float64) * scale + field.offset
    if layout.name == "cbed" and value.size and value.min() < 0:
        if not field.clip_negative:
            raise UsageError(
                f"{where}: an intensity is negative ({value.min():.4g}). Intensities are never below zero; set "
                "clip_negative: true if that is noise around it."
            )
        value = np.maximum(value, 0)
    if field.normalise == "mean-pattern":
        # (Ry, Rx, Qy, Qx): the mean over positions of the sum over the detector becomes one
        positions = int(np.prod(value.shape[:-2], dtype=np.int64))
        total = float(value.sum(dtype=np.float64)) / max(positions, 1)
        if total <= 0:
            raise UsageError(f"{where}: has no intensity at all and cannot be normalised.")
        value = value / total
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if value.min() < limits.min or value.max() > limits.max or (value.dtype.kind == "f" and (value % 1).any()):
            raise UsageError(
                f"{where}: values of {value.min():g} to {value.max():g} are not all whole numbers of {dtype}."
            )
    elif value.size and max(abs(float(value.max())), abs(float(value.min()))) > np.finfo(dtype).max:
        raise UsageError(f"{where}: {value.max():g} is beyond {dtype}.")
    return np.ascontiguousarray(value, dtype=dtype)
