"""One structure as it is simulated, and one sample of it: what they are, and what stands of them in a shard."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from exitwave.ingest.records import StructureInfo
from exitwave.ingest.schema import MAX_PHONON_ELEMENTS, PARAMS_DTYPE
from exitwave.simulate.label import label_bandlimit
from exitwave.simulate.physics import (
    ANTIALIAS_CUTOFF,
    ANTIALIAS_TAPER,
    atomic_number,
    cell_points,
    smooth_size,
    wavelength_A,
)
from exitwave.simulate.spec import GridSpec, Recipe

__all__ = ["SampleSpec", "StructureSpec", "canonical_json"]


# Parameters that version 2 added; at zero they are not there.
_LATER = frozenset({"crystal_rotation_deg", "source_fwhm_A", "scan_jitter_A"})


def canonical_json(value: Any) -> str:
    """JSON with one spelling for one content: sorted keys, no spaces, shortest exact floats."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True, kw_only=True)
class StructureSpec:
    """One crystal along one zone axis: an orthogonal period, and how often it is laid side by side.

    `key` is the sha256 of the source's content; `index` is the place in the plan and takes part in no hash.
    `reflection` (hkl) of spacing `reflection_d_A` is what the zone axis was chosen by; zeros where it was given.
    Columns of `positions_A` and `lengths_A` are (x, y, z), z along the beam.
    """

    index: int
    key: str
    source: str
    licence: str
    formula: str
    space_group: int
    wyckoff: str
    prototype_group: int
    zone_axis: tuple[int, int, int]
    inplane_axis: tuple[int, int, int]
    strain: float
    numbers: tuple[int, ...]
    positions_A: tuple[tuple[float, float, float], ...]
    lengths_A: tuple[float, float, float]
    repeat_xy: tuple[int, int]
    slices: int
    reflection: tuple[int, int, int] = (0, 0, 0)
    reflection_d_A: float = 0.0

    @property
    def slice_thickness_A(self) -> float:
        return self.lengths_A[2] / self.slices

    @property
    def extent_yx_A(self) -> tuple[float, float]:
        """The supercell across the beam, (y, x)."""
        return self.lengths_A[1] * self.repeat_xy[1], self.lengths_A[0] * self.repeat_xy[0]

    def grid_yx(self, grid: GridSpec) -> tuple[int, int]:
        """Points of the grid, (y, x): the next fast size at or below the wanted sampling, of the supercell or, where
        the grid is to be commensurate, of each of its cells."""
        y, x = self.extent_yx_A
        if grid.commensurate:
            nx, ny = self.repeat_xy
            return ny * cell_points(y / ny / grid.sampling_A, ny), nx * cell_points(x / nx / grid.sampling_A, nx)
        return smooth_size(y / grid.sampling_A), smooth_size(x / grid.sampling_A)

    def info(self) -> StructureInfo:
        """The structure as shard and manifest tell of it."""
        return StructureInfo(
            index=self.index,
            formula=self.formula,
            space_group=self.space_group,
            prototype_group=self.prototype_group,
            source=self.source,
            licence=self.licence,
            sha256=self.key,
            zone_axis=self.zone_axis,
        )

    def tiled(self, repeat_z: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Numbers (m,), positions (m, 3) and lengths (3,) of the supercell, columns (x, y, z)."""
        nx, ny = self.repeat_xy
        cells = np.stack(np.meshgrid(np.arange(nx), np.arange(ny), np.arange(repeat_z), indexing="ij"), -1)
        lengths = np.asarray(self.lengths_A)
        shifts = cells.reshape(-1, 1, 3) * lengths
        positions = (np.asarray(self.positions_A)[None] + shifts).reshape(-1, 3)
        numbers = np.tile(np.asarray(self.numbers), nx * ny * repeat_z)
        return numbers, positions, lengths * np.array([nx, ny, repeat_z])


@dataclass(frozen=True, kw_only=True)
class SampleSpec:
    """One experiment, complete: the crystal and every physical value. `uid` is the hash of it."""

    structure: StructureSpec
    recipe: Recipe
    sample_index: int
    split: str
    values: Mapping[str, float]
    exit_plane: int
    scan_origin_yx_A: tuple[float, float]
    phonon_seed: int
    scan_jitter_seed: int = 0

    @property
    def thickness_A(self) -> float:
        """The thickness that is really simulated: whole slices to the exit plane."""
        return self.exit_plane * self.structure.slice_thickness_A

    @property
    def focus_A(self) -> tuple[float, ...]:
        """The focus of each image of the series: the recipe's steps about the sample's defocus."""
        images = self.recipe.images
        return tuple(self.values["defocus_A"] + step for step in images.focus_A) if images is not None else ()

    def phonon_rms_A(self, numbers: np.ndarray) -> np.ndarray:
        """RMS displacement along each axis of atoms of these atomic numbers (m,), Å. KeyError for one without."""
        rms = self.recipe.phonons.rms_A
        if isinstance(rms, float):
            return np.full(len(numbers), rms)
        by_number = {atomic_number(symbol): value for symbol, value in rms.items()}
        return np.array([by_number[int(number)] for number in numbers])

    @property
    def wavelength_A(self) -> float:
        return wavelength_A(self.values["energy_keV"])

    @property
    def q_sampling_yx_per_A(self) -> tuple[float, float]:
        """Width of a detector pixel, 1/Å."""
        max_q = self.recipe.detector.max_q(self.wavelength_A)
        rows, columns = self.recipe.detector.shape
        return 2.0 * max_q / rows, 2.0 * max_q / columns

    @property
    def grid_yx(self) -> tuple[int, int]:
        return self.structure.grid_yx(self.recipe.grid)

    @property
    def grid_sampling_A(self) -> float:
        """The coarser of the two samplings of the grid."""
        pairs = zip(self.structure.extent_yx_A, self.grid_yx, strict=True)
        return max(length / points for length, points in pairs)

    @property
    def label_bandlimit_per_A(self) -> float:
        return label_bandlimit(self.grid_sampling_A, self.recipe.label_sampling_A, ANTIALIAS_CUTOFF - ANTIALIAS_TAPER)

    @cached_property
    def uid(self) -> int:
        """64-bit hash of the content; neither the split nor any place in the plan takes part."""
        recipe = self.recipe
        content: dict[str, Any] = {
            "version": 1,
            "structure": self.structure.key,
            "zone_axis": self.structure.zone_axis,
            "cell": [recipe.cell.min_extent_A, recipe.cell.max_strain],
            "grid": recipe.grid.model_dump(exclude={"max_gpts"}),
            "scan": recipe.scan.model_dump(),
            "detector": recipe.detector.model_dump(),
            "label": recipe.label.model_dump(exclude={"atoms"}),
            "phonons": recipe.phonons.model_dump(),
            "phonon_seed": self.phonon_seed,
            "values": {name: value for name, value in self.values.items() if value != 0.0 or name not in _LATER},
            "exit_plane": self.exit_plane,
            "scan_origin": self.scan_origin_yx_A,
        }
        # What came later takes part where it is used, so that samples without it keep their uid.
        if recipe.label.atoms != "static":
            content["label_atoms"] = recipe.label.atoms
        if recipe.images is not None:
            content["images"] = recipe.images.model_dump()
        if recipe.volume is not None:
            content["volume"] = recipe.volume.model_dump()
        if self.scan_jitter_seed:
            content["scan_jitter_seed"] = self.scan_jitter_seed
        if recipe.grid.slice_thickness_A == "d_hkl":
            content["reflection"] = self.structure.reflection
        digest = hashlib.blake2b(canonical_json(content).encode(), digest_size=8, person=b"exitwave-uid-1").digest()
        return int.from_bytes(digest, "little")

    def params(self, *, captured_fraction: float) -> np.void:
        """The sample's row of `/params`."""
        structure, recipe = self.structure, self.recipe
        row = np.zeros(1, dtype=PARAMS_DTYPE)
        for name, value in self.values.items():
            row[name] = value
        q_y, q_x = self.q_sampling_yx_per_A
        given: dict[str, Any] = {
            "aperture_soft": 1,
            "thickness_A": self.thickness_A,
            "exit_plane": self.exit_plane,
            "Q_sampling_y_per_A": q_y,
            "Q_sampling_x_per_A": q_x,
            "R_sampling_y_A": recipe.scan.step_A,
            "R_sampling_x_A": recipe.scan.step_A,
            "potential_sampling_A": recipe.label_sampling_A,
            "scan_origin_y_A": self.scan_origin_yx_A[0],
            "scan_origin_x_A": self.scan_origin_yx_A[1],
            "zone_axis": structure.zone_axis,
            "inplane_axis": structure.inplane_axis,
            "strain": structure.strain,
            "reflection": structure.reflection,
            "reflection_d_A": structure.reflection_d_A,
            "grid_y": self.grid_yx[0],
            "grid_x": self.grid_yx[1],
            "extent_y_A": structure.extent_yx_A[0],
            "extent_x_A": structure.extent_yx_A[1],
            "slice_thickness_A": structure.slice_thickness_A,
            "projection": recipe.grid.projection.encode(),
            "parametrization": recipe.grid.parametrization.encode(),
            "antialias_cutoff": ANTIALIAS_CUTOFF,
            "antialias_taper": ANTIALIAS_TAPER,
            "phonon_count": recipe.phonons.count,
            "phonon_seed": self.phonon_seed,
            **self._phonon_params(),
            "scan_jitter_seed": self.scan_jitter_seed,
            "label_phonon_mean": recipe.label.atoms == "phonon-mean",
            "volume_slab_A": self.thickness_A / recipe.volume.slabs if recipe.volume is not None else 0.0,
            "captured_fraction": captured_fraction,
            "label_blur_A": recipe.label.blur_A,
            "label_bandlimit_per_A": self.label_bandlimit_per_A,
            "space_group": structure.space_group,
            "prototype_group": structure.prototype_group,
            "structure": structure.index,
            "sample_index": self.sample_index,
            "split": self.split.encode(),
        }
        if recipe.images is not None:
            given["images_sampling_A"] = recipe.images_sampling_A
            given["images_aperture_mrad"] = recipe.images.aperture_mrad or 0.0
            given["images_focal_spread_A"] = recipe.images.focal_spread_A
        for name, value in given.items():
            row[name] = value
        record: np.void = row[0]
        return record

    def _phonon_params(self) -> dict[str, Any]:
        """`phonon_rms_A` over all atoms, and each element's own where the recipe tells them apart."""
        if not self.recipe.phonons.count:
            return {"phonon_rms_A": 0.0}
        numbers = np.asarray(self.structure.numbers)
        given: dict[str, Any] = {"phonon_rms_A": float(np.sqrt((self.phonon_rms_A(numbers) ** 2).mean()))}
        if not isinstance(self.recipe.phonons.rms_A, float):
            elements = np.unique(numbers)
            padding = (0, MAX_PHONON_ELEMENTS - len(elements))
            given["phonon_elements"] = np.pad(elements, padding)
            given["phonon_element_rms_A"] = np.pad(self.phonon_rms_A(elements), padding)
        return given
