"""The defocused scan of a sample that a data set holds, at the same dose: what `ptychography.py` reconstructs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from exitwave.simulate.detector import resampling
from exitwave.simulate.physics import antialias_angle_mrad, wavelength_A
from exitwave.simulate.simulator import get_simulator
from exitwave.simulate.spec import DetectorSpec, ScanSpec
from exitwave.simulate.tasks import SampleSpec
from exitwave.train.dense_scan import at_dose, check_same_experiment
from exitwave.train.keys import generator

# What a defocused, round probe has none of.
_NOTHING = ("C12_A", "C21_A", "C23_A", "C30_A", "C32_A", "C34_A", "C50_A", "tilt_x_mrad", "tilt_y_mrad")
_BLURRING = ("source_fwhm_A", "scan_jitter_A")


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The defocused scan: positions a side, overlap of neighbouring probes, dose of the data set's own scan."""

    positions: int
    overlap: float
    dose_e_per_pattern: float

    def step_A(self, field_A: float) -> float:
        return field_A / self.positions

    def defocus_A(self, field_A: float, semiangle_mrad: float) -> float:
        """By which the probe is as wide as the overlap asks for: diameter 2 α |defocus| = step / (1 - overlap)."""
        return self.step_A(field_A) / (1.0 - self.overlap) / (2e-3 * semiangle_mrad)


def field_A(scan: ScanSpec) -> float:
    if scan.shape[0] != scan.shape[1]:
        raise SystemExit(f"the driver scans squares; the data set's scan is {list(scan.shape)}")
    return scan.shape[0] * scan.step_A


def defocused(spec: SampleSpec, geometry: Geometry) -> SampleSpec:
    """The same sample in the defocused scan; the detector lies along the scan, which a round probe does not notice."""
    odd = [name for name in (*_NOTHING, *_BLURRING) if spec.values[name]]
    if odd or spec.recipe.phonons.count:
        raise SystemExit(f"the driver's probe has nothing but a defocus; the data set has {odd or ['phonons']}")
    recipe, extents = spec.recipe, spec.structure.extent_yx_A
    field = field_A(recipe.scan)
    # a trifle wider than the cell's own points, which then spread over one pixel
    pixel = 1.0001 / min(extents)
    sampling = max(length / points for length, points in zip(extents, spec.grid_yx, strict=True))
    energy = spec.values["energy_keV"]
    reach = 0.95 * antialias_angle_mrad(energy, sampling) * 1e-3 / wavelength_A(energy)
    half = int(reach / pixel)
    there = recipe.model_copy(
        update={
            "scan": ScanSpec(shape=(geometry.positions, geometry.positions), step_A=geometry.step_A(field)),
            "detector": DetectorSpec(shape=(2 * half, 2 * half), max_q_per_A=half * pixel),
            "fields": ("cbed",),
            "images": None,
            "volume": None,
            "encoding": {},
        }
    )
    values = {
        **spec.values,
        "defocus_A": geometry.defocus_A(field, spec.values["semiangle_mrad"]),
        "crystal_rotation_deg": spec.values["crystal_rotation_deg"] - spec.values["scan_rotation_deg"],
        "scan_rotation_deg": 0.0,
    }
    return replace(spec, recipe=there, values=values)


def vacuum_pattern(spec: SampleSpec) -> np.ndarray[Any, Any]:
    """The soft aperture of the simulation, as the detector sees it: (Q, Q), sum 1. A rim one point of the grid wide."""
    (ny, nx), (ly, lx) = spec.grid_yx, spec.structure.extent_yx_A
    ky, kx = np.fft.fftfreq(ny, d=ly / ny)[:, None], np.fft.fftfreq(nx, d=lx / nx)[None, :]
    k = np.hypot(ky, kx)
    along = np.arctan2(ky, kx)
    radius = spec.values["semiangle_mrad"] * 1e-3 / wavelength_A(spec.values["energy_keV"])
    aperture = np.clip((radius - k) / np.hypot(np.cos(along) / lx, np.sin(along) / ly) + 0.5, 0.0, 1.0)
    detector = resampling(
        (ny, nx),
        (ly, lx),
        spec.recipe.detector.shape,
        spec.q_sampling_yx_per_A,
        spec.values["crystal_rotation_deg"],
    )
    return detector(aperture**2) / (aperture**2).sum()


def experiment(
    spec: SampleSpec, sample: dict[str, Any], simulator: str, geometry: Geometry
) -> dict[str, np.ndarray[Any, Any]]:
    """One file of the peer: noisy counts of the defocused scan, and what an experimenter knows."""
    made = next(iter(get_simulator(simulator).simulate([spec])))
    here, there = sample["params"], made.params
    check_same_experiment(here, there, where="the defocused scan", but=("defocus_A",))
    noise = generator("dose-ptychography", 0, int(sample["uid"]))
    return {
        "counts": at_dose(made.arrays["cbed"], here, there, geometry.dose_e_per_pattern, noise),
        "vacuum": vacuum_pattern(spec),
        "energy_eV": np.array(1e3 * float(there["energy_keV"])),
        "defocus_A": np.array(float(there["defocus_A"])),
        "q_per_A": np.array(float(there["Q_sampling_y_per_A"])),
        "step_A": np.array(float(there["R_sampling_y_A"])),
        "thickness_A": np.array(float(there["thickness_A"])),
        "label_shape": np.array(sample["potential"].shape),
        "label_A": np.array(float(here["potential_sampling_A"])),
        "label_blur_A": np.array(float(here["label_blur_A"])),
    }
