"""Which crystals a campaign has: their sources, zone axes, cells, and how they are divided into splits."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from exitwave.ingest.strict_model import StrictModel

__all__ = ["BuilderCall", "CellSpec", "SplitSpec", "StrongestAxes", "StructureSource", "ZoneAxes", "ZoneIndex"]


# A direction with larger indices has a period of hundreds of Å, which no cell of a sensible size holds.
ZoneIndex = Annotated[int, Field(ge=-50, le=50)]


ZoneAxes = Annotated[tuple[tuple[ZoneIndex, ZoneIndex, ZoneIndex], ...], Field(min_length=1)]


class BuilderCall(StrictModel):
    """A call of one of ASE's builders: `name` is a function of `ase.build` (bulk, nanotube, …)."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _plain(self) -> BuilderCall:
        try:
            json.dumps([self.args, self.kwargs], allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"args and kwargs: plain values and finite numbers expected ({error})") from None
        return self


class StrongestAxes(StrictModel):
    """Zone axes from the strongest kinematic reflections: the normals of the `strongest` families of planes whose
    spacing lies within `d_A`, in Å."""

    strongest: int = Field(ge=1, le=50)
    d_A: tuple[float, float] = (1.0, 5.0)

    @field_validator("d_A")
    @classmethod
    def _ordered(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0.3 <= value[0] < value[1] <= 100:
            raise ValueError(f"d_A: [least, largest] with 0.3 <= least < largest <= 100 expected, came {list(value)}")
        return value


class StructureSource(StrictModel):
    """One entry of `structures`: exactly one of library, cif, prototype, ase_db, builder, index.

    An `index` is a file of crystals that somebody has read and judged already (`structures/index.py`).
    """

    library: tuple[str, ...] | None = None
    cif: str | tuple[str, ...] | None = None
    prototype: str | None = None
    elements: tuple[str, ...] = ()
    a_A: float | None = Field(default=None, gt=0.5, lt=100)
    c_A: float | None = Field(default=None, gt=0.5, lt=100)
    ase_db: str | None = None
    select: str = ""
    builder: BuilderCall | None = None
    index: str | None = None
    zone_axes: ZoneAxes | StrongestAxes = ((0, 0, 1),)
    split: Literal["train", "val", "test"] | None = None
    # A file with places that are occupied in part is no crystal: rejected, or a seeded supercell with edges of at least
    # occupancy_extent_A is drawn from it.
    partial_occupancy: Literal["reject", "sample"] = "reject"
    occupancy_extent_A: float = Field(default=12.0, gt=0, le=200)

    @field_validator("library", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("zone_axes", mode="wrap")
    @classmethod
    def _one_form(cls, value: Any, handler: Any) -> Any:
        """Judged as the form that was written, so that an error speaks of that form only."""
        return StrongestAxes.model_validate(value) if isinstance(value, dict) else handler(value)

    @field_validator("zone_axes")
    @classmethod
    def _no_null_axis(cls, value: Any) -> Any:
        if isinstance(value, tuple) and any(axis == (0, 0, 0) for axis in value):
            raise ValueError("zone axis [0, 0, 0] has no direction; three integers, not all zero, expected")
        return value

    @model_validator(mode="after")
    def _one_kind(self) -> StructureSource:
        kinds = ("library", "cif", "prototype", "ase_db", "builder", "index")
        given = [kind for kind in kinds if getattr(self, kind) is not None]
        if len(given) != 1:
            came = ", ".join(given) or "none"
            raise ValueError(f"exactly one of {', '.join(kinds)} expected, came {came}")
        if self.prototype is not None and (self.a_A is None or not self.elements):
            raise ValueError("a prototype needs `elements` and `a_A` (the lattice parameter in Å)")
        if self.prototype is None and (self.a_A is not None or self.c_A is not None or self.elements):
            raise ValueError("elements, a_A and c_A belong to a `prototype`")
        if self.partial_occupancy == "sample" and self.cif is None and self.library is None:
            raise ValueError("partial_occupancy belongs to `cif` or `library`: no other source has occupancies")
        if self.select and self.ase_db is None:
            raise ValueError("`select` belongs to an `ase_db`")
        return self


class SplitSpec(StrictModel):
    """How structures are divided: an integer counts units (of one composition, prototype or structure), a fraction
    takes that part of them.

    `new_prototype` (prototypes) and `new_composition` (compositions of prototypes that are trained on) are two test
    sets in place of `test`. `stratify` takes each part from the crystal systems in proportion. `least_units`: fewer in
    training or in a part that was asked for are refused. `classes: space_group` is for classification: stratified by
    class, and classes with fewer than `least_compositions` compositions in training are rejected.
    """

    by: Literal["composition", "prototype", "structure"] = "composition"
    val: int | float = 0
    test: int | float = 0
    new_composition: int | float = 0
    new_prototype: int | float = 0
    stratify: Literal["crystal_system"] | None = None
    least_units: int = Field(default=1, ge=1)
    classes: Literal["space_group"] | None = None
    least_compositions: int = Field(default=3, ge=1)

    @model_validator(mode="after")
    def _one_kind(self) -> SplitSpec:
        if (self.new_composition or self.new_prototype) and (self.test or self.by != "composition"):
            raise ValueError("new_composition and new_prototype make the test sets: leave `test` and `by` away")
        if self.classes and (self.by != "composition" or self.new_composition or self.new_prototype):
            raise ValueError("classes: split by composition into val and test, so that every class can be tested")
        return self

    @field_validator("val", "test", "new_composition", "new_prototype")
    @classmethod
    def _part(cls, value: int | float) -> int | float:
        if value < 0 or (isinstance(value, float) and value >= 1):
            raise ValueError(f"a number of units (integer >= 0) or a fraction (0 <= f < 1) expected, came {value}")
        return value


class CellSpec(StrictModel):
    """The periodic supercell: tiled to at least `min_extent_A` along x and y.

    Two points of its reciprocal lattice should fit into a detector pixel (1 / extent <= pixel / 2), or flat discs show
    a ripple; the default does that for the default detector.
    """

    min_extent_A: float = Field(default=22.0, gt=0, le=2000)
    max_atoms: int = Field(default=20000, ge=1, le=10_000_000)
    max_strain: float = Field(default=0.01, ge=0, le=0.2)
