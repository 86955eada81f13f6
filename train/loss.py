"""The loss, one number per sample, so that ranks can weigh it and a bad sample can be named.

The target is standardised. Prediction and target are each split into their mean over the valid pixels and the rest:
a sample's mean potential is nearly its thickness times the material's mean inner potential, which no diffraction
experiment with a filled bright-field disc sees well and no score counts; the structure around it is what matters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exitwave.train.spec import LossSpec

__all__ = ["per_sample_loss", "structure_square"]


def per_sample_loss(spec: LossSpec, prediction: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Loss of each sample.

    Args:
        prediction, target: (B, H, W), standardised.
        weight: (B, H, W), 1 where the target is known, 0 elsewhere.

    Returns:
        (B,)
    """
    error = prediction - target
    total = weight.sum(dim=(1, 2)).clamp(min=1.0)
    offset = (error * weight).sum(dim=(1, 2)) / total
    structure = (_penalty(spec, error - offset[:, None, None]) * weight).sum(dim=(1, 2)) / total
    if spec.name == "pairwise":
        # the mean over all pairs of pixels of ((p_i - p_j) - (t_i - t_j))² is 2n/(n-1) times the error's variance
        structure = structure * (2.0 * total / (total - 1.0).clamp(min=1.0))
    return structure + spec.offset_weight * _penalty(spec, offset)


def structure_square(error: Tensor, weight: Tensor) -> Tensor:
    """(B,): mean square of an error (B, H, W) over the known pixels, each sample's mean error taken off first."""
    total = weight.sum(dim=(1, 2)).clamp(min=1.0)
    offset = (error * weight).sum(dim=(1, 2)) / total
    return ((error - offset[:, None, None]).square() * weight).sum(dim=(1, 2)) / total


def _penalty(spec: LossSpec, error: Tensor) -> Tensor:
    if spec.name in ("mse", "pairwise"):
        return error.square()
    if spec.name == "l1":
        return error.abs()
    # Huber: quadratic within delta, linear outside, continuous slope
    size = error.abs()
    return torch.where(size <= spec.delta, 0.5 * error.square(), spec.delta * (size - 0.5 * spec.delta))
