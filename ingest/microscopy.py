"""4D-STEM scans as microscopes write them: any format that RosettaSciIO reads (EMD, HyperSpy, MIB, DM4, MRC, …).

The array is opened lazily and read by the scan row, so that a file larger than memory is no obstacle. What the file
says of itself is brought to our units (Å, 1/Å, keV, mrad, degrees); what it does not say stays None, for somebody else
to give or to estimate. Arrays are (Ry, Rx, Qy, Qx): scan rows and columns, detector rows and columns. A file that says
which axes are of navigation is believed; of other files with four axes the first two are the scan's.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.errors import UsageError

__all__ = ["Scan4D", "open_scan"]

Array = np.ndarray[Any, Any]

_LENGTHS_A = {"å": 1.0, "a": 1.0, "angstrom": 1.0, "angstroms": 1.0, "nm": 10.0, "pm": 0.01, "µm": 1e4, "um": 1e4}
_FREQUENCIES_PER_A = {
    "1/å": 1.0, "1/a": 1.0, "a^-1": 1.0, "å^-1": 1.0, "a-1": 1.0, "å⁻¹": 1.0, "a^{-1}": 1.0, "å^{-1}": 1.0,
    "1/nm": 0.1, "nm^-1": 0.1, "nm-1": 0.1, "nm⁻¹": 0.1, "nm^{-1}": 0.1,
}  # fmt: skip
_HDF5 = ("h5", "hdf5")


@dataclass(frozen=True, kw_only=True)
class Scan4D:
    """A scan and what its file says of it; None where it says nothing.

    data: (Ry, Rx, Qy, Qx), sliced lazily; read it with `row`.
    scan_step_A, q_sampling_per_A: (y, x). q_sampling_mrad: where the detector is calibrated in angles.
    center: pixel of the zero frequency (y, x), fractions allowed.
    rotation_deg: of the scan against the detector, in the convention of our parameter `scan_rotation_deg`.
    """

    data: Any
    title: str
    scan_step_A: tuple[float, float] | None = None
    q_sampling_per_A: tuple[float, float] | None = None
    q_sampling_mrad: tuple[float, float] | None = None
    center: tuple[float, float] | None = None
    energy_keV: float | None = None
    semiangle_mrad: float | None = None
    defocus_A: float | None = None
    rotation_deg: float | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        ry, rx, qy, qx = self.data.shape
        return int(ry), int(rx), int(qy), int(qx)

    def block(self, rows: slice, columns: slice = slice(None)) -> Array:
        """Patterns of some positions: (rows, columns, Qy, Qx) float32."""
        return np.asarray(self.data[rows, columns], dtype=np.float32)

    def with_scan_shape(self, shape: tuple[int, int]) -> Scan4D:
        """The same patterns as a scan of another shape. Raises UsageError where the numbers do not fit."""
        ry, rx, qy, qx = self.shape
        if shape[0] * shape[1] != ry * rx:
            raise UsageError(f"--scan-shape: {shape[0]}x{shape[1]} positions, but the file holds {ry * rx} patterns")
        return replace(self, data=self.data.reshape((*shape, qy, qx)))


def open_scan(path: Path, *, scan_shape: tuple[int, int] | None = None) -> Scan4D:
    """Opens the one four-dimensional signal of a file; a stack of patterns needs `scan_shape`.

    Raises:
        UsageError: no such file, a format that RosettaSciIO does not read, no scan of patterns in it, or several.
    """
    signals = _read(path)
    scans = [s for s in signals if len(s["data"].shape) == 4 or (len(s["data"].shape) == 3 and scan_shape)]
    if not scans:
        shapes = ", ".join("x".join(str(n) for n in s["data"].shape) for s in signals) or "nothing"
        stack = any(len(s["data"].shape) == 3 for s in signals)
        hint = "; a stack of patterns needs --scan-shape ROWSxCOLUMNS" if stack else ""
        raise UsageError(f"{path}: a scan of patterns with four axes is expected, the file holds {shapes}{hint}")
    if len(scans) > 1:
        raise UsageError(f"{path}: one scan of patterns is expected, the file holds {len(scans)}; export one of them")
    scan = _described(scans[0], path)
    return scan if scan_shape is None else scan.with_scan_shape(scan_shape)


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        raise UsageError(f"{path}: no such file")
    try:
        import rsciio
    except ImportError:
        raise UsageError("reading microscopes' files needs RosettaSciIO: pip install 'exitwave[formats]'") from None
    extension = path.suffix.lower().lstrip(".")
    plugins = [p for p in rsciio.IO_PLUGINS if extension in {e.lower() for e in p["file_extensions"]}]
    if extension in _HDF5:  # several programs call their files so, HyperSpy and py4DSTEM among them
        general = [p for name in ("HSPY", "EMD") for p in rsciio.IO_PLUGINS if p["name"] == name]
        plugins = general + [p for p in plugins if p not in general]
    if not plugins:
        raise UsageError(f"{path}: RosettaSciIO reads no files called .{extension or '?'}; rename it if it is another")
    why = ""
    for plugin in plugins:
        try:
            return list(importlib.import_module(plugin["api"]).file_reader(str(path), lazy=True))
        except (MemoryError, KeyboardInterrupt):
            raise
        except Exception as error:  # readers raise whatever they stumble over
            why = why or f"{type(error).__name__}: {error}".splitlines()[0][:200]
    names = ", ".join(p["name"] for p in plugins)
    raise UsageError(f"{path}: not readable as {names} ({why})")


def _described(signal: Mapping[str, Any], path: Path) -> Scan4D:
    data, axes = signal["data"], list(signal["axes"])
    order = [i for i, a in enumerate(axes) if a.get("navigate")]
    if len(order) in (1, 2) and order != list(range(len(order))):
        order += [i for i in range(len(axes)) if i not in order]
        data, axes = data.transpose(order), [axes[i] for i in order]
    if data.ndim == 3:  # a stack: its one axis of navigation is no distance
        data, axes = data.reshape((1, *data.shape)), [{}, {}, *axes[1:]]
    step = _pair(axes[:2], _LENGTHS_A)
    frequency, angle = _pair(axes[2:], _FREQUENCIES_PER_A), _pair(axes[2:], {"mrad": 1.0, "rad": 1e3})
    scales = [float(a.get("scale", 1.0) or 1.0) for a in axes[2:]]
    offsets = [float(a.get("offset", 0.0) or 0.0) for a in axes[2:]]
    calibrated = (frequency or angle) and all(o < 0 for o in offsets)
    metadata, original = signal.get("metadata") or {}, signal.get("original_metadata") or {}
    ours = _at(original, "exitwave") or {}
    theirs = _at(original, "calibration") or {}
    return Scan4D(
        data=data,
        title=str(_at(metadata, "General", "title") or path.stem),
        scan_step_A=step,
        q_sampling_per_A=frequency,
        q_sampling_mrad=angle,
        center=(-offsets[0] / scales[0], -offsets[1] / scales[1]) if calibrated else None,
        energy_keV=_number(
            _at(metadata, "Acquisition_instrument", "TEM", "beam_energy"),
            ours.get("energy_keV"),
            theirs.get("energy_keV"),
        ),
        semiangle_mrad=_number(
            _at(metadata, "Acquisition_instrument", "TEM", "convergence_angle"),
            ours.get("semiangle_mrad"),
            theirs.get("probe_convergence_semiangle_mrad"),
        ),
        defocus_A=_number(ours.get("defocus_A"), theirs.get("defocus_A"), zero=True),
        rotation_deg=_number(ours.get("scan_rotation_deg"), theirs.get("QR_rotation_degrees"), zero=True),
    )


def _pair(axes: list[Any], units: Mapping[str, float]) -> tuple[float, float] | None:
    """Steps along two axes in the unit of `units`; None where either is not calibrated so."""
    found = []
    for axis in axes:
        unit = str(axis.get("units") or "").replace(" ", "").replace("$", "").lower()
        scale = float(axis.get("scale") or 0.0)
        if unit not in units or not math.isfinite(scale) or scale <= 0:
            return None
        found.append(scale * units[unit])
    return found[0], found[1]


def _at(tree: Any, *path: str) -> Any:
    for key in path:
        if not isinstance(tree, Mapping) or key not in tree:
            return None
        tree = tree[key]
    return tree


def _number(*candidates: Any, zero: bool = False) -> float | None:
    """The first that is a finite number; zero counts only where it may be meant."""
    for candidate in candidates:
        try:
            value = float(candidate)
        except (TypeError, ValueError):
            continue
        if math.isfinite(value) and (value > 0 or zero):
            return value
    return None
