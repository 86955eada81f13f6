"""What a network trained on through-focal series is worth on samples it never saw, beside the training set's mean.

`volume`: root mean square error of the potential by slabs [V·Å] and the part of its variance that is explained.
`regress`: the same for each parameter, in its own unit, and `mse`, the mean over parameters of squared errors in
standard deviations of the training set.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from exitwave.ingest import ShardDataset
from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import write_atomic
from exitwave.train.loader import EVALUATION_EPOCH, open_split
from exitwave.train.run import read_saved
from exitwave.train.series import SeriesMeasured
from exitwave.train.spec import TrainSpec
from exitwave.train.task import Task, task_of
from exitwave.train.tiled_data import TileReader

__all__ = ["TrainedSeries", "evaluate_series", "is_series_run", "load_series"]

_BATCH = 8


@dataclass(frozen=True, kw_only=True)
class TrainedSeries:
    """What `model.pt` of such a training holds, ready to be called."""

    module: nn.Module
    spec: TrainSpec
    task: Task
    measured: SeriesMeasured
    dataset_id: str
    step: int


def is_series_run(run: Path) -> bool:
    """Whether the run's trained model takes through-focal series. Raises what `read_saved` raises."""
    return json.loads(read_saved(run)["spec"]).get("task") in ("volume", "regress")


def load_series(run: Path) -> TrainedSeries:
    """The trained model of a run, in evaluation mode. Raises what `read_saved` raises."""
    content = read_saved(run)
    spec = TrainSpec.model_validate_json(content["spec"])
    measured = SeriesMeasured.from_json(json.loads(content["preprocessing"]))
    task = task_of(spec)
    module = task.make_model(measured)
    module.load_state_dict(content["state_dict"])
    return TrainedSeries(
        module=module.eval(),
        spec=spec,
        task=task,
        measured=measured,
        dataset_id=content["dataset_id"],
        step=content["step"],
    )


def evaluate_series(run: Path, data: Path, *, split: str = "test", cache: Path | None = None) -> dict[str, Any]:
    """Scores on one split; written to RUN/metrics.json and returned: split, n, metrics {model|mean: …}, ms_per_sample.

    Raises:
        UsageError: no trained model, no such split, or samples of another shape.
    """
    model = load_series(run)
    test = open_split(data, split, cache=cache, fields=model.task.fields)
    began = time.perf_counter()
    predicted, truth = _predictions(model, test)
    seconds = time.perf_counter() - began
    mean = np.zeros(truth.shape)  # the training set's, which standardising takes away
    outcome = {
        "split": split,
        "n": len(test),
        "task": model.spec.task,
        "metrics": {"model": _scores(model, predicted, truth), "mean": _scores(model, mean, truth)},
        "ms_per_sample": 1e3 * seconds / len(test),
        "model": {"parameters": sum(p.numel() for p in model.module.parameters()), "step": model.step},
        "data": {"dataset_id": test.dataset_id, "trained_on": model.dataset_id},
    }
    write_atomic(run / "metrics.json", (json.dumps(outcome, indent=1) + "\n").encode())
    return outcome


def _predictions(
    model: TrainedSeries, dataset: ShardDataset
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Standardised outputs and targets, (N, …)."""
    shapes = {field.name: field.shape for field in dataset.data.fields}
    images, crop = shapes[model.spec.series.input], model.spec.series.crop
    seen = images if crop is None else (images[0], crop, crop)
    if seen != model.measured.images_shape:
        raise UsageError(f"{dataset.data.root}: the model takes series {model.measured.images_shape}, here are {seen}")
    reader = TileReader(dataset, crop=crop, spatial_rank=0, spatial_size=1, halvings=0)
    prepare = model.task.prepare(model.measured, epoch=EVALUATION_EPOCH)
    outputs, targets = [], []
    for first in range(0, len(dataset), _BATCH):
        batch = prepare([reader[i] for i in range(first, min(first + _BATCH, len(dataset)))])
        with torch.inference_mode():
            outputs.append(model.module(batch.inputs).numpy())
        targets.append(batch.target.numpy())
    return np.concatenate(outputs).astype(np.float64), np.concatenate(targets).astype(np.float64)


def _scores(
    model: TrainedSeries, predicted: npt.NDArray[np.float64], truth: npt.NDArray[np.float64]
) -> dict[str, float]:
    error = ((predicted - truth) ** 2).reshape(len(truth), -1)
    spread = ((truth - truth.mean(axis=0)) ** 2).reshape(len(truth), -1)
    if model.spec.task == "volume":
        variance = float(((truth - truth.mean()) ** 2).mean())
        return {
            "rmse_VA": float(error.mean() ** 0.5) * model.measured.volume_std_VA,
            "r2": 1 - float(error.mean()) / max(variance, 1e-12),
            "mse": float(error.mean()),
        }
    scores = {"mse": float(error.mean()), "r2": 1 - float(error.mean() / max(spread.mean(), 1e-12))}
    for k, name in enumerate(model.spec.series.targets):
        scores[f"rmse_{name}"] = float(error[:, k].mean() ** 0.5) * model.measured.targets_std[k]
        scores[f"r2_{name}"] = 1 - float(error[:, k].mean() / max(spread[:, k].mean(), 1e-12))
    return scores
