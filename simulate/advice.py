"""What works but should be known before hours are spent: the warnings of a plan. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from exitwave.simulate.detector import flat_field_ripple
from exitwave.simulate.distributions import bounds
from exitwave.simulate.physics import chemical_symbol, wavelength_A

if TYPE_CHECKING:
    from exitwave.simulate.spec import CampaignSpec
    from exitwave.simulate.tasks import StructureSpec

__all__ = ["advice"]

# Where the antialias aperture cuts a transmission function, it rises above 1 around the atoms, and a narrow probe that
# stands there gains by it, most in thin crystals: with 20 mrad at 25 Å, aluminium on a grid of 0.25 Å holds 1.0008 of
# the beam, gold 1.04, uranium carbide 1.06. At 0.2 Å only uranium is left (1.015), at 0.19 Å none.
_COARSE_A, _HEAVY, _COARSE_FOR_HEAVY_A, _NARROW_mrad = 0.2, 83, 0.19, 15.0


def advice(spec: CampaignSpec, structures: list[StructureSpec]) -> Iterator[str]:
    """What works but should be known, one sentence each."""
    _, high_keV = bounds(spec.sampling.energy_keV)
    yield from _ripple_warning(spec, structures)
    yield from _grid_warnings(spec, structures)
    step = spec.scan.step_A
    field = step * max(spec.scan.shape)
    small = [s for s in structures if min(s.extent_yx_A) < field]
    if small:
        narrowest = min(small, key=lambda s: min(s.extent_yx_A))
        yield (
            f"{len(small)} structure(s) are scanned over {field:g} Å but repeat sooner, {narrowest.source} after "
            f"{min(narrowest.extent_yx_A):.1f} Å: patterns and label hold copies; cell.min_extent_A of "
            f"{math.ceil(field)} or a smaller scan.step_A would avoid it"
        )
    widest = bounds(spec.sampling.semiangle_mrad)[1] * 1e-3
    nyquist = wavelength_A(high_keV) / (4.0 * widest)
    if spec.sampling.touching_discs:  # lambda / (2 d), at any energy
        nyquist = min(s.reflection_d_A for s in structures) / 2.0
    if step > nyquist * 1.001:
        yield f"scan.step_A of {step:g} Å undersamples the probe: up to {nyquist:.2f} Å (lambda / 4 alpha) resolve it"
    strained = [s for s in structures if s.strain > 1e-6]
    if strained:
        worst = max(strained, key=lambda s: s.strain)
        yield f"{len(strained)} structure(s) are strained to be orthogonal, {worst.source} the most: {worst.strain:.2%}"


def _grid_warnings(spec: CampaignSpec, structures: list[StructureSpec]) -> Iterator[str]:
    """Grids too coarse for the heaviest atoms, and those that repeat with a crystal which does not."""
    semiangle_mrad = bounds(spec.sampling.semiangle_mrad)[1]
    coarse = {
        s.source: max(s.numbers)
        for s in structures
        if _too_coarse(
            max(e / n for e, n in zip(s.extent_yx_A, s.grid_yx(spec.grid), strict=True)), max(s.numbers), semiangle_mrad
        )
    }
    if coarse:
        source, number = max(coarse.items(), key=lambda one: one[1])
        yield (
            f"{len(coarse)} structure(s) on a grid of {spec.grid.sampling_A:g} Å, too coarse for them and a probe "
            f"of {semiangle_mrad:g} mrad ({source} has the heaviest, {chemical_symbol(number)}): the waves may hold "
            "more than the beam, and a sample whose patterns do is refused; grid.sampling_A of "
            f"{_COARSE_FOR_HEAVY_A if number >= _HEAVY else _COARSE_A:g} expected"
        )
    if spec.grid.commensurate and spec.phonons.count:
        yield "grid.commensurate gains nothing with phonons: displaced atoms repeat in no cell"


def _too_coarse(sampling_A: float, heaviest: int, semiangle_mrad: float) -> bool:
    """Whether patterns of more than the beam are to be expected."""
    heavy = heaviest >= _HEAVY and sampling_A > _COARSE_FOR_HEAVY_A + 1e-9
    return heavy or (semiangle_mrad >= _NARROW_mrad and sampling_A > _COARSE_A + 1e-9)


def _ripple_warning(spec: CampaignSpec, structures: list[StructureSpec]) -> Iterator[str]:
    """Supercells too small for the detector: points in q coarser than half a pixel print a ripple onto flat discs."""

    widths = [2.0 * spec.detector.max_q(wavelength_A(e)) for e in sorted(set(bounds(spec.sampling.energy_keV)))]
    found: dict[str, tuple[float, float, float]] = {}  # label -> ripple, 1 / L, Q
    for s in structures:
        rows = [
            (flat_field_ripple(extent, width / pixels, pixels), 1.0 / extent, width / pixels)
            for width in widths
            for extent, pixels in zip(s.extent_yx_A, spec.detector.shape, strict=True)
            if 1.0 / extent > width / pixels / 2.0 * (1.0 + 1e-9)
        ]
        if rows:
            found[f"{s.source} along [{' '.join(map(str, s.zone_axis))}]"] = max(rows)
    if not found:
        return
    labels = sorted(found, key=lambda label: -found[label][0])
    names = ", ".join(labels[:3]) + (f" and {len(labels) - 3} more" if len(labels) > 3 else "")
    ripple, point, pixel = found[labels[0]]
    enough = 2.0 * max(spec.detector.shape) / min(widths)
    yield (
        f"{len(labels)} structure(s) have a supercell too small for the detector's pixels ({names}): flat discs will "
        f"ripple by up to {100 * ripple:.0f} % along an axis. 1/L is {point:.4f} /Å, at most half a pixel, "
        f"Q/2 = {pixel / 2:.4f} /Å, expected; cell.min_extent_A of {math.ceil(10 * enough - 1e-6) / 10:g} does that, "
        "and leaves 8 % at most"
    )
