"""What a sample tells beside its patterns: labels of the potential, and images of the exit wave."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from exitwave.simulate.imaging import focal_images
from exitwave.simulate.label import project_label
from exitwave.simulate.scanning import in_cell_axes, lattice_rotation_deg
from exitwave.simulate.slices import Slices
from exitwave.simulate.tasks import SampleSpec

__all__ = ["focal_series", "potential_fields"]


def potential_fields(spec: SampleSpec, slices: Slices) -> dict[str, NDArray[np.float64]]:
    """The fields that are made of the potential: its projection (H, W) and its slabs (Z, H, W), in V Å."""
    recipe = spec.recipe
    made: dict[str, NDArray[np.float64]] = {}
    if recipe.volume is not None:
        made["volume"] = np.stack([_label(spec, slab) for slab in slices.slabs(recipe.volume.slabs)])
    if "potential" in recipe.fields:
        made["potential"] = _label(spec, slices.projected())
    return made


def _label(spec: SampleSpec, projected: NDArray[np.float64]) -> NDArray[np.float64]:
    """A sum of slices (x, y) at the label's pixels (H, W)."""
    recipe = spec.recipe
    return project_label(
        projected.T,  # (x, y) -> (y, x)
        spec.structure.extent_yx_A,
        shape=recipe.label.shape,
        sampling_A=recipe.label_sampling_A,
        origin_yx_A=spec.scan_origin_yx_A,
        rotation_deg=lattice_rotation_deg(spec.values),
        blur_A=recipe.label.blur_A,
        bandlimit_per_A=spec.label_bandlimit_per_A,
    )


def focal_series(spec: SampleSpec, spectrum: NDArray[np.complexfloating]) -> NDArray[np.float64]:
    """The through-focal series (F, H, W) of an exit wave's spectrum (Ny, Nx), over the scanned field."""
    recipe = spec.recipe
    assert recipe.images is not None
    return focal_images(
        spectrum,
        spec.structure.extent_yx_A,
        in_cell_axes(spec.values),
        spec.focus_A,
        shape=recipe.images_shape,
        sampling_A=recipe.images_sampling_A,
        origin_yx_A=spec.scan_origin_yx_A,
        rotation_deg=lattice_rotation_deg(spec.values),
        aperture_mrad=recipe.images.aperture_mrad,
        focal_spread_A=recipe.images.focal_spread_A,
    )
