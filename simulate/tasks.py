"""What is sent to a worker, and what it makes of it: structure, task, sample.

A `TaskSpec` makes exactly one shard. It carries one structure, the recipe and the indices of its samples; the samples
themselves are drawn where they are simulated, by the same pure function that the planner used to count them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from exitwave.ingest.records import StructureInfo
from exitwave.ingest.schema import MAX_PHONON_ELEMENTS, PARAMS_DTYPE, SHARD_VERSION, FieldSpec
from exitwave.simulate.distributions import bounds, draw, uniform_stream
from exitwave.simulate.label import label_bandlimit
from exitwave.simulate.outputs import fields_of
from exitwave.simulate.physics import (
    ANTIALIAS_CUTOFF,
    ANTIALIAS_TAPER,
    antialias_angle_mrad,
    atomic_number,
    cell_points,
    chemical_symbol,
    probe_radius_A,
    smooth_size,
    wavelength_A,
)
from exitwave.simulate.spec import GridSpec, Recipe

if TYPE_CHECKING:
    from exitwave.ingest.shard import ShardWriter
    from exitwave.simulate.simulator import Sample

__all__ = [
    "SampleSpec",
    "StructureSpec",
    "TaskSpec",
    "canonical_json",
    "draw_sample",
    "fields_of",
    "reject_sample",
    "rounded",
    "whole_slices",
]


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


def draw_sample(structure: StructureSpec, recipe: Recipe, sample_index: int, split: str) -> SampleSpec:
    """Sample number `sample_index` of a structure: a pure function of its arguments.

    What does not fan out is drawn by the number of the pass, and so is the same for all samples of one.
    """
    seed = recipe.seed
    drawn_by, parts = recipe.fan_out.numbers(sample_index)
    key = f"{structure.key}|{','.join(map(str, structure.zone_axis))}"
    values = {
        name: rounded(draw(d, seed=seed, structure_key=key, sample=drawn_by, name=name, part=parts.get(name, (0, 1))))
        for name, d in recipe.sampling.drawn().items()
    }
    if recipe.sampling.touching_discs:
        values["semiangle_mrad"] = rounded(1e3 * wavelength_A(values["energy_keV"]) / (2.0 * structure.reflection_d_A))
    if recipe.sampling.scan_origin == "random":
        y, x = (
            rounded(length * next(uniform_stream(seed, key, drawn_by, f"scan_origin_{axis}")))
            for axis, length in zip("yx", structure.extent_yx_A, strict=True)
        )
    else:
        y, x = recipe.sampling.scan_origin
    phonon_seed = 0
    if recipe.phonons.count:
        phonon_seed = int(next(uniform_stream(seed, key, drawn_by, "phonon_seed")) * 2**53)
    jitter_seed = 0
    if values["scan_jitter_A"]:
        jitter_seed = int(next(uniform_stream(seed, key, drawn_by, "scan_jitter_seed")) * 2**53)
    wanted = values.pop("thickness_A")
    return SampleSpec(
        structure=structure,
        recipe=recipe,
        sample_index=sample_index,
        split=split,
        values=values,
        exit_plane=whole_slices(wanted, structure.slice_thickness_A, bounds(recipe.sampling.thickness_A)),
        scan_origin_yx_A=(y, x),
        phonon_seed=phonon_seed,
        scan_jitter_seed=jitter_seed,
    )


def rounded(value: float) -> float:
    """Twelve digits: the last bits of a logarithm differ between C libraries, and a uid must not."""
    return float(f"{value:.12g}")


def whole_slices(wanted_A: float, slice_A: float, limits_A: tuple[float, float]) -> int:
    """The number of slices whose thickness is nearest to `wanted_A` and within `limits_A`; at least one.

    Where no whole number of slices falls within the limits (a constant thickness, say), the nearest.
    """
    nearest = max(1, round(wanted_A / slice_A))
    least = max(1, math.ceil(limits_A[0] / slice_A - 1e-9))
    most = math.floor(limits_A[1] / slice_A + 1e-9)
    return min(max(nearest, least), most) if least <= most else nearest


def reject_sample(spec: SampleSpec) -> str | None:
    """Why this draw cannot be simulated faithfully, or None. Rejected draws are counted, never drawn again."""
    radius = probe_radius_A(spec.values, spec.thickness_A)
    room = min(spec.structure.extent_yx_A) / 4.0
    if radius > room:
        least = 4.0 * radius
        return (
            f"the probe's radius of {radius:.1f} Å exceeds a quarter of the cell ({room:.1f} Å); "
            f"cell.min_extent_A of {math.ceil(least)} would hold it"
        )
    if (reason := _reject_outputs(spec)) is not None:
        return reason
    limit = antialias_angle_mrad(spec.values["energy_keV"], spec.grid_sampling_A)
    widest = 1e3 * spec.recipe.detector.max_q(spec.wavelength_A) * spec.wavelength_A
    if widest > limit:
        return (
            f"the detector reaches {widest:.1f} mrad, the grid's antialias cutoff is {limit:.1f} mrad; "
            f"grid.sampling_A of {spec.recipe.grid.sampling_A * limit / widest * 0.98:.3f} would do"
        )
    if spec.values["semiangle_mrad"] > widest:
        return (
            f"the aperture of {spec.values['semiangle_mrad']:.1f} mrad is wider than the detector ({widest:.1f} mrad)"
        )
    return None


def _reject_outputs(spec: SampleSpec) -> str | None:
    recipe = spec.recipe
    source, step = spec.values["source_fwhm_A"], recipe.scan.step_A
    if 0.0 < source < 2.0 * step * (1.0 - 1e-9):
        return (
            f"the source's image of {source:g} Å is less than twice the scan's step of {step:g} Å, too few positions "
            f"to average over; scan.step_A of {source / 2:g} would do"
        )
    if recipe.phonons.count and not isinstance(recipe.phonons.rms_A, float):
        elements = {int(number) for number in spec.structure.numbers}
        missing = elements - {atomic_number(symbol) for symbol in recipe.phonons.rms_A}
        if missing:
            return f"phonons.rms_A names no displacement for {', '.join(chemical_symbol(n) for n in sorted(missing))}"
        if len(elements) > MAX_PHONON_ELEMENTS:
            return f"{len(elements)} elements with displacements of their own, at most {MAX_PHONON_ELEMENTS} have room"
    if recipe.volume is not None and recipe.volume.slabs > spec.exit_plane:
        return (
            f"volume.slabs of {recipe.volume.slabs} for {spec.exit_plane} slices of "
            f"{spec.structure.slice_thickness_A:.3g} Å: there is nothing between slices; fewer slabs, a smaller "
            "grid.slice_thickness_A or a larger thickness_A"
        )
    if recipe.images is not None:
        passed = antialias_angle_mrad(spec.values["energy_keV"], spec.grid_sampling_A)
        passed = min(passed, recipe.images.aperture_mrad or passed)
        widest = 1e-3 * passed / spec.wavelength_A
        if recipe.images_sampling_A > 1.0 / (2.0 * widest) * (1.0 + 1e-9):
            return (
                f"images of {recipe.images_sampling_A:.3g} Å a pixel undersample a wave of {passed:.1f} mrad; "
                f"images.shape for {1.0 / (2.0 * widest):.3g} Å, or an images.aperture_mrad, would do"
            )
    return None


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """The work of one shard. `index` is its place in the plan; `shard_id` is the hash of what it makes."""

    index: int
    campaign_hash: str
    simulator: str
    structure: StructureSpec
    recipe: Recipe
    split: str
    sample_indices: tuple[int, ...]
    shard_id: str

    @property
    def task_id(self) -> str:
        return f"task-{self.index:06d}"

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.structure.source,)

    @property
    def fields(self) -> tuple[FieldSpec, ...]:
        return fields_of(self.recipe)

    @property
    def params_dtype(self) -> np.dtype[Any]:
        return PARAMS_DTYPE

    @property
    def compression(self) -> str:
        return self.recipe.storage.compression

    def uids(self) -> tuple[int, ...]:
        return tuple(sample.uid for sample in self.samples())

    def estimated_seconds(self) -> float:
        """On one core, by the model of the cost."""
        from exitwave.simulate.cost import estimate_seconds

        return sum(estimate_seconds(sample, self.simulator) for sample in self.samples())

    def prepare(self, dataset: Path) -> dict[str, str]:
        """Import the simulator, take the data set's wisdom. Returns versions."""
        from exitwave.simulate.simulator import prepared_simulator
        from exitwave.simulate.wisdom import use_wisdom

        simulator = prepared_simulator(self.simulator)
        use_wisdom(dataset)
        return {"simulator": self.simulator, "simulator_version": simulator.version}

    def simulate(self) -> Iterator[Sample]:
        """The samples, simulated, in order."""
        from exitwave.simulate.simulator import prepared_simulator

        return prepared_simulator(self.simulator).simulate(self.samples())

    def add_structures(self, writer: ShardWriter) -> None:
        """The crystal as simulated."""
        structure = self.structure
        numbers, positions, lengths = structure.tiled(1)
        writer.add_structure(
            structure.info(),
            numbers=numbers,
            positions_A=positions,
            cell_A=np.diag(lengths),
            pbc=np.ones(3, dtype=bool),
            wyckoff=structure.wyckoff,
        )

    def samples(self) -> tuple[SampleSpec, ...]:
        """The samples of this task, drawn anew; the same wherever this runs."""
        return tuple(draw_sample(self.structure, self.recipe, k, self.split) for k in self.sample_indices)


def shard_id_of(
    *,
    index: int,
    campaign_hash: str,
    simulator: str,
    split: str,
    fields: tuple[FieldSpec, ...],
    uids: tuple[int, ...],
) -> str:
    """128-bit hash (32 hex digits) of all that decides on the bytes of a shard."""
    content = {
        "version": SHARD_VERSION,
        "task": index,
        "campaign": campaign_hash,
        "simulator": simulator,
        "split": split,
        "fields": [[f.name, f.dtype, list(f.shape), f.encoding, f.scale] for f in fields],
        "uids": list(uids),
    }
    return hashlib.blake2b(canonical_json(content).encode(), digest_size=16).hexdigest()
