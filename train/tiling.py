"""A large scan through a small window: where the windows lie, and how their images become one without seams.

1. Windows of the network's scan shape cover the scan, each starting at most `window - 2·margin` (and a third of a
   window, so that every pixel is seen by about as many) after the one before; the last one ends with the scan. A
   margin of one probe diameter at a window's rim, which the window's own probes hardly see, then counts only where the
   scan itself ends.
2. No pattern says what a potential's mean is, so each window is sure of its image up to a constant. The constants are
   chosen so that overlapping windows agree (least squares, by conjugate gradients), their mean staying what it was.
3. Pixels are the mean over the windows that see them, weighted by a ramp that rises from the window's rim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse.linalg import LinearOperator, cg

__all__ = ["Stitched", "starts", "stitch", "window_weight"]

Array = npt.NDArray[np.floating[Any]]

_MOST_ITERATIONS = 200
_LEAST_WEIGHT = 1e-4


@dataclass(frozen=True, kw_only=True)
class Stitched:
    """An image (H, W), and the weighted deviation of what the windows and their views say of each pixel."""

    image: Array
    spread: Array


def starts(length: int, window: int, *, margin: int, grain: int = 1) -> list[int]:
    """First positions of the windows along one axis; all are multiples of `grain`.

    At most `grain - 1` positions at the end are left out. `length` must hold one window.
    """
    stride = max(1, min(window // 3, window - 2 * margin)) // grain * grain or grain
    last = (length - window) // grain * grain
    return sorted({*range(0, last, stride), last})


def window_weight(shape: tuple[int, int], margin: int) -> Array:
    """Weights (H, W) of a window's pixels: a squared sine from the rim, one from two margins on."""

    def ramp(n: int) -> Array:
        distance = np.minimum(np.arange(n), np.arange(n)[::-1]) + 0.5
        width = max(1.0, min(2.0 * margin, n / 2))
        rise: Array = np.sin(0.5 * np.pi * np.minimum(1.0, distance / width)) ** 2
        return rise

    return np.maximum(np.outer(ramp(shape[0]), ramp(shape[1])), _LEAST_WEIGHT)


def stitch(
    tiles: Array, spreads: Array, corners: list[tuple[int, int]], shape: tuple[int, int], *, margin: int
) -> Stitched:
    """One image from the windows' images.

    Args:
        tiles: (K, h, w), the windows' images; a pixel that is not a number is not known.
        spreads: (K, h, w), the deviation of each over its views.
        corners: pixel (y, x) of each window's first pixel.
        shape: (H, W), of the whole.
        margin: pixels at a window's rim of which it is least sure.
    """
    h, w = tiles.shape[1:]
    weight = window_weight((h, w), margin)[None] * np.isfinite(tiles)
    values = np.nan_to_num(tiles.astype(np.float64))
    places = [(slice(y, y + h), slice(x, x + w)) for y, x in corners]
    total = np.zeros(shape)
    for place, one in zip(places, weight, strict=True):
        total[place] += one
    safe = np.where(total > 0, total, 1.0)
    power = weight.sum(axis=(1, 2))

    def blended(amounts: Array) -> Array:
        image = np.zeros(shape)
        for place, one, amount in zip(places, weight, amounts, strict=True):
            image[place] += one * amount
        return image / safe

    def disagreement(amounts: Array) -> Array:
        """Of each window with the mean of all: the sum over its pixels of weight times (window - mean)."""
        image = blended(amounts)
        return np.array(
            [
                float((one * (amount - image[place])).sum())
                for place, one, amount in zip(places, weight, amounts, strict=True)
            ]
        )

    # the normal equations of the offsets; constants are in the operator's null space and stay what they were
    ones = np.ones_like(values)
    operator = LinearOperator(
        (len(tiles), len(tiles)), matvec=lambda o: disagreement(ones * np.reshape(o, (-1, 1, 1))), dtype=np.float64
    )
    offsets = np.zeros(len(tiles))
    if len(tiles) > 1:
        offsets, _ = cg(operator, -disagreement(values), rtol=1e-6, maxiter=_MOST_ITERATIONS)
        offsets = offsets - float((power * offsets).sum() / max(power.sum(), 1e-12))
    shifted = values + offsets[:, None, None]
    image = blended(shifted)
    second = blended(shifted**2 + np.nan_to_num(spreads.astype(np.float64)) ** 2)
    spread = np.sqrt(np.maximum(second - image**2, 0.0))
    unknown = total <= 0
    image[unknown] = spread[unknown] = math.nan
    return Stitched(image=image, spread=spread)
