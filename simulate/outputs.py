"""What a sample holds beside its patterns and label, as sections of a recipe, and how a shard lays all of it out.

`images` asks for a through-focal series of the exit wave of a plane wave (see `imaging`), `volume` for the potential in
slabs. Both cover exactly the scanned field, as the label does, so that everything in a sample is registered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, field_validator

from exitwave.ingest.codecs import ENCODINGS
from exitwave.ingest.encoding import LARGEST_VALUE, sqrt_scale
from exitwave.ingest.schema import STANDARD_FIELDS, FieldSpec
from exitwave.ingest.strict_model import StrictModel

if TYPE_CHECKING:
    from exitwave.simulate.spec import Recipe

__all__ = ["ImagesSpec", "VolumeSpec", "fields_of"]

FocusA = Annotated[float, Field(ge=-1e5, le=1e5)]


class ImagesSpec(StrictModel):
    """A through-focal series. `focus_A` are steps about the sample's own `defocus_A`, positive: underfocus.

    `shape` is that of the label unless given, over the same field. `aperture_mrad` is the objective's (none: null),
    `focal_spread_A` the standard deviation of the focus within one image.
    """

    focus_A: tuple[FocusA, ...] = Field(min_length=1, max_length=256)
    shape: tuple[int, int] | None = None
    aperture_mrad: float | None = Field(default=None, gt=0, le=150)
    focal_spread_A: float = Field(default=0.0, ge=0, le=1000)

    @field_validator("focus_A")
    @classmethod
    def _different(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if len(set(value)) != len(value):
            raise ValueError(f"each focus once expected, came {list(value)}")
        return value

    @field_validator("shape")
    @classmethod
    def _positive(cls, value: tuple[int, int] | None) -> tuple[int, int] | None:
        if value is not None and (min(value) < 1 or max(value) > 4096):
            raise ValueError(f"two numbers in 1..4096 expected, came {list(value)}")
        return value


class VolumeSpec(StrictModel):
    """The potential in `slabs` slabs of equal thickness from the entrance surface to the exit plane, label's pixels.

    A slice of the simulation that lies in two slabs is shared out by its overlap; the slabs add up to the label.
    """

    slabs: int = Field(ge=1, le=1024)


def fields_of(recipe: Recipe) -> tuple[FieldSpec, ...]:
    """The array fields of a sample: those of `fields` in their order, then `images`, `focus_A`, `volume`."""
    shapes: dict[str, tuple[int, ...]] = {
        "cbed": (*recipe.scan.shape, *recipe.detector.shape),
        "potential": recipe.label.shape,
    }
    if recipe.images is not None:
        count = len(recipe.images.focus_A)
        shapes |= {"images": (count, *recipe.images_shape), "focus_A": (count,)}
    if recipe.volume is not None:
        shapes["volume"] = (recipe.volume.slabs, *recipe.label.shape)
    encodings: dict[str, str] = {str(name): str(kind) for name, kind in recipe.encoding.items()}
    mean = recipe.label.atoms == "phonon-mean"
    return tuple(_field(name, shapes[name], encodings.get(name, ""), mean) for name in recipe.array_fields)


def _field(name: str, shape: tuple[int, ...], encoding: str, phonon_mean: bool) -> FieldSpec:
    axes, unit, meaning = STANDARD_FIELDS[name]
    if phonon_mean and name in ("potential", "volume"):
        meaning += "; mean over the frozen phonons' configurations"
    return FieldSpec(
        name=name,
        dtype=ENCODINGS[encoding].stored_dtype if encoding else "<f4",
        shape=shape,
        axes=axes,
        unit=unit,
        meaning=meaning,
        encoding=encoding,
        scale=sqrt_scale(LARGEST_VALUE[name]) if encoding else 1.0,
    )
