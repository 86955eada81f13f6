"""The task `volume`: the potential by slabs from a through-focal series, by a 3D U-Net.

A series of F images is a stack as the volume of Z slabs is: focus runs along depth. The network sees the series with
its planes interpolated to Z, as one channel (1, Z, H, W), and gives the standardised potential on the same grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from exitwave.ingest import ShardDataset
from exitwave.ingest.errors import UsageError
from exitwave.train.loader import Batch
from exitwave.train.models.unet3d import UNet3D
from exitwave.train.series import SeriesMeasured, TileBatch, measure_series, save_series, series_batch
from exitwave.train.spec import TrainSpec

__all__ = ["Volume"]


@dataclass(frozen=True, kw_only=True)
class _Prepare:
    spec: TrainSpec
    measured: SeriesMeasured
    epoch: int

    def __call__(self, samples: Sequence[dict[str, Any]]) -> TileBatch:
        measured = self.measured
        target = np.stack([s[self.spec.series.target] for s in samples]).astype(np.float32)[:, None]
        target = (target - np.float32(measured.volume_mean_VA)) / np.float32(measured.volume_std_VA)
        whole = int(np.prod(measured.volume_shape))
        return series_batch(samples, self.spec, measured, epoch=self.epoch, target=target, whole=whole)


class Volume:
    """A `Task`: fields `images` and `volume`, a 3D U-Net, the mean squared error of the standardised potential."""

    def __init__(self, spec: TrainSpec) -> None:
        self._spec = spec
        self.fields = (spec.series.input, spec.series.target)

    def measure(self, dataset: ShardDataset) -> SeriesMeasured:
        return measure_series(dataset, self._spec.series, volume=True)

    def make_model(self, measured: SeriesMeasured) -> nn.Module:
        series = self._spec.series
        depth, height, width = measured.volume_shape
        side = 1 << series.levels
        if height % side or width % side:
            raise UsageError(
                f"series.levels: {series.levels} poolings need sides divisible by {side}, the samples are "
                f"{height} x {width}; use fewer, or another series.crop"
            )
        # as many poolings along depth as halve it, the rest in the plane alone
        deep = next(k for k in range(series.levels, -1, -1) if depth % (1 << k) == 0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._spec.seed)
            return UNet3D(width=series.width, levels=series.levels, norm=series.norm, flat=series.levels - deep)

    def prepare(self, measured: SeriesMeasured, *, epoch: int) -> _Prepare:
        return _Prepare(spec=self._spec, measured=measured, epoch=epoch)

    def per_sample_loss(self, output: Tensor, batch: Batch) -> Tensor:
        """(B,): this rank's part of each sample's mean squared error, as gradients want it: parts add up over tiles.

        The value counts a part as often as there are copies of the sample, since the trainer divides by them.
        """
        assert isinstance(batch, TileBatch)
        part = (output - batch.target).square().sum(dim=(1, 2, 3, 4)) / batch.whole
        return part + (batch.copies - 1) * part.detach()

    def squared_errors(self, output: Tensor, batch: Batch, measured: SeriesMeasured) -> dict[str, Tensor]:
        return {"rmse_VA": self.per_sample_loss(output, batch) * measured.volume_std_VA**2}

    def save(self, path: Path, module: nn.Module, measured: SeriesMeasured, *, dataset_id: str, step: int) -> None:
        save_series(path, module, self._spec, measured, dataset_id=dataset_id, step=step)
