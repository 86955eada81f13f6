"""Parameters, split and structure of foreign samples: constants of the map, or what stands in the file."""

from __future__ import annotations

import fnmatch
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from exitwave.ingest.errors import UsageError
from exitwave.ingest.foreign import ForeignFile, plain_value
from exitwave.ingest.foreign_map import MapSpec, SplitMap, Text, ValueFrom
from exitwave.ingest.records import StructureInfo

__all__ = ["FileStructure", "params_of_file", "splits_of_file", "structure_of_file"]

Array = np.ndarray[Any, Any]
# What a value cannot be in its unit; told apart from units mixed up.
_RANGES = {"energy_keV": (1.0, 5000.0, "given in eV?"), "semiangle_mrad": (0.0, 500.0, "given in degrees or rad?")}


@dataclass(frozen=True, kw_only=True)
class FileStructure:
    """The specimen of a file, and its atoms where the file has them (else None)."""

    info: StructureInfo
    numbers: Array
    positions_A: Array
    cell_A: Array


def _wrong(file: ForeignFile, key: str, place: str, what: str) -> UsageError:
    return UsageError(f"{file.path}: {place}, for {key}: {what}")


def params_of_file(file: ForeignFile, spec: MapSpec, n: int, structure: int) -> Array:
    """The records (n,) of the file's `n` samples, by the map; what the map does not give is zero."""
    params = np.zeros(n, dtype=spec.params_dtype)
    params["structure"] = structure
    for name, value in spec.parameters.items():
        if isinstance(value, ValueFrom):
            params[name] = _from_file(file, name, value, params.dtype[name], n)
        else:
            params[name] = _checked(value, params.dtype[name], f"parameters.{name}")
        if name in _RANGES:
            low, high, hint = _RANGES[name]
            column = params[name]
            if column.min() < low or column.max() > high:
                raise UsageError(
                    f"{file.path}: {name} is {column.min():g} to {column.max():g}, expected {low:g} to {high:g} "
                    f"({hint})."
                )
    return params


def _from_file(file: ForeignFile, name: str, value: ValueFrom, dtype: np.dtype[Any], n: int) -> Any:
    found = np.asarray(file.value(value.place))
    each = dtype.shape
    if found.shape in ((), (1,)) and not each:
        found = found.reshape(())
    elif found.shape not in (each, (n, *each)):
        raise _wrong(
            file,
            name,
            value.place,
            f"shape {found.shape}, expected one value{'' if n == 1 else f' or {n}'} of {each or '()'}.",
        )
    if dtype.base.kind != "S":
        if found.dtype.kind not in "fiub":
            raise _wrong(file, name, value.place, f"{plain_value(found)!r} is no number.")
        if value.scale != 1.0 or value.offset != 0.0:
            found = found.astype(np.float64) * value.scale + value.offset
        if not np.isfinite(found).all():
            raise _wrong(file, name, value.place, "not finite.")
        if dtype.base.kind in "iu" and found.dtype.kind == "f" and (found % 1).any():
            raise _wrong(file, name, value.place, f"{plain_value(found)} is no whole number.")
        return found
    texts = [t if isinstance(t, bytes) else str(t).encode() for t in found.reshape(-1).tolist()]
    if max(map(len, texts)) > dtype.itemsize:
        raise _wrong(file, name, value.place, f"a text is longer than {dtype.itemsize} bytes.")
    return np.array(texts, dtype=dtype).reshape(found.shape)


def _checked(value: Any, dtype: np.dtype[Any], key: str) -> Any:
    """A constant of the map, if the column can hold it."""
    if dtype.base.kind == "S":
        if not isinstance(value, str) or len(value.encode()) > dtype.itemsize:
            raise UsageError(f"{key}: expected a text of at most {dtype.itemsize} bytes, got {value!r}.")
        return value.encode()
    array = np.asarray(value)
    if array.dtype.kind not in "fiu" or array.shape != dtype.shape or not np.isfinite(array).all():
        raise UsageError(
            f"{key}: expected {'a number' if not dtype.shape else f'{dtype.shape[0]} numbers'}, got {value!r}."
        )
    if dtype.base.kind in "iu":
        limits = np.iinfo(dtype.base)
        if (array % 1).any() or array.min() < limits.min or array.max() > limits.max:
            raise UsageError(f"{key}: expected a whole number of {limits.min} to {limits.max}, got {value!r}.")
    return value


def splits_of_file(file: ForeignFile, split: str | SplitMap, n: int) -> list[str]:
    """The split of each of the file's `n` samples."""
    if isinstance(split, str):
        return [_split_name(split, file)] * n
    name = file.path.name
    if split.by_file is not None:
        for pattern, wanted in split.by_file.items():
            if fnmatch.fnmatch(name, pattern):
                return [_split_name(wanted, file)] * n
        raise UsageError(f"{file.path}: fits none of the patterns of split.by_file: {', '.join(split.by_file)}.")
    if split.fractions is not None:
        # of the file's name alone: the same file falls into the same split whatever comes beside it
        drawn = xxhash.xxh3_64_intdigest(name.encode()) / 2**64
        edge = 0.0
        for wanted, share in split.fractions.items():
            edge += share
            if drawn < edge:
                return [_split_name(wanted, file)] * n
        return [_split_name(list(split.fractions)[-1], file)] * n
    place = split.array or split.attribute or ""
    found = plain_value(np.asarray(file.value(place)))
    texts = [str(t) for t in found] if isinstance(found, list) else np.asarray(found).reshape(-1).tolist()
    texts = [t.decode() if isinstance(t, bytes) else str(t) for t in texts]
    if len(texts) not in (1, n):
        raise _wrong(file, "split", place, f"{len(texts)} values, expected one or {n}.")
    return [_split_name(t, file) for t in (texts * n if len(texts) == 1 else texts)]


def _split_name(name: str, file: ForeignFile) -> str:
    if not name.isidentifier() or len(name.encode()) > 16:
        raise UsageError(
            f"{file.path}: split {name!r}: expected a word of at most 16 letters, such as train, val, test."
        )
    return name


def structure_of_file(file: ForeignFile, spec: MapSpec, index: int) -> FileStructure | None:
    """The structure that the map describes, None where it describes none."""
    wanted = spec.structure
    if wanted is None:
        return None

    def text(value: Text) -> str:
        if not isinstance(value, ValueFrom):
            return value
        found = plain_value(file.value(value.place))
        return str(found[0] if isinstance(found, list) and len(found) == 1 else found)

    arrays: dict[str, Array] = {
        "numbers": np.zeros(0, "<i4"),
        "positions_A": np.zeros((0, 3)),
        "cell_A": np.zeros((3, 3)),
    }
    if wanted.atoms is not None:
        arrays = {name: np.asarray(file.read(getattr(wanted.atoms, name))) for name in arrays}
        count = arrays["numbers"].size
        shapes = {"numbers": (count,), "positions_A": (count, 3), "cell_A": (3, 3)}
        for name, shape in shapes.items():
            if arrays[name].shape != shape or not np.isfinite(arrays[name]).all():
                raise _wrong(
                    file,
                    "structure.atoms",
                    getattr(wanted.atoms, name),
                    f"shape {arrays[name].shape}, expected {shape}, finite.",
                )
    formula = text(wanted.formula)
    group = wanted.space_group
    space_group = int(file.value(group.place)) if isinstance(group, ValueFrom) else group
    digest = hashlib.sha256(formula.encode())
    for array in arrays.values():
        digest.update(np.ascontiguousarray(array, dtype="<f8").tobytes())
    known = formula not in ("", "unknown")
    return FileStructure(
        info=StructureInfo(
            index=index,
            formula=formula or "unknown",
            space_group=space_group,
            prototype_group=xxhash.xxh3_64_intdigest(f"{formula} {space_group}".encode()) if known else 0,
            source=text(wanted.source) or file.path.name,
            licence=text(wanted.licence),
            sha256=digest.hexdigest(),
            zone_axis=wanted.zone_axis,
        ),
        **arrays,
    )


def tiled_params(params: np.void, tile: tuple[int, int], sizes: Mapping[str, int]) -> np.void:
    """The parameters of one tile: its scan begins elsewhere on the specimen.

    Pixel (i, j) of a scan lies at scan_origin + R(scan_rotation - crystal_rotation)·(i, j)·R_sampling.
    """
    if tile == (0, 0):
        return params
    moved = params.copy()
    along_y = tile[0] * sizes.get("Ry", 0) * float(params["R_sampling_y_A"])
    along_x = tile[1] * sizes.get("Rx", 0) * float(params["R_sampling_x_A"])
    # the origin is told in the crystal's own frame
    angle = math.radians(float(params["scan_rotation_deg"]) - float(params["crystal_rotation_deg"]))
    moved["scan_origin_y_A"] += math.cos(angle) * along_y + math.sin(angle) * along_x
    moved["scan_origin_x_A"] += math.cos(angle) * along_x - math.sin(angle) * along_y
    return moved
