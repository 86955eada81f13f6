"""Axes of a sample's fields as other programs want them: name, scale, offset, unit, navigation or signal.

Arrays stay as they are stored, (y, x). Scan axes begin at 0 Å: pixel [0, 0] of scan and label is the same point of the
specimen, whose place and rotation stand among the parameters. The detector's zero frequency lies at [Qy//2, Qx//2].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from exitwave.ingest.schema import FieldSpec

__all__ = ["CalibratedAxis", "axes_of", "plain_params"]


@dataclass(frozen=True, kw_only=True)
class CalibratedAxis:
    """Pixel `i` lies at `offset + i·scale`, in `unit` ("Å", "1/Å" or "" for a plain index)."""

    name: str
    size: int
    scale: float
    offset: float
    unit: str
    navigate: bool

    @property
    def values(self) -> np.ndarray[Any, Any]:
        """The positions of all pixels (size,)."""
        return self.offset + np.arange(self.size) * self.scale


_SCAN = {"Ry": ("y", "R_sampling_y_A"), "Rx": ("x", "R_sampling_x_A")}
_DETECTOR = {"Qy": ("ky", "Q_sampling_y_per_A"), "Qx": ("kx", "Q_sampling_x_per_A")}
_DEPTH = {"Z": ("z", "volume_slab_A")}
_IMAGE = {"H": ("y", "potential_sampling_A"), "W": ("x", "potential_sampling_A")}


def axes_of(field: FieldSpec, params: Mapping[str, Any] | np.void) -> tuple[CalibratedAxis, ...]:
    """One axis for each dimension of a sample of `field`, calibrated from the sample's parameters."""
    names = params.dtype.names or () if isinstance(params, np.void) else tuple(params)
    four = len(field.shape) == 4

    def value(column: str) -> float:
        found = float(params[column]) if column in names else 0.0
        return found if np.isfinite(found) and found > 0 else 0.0

    axes = []
    for i, size in enumerate(field.shape):
        axis = field.axes[i] if i < len(field.axes) else f"axis{i}"
        shown, column = {**_SCAN, **_DETECTOR, **_IMAGE, **_DEPTH}.get(axis, (axis, ""))
        if field.name == "images" and axis in _IMAGE:
            column = "images_sampling_A"
        scale = value(column)
        unit = ("1/Å" if axis in _DETECTOR else "Å") if scale else ""
        offset = -(size // 2) * scale if axis in _DETECTOR and scale else 0.0
        navigate = axis in _SCAN if four else axis not in _IMAGE and i < len(field.shape) - 2
        axes.append(
            CalibratedAxis(name=shown, size=size, scale=scale or 1.0, offset=offset, unit=unit, navigate=navigate)
        )
    return tuple(axes)


def plain_params(params: np.void) -> dict[str, Any]:
    """A record of parameters as plain numbers, texts and lists."""
    plain: dict[str, Any] = {}
    for name in params.dtype.names or ():
        value = params[name]
        plain[name] = value.decode(errors="replace") if isinstance(value, bytes) else value.tolist()
    return plain
