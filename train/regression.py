"""The task `regress`: thickness, tilt, or other parameters of a sample from its through-focal series, by CosmoFlow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from exitwave.ingest import ShardDataset
from exitwave.train.loader import Batch
from exitwave.train.models.cosmoflow import CosmoFlow
from exitwave.train.series import SeriesMeasured, TileBatch, measure_series, save_series, series_batch
from exitwave.train.spec import TrainSpec

__all__ = ["Regression"]


@dataclass(frozen=True, kw_only=True)
class _Prepare:
    spec: TrainSpec
    measured: SeriesMeasured
    epoch: int

    def __call__(self, samples: Sequence[dict[str, Any]]) -> TileBatch:
        measured = self.measured
        raw = np.array([[float(s["params"][name]) for name in self.spec.series.targets] for s in samples])
        target = (raw - np.array(measured.targets_mean)) / np.array(measured.targets_std)
        return series_batch(
            samples,
            self.spec,
            measured,
            epoch=self.epoch,
            target=target.astype(np.float32),
            whole=len(self.spec.series.targets),
        )


class Regression:
    """A `Task`: field `images`, CosmoFlow, the mean squared error of the standardised parameters."""

    def __init__(self, spec: TrainSpec) -> None:
        self._spec = spec
        self.fields = (spec.series.input,)

    def measure(self, dataset: ShardDataset) -> SeriesMeasured:
        return measure_series(dataset, self._spec.series, volume=False)

    def make_model(self, measured: SeriesMeasured) -> nn.Module:
        series = self._spec.series
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._spec.seed)
            return CosmoFlow(
                in_shape=(measured.planes, *measured.images_shape[1:]),
                in_channels=1,
                outputs=len(series.targets),
                widths=series.filters,
                hidden=series.hidden,
                dropout=series.dropout,
                norm="batch" if series.norm == "batch" else "none",
            )

    def prepare(self, measured: SeriesMeasured, *, epoch: int) -> _Prepare:
        return _Prepare(spec=self._spec, measured=measured, epoch=epoch)

    def per_sample_loss(self, output: Tensor, batch: Batch) -> Tensor:
        """(B,): the same on all ranks that share a sample, since its numbers are."""
        return (output - batch.target).square().mean(dim=1)

    def squared_errors(self, output: Tensor, batch: Batch, measured: SeriesMeasured) -> dict[str, Tensor]:
        error = (output - batch.target).square() * output.new_tensor(measured.targets_std).square()
        return {f"rmse_{name}": error[:, k] for k, name in enumerate(self._spec.series.targets)}

    def save(self, path: Path, module: nn.Module, measured: SeriesMeasured, *, dataset_id: str, step: int) -> None:
        save_series(path, module, self._spec, measured, dataset_id=dataset_id, step=step)
