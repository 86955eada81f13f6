"""The task `classify`: the space group of a crystal from its diffraction patterns.

The classes are the space groups of the training set. Patterns are prepared as for reconstruction in the layout
`probes-as-channels` (dose noise at load time, normalised by the detected sum, mirrored scan and detector together), so
a sample of one pattern is one channel beside the conditions. The trained file also holds templates, the mean pattern
of each training structure, for the baseline that matches patterns to them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from exitwave.ingest import ShardDataset
from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import write_atomic
from exitwave.train.keys import generator
from exitwave.train.loader import EVALUATION_EPOCH, Batch
from exitwave.train.models.classifier import PatternClassifier
from exitwave.train.preprocess import Preprocessing, input_channels, mirrored, network_input, noisy_counts
from exitwave.train.run import MODEL_FORMAT, MODEL_VERSION, read_saved
from exitwave.train.spec import TrainSpec

__all__ = ["Classification", "Classified", "TrainedClassifier", "load_classifier", "make_classifier"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Classified:
    """What the training set says: its classes (space groups), templates (T, C, h, w) and the class of each (T,).

    `counts`: training samples of each class.
    """

    preprocessing: Preprocessing
    classes: tuple[int, ...]
    counts: tuple[int, ...]
    templates: Array
    template_class: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TrainedClassifier:
    module: nn.Module
    spec: TrainSpec
    measured: Classified
    dataset_id: str
    step: int


@dataclass(frozen=True, kw_only=True)
class _Prepare:
    spec: TrainSpec
    measured: Classified
    epoch: int

    def __call__(self, samples: Sequence[dict[str, Any]]) -> Batch:
        place = {number: k for k, number in enumerate(self.measured.classes)}
        inputs, target = [], []
        for sample in samples:
            group = int(sample["params"]["space_group"])
            if group not in place:
                raise UsageError(
                    f"sample {int(sample['uid']):016x}: space group {group} is not among the {len(place)} classes of "
                    "the training set; split by composition with `classes: space_group`"
                )
            inputs.append(patterns_of(sample, self.spec, self.measured.preprocessing, epoch=self.epoch))
            target.append(place[group])
        return Batch(
            inputs=torch.from_numpy(np.stack(inputs)),
            target=torch.tensor(target),
            weight=torch.ones(len(samples)),
            uids=tuple(int(sample["uid"]) for sample in samples),
        )


class Classification:
    """A `Task`: field `cbed`, a `PatternClassifier`, cross entropy."""

    fields = ("cbed",)

    def __init__(self, spec: TrainSpec) -> None:
        self._spec = spec

    def measure(self, dataset: ShardDataset) -> Classified:
        params = dataset.data.params
        classes, counts = np.unique(params["space_group"], return_counts=True)
        if len(classes) < 2:
            raise UsageError(
                f"classify: the training set has one space group ({classes[0]}); two at least are expected"
            )
        shape = dataset[0]["cbed"].shape
        prepared = Preprocessing(
            layout="probes-as-channels",
            scan_shape=(shape[0], shape[1]),
            detector_shape=(shape[2], shape[3]),
            label_shape=(1, 1),
            target_mean_VA=0.0,
            target_std_VA=1.0,
            com_std=1.0,
            icom_std_VA=1.0,
        )
        templates, of_class = [], []
        for structure in np.unique(params["structure"]):
            rows = np.flatnonzero(params["structure"] == structure)[:_TEMPLATE_SAMPLES]
            templates.append(np.mean([_clean(dataset[int(i)], self._spec, prepared) for i in rows], axis=0))
            of_class.append(int(params["space_group"][rows[0]]))
        return Classified(
            preprocessing=prepared,
            classes=tuple(int(c) for c in classes),
            counts=tuple(int(c) for c in counts),
            templates=np.stack(templates),
            template_class=tuple(of_class),
        )

    def make_model(self, measured: Classified) -> nn.Module:
        return make_classifier(self._spec, measured)

    def prepare(self, measured: Classified, *, epoch: int) -> _Prepare:
        return _Prepare(spec=self._spec, measured=measured, epoch=epoch)

    def per_sample_loss(self, output: Tensor, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(output, batch.target, reduction="none")

    def squared_errors(self, output: Tensor, batch: Batch, measured: Classified) -> dict[str, Tensor]:
        return {}

    def save(self, path: Path, module: nn.Module, measured: Classified, *, dataset_id: str, step: int) -> None:
        buffer = io.BytesIO()
        torch.save(
            {
                "format": MODEL_FORMAT,
                "version": MODEL_VERSION,
                "task": "classify",
                "spec": json.dumps(self._spec.canonical()),
                "preprocessing": json.dumps(measured.preprocessing.to_json()),
                "classes": list(measured.classes),
                "counts": list(measured.counts),
                "templates": torch.from_numpy(measured.templates.astype(np.float32)),
                "template_class": list(measured.template_class),
                "dataset_id": dataset_id,
                "step": step,
                "state_dict": {name: value.detach().cpu() for name, value in module.state_dict().items()},
            },
            buffer,
        )
        write_atomic(path, buffer.getvalue())


_TEMPLATE_SAMPLES = 64


def make_classifier(spec: TrainSpec, measured: Classified) -> nn.Module:
    """The network, initialised from the spec's seed alone."""
    prepared = measured.preprocessing
    channels = input_channels(spec.data, "probes-as-channels", prepared.scan_shape, prepared.detector_shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        return PatternClassifier(
            channels=channels,
            classes=len(measured.classes),
            width=spec.model.growth or 24,
            dropout=0.2 if spec.model.dropout is None else spec.model.dropout,
        )


def patterns_of(sample: dict[str, Any], spec: TrainSpec, prepared: Preprocessing, *, epoch: int) -> Array:
    """The network's input (C, h, w) of one stored sample, with noise and, in training, a mirror."""
    uid, params = int(sample["uid"]), sample["params"]
    counts = noisy_counts(sample["cbed"], spec.data, seed=spec.seed, epoch=epoch, uid=uid, params=params)
    if epoch != EVALUATION_EPOCH and spec.data.augment == "dihedral":
        element = int(generator("augment", spec.seed, epoch, uid).integers(8))
        counts, params = mirrored(counts, params, element)
    return network_input(counts, params, spec.data, prepared)


def _clean(sample: dict[str, Any], spec: TrainSpec, prepared: Preprocessing) -> Array:
    """Patterns without noise and conditions, as templates are."""
    made = network_input(sample["cbed"], sample["params"], spec.data, prepared)
    return made[: prepared.scan_shape[0] * prepared.scan_shape[1]]


def load_classifier(run: Path) -> TrainedClassifier:
    """The trained classifier of a run, in evaluation mode. Raises what `read_saved` raises."""
    content = read_saved(run)
    spec = TrainSpec.model_validate_json(content["spec"])
    measured = Classified(
        preprocessing=Preprocessing.from_json(json.loads(content["preprocessing"])),
        classes=tuple(content["classes"]),
        counts=tuple(content["counts"]),
        templates=content["templates"].numpy(),
        template_class=tuple(content["template_class"]),
    )
    module = make_classifier(spec, measured)
    module.load_state_dict(content["state_dict"])
    return TrainedClassifier(
        module=module.eval(), spec=spec, measured=measured, dataset_id=content["dataset_id"], step=content["step"]
    )
