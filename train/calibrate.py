"""What a 4D-STEM scan tells of itself: the bright-field disc, and how the scan is turned against the detector.

- Disc: the mean pattern is bright inside the aperture's image. Its plateau is the median of what exceeds half the
  maximum (of a pattern smoothed by a pixel); the pixels above half the plateau are the disc, their centroid is the zero
  frequency and their area gives the radius. Known energy: radius and pixel give the semi-angle, or the semi-angle the
  pixel.
- Rotation: the centre of mass is the gradient of a potential (see `classical`), so along the scan's own axes it has no
  curl. The angle that leaves the least curl is right up to half a turn, a transposed detector leaves more of it than
  the right one (Savitzky et al., Microscopy and Microanalysis 27, 712 (2021)); of the two halves of a turn the one
  whose integral has its tail upwards is taken, since atoms are peaks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.ndimage import gaussian_filter
from scipy.stats import skew

from exitwave.train.classical import integrate_gradient, rotated

__all__ = ["Disc", "Turn", "find_disc", "find_turn"]

_SMOOTH = 1.0  # positions: differences of neighbours are derivatives only of what is smooth

Array = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True)
class Disc:
    """Centre (y, x) and radius of the bright-field disc, in detector pixels."""

    center: tuple[float, float]
    radius: float


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Rotation of the scan [degrees], whether the detector is transposed, and the curl that is left over the whole."""

    rotation_deg: float
    transposed: bool
    curl: float


def find_disc(mean_pattern: Array) -> Disc | None:
    """The disc of a mean pattern (Qy, Qx); None where nothing stands out."""
    smooth = gaussian_filter(np.asarray(mean_pattern, dtype=np.float64), 1.0)
    top = float(smooth.max(initial=0.0))
    if not top > 0:
        return None
    plateau = float(np.median(smooth[smooth > 0.5 * top]))
    mask = smooth > 0.5 * plateau
    if mask.all():
        return None
    y, x = np.nonzero(mask)
    return Disc(center=(float(y.mean()), float(x.mean())), radius=float(np.sqrt(mask.sum() / np.pi)))


def find_turn(com: Array, *, transposed: bool | None = None) -> Turn:
    """The turn of a field of centres of mass (2, Ry, Rx) along the detector's axes, in any unit.

    `transposed`: whether the detector's axes are exchanged, where that is known.
    """
    field = gaussian_filter(com - com.mean(axis=(1, 2), keepdims=True), sigma=(0, _SMOOTH, _SMOOTH))
    found: list[Turn] = []
    for swap in (False, True) if transposed is None else (transposed,):
        turned = field[::-1] if swap else field
        angles = np.arange(0.0, 180.0, 0.5)
        curls = np.array([_curl(rotated(turned, angle)) for angle in angles])
        best = int(curls.argmin())
        angle = float(angles[best])
        if skew(integrate_gradient(rotated(turned, angle), (1.0, 1.0)).ravel()) < 0:
            angle -= 180.0
        found.append(Turn(rotation_deg=angle, transposed=swap, curl=float(curls[best])))
    return min(found, key=lambda turn: turn.curl)


def _curl(field: Array) -> float:
    """Power of the curl over that of curl and divergence."""
    derivatives: Any = np.gradient(field, axis=(1, 2))
    dy, dx = derivatives
    curl, divergence = dy[1] - dx[0], dy[0] + dx[1]
    total = float((curl**2).sum() + (divergence**2).sum())
    return float((curl**2).sum()) / total if total > 0 else 1.0
