"""The mapping file of `exitwave ingest`: what each array of somebody's file is, and where its parameters stand.

    fields:
      cbed:
        array: /data                      # where it lies in each file
        axes: [sample, Qx, Qy, Rx, Ry]    # the file's axes in the file's order, by our names
        scale: 1.0e-4                     # value = stored · scale + offset
    parameters:
      energy_keV: 200                     # a constant, an attribute, or an array with one value a sample
      R_sampling_y_A: {attribute: /data@step_nm, scale: 10}
    split: train

`docs/formats.md` has a worked example for each kind of file.
"""

from __future__ import annotations

import re
from typing import Any, Literal, TypeAlias

import numpy as np
from pydantic import Field, field_validator, model_validator

from exitwave.ingest.schema import PARAMS_DTYPE, RESERVED_NAMES, STANDARD_FIELDS
from exitwave.ingest.strict_model import StrictModel

__all__ = ["FieldMap", "MapSpec", "SplitMap", "StructureMap", "ValueFrom", "order_of"]


_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


def _check_name(what: str, name: str) -> None:
    """ValueError unless `name` may stand in a shard, and in every format that samples leave in."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{what} {name!r}: expected a letter, then letters, digits and _, at most 64 in all")
    if name in RESERVED_NAMES:
        raise ValueError(f"{what} {name!r}: has a meaning of its own in a data set; choose another name")


class ValueFrom(StrictModel):
    """A value that stands in the file: `attribute: PATH@NAME`, or `array: PATH` (one value, or one a sample)."""

    attribute: str | None = None
    array: str | None = None
    scale: float = 1.0
    offset: float = 0.0

    @model_validator(mode="after")
    def _one_place(self) -> ValueFrom:
        if (self.attribute is None) == (self.array is None):
            raise ValueError("give either `attribute: PATH@NAME` or `array: PATH`")
        if self.attribute is not None and "@" not in self.attribute:
            raise ValueError(f"attribute: expected PATH@NAME, got {self.attribute!r}")
        return self

    @property
    def place(self) -> str:
        return self.attribute if self.attribute is not None else str(self.array)


Value: TypeAlias = float | int | str | tuple[float, ...] | ValueFrom
Text: TypeAlias = str | ValueFrom


def order_of(name: str, axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of a sample of field `name` in the order in which they are stored: (y, x) for the standard fields."""
    mine = tuple(axis for axis in axes if axis not in ("sample", "_"))
    standard = STANDARD_FIELDS[name][0] if name in STANDARD_FIELDS else mine
    return standard if sorted(standard) == sorted(mine) else mine


class FieldMap(StrictModel):
    """One field. `axes`: `sample` marks the axis along which samples follow each other, `_` one of length 1 to drop.

    `flip`: axes to reverse. `centre`: pixel of the zero frequency, moved to [Qy//2, Qx//2]. `normalise: mean-pattern`
    divides a sample by its mean sum over a pattern, for counts of unknown dose.
    """

    array: str
    axes: tuple[str, ...]
    flip: tuple[str, ...] = ()
    scale: float | ValueFrom = 1.0
    offset: float = 0.0
    normalise: Literal["", "mean-pattern"] = ""
    clip_negative: bool = False
    centre: dict[str, int] = Field(default_factory=dict)
    dtype: Literal["float32", "float64", "uint8", "uint16", "uint32", "int16", "int32"] = "float32"
    unit: str | None = None
    meaning: str | None = None

    @model_validator(mode="after")
    def _axes_fit(self) -> FieldMap:
        named = [axis for axis in self.axes if axis != "_"]
        if len(set(named)) != len(named) or not [a for a in named if a != "sample"]:
            raise ValueError(f"axes: expected each axis once and one besides `sample`, got {', '.join(self.axes)}")
        for axis in named:
            if not _NAME.fullmatch(axis):
                raise ValueError(f"axes: {axis!r}: expected a name of letters, digits and _")
        if self.scale == 0:
            raise ValueError("scale: 0 would leave nothing of the values")
        if "\0" in f"{self.array}{self.unit}{self.meaning}":
            raise ValueError("array, unit, meaning: expected texts without a zero byte")
        for what, given in (("flip", self.flip), ("centre", tuple(self.centre))):
            if unknown := [axis for axis in given if axis not in named or axis == "sample"]:
                raise ValueError(f"{what}: no axis {unknown[0]!r} in {', '.join(self.axes)}")
        return self


class AtomsMap(StrictModel):
    """Arrays of atoms: numbers (N,), positions_A (N, 3), cell_A (3, 3), each by its path."""

    numbers: str
    positions_A: str
    cell_A: str


class StructureMap(StrictModel):
    """What the specimen is; texts and numbers are constants or stand in the file."""

    formula: Text = "unknown"
    space_group: int | ValueFrom = 1
    zone_axis: tuple[int, int, int] = (0, 0, 1)
    source: Text = ""
    licence: Text = ""
    atoms: AtomsMap | None = None


class SplitMap(StrictModel):
    """One of: `by_file` (pattern of the file's name -> split, the first that fits), `fractions` (of the files, drawn by
    their names), `array` or `attribute` (a text in the file)."""

    by_file: dict[str, str] | None = None
    fractions: dict[str, float] | None = None
    array: str | None = None
    attribute: str | None = None

    @model_validator(mode="after")
    def _one_way(self) -> SplitMap:
        given = [w for w in ("by_file", "fractions", "array", "attribute") if getattr(self, w) is not None]
        if len(given) != 1:
            raise ValueError("give one of by_file, fractions, array, attribute")
        if self.fractions is not None and (
            min(self.fractions.values(), default=-1) < 0 or abs(sum(self.fractions.values()) - 1) > 1e-6
        ):
            raise ValueError(f"fractions: expected shares that sum to 1, got {self.fractions}")
        return self


class MapSpec(StrictModel):
    """A mapping file. `tile`: cuts a large scan into samples of so many positions, e.g. {Ry: 16, Rx: 16}.

    `columns` declares parameters of one's own (name -> f8, i4, S16 …) beside those of the contract.
    """

    name: str = "ingested"
    fields: dict[str, FieldMap]
    parameters: dict[str, Value] = Field(default_factory=dict)
    columns: dict[str, Literal["f8", "i4", "i8", "u8", "S8", "S16", "S32", "S64"]] = Field(default_factory=dict)
    split: str | SplitMap = "train"
    structure: StructureMap | None = None
    tile: dict[str, int] = Field(default_factory=dict)
    shard_bytes: int = 256 << 20
    compression: Literal["", "bitshuffle-lz4", "blosc2-zstd"] = ""

    @field_validator("parameters", mode="before")
    @classmethod
    def _vectors(cls, value: Any) -> Any:
        lists = isinstance(value, dict)
        return {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()} if lists else value

    @field_validator("fields")
    @classmethod
    def _some_fields(cls, value: dict[str, FieldMap]) -> dict[str, FieldMap]:
        if not value:
            raise ValueError("expected at least one field")
        for name in value:
            _check_name("field", name)
            if name in (PARAMS_DTYPE.names or ()):
                raise ValueError(f"field {name!r}: is the name of a parameter; choose another, such as {name}_map")
        return value

    @field_validator("columns")
    @classmethod
    def _own_columns(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            _check_name("column", name)
            if name in (PARAMS_DTYPE.names or ()):
                raise ValueError(f"column {name!r}: every sample has it already; give its value under `parameters:`")
        return value

    @model_validator(mode="after")
    def _known_names(self) -> MapSpec:
        import difflib

        if both := [name for name in self.columns if name in self.fields]:
            raise ValueError(f"columns: {both[0]} is the name of a field; choose another")
        known = set(PARAMS_DTYPE.names or ()) | set(self.columns)
        for name in self.parameters:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
                hint = f"did you mean {near[0]}?" if near else "declare your own under `columns:` (name: f8)."
                raise ValueError(f"parameters: {name} is not a parameter that samples have; {hint}")
        for axis, size in self.tile.items():
            if axis not in ("Ry", "Rx") or size < 1:
                raise ValueError(f"tile: expected positions along Ry and Rx, got {axis}: {size}")
            if not any(axis in field.axes for field in self.fields.values()):
                raise ValueError(f"tile: no field has an axis {axis}")
        if self.shard_bytes < 1:
            raise ValueError("shard_bytes: expected a size in bytes")
        return self

    @property
    def params_dtype(self) -> np.dtype[np.void]:
        """The columns of `/params`: the contract's, then one's own."""
        own = [(name, f"<{kind}" if kind[0] != "S" else kind) for name, kind in self.columns.items()]
        return np.dtype([*PARAMS_DTYPE.descr, *own])
