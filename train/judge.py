"""What a trained network gets wrong, sample by sample: the losses that a campaign is steered by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from exitwave.train.loader import EVALUATION_EPOCH, Measured, open_split
from exitwave.train.metrics import squared_errors
from exitwave.train.reconstruction import Reconstruction
from exitwave.train.run import load_model
from exitwave.train.training import DTYPE

__all__ = ["Judged", "judge"]

_BATCH = 8


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One sample: the training's own loss, and the mean square of the centred error of its potential [(V·Å)²]."""

    uid: int
    loss: float
    mse_VA2: float
    thickness_A: float


def judge(run: Path, data: Path, split: str, *, cache: Path | None = None) -> tuple[Judged, ...]:
    """Every sample of a split as the trained model of `run` sees it: evaluation noise, no augmentation.

    Raises:
        UsageError: no trained model that reconstructs potentials, no such split.
        DamagedDataError: a sample is damaged.
    """
    model = load_model(run)
    task = Reconstruction(model.spec)
    measured = Measured(preprocessing=model.preprocessing, mean_image_V=model.mean_image_V.numpy())
    prepare = task.prepare(measured, epoch=EVALUATION_EPOCH)
    dataset = open_split(data, split, cache=cache, fields=task.fields)
    module = model.module.to(DTYPE[model.spec.precision])
    found: list[Judged] = []
    with torch.inference_mode():
        for start in range(0, len(dataset), _BATCH):
            samples = [dataset[k] for k in range(start, min(start + _BATCH, len(dataset)))]
            batch = prepare(samples).to(DTYPE[model.spec.precision])
            output = module(batch.inputs)
            losses = task.per_sample_loss(output, batch).tolist()
            made = model.preprocessing.to_VA(output.double().numpy())
            truth = np.stack([sample["potential"] for sample in samples])
            for sample, loss, mse in zip(samples, losses, squared_errors(made, truth), strict=True):
                thickness = float(sample["params"]["thickness_A"])
                found.append(
                    Judged(uid=int(sample["uid"]), loss=float(loss), mse_VA2=float(mse), thickness_A=thickness)
                )
    return tuple(found)
