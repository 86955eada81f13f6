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
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.ndimage import gaussian_filter

__all__ = ["Scores", "centred", "fit_scale", "score", "ssim"]

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

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def centred(images: Array) -> Array:
    """Each image without its mean: (N, H, W) -> (N, H, W) float64."""
    images = images.astype(np.float64)
    return images - images.mean(axis=(-2, -1), keepdims=True)


def fit_scale(prediction: Array, truth: Array) -> float:
    """The one non-negative scale for all samples that brings centred predictions nearest to the truth."""
    p, t = centred(prediction), centred(truth)
    power = float((p * p).sum())
    return max(0.0, float((p * t).sum()) / power) if power > 0 else 0.0


def score(prediction_VA: Array, truth_VA: Array, thickness_A: Array) -> Scores:
    """Scores of predictions against the truth, both (N, H, W) [V·Å] cut to the scored pixels; thickness (N,) [Å]."""
    p_VA, t_VA = centred(prediction_VA), centred(truth_VA)
    depth = np.asarray(thickness_A, dtype=np.float64)[:, None, None]
    p, t = p_VA / depth, t_VA / depth
    per_sample = ((p - t) ** 2).mean(axis=(1, 2))
    span = np.maximum(t.max(axis=(1, 2)) - t.min(axis=(1, 2)), 1e-12)
    psnr = 20 * np.log10(span / np.sqrt(np.maximum(per_sample, 1e-24)))
    return Scores(
        rmse_V=float(np.sqrt(per_sample.mean())),
        rmse_V_fitted=float(np.sqrt(((_fitted(p, t) - t) ** 2).mean())),
        rmse_VA=float(np.sqrt(((p_VA - t_VA) ** 2).mean())),
        r2=float(1 - ((p - t) ** 2).sum() / max(float((t**2).sum()), 1e-24)),
        psnr=float(psnr.mean()),
        ssim=float(np.mean([ssim(a, b) for a, b in zip(p, t, strict=True)])),
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
    """Centred predictions scaled for each sample, never turned over: (N, H, W)."""
    power = (p * p).sum(axis=(1, 2))
    scale = np.where(power > 0, (p * t).sum(axis=(1, 2)) / np.where(power > 0, power, 1.0), 0.0)
    return np.maximum(scale, 0.0)[:, None, None] * p
