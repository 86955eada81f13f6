"""The task that exitwave exists for: the projected potential from the diffraction patterns."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from exitwave.ingest import ShardDataset
from exitwave.train.loader import Batch, Measured, Prepare, measure
from exitwave.train.loss import per_sample_loss, structure_square
from exitwave.train.run import make_model, save_model
from exitwave.train.spec import TrainSpec

__all__ = ["Reconstruction"]


class Reconstruction:
    """A `Task`: fields `cbed` and `potential`, preprocessing of preprocess.py, an FC-DenseNet."""

    fields = ("cbed", "potential")

    def __init__(self, spec: TrainSpec) -> None:
        self._spec = spec

    def measure(self, dataset: ShardDataset) -> Measured:
        return measure(dataset, layout=self._spec.model.layout)

    def make_model(self, measured: Measured) -> nn.Module:
        return make_model(self._spec, measured.preprocessing)

    def prepare(self, measured: Measured, *, epoch: int) -> Prepare:
        return Prepare(
            data=self._spec.data,
            preprocessing=measured.preprocessing,
            seed=self._spec.seed,
            epoch=epoch,
            per_thickness=self._spec.loss.unit == "V",
        )

    def per_sample_loss(self, output: Tensor, batch: Batch) -> Tensor:
        target = batch.target
        if batch.scale is not None:
            output, target = output * batch.scale[:, None, None], target * batch.scale[:, None, None]
        return per_sample_loss(self._spec.loss, output, target, batch.weight)

    def squared_errors(self, output: Tensor, batch: Batch, measured: Measured) -> dict[str, Tensor]:
        error = structure_square(output - batch.target, batch.weight)
        return {"rmse_VA": error * measured.preprocessing.target_std_VA**2}

    def save(self, path: Path, module: nn.Module, measured: Measured, *, dataset_id: str, step: int) -> None:
        save_model(path, module, self._spec, measured, dataset_id=dataset_id, step=step)
