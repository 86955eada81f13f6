"""Where a picture of a potential shows atomic columns, and how far from the true place.

A column is a local maximum (of 3 x 3 pixels) that stands out from the picture's range by at least `PROMINENCE`. Its
place is the vertex of the parabola through the maximum and its two neighbours, along each axis by itself; for the
Gaussian columns of a blurred label half a pixel from the grid this is good to some hundredths of a pixel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.ndimage import maximum_filter
from scipy.spatial import cKDTree

__all__ = ["CAPTURE_A", "PROMINENCE", "column_errors_A", "find_columns"]

Array = npt.NDArray[np.floating[Any]]

PROMINENCE = 0.3  # of the picture's range, above its minimum
CAPTURE_A = 0.6  # a column farther away than this is another one


def find_columns(image: Array) -> Array:
    """Places of the columns of an image (H, W), in pixels: (n, 2), (y, x). Those on the border are left out."""
    image = np.asarray(image, dtype=np.float64)
    low, high = float(image.min()), float(image.max())
    if min(image.shape) < 3 or not high > low:
        return np.empty((0, 2))
    peaks = (maximum_filter(image, size=3) == image) & (image > low + PROMINENCE * (high - low))
    peaks[[0, -1], :] = peaks[:, [0, -1]] = False
    y, x = np.nonzero(peaks)
    places = np.stack([y, x], axis=1).astype(np.float64)
    for axis, (before, after) in enumerate(((image[y - 1, x], image[y + 1, x]), (image[y, x - 1], image[y, x + 1]))):
        curvature = before - 2 * image[y, x] + after
        shift = 0.5 * (before - after) / np.where(curvature < 0, curvature, -np.inf)
        places[:, axis] += np.clip(shift, -0.5, 0.5)
    return places


def column_errors_A(prediction: Array, truth: Array, sampling_A: float) -> tuple[Array, int]:
    """Distances [Å] from the truth's columns to the nearest ones predicted, and how many columns the truth has.

    Columns without a prediction within `CAPTURE_A` have no distance: (found,) with found <= the number of columns.
    """
    wanted, got = find_columns(truth), find_columns(prediction)
    if not len(wanted) or not len(got):
        return np.empty(0), len(wanted)
    distance, _ = cKDTree(got).query(wanted)
    distance = np.asarray(distance) * sampling_A
    return distance[distance <= CAPTURE_A], len(wanted)
