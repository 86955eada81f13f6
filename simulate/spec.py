"""What a person asks for: a campaign of simulated experiments, as frozen and checked records.

A campaign is a list of structures, and one *recipe* by which samples are drawn from any of them. The recipe travels
with every task to the workers; the list of structures does not. Every physical field carries its unit in its name, and
each value is checked against the range in which it makes sense, with a hint at the usual slip of units.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from exitwave.ingest.strict_model import StrictModel
from exitwave.simulate.fan_out import FanOut
from exitwave.simulate.outputs import ImagesSpec, VolumeSpec
from exitwave.simulate.spec_experiment import (
    DetectorSpec,
    GridSpec,
    LabelSpec,
    PhononSpec,
    SamplingSpec,
    ScanSpec,
    StorageSpec,
)
from exitwave.simulate.spec_structures import BuilderCall, CellSpec, SplitSpec, StrongestAxes, StructureSource

__all__ = [
    "BuilderCall",
    "CampaignSpec",
    "CellSpec",
    "DetectorSpec",
    "GridSpec",
    "LabelSpec",
    "PhononSpec",
    "Recipe",
    "SamplingSpec",
    "ScanSpec",
    "SplitSpec",
    "StorageSpec",
    "StrongestAxes",
    "StructureSource",
]


class Recipe(StrictModel):
    """How samples are drawn from any structure: all of a campaign but its structures, sizes and splits."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    cell: CellSpec = CellSpec()
    sampling: SamplingSpec = SamplingSpec()
    fan_out: FanOut = FanOut()
    scan: ScanSpec = ScanSpec()
    grid: GridSpec = GridSpec()
    # Within the antialias cutoff of the default grid (1.64 /Å) at any energy, which no fixed angle is.
    detector: DetectorSpec = DetectorSpec(max_q_per_A=1.5)
    phonons: PhononSpec = PhononSpec()
    label: LabelSpec = LabelSpec()
    fields: tuple[Literal["cbed", "potential"], ...] = ("cbed", "potential")
    # Each of these sections adds its own field.
    images: ImagesSpec | None = None
    volume: VolumeSpec | None = None
    # How a field of intensities is stored; readers give float32 values whatever it is.
    encoding: dict[Literal["cbed", "images"], Literal["sqrt-f2"]] = Field(default_factory=dict)
    storage: StorageSpec = StorageSpec()

    @model_validator(mode="after")
    def _fans_out(self) -> Recipe:
        for conflict in self.fan_out.conflicts(self.sampling.drawn()):
            raise ValueError(conflict)
        return self

    @model_validator(mode="after")
    def _square_label_pixels(self) -> Recipe:
        rows, columns = (n * self.scan.step_A / m for n, m in zip(self.scan.shape, self.label.shape, strict=True))
        if not math.isclose(rows, columns, rel_tol=1e-9):
            raise ValueError(
                f"label.shape {list(self.label.shape)} over scan.shape {list(self.scan.shape)} makes pixels of "
                f"{rows:g} x {columns:g} Å; the two shapes must be in one proportion"
            )
        return self

    @model_validator(mode="after")
    def _outputs(self) -> Recipe:
        if len(set(self.fields)) != len(self.fields):
            raise ValueError(f"fields: each name once expected, came {list(self.fields)}")
        if not self.array_fields:
            raise ValueError("fields: none, and neither images nor volume: a sample would hold nothing")
        if extra := [name for name in self.encoding if name not in self.array_fields]:
            raise ValueError(f"encoding: {extra[0]} is not among the fields {list(self.array_fields)}")
        if self.label.atoms == "phonon-mean" and not self.phonons.count:
            raise ValueError("label.atoms: phonon-mean needs phonons.count of at least 1")
        if self.images is not None and self.images.shape is not None:
            rows, columns = (n / m for n, m in zip(self.images.shape, self.label.shape, strict=True))
            if not math.isclose(rows, columns, rel_tol=1e-9):
                raise ValueError(
                    f"images.shape {list(self.images.shape)} and label.shape {list(self.label.shape)} must be in one "
                    "proportion: both cover the scanned field"
                )
        return self

    @property
    def array_fields(self) -> tuple[str, ...]:
        """The names of all fields of a sample, in their order."""
        images = ("images", "focus_A") if self.images is not None else ()
        return (*self.fields, *images, *(("volume",) if self.volume is not None else ()))

    @property
    def images_shape(self) -> tuple[int, int]:
        return (self.images.shape if self.images is not None else None) or self.label.shape

    @property
    def images_sampling_A(self) -> float:
        """Width of an image's pixel: the scanned field over the images' shape."""
        return self.scan.shape[0] * self.scan.step_A / self.images_shape[0]

    @property
    def label_sampling_A(self) -> float:
        """Width of a label's pixel: the scanned field over the label's shape."""
        return self.scan.shape[0] * self.scan.step_A / self.label.shape[0]


# Planning draws every sample, in about a third of a millisecond each: minutes for this many.
MAX_SAMPLES = 1_000_000


class CostSpec(StrictModel):
    """What is known of a large campaign's costs, so that `plan` need not measure and need not draw every sample.

    `us_per_probe_slice`: microseconds of one core for one probe through one slice on a grid of `grid` points squared;
    other grids count by their points. Staging: gigabytes a second that the shared file system gives to all nodes
    together, that one node takes in, and the gigabytes that a node's local disk holds, for each number of `nodes`.
    """

    us_per_probe_slice: float = Field(gt=0, le=1e9)
    grid: int = Field(default=512, ge=16, le=8192)
    shared_GB_per_s: float = Field(default=100.0, gt=0)
    node_GB_per_s: float = Field(default=2.0, gt=0)
    node_disk_GB: float = Field(default=1600.0, gt=0)
    nodes: tuple[Annotated[int, Field(ge=1, le=1_000_000)], ...] = (64, 256, 1024, 4096)
    drawn: int = Field(default=500, ge=10, le=20_000)


class CampaignSpec(Recipe):
    """A whole campaign: a recipe, the structures it is applied to, how many samples of each, and the splits.

    `samples_per_structure` and `samples_per_shard` count samples, whole passes of `fan_out` each. Where a shard of one
    structure would be too small, up to `structures_per_shard` share one, within `samples_per_shard`.
    """

    name: str = Field(min_length=1, max_length=200)
    structures: tuple[StructureSource, ...] = Field(min_length=1)
    split: SplitSpec = SplitSpec()
    samples_per_structure: int = Field(default=16, ge=1, le=MAX_SAMPLES)
    samples_per_shard: int = Field(default=16, ge=1, le=100_000)
    structures_per_shard: int = Field(default=1, ge=1, le=100_000)
    simulator: Literal["auto", "fast", "smatrix", "bloch", "abtem", "weak-phase"] = "auto"
    cost: CostSpec | None = None

    @model_validator(mode="after")
    def _reflections_where_needed(self) -> CampaignSpec:
        """What refers to the reflection of a zone axis needs axes that have one."""
        given = [k for k, source in enumerate(self.structures) if not isinstance(source.zone_axes, StrongestAxes)]
        for key, asked in (
            ("grid.slice_thickness_A: d_hkl", self.grid.slice_thickness_A == "d_hkl"),
            ("sampling.touching_discs", self.sampling.touching_discs),
        ):
            if asked and given:
                raise ValueError(
                    f"{key} needs the reflection of each zone axis: structures[{given[0]}].zone_axes: "
                    "{strongest: 5, d_A: [1, 5]} expected"
                )
        return self

    @model_validator(mode="after")
    def _fit_for_the_simulator(self) -> CampaignSpec:
        from exitwave.simulate.fitness import conflict

        if (reason := conflict(self, self.simulator)) is not None:
            raise ValueError(f"simulator: {reason}")
        return self

    @model_validator(mode="after")
    def _whole_passes(self) -> CampaignSpec:
        width = self.fan_out.width
        for name in ("samples_per_structure", "samples_per_shard"):
            came = getattr(self, name)
            if came % width:
                below = came // width * width
                either = f"{below} or {below + width}" if below else f"{width}"
                raise ValueError(
                    f"{name}: a multiple of {width} expected, the samples of one pass of fan_out, came {came}; "
                    f"{either} would do"
                )
        return self

    def recipe(self) -> Recipe:
        """The part of the campaign that travels to the workers."""
        return Recipe(**{name: getattr(self, name) for name in Recipe.model_fields})
