"""Scores in physical units, the same for the network and for the classical methods.

The quantity is the projected potential [V·Å] (`rmse_VA`) or that divided by the sample's thickness [V] (all others).
Each image's mean over the scored pixels is removed first, from prediction and truth alike: no method sees it.

- rmse_VA, rmse_V: root mean square error, pooled over all scored pixels of all samples.
- rmse_V_fitted: the same after the best scale (not negative) and offset for each sample.
- r2: 1 - pooled squared error / pooled squared truth, in V (means removed).
- psnr: 20 log10(range of the sample's truth / its rmse) [dB], averaged over samples.
- ssim: Wang et al., IEEE Trans. Image Processing 13, 600 (2004): Gaussian window of sigma 1.5 pixels cut at radius 5,
  population moments, K1 = 0.01, K2 = 0.03, dynamic range = that of the sample's truth; averaged over the scored pixels
  (windows at the edge are mirrored) and over samples.
- column_pm: mean distance of the columns that were found from their true places [pm], pooled over all columns;
  columns_found: their part of all columns (columns.py says what counts). None where there is no column at all.

Samples may be of different sizes: each is cut to the pixels that count for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.ndimage import gaussian_filter

from exitwave.train.columns import column_errors_A

__all__ = ["Scores", "centred", "fit_scale", "score", "squared_errors", "ssim"]

Array = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True)
class Scores:
    """See the module's docstring."""

    rmse_V: float
    rmse_V_fitted: float
    rmse_VA: float
    r2: float
    psnr: float
    ssim: float
    column_pm: float | None = None
    columns_found: float | None = None

    def to_json(self) -> dict[str, float | None]:
        return asdict(self)


def centred(image: Array) -> Array:
    """Images without their means: (…, H, W) -> (…, H, W) float64."""
    image = np.asarray(image, dtype=np.float64)
    return image - image.mean(axis=(-2, -1), keepdims=True)


def fit_scale(prediction: Sequence[Array] | Array, truth: Sequence[Array] | Array) -> float:
    """The one non-negative scale for all samples that brings centred predictions nearest to the truth."""
    pairs = [(centred(p), centred(t)) for p, t in zip(prediction, truth, strict=True)]
    power = sum(float((p * p).sum()) for p, _ in pairs)
    return max(0.0, sum(float((p * t).sum()) for p, t in pairs) / power) if power > 0 else 0.0


def squared_errors(prediction: Sequence[Array] | Array, truth: Sequence[Array] | Array) -> Array:
    """Mean square of the centred difference of each sample (N,), in the square of the images' unit."""
    return np.array([((centred(p) - centred(t)) ** 2).mean() for p, t in zip(prediction, truth, strict=True)])


def score(
    prediction_VA: Sequence[Array] | Array,
    truth_VA: Sequence[Array] | Array,
    thickness_A: Array,
    *,
    sampling_A: Array | None = None,
) -> Scores:
    """Scores of predictions against the truth, N images each [V·Å] cut to the scored pixels; thickness (N,) [Å].

    `sampling_A` (N,): width of a pixel [Å]; without it columns are not looked for.
    """
    depth = np.asarray(thickness_A, dtype=np.float64)
    truths = [centred(t) / d for t, d in zip(truth_VA, depth, strict=True)]
    made = [centred(p) / d for p, d in zip(prediction_VA, depth, strict=True)]
    count = np.array([t.size for t in truths], dtype=np.float64)
    error = np.array([((p - t) ** 2).sum() for p, t in zip(made, truths, strict=True)])
    fitted = np.array([((_fitted(p, t) - t) ** 2).sum() for p, t in zip(made, truths, strict=True)])
    power = sum(float((t**2).sum()) for t in truths)
    span = np.maximum([t.max() - t.min() for t in truths], 1e-12)
    psnr = 20 * np.log10(span / np.sqrt(np.maximum(error / count, 1e-24)))
    found: list[Array] = []
    columns = 0
    if sampling_A is not None:
        for p, t, sampling in zip(made, truths, sampling_A, strict=True):
            distances, number = column_errors_A(p, t, float(sampling))
            found.append(distances)
            columns += number
    distance = np.concatenate(found) if found else np.empty(0)
    return Scores(
        rmse_V=float(np.sqrt(error.sum() / count.sum())),
        rmse_V_fitted=float(np.sqrt(fitted.sum() / count.sum())),
        rmse_VA=float(np.sqrt((error * depth**2).sum() / count.sum())),
        r2=float(1 - error.sum() / max(power, 1e-24)),
        psnr=float(psnr.mean()),
        ssim=float(np.mean([ssim(p, t) for p, t in zip(made, truths, strict=True)])),
        column_pm=float(100 * distance.mean()) if distance.size else None,
        columns_found=distance.size / columns if columns else None,
    )


def ssim(image: Array, truth: Array) -> float:
    """Structural similarity of two (H, W) images; 1 where they are the same."""
    span = max(float(truth.max() - truth.min()), 1e-12)
    c1, c2 = (0.01 * span) ** 2, (0.03 * span) ** 2
    a, b = image.astype(np.float64), truth.astype(np.float64)
    mean_a, mean_b = _window(a), _window(b)
    var_a = _window(a * a) - mean_a**2
    var_b = _window(b * b) - mean_b**2
    cov = _window(a * b) - mean_a * mean_b
    local = ((2 * mean_a * mean_b + c1) * (2 * cov + c2)) / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
    return float(local.mean())


def _window(image: Array) -> Array:
    out: Array = gaussian_filter(image, sigma=1.5, radius=5, mode="reflect")
    return out


def _fitted(p: Array, t: Array) -> Array:
    """A centred prediction in its best scale, never turned over."""
    power = float((p * p).sum())
    return max(0.0, float((p * t).sum()) / power) * p if power > 0 else 0.0 * p
