"""What a shard holds: its fields, their axes and units, and the versions of the formats (contract of a data set).

Array axes are (y, x). `n` is the number of samples of a shard, (Ry, Rx) the scan axes, (Qy, Qx) the detector axes,
(H, W) the axes of the projected potential.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from exitwave.ingest.codecs import ENCODINGS

__all__ = [
    "MANIFEST_FORMAT",
    "MANIFEST_VERSION",
    "MAX_PHONON_ELEMENTS",
    "PARAMS_DTYPE",
    "PARAMS_SINCE_2",
    "RESERVED_NAMES",
    "SHARD_FORMAT",
    "SHARD_VERSION",
    "SHARD_VERSIONS_READ",
    "STANDARD_FIELDS",
    "TABLES",
    "FieldSpec",
]

SHARD_FORMAT = "exitwave-shard"
SHARD_VERSION = 2
# Version 1 had the same layout and fewer columns of /params (`PARAMS_SINCE_2`): readers take it as it is.
SHARD_VERSIONS_READ = (1, 2)
MANIFEST_FORMAT = "exitwave-manifest"
MANIFEST_VERSION = 1

# The small tables beside the array fields. `/params_crc32c` (n,) is to `/params` what `/crc32c` (n, fields) is to the
# array fields, whose names in the order of the columns stand in its attribute `fields`.
TABLES = ("uid", "params", "crc32c", "params_crc32c")

# No field and no column of one's own may be called so: what stands beside the fields in a shard, what a condition knows
# of a sample besides its parameters, and what exports call their axis of samples and their groups.
RESERVED_NAMES = frozenset({*TABLES, "structures", "sample", "formula", "source", "space_group", "datacube",
                            "metadatabundle"})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FieldSpec:
    """One array field of a sample.

    `shape` is the shape of one sample; in the shard the dataset has a leading axis of `n` samples. `axes` names each
    of the sample's axes, `unit` is the unit of the values. `dtype` is that of the stored numbers, which `encoding` and
    `scale` turn into values of `value_dtype` (see `codecs`); without an encoding they are the same.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[str, ...] = ()
    unit: str = ""
    meaning: str = ""
    encoding: str = ""
    scale: float = 1.0

    @property
    def value_dtype(self) -> np.dtype[Any]:
        """What readers give."""
        return np.dtype(ENCODINGS[self.encoding].value_dtype if self.encoding else self.dtype).newbyteorder("<")

    @property
    def nbytes(self) -> int:
        """Stored bytes of one sample, uncompressed."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.stored_dtype.itemsize

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """What the shard holds."""
        return np.dtype(self.dtype).newbyteorder("<")


STANDARD_FIELDS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "cbed": (
        ("Ry", "Rx", "Qy", "Qx"),
        "fraction of the incident beam",
        "diffraction intensity per probe position, noise-free; zero frequency at [Qy//2, Qx//2]",
    ),
    "potential": (
        ("H", "W"),
        "V Å",
        "projected potential from the entrance surface to the exit plane, blurred to label_blur_A; pixel [i, j] at "
        "scan_origin + R(scan_rotation - crystal_rotation)·(i, j)·potential_sampling",
    ),
    "images": (
        ("F", "H", "W"),
        "fraction of the incident beam",
        "through-focal series of the exit wave of a plane wave, noise-free; pixel [f, i, j] at focus_A[f] and "
        "scan_origin + R(scan_rotation - crystal_rotation)·(i, j)·images_sampling",
    ),
    "focus_A": (
        ("F",),
        "Å",
        "focus of each image, positive: the image shows a plane that far upstream of the exit surface (underfocus)",
    ),
    "volume": (
        ("Z", "H", "W"),
        "V Å",
        "potential in slabs of volume_slab_A from the entrance surface to the exit plane, blurred across the beam; the "
        "slabs add up to the projected potential, pixels as there",
    ),
}

# How many chemical elements of a structure may have an RMS displacement of their own.
MAX_PHONON_ELEMENTS = 8

# What version 2 added to /params; zero says that the thing was not there, as in all of version 1.
PARAMS_SINCE_2: list[tuple[str, str] | tuple[str, str, tuple[int]]] = [
    ("source_fwhm_A", "<f8"),  # full width at half maximum of the source's image on the specimen
    ("scan_jitter_A", "<f8"),  # standard deviation of a probe's position along y and along x
    ("scan_jitter_seed", "<u8"),
    ("phonon_elements", "u1", (MAX_PHONON_ELEMENTS,)),  # atomic numbers, ascending, then zeros
    ("phonon_element_rms_A", "<f8", (MAX_PHONON_ELEMENTS,)),  # along each axis, in the order of phonon_elements
    ("label_phonon_mean", "u1"),  # 1: potential and volume are means over the phonons' configurations
    ("reflection", "<i4", (3,)),  # (hkl) whose normal the zone axis follows; 0 where the axis was given
    ("reflection_d_A", "<f8"),
    ("volume_slab_A", "<f8"),
    ("images_sampling_A", "<f8"),
    ("images_aperture_mrad", "<f8"),  # of the objective; 0: none
    ("images_focal_spread_A", "<f8"),
    ("simulator", "S16"),  # which one made the sample: what `auto` chose
]

# Everything that makes a sample again. Aberrations follow one convention, that of abTEM's polar expansion
# (Kirkland, "Advanced Computing in Electron Microscopy", eq. 2.22 generalised): coefficients C_nm in Å, angles phi_nm
# in degrees, and defocus_A = -C10, positive when the crossover lies downstream of the entrance surface.
PARAMS_DTYPE = np.dtype(
    [
        ("energy_keV", "<f8"),
        ("semiangle_mrad", "<f8"),
        ("aperture_soft", "u1"),
        ("defocus_A", "<f8"),
        ("C12_A", "<f8"),
        ("phi12_deg", "<f8"),
        ("C21_A", "<f8"),
        ("phi21_deg", "<f8"),
        ("C23_A", "<f8"),
        ("phi23_deg", "<f8"),
        ("C30_A", "<f8"),
        ("C32_A", "<f8"),
        ("phi32_deg", "<f8"),
        ("C34_A", "<f8"),
        ("phi34_deg", "<f8"),
        ("C50_A", "<f8"),
        ("tilt_x_mrad", "<f8"),
        ("tilt_y_mrad", "<f8"),
        ("thickness_A", "<f8"),
        ("exit_plane", "<i4"),
        ("Q_sampling_y_per_A", "<f8"),
        ("Q_sampling_x_per_A", "<f8"),
        ("R_sampling_y_A", "<f8"),
        ("R_sampling_x_A", "<f8"),
        ("potential_sampling_A", "<f8"),
        ("scan_origin_y_A", "<f8"),
        ("scan_origin_x_A", "<f8"),
        ("scan_rotation_deg", "<f8"),
        ("crystal_rotation_deg", "<f8"),
        ("zone_axis", "<i4", (3,)),
        ("inplane_axis", "<i4", (3,)),
        ("strain", "<f8"),
        ("grid_y", "<i4"),
        ("grid_x", "<i4"),
        ("extent_y_A", "<f8"),
        ("extent_x_A", "<f8"),
        ("slice_thickness_A", "<f8"),
        ("projection", "S16"),
        ("parametrization", "S16"),
        ("antialias_cutoff", "<f8"),
        ("antialias_taper", "<f8"),
        ("phonon_count", "<i4"),
        ("phonon_seed", "<u8"),
        ("phonon_rms_A", "<f8"),
        ("captured_fraction", "<f8"),
        ("label_blur_A", "<f8"),
        ("label_bandlimit_per_A", "<f8"),
        ("space_group", "<i4"),
        ("prototype_group", "<u8"),
        ("structure", "<i4"),
        ("sample_index", "<i8"),
        ("split", "S16"),
        *PARAMS_SINCE_2,
    ]
)
