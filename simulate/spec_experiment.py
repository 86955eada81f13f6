"""The experiment: microscope, scan, grid, detector, phonons, labels and how they are stored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from exitwave.ingest.strict_model import StrictModel
from exitwave.simulate.distributions import Distribution, bounds, parse
from exitwave.simulate.physics import atomic_number

__all__ = ["DetectorSpec", "GridSpec", "LabelSpec", "PhononSpec", "SamplingSpec", "ScanSpec", "StorageSpec"]


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
        default = type(self).model_fields["semiangle_mrad"].default  # as a resolved file says it
        if self.touching_discs and self.semiangle_mrad != default:
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
