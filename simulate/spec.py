"""What a person asks for: a campaign of simulated experiments, as frozen and checked records.

A campaign is a list of structures, and one *recipe* by which samples are drawn from any of them. The recipe travels
with every task to the workers; the list of structures does not. Every physical field carries its unit in its name, and
each value is checked against the range in which it makes sense, with a hint at the usual slip of units.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from exitwave.ingest.strict_model import StrictModel
from exitwave.simulate.distributions import Distribution, bounds, parse
from exitwave.simulate.fan_out import FanOut
from exitwave.simulate.outputs import ImagesSpec, VolumeSpec
from exitwave.simulate.physics import atomic_number

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
    "StrongestAxes",
    "StructureSource",
]


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


# Least and largest value, unit, and what a value outside usually means.
_RANGES: dict[str, tuple[float, float, str, str]] = {
    "energy_keV": (1, 1000, "keV", "given in eV?"),
    "semiangle_mrad": (0.1, 150, "mrad", "given in rad or degrees?"),
    "defocus_A": (-1e5, 1e5, "Å", "given in pm?"),
    "C12_A": (0, 1e5, "Å", "given in pm?"),
    "C21_A": (0, 1e6, "Å", "given in pm?"),
    "C23_A": (0, 1e6, "Å", "given in pm?"),
    "C30_A": (-1e8, 1e8, "Å", "1 mm is 1e7 Å"),
    "C32_A": (0, 1e8, "Å", "1 mm is 1e7 Å"),
    "C34_A": (0, 1e8, "Å", "1 mm is 1e7 Å"),
    "C50_A": (-1e10, 1e10, "Å", "1 mm is 1e7 Å"),
    "tilt_x_mrad": (-100, 100, "mrad", "given in degrees?"),
    "tilt_y_mrad": (-100, 100, "mrad", "given in degrees?"),
    "thickness_A": (0.1, 1e5, "Å", "given in nm?"),
    "scan_rotation_deg": (-360, 360, "degrees", "given in mrad?"),
    "crystal_rotation_deg": (-360, 360, "degrees", "given in mrad?"),
    "source_fwhm_A": (0, 100, "Å", "given in pm?"),
    "scan_jitter_A": (0, 10, "Å", "given in pm?"),
    "phi12_deg": (-360, 360, "degrees", ""),
    "phi21_deg": (-360, 360, "degrees", ""),
    "phi23_deg": (-360, 360, "degrees", ""),
    "phi32_deg": (-360, 360, "degrees", ""),
    "phi34_deg": (-360, 360, "degrees", ""),
}


OriginA = Annotated[float, Field(ge=-1e5, le=1e5)]


class SamplingSpec(StrictModel):
    """The physical parameters of a sample, each a constant or a distribution.

    Aberrations follow abTEM's polar expansion; `defocus_A = -C10`, positive when the crossover lies downstream.
    `scan_origin` is `random` (anywhere in the cell, evenly) or [y, x] in Å. `thickness_A` is realised in whole slices
    of the structure: the number nearest to the value drawn, within the bounds of its distribution where one fits. Each
    sample records the thickness that was simulated. `touching_discs` takes lambda / (2 d) for the semi-angle, d the
    spacing of the reflection that gave the zone axis, in place of `semiangle_mrad`.

    `crystal_rotation_deg` turns the crystal in its plane against detector and scan. `source_fwhm_A` is the width of the
    source's image, at least two steps of the scan (or 0), and `scan_jitter_A` the standard deviation of a position
    along y and along x: both act in the simulation, for good.
    """

    energy_keV: Distribution = 200.0
    semiangle_mrad: Distribution = 15.0
    touching_discs: bool = False
    defocus_A: Distribution = 0.0
    C12_A: Distribution = 0.0
    phi12_deg: Distribution = 0.0
    C21_A: Distribution = 0.0
    phi21_deg: Distribution = 0.0
    C23_A: Distribution = 0.0
    phi23_deg: Distribution = 0.0
    C30_A: Distribution = 0.0
    C32_A: Distribution = 0.0
    phi32_deg: Distribution = 0.0
    C34_A: Distribution = 0.0
    phi34_deg: Distribution = 0.0
    C50_A: Distribution = 0.0
    tilt_x_mrad: Distribution = 0.0
    tilt_y_mrad: Distribution = 0.0
    thickness_A: Distribution = 50.0
    scan_rotation_deg: Distribution = 0.0
    crystal_rotation_deg: Distribution = 0.0
    source_fwhm_A: Distribution = 0.0
    scan_jitter_A: Distribution = 0.0
    scan_origin: Literal["random"] | tuple[OriginA, OriginA] = "random"

    @field_validator(*_RANGES, mode="before")
    @classmethod
    def _parsed(cls, value: Any) -> Any:
        return parse(value)

    @field_validator(*_RANGES)
    @classmethod
    def _in_range(cls, value: Distribution, info: Any) -> Distribution:
        low, high, unit, hint = _RANGES[info.field_name]
        for edge in bounds(value):
            if not low <= edge <= high:
                ask = f"; {hint}" if hint else ""
                raise ValueError(f"{edge:g}: expected {low:g}..{high:g} {unit}{ask}")
        return value

    @model_validator(mode="after")
    def _one_semiangle(self) -> SamplingSpec:
        if self.touching_discs and "semiangle_mrad" in self.model_fields_set:
            raise ValueError("touching_discs decides on the semi-angle: leave semiangle_mrad away, or touching_discs")
        return self

    def drawn(self) -> dict[str, Distribution]:
        """Parameter name -> distribution, without `scan_origin`."""
        return {name: getattr(self, name) for name in _RANGES}


class ScanSpec(StrictModel):
    """Probe positions: `shape` is (rows, columns) = (Ry, Rx), `step_A` the distance between neighbours."""

    shape: tuple[int, int] = (8, 8)
    step_A: float = Field(default=0.6, ge=0.001, le=100)

    @field_validator("shape")
    @classmethod
    def _positive(cls, value: tuple[int, int]) -> tuple[int, int]:
        return _positive_shape(value)


SliceThickness = Annotated[float, Field(gt=0.1, le=20)]


class GridSpec(StrictModel):
    """The grid of the wave function and the slices of the potential.

    `commensurate` takes whole points in every cell of a crystal that repeats across the beam, the next fast number at
    or below the wanted sampling. A crystal at rest then needs one cell's propagation for each beam (bloch.py). Without
    it the whole supercell has a fast number of points, which cells seldom divide.
    """

    sampling_A: float = Field(default=0.2, gt=0.005, le=1)
    commensurate: bool = False
    max_gpts: int = Field(default=1024, ge=16, le=8192)
    slice_thickness_A: SliceThickness | Literal["d_hkl"] = 2.0  # d_hkl: the spacing that gave the zone axis
    projection: Literal["infinite", "finite"] = "infinite"
    parametrization: Literal["lobato", "kirkland"] = "lobato"

    @model_serializer(mode="wrap")
    def _as_before(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What came later is written where it is used: uids and hashes of recipes without it stay as they were."""
        content: dict[str, Any] = handler(self)
        if not self.commensurate:
            content.pop("commensurate", None)
        return content


class DetectorSpec(StrictModel):
    """A detector of fixed shape. Its pixels are squares of `2 * max / shape` with zero frequency at [Qy//2, Qx//2]."""

    shape: tuple[int, int] = (32, 32)
    max_angle_mrad: float | None = Field(default=None, gt=0, le=1000)
    max_q_per_A: float | None = Field(default=None, gt=0, le=50)

    @field_validator("shape")
    @classmethod
    def _positive(cls, value: tuple[int, int]) -> tuple[int, int]:
        return _positive_shape(value)

    @model_validator(mode="after")
    def _one_extent(self) -> DetectorSpec:
        if (self.max_angle_mrad is None) == (self.max_q_per_A is None):
            raise ValueError("exactly one of max_angle_mrad and max_q_per_A expected")
        return self

    def max_q(self, wavelength_A: float) -> float:
        """Half the detector's width in 1/Å."""
        if self.max_q_per_A is not None:
            return self.max_q_per_A
        assert self.max_angle_mrad is not None
        return self.max_angle_mrad * 1e-3 / wavelength_A


RmsA = Annotated[float, Field(ge=0, le=1)]


class PhononSpec(StrictModel):
    """Frozen phonons: `count` displaced configurations (0: static atoms), `rms_A` along each axis.

    `rms_A` is one number for all atoms or one for each element, `{Ga: 0.08, As: 0.07}`, every element named.
    """

    count: int = Field(default=0, ge=0, le=1000)
    rms_A: RmsA | dict[str, RmsA] = 0.08

    @field_validator("rms_A")
    @classmethod
    def _elements(cls, value: float | dict[str, float]) -> float | dict[str, float]:
        for symbol in value if isinstance(value, dict) else ():
            atomic_number(symbol)
        return value


class LabelSpec(StrictModel):
    """The projected potential over exactly the scanned field. `blur_A` is the standard deviation of its Gaussian.

    `atoms`: where they rest, or the mean over the frozen phonons' configurations that the patterns are a mean of.
    """

    shape: tuple[int, int] = (32, 32)
    blur_A: float = Field(default=0.3, ge=0, le=10)
    atoms: Literal["static", "phonon-mean"] = "static"

    @field_validator("shape")
    @classmethod
    def _positive(cls, value: tuple[int, int]) -> tuple[int, int]:
        return _positive_shape(value)


def _positive_shape(value: tuple[int, int]) -> tuple[int, int]:
    if min(value) < 1 or max(value) > 4096:
        raise ValueError(f"two numbers in 1..4096 expected, came {list(value)}")
    return value


class StorageSpec(StrictModel):
    """How shards lie on disk. `compression` is lossless; it helps counts, and noise-free float32 hardly at all."""

    compression: Literal["", "bitshuffle-lz4", "blosc2-zstd"] = ""


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
