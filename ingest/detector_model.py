"""What an experiment's detector, source and scan make of noise-free patterns: pure functions, applied as data is read.

Data on disk stays noise-free. Each draw comes from a generator that the caller keys by what it is for, (purpose, seed,
epoch, uid), so that a sample looks the same on any rank and in any order, and different in every epoch. In their order,
for the patterns (Ry, Rx, Qy, Qx) of one sample, as fractions of the beam:

1. elliptical distortion: q -> R(phi) diag(exp(e/2), exp(-e/2)) R(-phi) q, e of deviation `ellipticity`, any phi;
2. descan: the pattern wanders with the probe, by a shift that is linear in its position and one that is constant, each
   of deviation `descan_pixels` at the ends of the scan. Both move intensity by the overlap of a pixel's square with the
   pixels that it comes to lie on, which keeps sum and centre of mass as long as nothing leaves the detector;
3. source and jitter: each pattern becomes a mean over the scan's positions, weighted by a Gaussian of full width
   `source_fwhm_A` about a position that is off by `scan_jitter_A` (deviation, along y and x). The scan's step must be
   at most half that width; positions beyond the scan are missing, and the weights of the others take their part;
4. background: `background` of the beam, evenly over the detector;
5. dose: Poisson counts at so many electrons of incident beam in a pattern, or on an Å² of the scan's grid;
6. transfer: every count spreads to its neighbours along y and x by (k, 1 - 2k, k), whose modulation transfer is
   1 - 2k + 2k cos(2 pi q): `mtf_nyquist` = 1 - 4k at the Nyquist frequency. At the edge it is reflected, so that counts
   are kept;
7. dead pixels: `dead_fraction` of the pixels, drawn for the sample, read nothing in all of its patterns.

At zero strength a step does nothing, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from exitwave.ingest.errors import UsageError

__all__ = [
    "DetectorModel",
    "descan_shifts",
    "detect",
    "distort",
    "electrons_per_pattern",
    "mix_positions",
    "shift_patterns",
    "transfer",
]

Array = npt.NDArray[np.floating[Any]]
Float32 = npt.NDArray[np.float32]
Draw = Callable[[str], np.random.Generator]


@dataclass(frozen=True, kw_only=True)
class DetectorModel:
    """Strengths of all effects; the defaults are none. At most one of the two doses is given."""

    dose_e_per_pattern: float | None = None
    dose_e_per_A2: float | None = None
    source_fwhm_A: float = 0.0
    scan_jitter_A: float = 0.0
    mtf_nyquist: float = 1.0
    background: float = 0.0
    ellipticity: float = 0.0
    descan_pixels: float = 0.0
    dead_fraction: float = 0.0

    def __post_init__(self) -> None:
        if self.dose_e_per_pattern is not None and self.dose_e_per_A2 is not None:
            raise UsageError("dose_e_per_pattern and dose_e_per_A2 are both given: at most one expected")
        for name in ("source_fwhm_A", "scan_jitter_A", "background", "ellipticity", "descan_pixels"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name}: {getattr(self, name)}, a number >= 0 expected")
        if not 0.0 <= self.mtf_nyquist <= 1.0:
            raise UsageError(f"mtf_nyquist: {self.mtf_nyquist}, 0..1 expected; 1 is a perfect detector")
        if not 0.0 <= self.dead_fraction < 1.0:
            raise UsageError(f"dead_fraction: {self.dead_fraction}, 0 <= f < 1 expected")
        if self.scan_jitter_A and not self.source_fwhm_A:
            raise UsageError(
                "scan_jitter_A without source_fwhm_A: between two positions there is nothing to read. Give a source, "
                "or simulate with jitter (sampling.scan_jitter_A)."
            )


def detect(cbed: Array, params: np.void, model: DetectorModel, draw: Draw) -> Float32:
    """What is recorded of the patterns `cbed` (Ry, Rx, Qy, Qx) [fraction of the beam]: counts, or fractions where no
    dose is given. `draw(purpose)` gives the sample's generator for a purpose; `params` is its record, for the scan's
    step. UsageError where the step is too wide for the source."""
    patterns: Array = np.asarray(cbed)
    if model.ellipticity:
        drawn = draw("ellipse")
        patterns = distort(patterns, model.ellipticity * drawn.standard_normal(), math.pi * drawn.random())
    if model.descan_pixels:
        shape = (patterns.shape[0], patterns.shape[1])
        patterns = shift_patterns(patterns, descan_shifts(shape, model.descan_pixels, draw("descan")))
    if model.source_fwhm_A:
        step = (float(params["R_sampling_y_A"]), float(params["R_sampling_x_A"]))
        patterns = mix_positions(patterns, step, model.source_fwhm_A, model.scan_jitter_A, draw("jitter"))
    if model.background:
        patterns = patterns + model.background / (patterns.shape[2] * patterns.shape[3])
    dose = electrons_per_pattern(model, params)
    if dose is not None:
        patterns = draw("dose").poisson(np.maximum(patterns, 0.0) * dose).astype(np.float32)
    if model.mtf_nyquist < 1.0:
        patterns = transfer(patterns, model.mtf_nyquist)
    if model.dead_fraction:
        patterns = patterns * (draw("dead").random(patterns.shape[2:]) >= model.dead_fraction)
    return np.ascontiguousarray(patterns, dtype=np.float32)


def electrons_per_pattern(model: DetectorModel, params: np.void) -> float | None:
    """The incident electrons of one pattern: as given, or those on the area between the scan's positions."""
    if model.dose_e_per_A2 is None:
        return model.dose_e_per_pattern
    return model.dose_e_per_A2 * float(params["R_sampling_y_A"]) * float(params["R_sampling_x_A"])


def distort(patterns: Array, log_ratio: float, angle: float) -> Array:
    """An ellipse for every circle: axes in the ratio exp(log_ratio), the longer at `angle` (rad) from x towards y."""
    qy, qx = patterns.shape[2:]
    y, x = np.meshgrid(np.arange(qy) - qy // 2, np.arange(qx) - qx // 2, indexing="ij")
    c, s = math.cos(angle), math.sin(angle)
    along, across = (x * c + y * s) * math.exp(log_ratio / 2), (y * c - x * s) * math.exp(-log_ratio / 2)
    to_y, to_x = along * s + across * c + qy // 2, along * c - across * s + qx // 2
    low_y, low_x = np.floor(to_y).astype(np.int64), np.floor(to_x).astype(np.int64)
    part_y, part_x = to_y - low_y, to_x - low_x
    flat = patterns.reshape(-1, qy * qx).astype(np.float64)
    out = np.zeros_like(flat)
    for dy, dx in ((0, 0), (0, 1), (1, 0), (1, 1)):
        weight = (part_y if dy else 1 - part_y) * (part_x if dx else 1 - part_x)
        inside = (low_y + dy >= 0) & (low_y + dy < qy) & (low_x + dx >= 0) & (low_x + dx < qx)
        target = ((low_y + dy) * qx + low_x + dx)[inside]
        held = inside.ravel()
        for pattern, made in zip(flat, out, strict=True):
            made += np.bincount(target, weights=pattern[held] * weight[inside], minlength=qy * qx)
    return out.reshape(patterns.shape)


def descan_shifts(scan: tuple[int, int], pixels: float, drawn: np.random.Generator) -> npt.NDArray[np.float64]:
    """Shifts (Ry, Rx, 2) as (y, x) in pixels: a constant, and what is linear in position, -1..1 over the scan."""
    constant, slopes = drawn.standard_normal(2), drawn.standard_normal((2, 2))
    y, x = (np.linspace(-1.0, 1.0, n) if n > 1 else np.zeros(1) for n in scan)
    return pixels * (constant + y[:, None, None] * slopes[0] + x[None, :, None] * slopes[1])


def shift_patterns(patterns: Array, shifts: npt.NDArray[np.float64]) -> Array:
    """Each pattern moved by its own (y, x) pixels; what leaves the detector is lost."""
    out = np.zeros(patterns.shape, dtype=np.float64)
    qy, qx = patterns.shape[2:]
    for i, j in np.ndindex(patterns.shape[:2]):
        y, x = shifts[i, j]
        low_y, low_x = math.floor(y), math.floor(x)
        for dy, weight_y in ((low_y, 1 - (y - low_y)), (low_y + 1, y - low_y)):
            for dx, weight_x in ((low_x, 1 - (x - low_x)), (low_x + 1, x - low_x)):
                if weight_y * weight_x > 0 and abs(dy) < qy and abs(dx) < qx:
                    target = out[i, j, max(0, dy) : qy + min(0, dy), max(0, dx) : qx + min(0, dx)]
                    source = patterns[i, j, max(0, -dy) : qy - max(0, dy), max(0, -dx) : qx - max(0, dx)]
                    target += weight_y * weight_x * source
    return out


def mix_positions(
    patterns: Array, step_yx_A: tuple[float, float], fwhm_A: float, jitter_A: float, drawn: np.random.Generator
) -> Array:
    """The patterns (Ry, Rx, …) of a source of this width, at positions off by `jitter_A`."""
    if max(step_yx_A) > fwhm_A / 2 * (1 + 1e-9):
        raise UsageError(
            f"source_fwhm_A of {fwhm_A:g} Å: the scan's step of {max(step_yx_A):g} Å is more than half of it, too few "
            f"positions to average over. At least {2 * max(step_yx_A):g} Å, or none, or simulate with a source "
            "(sampling.source_fwhm_A)."
        )
    ry, rx = patterns.shape[:2]
    y, x = np.meshgrid(np.arange(ry) * step_yx_A[0], np.arange(rx) * step_yx_A[1], indexing="ij")
    places = np.stack([y.ravel(), x.ravel()], axis=-1)  # (positions, 2)
    centres = places + jitter_A * drawn.standard_normal(places.shape) if jitter_A else places
    sigma = fwhm_A / (2.0 * math.sqrt(2.0 * math.log(2.0)))
    weights = np.exp(-((centres[:, None] - places[None]) ** 2).sum(axis=-1) / (2.0 * sigma**2))
    weights /= weights.sum(axis=1, keepdims=True)
    mixed: Array = (weights @ patterns.reshape(ry * rx, -1)).reshape(patterns.shape)
    return mixed


def transfer(patterns: Array, mtf_nyquist: float) -> Array:
    """Counts spread to their neighbours, by the modulation transfer `mtf_nyquist` at the Nyquist frequency."""
    k = (1.0 - mtf_nyquist) / 4.0
    spread: Array = patterns.astype(np.float64)
    for axis in (-2, -1):
        width = [(0, 0)] * spread.ndim
        width[axis] = (1, 1)
        padded = np.pad(spread, width, mode="symmetric")
        n = spread.shape[axis]
        before, after = (np.take(padded, np.arange(n) + start, axis=axis) for start in (0, 2))
        spread = (1.0 - 2.0 * k) * spread + k * (before + after)
    return spread
