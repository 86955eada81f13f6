"""Which samples a structure has: drawn by keyed random numbers, and rejected where they would be wrong. Pure."""

from __future__ import annotations

import math

from exitwave.ingest.schema import MAX_PHONON_ELEMENTS
from exitwave.simulate.distributions import bounds, draw, uniform_stream
from exitwave.simulate.physics import (
    antialias_angle_mrad,
    atomic_number,
    chemical_symbol,
    probe_radius_A,
    wavelength_A,
)
from exitwave.simulate.samples import SampleSpec, StructureSpec
from exitwave.simulate.spec import Recipe

__all__ = ["draw_sample", "reject_sample", "rounded", "whole_slices"]


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
