"""Learning one field of a simulator's samples from others: any science, `data: {input: later, target: initial}`.

Inputs and target lie on one grid (…, H, W); axes before the last two become channels. Each input field and the target
are standardised by the training set. The network is the FC-DenseNet; where there is one input of the target's own unit
and shape, it learns the difference, `residual` in the preprocessing, since what is already there need not be learnt.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from exitwave.ingest import ShardDataset
from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import write_atomic
from exitwave.train.loader import Batch, check_numbers
from exitwave.train.loss import per_sample_loss
from exitwave.train.models import build_model
from exitwave.train.run import read_saved
from exitwave.train.spec import TrainSpec

__all__ = ["Fields", "FieldsMeasured", "TrainedFields", "load_fields"]

Array = npt.NDArray[np.floating[Any]]
_MEASURED_SAMPLES = 1024


@dataclass(frozen=True, kw_only=True)
class FieldsMeasured:
    """Statistics of the training set. `inputs`: field -> (channels, mean, deviation), in the order of channels."""

    inputs: dict[str, tuple[int, float, float]]
    target: str
    shape: tuple[int, int]
    target_mean: float
    target_std: float
    residual: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> FieldsMeasured:
        inputs = {name: (int(c), float(mean), float(std)) for name, (c, mean, std) in data["inputs"].items()}
        return cls(**{**data, "inputs": inputs, "shape": tuple(data["shape"])})

    def network_input(self, sample: dict[str, Any]) -> npt.NDArray[np.float32]:
        """(C, H, W)"""
        parts = [
            ((sample[name].astype(np.float32) - np.float32(mean)) / np.float32(std)).reshape(channels, *self.shape)
            for name, (channels, mean, std) in self.inputs.items()
        ]
        return np.concatenate(parts)

    def start(self, sample: dict[str, Any]) -> Array:
        """(H, W), in the target's unit: what the network's output is added to."""
        if self.residual:
            return np.asarray(sample[next(iter(self.inputs))], dtype=np.float64).reshape(self.shape)
        return np.full(self.shape, self.target_mean)


@dataclass(frozen=True, kw_only=True)
class _Prepare:
    measured: FieldsMeasured

    def __call__(self, samples: Sequence[dict[str, Any]]) -> Batch:
        measured = self.measured
        for sample in samples:
            for name in (*measured.inputs, measured.target):
                check_numbers(sample, name)
        targets = [
            (sample[measured.target].reshape(measured.shape) - measured.start(sample)) / measured.target_std
            for sample in samples
        ]
        return Batch(
            inputs=torch.from_numpy(np.stack([measured.network_input(sample) for sample in samples])),
            target=torch.from_numpy(np.stack(targets).astype(np.float32)),
            weight=torch.ones(len(samples), *measured.shape),
            uids=tuple(int(sample["uid"]) for sample in samples),
        )


class Fields:
    """A `Task`: the fields that `data.input` and `data.target` name."""

    def __init__(self, spec: TrainSpec) -> None:
        self._spec = spec
        named = spec.data.input
        assert named is not None and spec.data.target is not None
        self._inputs = (named,) if isinstance(named, str) else named
        self._target = spec.data.target
        self.fields = (*self._inputs, self._target)

    def measure(self, dataset: ShardDataset) -> FieldsMeasured:
        """Over at most 1024 evenly spaced samples.

        Raises:
            UsageError: fields that do not lie on one grid, or a target of several channels.
        """
        known = {f.name: f for f in dataset.data.fields}
        target = known[self._target]
        shape = tuple(target.shape[-2:])
        if len(shape) != 2 or prod(target.shape) != prod(shape):
            raise UsageError(f"data.target: expected one image (H, W), {self._target} is {target.shape}")
        for name in self._inputs:
            if tuple(known[name].shape[-2:]) != shape:
                raise UsageError(
                    f"data.input: {name} is {known[name].shape}, expected (…, {shape[0]}, {shape[1]}) as the target "
                    f"{self._target} is"
                )
        n = min(len(dataset), _MEASURED_SAMPLES)
        total = dict.fromkeys(self.fields, 0.0)
        square = dict.fromkeys((*self.fields, "difference"), 0.0)
        alike = len(self._inputs) == 1 and _alike(known[self._inputs[0]], target)
        for k in range(n):
            sample = dataset[k * len(dataset) // n]
            for name in self.fields:
                check_numbers(sample, name)
                total[name] += float(sample[name].mean(dtype=np.float64)) / n
                square[name] += float(np.square(sample[name], dtype=np.float64).mean()) / n
            if alike:
                difference = sample[self._target].reshape(shape) - sample[self._inputs[0]].reshape(shape)
                square["difference"] += float(np.square(difference, dtype=np.float64).mean()) / n
        std = {name: max(square[name] - total[name] ** 2, 0.0) ** 0.5 or 1.0 for name in self.fields}
        residual = alike and square["difference"] < std[self._target] ** 2
        return FieldsMeasured(
            inputs={name: (prod(known[name].shape[:-2]), total[name], std[name]) for name in self._inputs},
            target=self._target,
            shape=(shape[0], shape[1]),
            target_mean=total[self._target],
            target_std=(square["difference"] ** 0.5 or 1.0) if residual else std[self._target],
            residual=residual,
        )

    def make_model(self, measured: FieldsMeasured) -> nn.Module:
        return _network(self._spec, measured)

    def prepare(self, measured: FieldsMeasured, *, epoch: int) -> _Prepare:
        return _Prepare(measured=measured)

    def per_sample_loss(self, output: Tensor, batch: Batch) -> Tensor:
        return per_sample_loss(self._spec.loss, output, batch.target, batch.weight)

    def squared_errors(self, output: Tensor, batch: Batch, measured: Any) -> dict[str, Tensor]:
        return {}

    def save(self, path: Path, module: nn.Module, measured: FieldsMeasured, *, dataset_id: str, step: int) -> None:
        buffer = io.BytesIO()
        torch.save(
            {
                "format": "exitwave-model",
                "version": 1,
                "task": "fields",
                "spec": json.dumps(self._spec.canonical()),
                "preprocessing": json.dumps(measured.to_json()),
                "dataset_id": dataset_id,
                "step": step,
                "state_dict": {name: value.detach().cpu() for name, value in module.state_dict().items()},
            },
            buffer,
        )
        write_atomic(path, buffer.getvalue())


@dataclass(frozen=True, kw_only=True)
class TrainedFields:
    """A trained model of this task; call it with samples as a data set gives them."""

    module: nn.Module
    measured: FieldsMeasured

    def __call__(self, samples: Sequence[dict[str, Any]]) -> Array:
        """(n, H, W), in the target's unit."""
        inputs = np.stack([self.measured.network_input(sample) for sample in samples])
        with torch.inference_mode():
            out = self.module(torch.from_numpy(inputs)).double().numpy()
        return np.stack([self.measured.start(sample) for sample in samples]) + out * self.measured.target_std


def load_fields(run: Path) -> TrainedFields:
    """The trained model of a run on fields. UsageError where the run has none, or one of another task."""
    content = read_saved(run)
    if content.get("task") != "fields":
        raise UsageError(f"{run}: expected a model that learnt fields (`data.input`), it is of another task")
    spec = TrainSpec.model_validate_json(content["spec"])
    measured = FieldsMeasured.from_json(json.loads(content["preprocessing"]))
    module = _network(spec, measured)
    module.load_state_dict(content["state_dict"])
    return TrainedFields(module=module.eval(), measured=measured)


def _network(spec: TrainSpec, measured: FieldsMeasured) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        return build_model(
            preset=spec.model.preset,
            layout=spec.model.layout,
            in_channels=sum(channels for channels, _, _ in measured.inputs.values()),
            in_shape=measured.shape,
            out_shape=measured.shape,
            overrides=spec.model.overrides(),
        )


def _alike(a: Any, b: Any) -> bool:
    return prod(a.shape) == prod(b.shape) and a.unit == b.unit
