"""One sample as a file of the field: EMD 1.0 (emdfile, py4DSTEM) and `.hspy` (HyperSpy, RosettaSciIO), by HDF5.

EMD: `/<root>/datacube` is an array node with `data` and one vector of positions per dimension. py4DSTEM names the
first (row) axis of scan and detector x and the second y; the array itself is the same. As a DataCube the file is what
py4DSTEM itself writes (its calibration in the root's metadata, origin in pixels); as an Array any reader of EMD 1.0
opens it, without py4DSTEM installed.
hspy: one signal per field under `/Experiments`, axes in the order of the array, scan axes for navigation.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from exitwave.ingest.calibration import CalibratedAxis, axes_of, plain_params
from exitwave.ingest.schema import FieldSpec
from exitwave.ingest.shard import Structure

__all__ = ["ExportedSample", "write_emd", "write_hspy"]

Array = np.ndarray[Any, Any]
_LIBVER = ("earliest", "v110")
_METADATA = 1 << 18  # bytes: more than names, attributes and parameters of a sample take
_CHUNK = 1 << 20  # bytes: whole patterns together, as HyperSpy itself writes


@dataclass(frozen=True, kw_only=True)
class ExportedSample:
    """What goes into one file: `arrays` by field name, in the shape of `fields`; `units` of their values."""

    uid: int
    params: np.void
    arrays: Mapping[str, Array]
    fields: tuple[FieldSpec, ...]
    units: Mapping[str, str]
    structure: Structure | None
    provenance: Mapping[str, Any]

    @property
    def title(self) -> str:
        formula = self.structure.info.formula if self.structure is not None else "sample"
        return f"{formula} {self.uid:016x}"


@contextlib.contextmanager
def _reserved(path: Path, sample: ExportedSample) -> Iterator[Any]:
    """A new HDF5 file whose room on the disk is reserved before anything is written.

    HDF5 takes the whole process down when it meets a full disk at closing; reserving meets it first, as an OSError.
    Closing cuts the file to its true length.
    """
    nbytes = sum(array.nbytes for array in sample.arrays.values())
    atoms = 0 if sample.structure is None else 64 * sample.structure.numbers.size
    needed = nbytes + nbytes // 32 + atoms + _METADATA
    disk = os.statvfs(path.parent)
    if disk.f_bavail * disk.f_frsize < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    with h5py.File(path, "w", libver=_LIBVER):
        pass
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, needed)
    finally:
        os.close(fd)
    with h5py.File(path, "r+", libver=_LIBVER) as file:
        yield file


def write_emd(path: Path, sample: ExportedSample, *, datacube: bool = False) -> None:
    """An EMD 1.0 file at `path`. `datacube`: the four-dimensional field as a DataCube of py4DSTEM."""
    with _reserved(path, sample) as file:
        file.attrs["emd_group_type"] = "file"
        file.attrs["version_major"], file.attrs["version_minor"] = 1, 0
        file.attrs["authoring_program"] = "exitwave"
        file.attrs["UUID"] = f"{sample.uid:016x}"
        root = file.create_group("exitwave")
        root.attrs["emd_group_type"], root.attrs["python_class"] = "root", "Root"
        bundle = _emd_bundle(root)
        cube = next((f for f in sample.fields if len(f.shape) == 4), None)
        if cube is not None:
            calibration = _py4dstem_calibration(axes_of(cube, sample.params), sample.params)
            _emd_metadata(bundle, "calibration", calibration, "Calibration" if datacube else "Metadata")
        for field in sample.fields:
            name = "datacube" if field is cube else field.name
            node = _emd_array(root.create_group(name), field, sample, datacube=datacube and field is cube)
            mine = _emd_bundle(node)
            _emd_metadata(mine, "exitwave", {**plain_params(sample.params), **sample.provenance})
            if sample.structure is not None:
                _emd_metadata(mine, "structure", _structure_values(sample.structure))


def _emd_bundle(group: Any) -> Any:
    bundle = group.create_group("metadatabundle")
    bundle.attrs["emd_group_type"] = "metadatabundle"
    return bundle


def _emd_array(group: Any, field: FieldSpec, sample: ExportedSample, *, datacube: bool) -> Any:
    axes = axes_of(field, sample.params)
    group.attrs["emd_group_type"] = "array"
    group.attrs["python_class"] = "DataCube" if datacube else "Array"
    data = group.create_dataset("data", data=sample.arrays[field.name], track_times=False)
    data.attrs["units"] = sample.units[field.name]
    # A row is the x of py4DSTEM, a column its y, in real and in reciprocal space alike.
    names = (
        ("Rx", "Ry", "Qx", "Qy") if datacube else [field.axes[i] if field.axes else a.name for i, a in enumerate(axes)]
    )
    for i, (axis, name) in enumerate(zip(axes, names, strict=True)):
        vector = group.create_dataset(f"dim{i}", data=axis.values, track_times=False)
        vector.attrs["name"] = name
        vector.attrs["units"] = _EMD_UNIT[axis.unit]
    return group


_EMD_UNIT = {"Å": "A", "1/Å": "A^-1", "": "pixels"}


def _py4dstem_calibration(axes: tuple[CalibratedAxis, ...], params: np.void) -> dict[str, Any]:
    """What py4DSTEM calls it. It knows one pixel size for each space: that of the first axis."""
    scan, detector = axes[0], axes[2]
    values: dict[str, Any] = {
        "R_pixel_size": scan.scale,
        "R_pixel_units": _EMD_UNIT[scan.unit],
        "Q_pixel_size": detector.scale,
        "Q_pixel_units": _EMD_UNIT[detector.unit],
        "qx0_mean": float(axes[2].size // 2),  # pixels
        "qy0_mean": float(axes[3].size // 2),
        "QR_flip": False,
    }
    names = params.dtype.names or ()
    if "scan_rotation_deg" in names:
        values["QR_rotation_degrees"] = float(params["scan_rotation_deg"])
    if "semiangle_mrad" in names:
        values["probe_convergence_semiangle_mrad"] = float(params["semiangle_mrad"])
    # it has no names for these, but it keeps them, and of all metadata RosettaSciIO gives the calibration alone
    values |= {name: float(params[name]) for name in ("energy_keV", "defocus_A") if name in names}
    return values


def _emd_metadata(bundle: Any, name: str, values: Mapping[str, Any], python_class: str = "Metadata") -> None:
    group = bundle.create_group(name)
    group.attrs["emd_group_type"], group.attrs["python_class"] = "metadata", python_class
    for key, value in values.items():
        kind: str
        stored: Any
        if isinstance(value, bool):
            kind, stored = "bool", np.bool_(value)
        elif isinstance(value, str):
            kind, stored = "string", value.encode() or b" "
        elif isinstance(value, np.ndarray | list | tuple):
            kind, stored = "array", np.asarray(value)
        else:
            kind, stored = "number", np.asarray(value)
        dataset = group.create_dataset(key, data=stored, track_times=False)
        dataset.attrs["type"] = kind.encode()


def _structure_values(structure: Structure) -> dict[str, Any]:
    info = structure.info
    return {
        "formula": info.formula,
        "space_group": info.space_group,
        "zone_axis": list(info.zone_axis),
        "source": info.source,
        "licence": info.licence,
        "numbers": structure.numbers,
        "positions_A": structure.positions_A,
        "cell_A": structure.cell_A,
    }


def write_hspy(path: Path, sample: ExportedSample) -> None:
    """A HyperSpy file (format 3.3) at `path`, one signal for each field."""
    with _reserved(path, sample) as file:
        file.attrs["file_format"], file.attrs["file_format_version"] = "HyperSpy", "3.3"
        experiments = file.create_group("Experiments")
        for field in sample.fields:
            title = sample.title if len(sample.fields) == 1 else f"{sample.title} {field.name}"
            _hspy_signal(experiments.create_group(title.replace("/", "-")), field, sample, title)


def _hspy_signal(group: Any, field: FieldSpec, sample: ExportedSample, title: str) -> None:
    axes = axes_of(field, sample.params)
    array = sample.arrays[field.name]
    group.create_dataset("data", data=array, chunks=_chunks(array, axes), track_times=False)
    for i, axis in enumerate(axes):
        attrs = group.create_group(f"axis-{i}").attrs
        attrs["_type"] = "UniformDataAxis"
        attrs["name"], attrs["size"], attrs["units"] = axis.name, axis.size, axis.unit
        attrs["scale"], attrs["offset"] = axis.scale, axis.offset
        attrs["navigate"], attrs["is_binned"] = axis.navigate, False
    params = plain_params(sample.params)
    four = len(field.shape) == 4
    metadata = {
        "General": {"title": title, "original_filename": str(sample.provenance.get("shard", ""))},
        "Signal": {"signal_type": "electron_diffraction" if four else "", "quantity": sample.units[field.name]},
        "Sample": {"description": sample.title.rpartition(" ")[0]},
        "Acquisition_instrument": {
            "TEM": {
                "acquisition_mode": "STEM",
                "beam_energy": float(params.get("energy_keV", 0.0)),
                "convergence_angle": float(params.get("semiangle_mrad", 0.0)),
            }
        },
    }
    _hspy_group(group.create_group("metadata"), metadata)
    original: dict[str, Any] = {"exitwave": {**params, **sample.provenance}}
    if sample.structure is not None:
        original["structure"] = _structure_values(sample.structure)
    _hspy_group(group.create_group("original_metadata"), original)
    _hspy_group(group.create_group("attributes"), {"_lazy": False, "ragged": False})
    group.create_group("learning_results")


def _chunks(array: Array, axes: tuple[CalibratedAxis, ...]) -> tuple[int, ...]:
    """Whole signals, as many along the last scan axis as fit a chunk."""
    chunks = [1 if axis.navigate else axis.size for axis in axes]
    navigation = [i for i, axis in enumerate(axes) if axis.navigate]
    if navigation:
        signal = array.dtype.itemsize * int(np.prod(chunks, dtype=np.int64))
        chunks[navigation[-1]] = max(1, min(axes[navigation[-1]].size, _CHUNK // max(signal, 1)))
    return tuple(max(1, c) for c in chunks)


def _hspy_group(group: Any, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping):
            _hspy_group(group.create_group(key), value)
        elif isinstance(value, list | tuple):
            group.create_dataset(f"_list_{key}", data=np.asarray(value), track_times=False)
        elif isinstance(value, np.ndarray):
            chunks = value.shape if value.size else None  # lazy readers take no contiguous array, however small
            group.create_dataset(key, data=value, chunks=chunks, track_times=False)
        else:
            group.attrs[key] = "_None_" if value is None else value
