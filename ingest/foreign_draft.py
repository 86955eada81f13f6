"""What a foreign file holds, and a first draft of the mapping file that would take it in.

The draft is a guess for a person to check: which array is the 4-D cube, its axes and calibrations from what EMD,
py4DSTEM and HyperSpy write beside it. What is not known is left out, and `notes` says so.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.errors import ExitwaveError
from exitwave.ingest.foreign import ForeignArray, ForeignFile, open_foreign

__all__ = ["ForeignReport", "describe_foreign"]

_LENGTH_A = {"å": 1.0, "a": 1.0, "ang": 1.0, "angstrom": 1.0, "nm": 10.0, "pm": 0.01, "um": 1e4, "µm": 1e4, "m": 1e10}
_ENERGY = ("beam_energy", "energy_kev", "energy", "accelerating_voltage", "voltage", "acceleration_voltage")
_ANGLE = ("convergence_angle", "semiangle_mrad", "probe_convergence_semiangle_mrad", "convergence_semiangle")


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """One axis as the file tells it; `where` is a path to its scale, for a map that fits many files."""

    name: str = ""
    scale: float | None = None
    unit: str = ""
    where: dict[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class ForeignReport:
    """`draft`: the mapping as plain values, empty where no array looks like measurements."""

    path: str
    kind: str
    arrays: tuple[ForeignArray, ...]
    draft: Mapping[str, Any]
    notes: tuple[str, ...]


def describe_foreign(path: Path) -> ForeignReport:
    """Looks at a file without reading its data. UsageError or DamagedDataError when it cannot be opened."""
    with open_foreign(path) as file:
        arrays = file.arrays()
        notes: list[str] = []
        draft = _draft(file, arrays, notes)
        if (
            "/Experiments" in file.groups()
            and len(names := {p.split("/")[2] for p in file.groups() if p.count("/") > 1}) == 1
        ):
            draft = _everywhere(draft, f"/Experiments/{names.pop()}/", "/Experiments/*/")  # titles differ between files
        return ForeignReport(path=str(path), kind=file.kind, arrays=tuple(arrays), draft=draft, notes=tuple(notes))


def _draft(file: ForeignFile, arrays: list[ForeignArray], notes: list[str]) -> dict[str, Any]:
    numbers = [a for a in arrays if a.dtype.kind in "fiu" and a.shape and "metadatabundle" not in a.path]
    cubes = [a for a in numbers if len(a.shape) in (4, 5) and min(a.shape[-2:]) > 1]
    fields: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    samples = None
    if cubes:
        cube = max(cubes, key=lambda a: int(np.prod(a.shape, dtype=np.int64)))
        axes = _axes(file, cube)
        names = _order(axes, len(cube.shape))
        samples = cube.shape[names.index("sample")] if "sample" in names else None
        fields["cbed"] = {"array": cube.path, "axes": names}
        if cube.dtype.kind in "iu":
            fields["cbed"]["normalise"] = "mean-pattern"
            notes.append("cbed: whole numbers, taken for counts: each sample is divided by its mean pattern sum.")
        _calibrations(names, axes, parameters, notes)
    label = next(
        (
            a
            for a in numbers
            if re.search("potential|label|phase|target", a.path, re.I) and len(a.shape) == (2 if samples is None else 3)
        ),
        None,
    )
    if label is not None:
        axes = _axes(file, label)
        fields["potential"] = {"array": label.path, "axes": ["sample"] * (samples is not None) + ["H", "W"]}
        step = axes[-1]
        if step.scale and step.unit.lower() in _LENGTH_A:
            parameters["potential_sampling_A"] = _value(step, _LENGTH_A[step.unit.lower()])
    if not fields:
        notes.append("no array looks like 4-D patterns or a label: write `fields:` by hand.")
        return {}
    _microscope(file, parameters)
    if "cbed" in fields:
        for name in ("energy_keV", "semiangle_mrad"):
            if name not in parameters:
                notes.append(f"{name}: found nowhere in the file; give it as a constant.")
    return {"name": file.path.stem, "fields": fields, "parameters": parameters, "split": "train"}


def _everywhere(value: Any, before: str, after: str) -> Any:
    """`value` with paths that begin with `before` beginning with `after`."""
    if isinstance(value, dict):
        return {k: _everywhere(v, before, after) for k, v in value.items()}
    return after + value.removeprefix(before) if isinstance(value, str) and value.startswith(before) else value


def _axes(file: ForeignFile, array: ForeignArray) -> list[_Axis]:
    """Names, scales and units of an array's axes: HyperSpy's `axis-N`, EMD's `dimN`, or xarray's dimensions."""
    parent = array.path.rpartition("/")[0]
    found = []
    first = 0
    with contextlib.suppress(ExitwaveError):
        file.array(f"{parent}/dim0")
        first = -1
    dimensions = array.attributes.get("_ARRAY_DIMENSIONS") or []
    for i in range(len(array.shape)):
        axis = _Axis(name=str(dimensions[i])) if len(dimensions) == len(array.shape) else _Axis()
        with contextlib.suppress(ExitwaveError, KeyError, TypeError, ValueError):
            attrs = file.attributes(f"{parent}/axis-{i}")
            place = {"attribute": f"{parent}/axis-{i}@scale"}
            axis = _Axis(name=str(attrs["name"]), scale=float(attrs["scale"]), unit=str(attrs["units"]), where=place)
        with contextlib.suppress(ExitwaveError, KeyError, TypeError, ValueError, IndexError):
            dim = file.array(f"{parent}/dim{i + 1 + first}")
            values = file.read(dim.path, (slice(0, 2),))
            axis = _Axis(
                name=str(dim.attributes.get("name", "")),
                scale=float(values[1] - values[0]),
                unit=re.sub(r"[\[\]_]", "", str(dim.attributes.get("units", ""))),
            )
        found.append(axis)
    return found


_KNOWN = {
    "ry": "Ry", "rx": "Rx", "qy": "Qy", "qx": "Qx", "y": "Ry", "x": "Rx", "ky": "Qy", "kx": "Qx",
    "dy": "Qy", "dx": "Qx", "scany": "Ry", "scanx": "Rx", "sample": "sample",
}  # fmt: skip


def _order(axes: list[_Axis], rank: int) -> list[str]:
    """Our names of the axes of a 4-D or 5-D array: those that the file tells where all are known, else by place."""
    told = [_KNOWN.get(re.sub("[^a-z]", "", axis.name.lower()), "") for axis in axes]
    by_place = ["sample"] * (rank - 4) + ["Ry", "Rx", "Qy", "Qx"]
    # py4DSTEM calls the rows of scan and detector x: its first axis is our y
    if [axis.name for axis in axes[-4:]] == ["Rx", "Ry", "Qx", "Qy"]:
        return by_place
    return told if sorted(told) == sorted(by_place) else by_place


def _calibrations(names: list[str], axes: list[_Axis], parameters: dict[str, Any], notes: list[str]) -> None:
    columns = {"Ry": "R_sampling_y_A", "Rx": "R_sampling_x_A", "Qy": "Q_sampling_y_per_A", "Qx": "Q_sampling_x_per_A"}
    for name, axis in zip(names, axes, strict=True):
        if name not in columns:
            continue
        unit = axis.unit.lower().replace(" ", "")
        factor = None
        if name[0] == "R":
            factor = _LENGTH_A.get(unit)
        else:
            inverse = re.fullmatch(r"\$?(?:1/([a-zåµ]+)|([a-zåµ]+)\^?\{?(?:-1|⁻¹)\}?)\$?", unit)
            length = _LENGTH_A.get((inverse[1] or inverse[2]) if inverse else "")
            factor = None if length is None else 1.0 / length
        if axis.scale and factor is not None:
            parameters[columns[name]] = _value(axis, factor)
        else:
            told = f"{axis.scale:g} {axis.unit}" if axis.scale else "nothing"
            notes.append(f"{columns[name]}: the file tells {told} of axis {name}; give it by hand.")


def _value(axis: _Axis, factor: float) -> Any:
    if axis.where is not None:
        return {**axis.where, **({"scale": factor} if factor != 1.0 else {})}
    return float(f"{(axis.scale or 0.0) * factor:.9g}")


def _microscope(file: ForeignFile, parameters: dict[str, Any]) -> None:
    """Energy and aperture by the names under which they usually stand, as attribute or as scalar array."""
    for place, name, value in _scalars(file):
        key = name.lower()
        if key in _ENERGY and "energy_keV" not in parameters and 1 < value < 1e7:
            factor = 1e-3 if value > 5000 else 1.0
            parameters["energy_keV"] = {**place, **({"scale": factor} if factor != 1.0 else {})}
        if key in _ANGLE and "semiangle_mrad" not in parameters and value > 0:
            parameters["semiangle_mrad"] = {**place, **({"scale": 1e3} if value < 0.2 else {})}


def _scalars(file: ForeignFile) -> list[tuple[dict[str, str], str, float]]:
    found: list[tuple[dict[str, str], str, float]] = []
    for path in file.groups():
        for name, value in file.attributes(path).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                found.append(({"attribute": f"{path}@{name}"}, name, float(value)))
    for array in file.arrays():
        if array.shape == () and array.dtype.kind in "fiu":
            with contextlib.suppress(ExitwaveError):
                found.append(({"array": array.path}, array.path.rpartition("/")[2], float(file.read(array.path))))
    return found
