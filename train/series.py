"""Through-focal series as tensors: what the tasks `volume` and `regress` have in common.

Everything is a function of the sample, the configuration and a key, tile by tile: noise belongs to a row of an image,
not to a rank, so that a split sample is the same as a whole one to the bit.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from exitwave.ingest import ShardDataset
from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import write_atomic
from exitwave.train.keys import generator
from exitwave.train.loader import Batch
from exitwave.train.series_spec import SeriesSpec
from exitwave.train.spec import TrainSpec
from exitwave.train.tiled_data import field_slices

__all__ = [
    "SeriesMeasured",
    "TileBatch",
    "images_input",
    "measure_series",
    "noisy_images",
    "save_series",
    "series_batch",
]

Array = npt.NDArray[np.float32]
_MEASURED_SAMPLES = 64  # evenly spaced; read plane by plane
_HALVINGS = 0


@dataclass(frozen=True, kw_only=True)
class TileBatch(Batch):
    """`copies`: how many ranks hold a tile of each sample; `whole`: values of the target of one whole sample."""

    copies: int = 1
    whole: int = 1


@dataclass(frozen=True, kw_only=True)
class SeriesMeasured:
    """Statistics of the training set, and the shapes of one sample after cropping.

    images: (F, H, W); volume: (Z, H, W) or (). `targets_*`: of each parameter that is regressed.
    """

    images_shape: tuple[int, ...]
    volume_shape: tuple[int, ...]
    image_mean: float
    image_std: float
    volume_mean_VA: float
    volume_std_VA: float
    targets_mean: tuple[float, ...]
    targets_std: tuple[float, ...]

    @property
    def planes(self) -> int:
        """Of the network's input: the volume's, or the next power of two, which CosmoFlow wants."""
        return self.volume_shape[0] if self.volume_shape else 1 << max(1, (self.images_shape[0] - 1).bit_length())

    def to_json(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SeriesMeasured:
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return cls(**values)


def measure_series(dataset: ShardDataset, spec: SeriesSpec, *, volume: bool) -> SeriesMeasured:
    """One pass over at most 64 evenly spaced training samples, plane by plane, so that no sample is held as a whole.

    Raises:
        UsageError: a field or parameter that is not there, or has other axes.
    """
    shapes = {f.name: f.shape for f in dataset.data.fields}
    for name in (spec.input, spec.target)[: 2 if volume else 1]:
        if len(shapes.get(name, ())) != 3:
            raise UsageError(f"series: expected {name} to have three axes (planes, H, W), got {shapes.get(name)}")
    n = min(len(dataset), _MEASURED_SAMPLES)
    indices = [i * len(dataset) // n for i in range(n)]
    params = dataset.data.params
    missing = [name for name in spec.targets if name not in (params.dtype.names or ())]
    if missing and not volume:
        raise UsageError(f"series.targets: no parameter {missing[0]!r} in the data set")
    numbers = {} if volume else {name: params[name].astype(np.float64) for name in spec.targets}
    image_mean, image_std = _moments(dataset, spec.input, indices, spec.crop)
    volume_mean, volume_std = _moments(dataset, spec.target, indices, spec.crop) if volume else (0.0, 1.0)

    def cropped(shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if spec.crop is None else (shape[0], spec.crop, spec.crop)

    return SeriesMeasured(
        images_shape=cropped(shapes[spec.input]),
        volume_shape=cropped(shapes[spec.target]) if volume else (),
        image_mean=image_mean,
        image_std=image_std,
        volume_mean_VA=volume_mean,
        volume_std_VA=volume_std,
        targets_mean=tuple(float(v.mean()) for v in numbers.values()),
        targets_std=tuple(max(float(v.std()), 1e-6) for v in numbers.values()),
    )


def _moments(dataset: ShardDataset, name: str, indices: Sequence[int], crop: int | None) -> tuple[float, float]:
    shape = next(f.shape for f in dataset.data.fields if f.name == name)
    cut = field_slices(shape, crop=crop, spatial_rank=0, spatial_size=1, halvings=_HALVINGS)
    total = square = count = 0.0
    for index in indices:
        for plane in range(shape[0]):
            values = dataset.read_tile(index, name, [slice(plane, plane + 1), *cut[1:]]).astype(np.float64)
            total, square, count = total + values.sum(), square + (values**2).sum(), count + values.size
    mean = total / count
    return float(mean), float(max((square / count - mean**2) ** 0.5, 1e-6))


def noisy_images(
    images: Array, dose: float | None, *, seed: int, epoch: int, uid: int, corner: tuple[int, int]
) -> Array:
    """Poisson noise at `dose` mean counts a pixel of the incident beam, given back in units of the beam.

    Args:
        images: (F, h, w), a tile of the sample that begins at `corner` (row, column).
    """
    if dose is None:
        return images
    out = np.empty(images.shape, dtype=np.float32)
    for f in range(images.shape[0]):
        for row in range(images.shape[1]):
            draw = generator("images", seed, epoch, uid, f, corner[0] + row, corner[1])
            out[f, row] = draw.poisson(np.maximum(images[f, row], 0).astype(np.float64) * dose) / dose
    return out


def images_input(sample: dict[str, Any], spec: TrainSpec, measured: SeriesMeasured, *, epoch: int) -> Array:
    """(1, D, h, w): the series standardised, its planes interpolated to as many as the network takes."""
    row, column = (int(v) for v in sample["tile"])
    images = noisy_images(
        sample[spec.series.input],
        spec.series.dose_e_per_pixel,
        seed=spec.seed,
        epoch=epoch,
        uid=int(sample["uid"]),
        corner=(row, column),
    )
    images = ((images - measured.image_mean) / measured.image_std).astype(np.float32)
    return resample_planes(images, measured.planes)[None]


def series_batch(
    samples: Sequence[dict[str, Any]],
    spec: TrainSpec,
    measured: SeriesMeasured,
    *,
    epoch: int,
    target: Array,
    whole: int,
) -> TileBatch:
    """The batch of these samples' series beside `target` (float32, a row for each), `whole` values of it a sample."""
    return TileBatch(
        inputs=torch.from_numpy(np.stack([images_input(s, spec, measured, epoch=epoch) for s in samples])),
        target=torch.from_numpy(target),
        weight=torch.ones(len(samples)),
        uids=tuple(int(s["uid"]) for s in samples),
        copies=int(samples[0]["copies"]),
        whole=whole,
    )


def resample_planes(images: Array, planes: int) -> Array:
    """(F, h, w) -> (planes, h, w), linearly; the first and the last stay what they are."""
    if planes == len(images):
        return images
    at = np.linspace(0, len(images) - 1, planes)
    low = np.minimum(at.astype(int), max(len(images) - 2, 0))
    part = (at - low)[:, None, None].astype(np.float32)
    high = np.minimum(low + 1, len(images) - 1)
    mixed: Array = images[low] * (1 - part) + images[high] * part
    return mixed


def save_series(
    path: Path, module: torch.nn.Module, spec: TrainSpec, measured: SeriesMeasured, *, dataset_id: str, step: int
) -> None:
    """Writes model.pt, whole or not at all. Called by one rank; every rank holds all weights."""
    buffer = io.BytesIO()
    torch.save(
        {
            "format": "exitwave-model",
            "version": 1,
            "task": spec.task,
            "spec": json.dumps(spec.canonical()),
            "preprocessing": json.dumps(measured.to_json()),
            "dataset_id": dataset_id,
            "step": step,
            "state_dict": {name: value.detach().cpu() for name, value in module.state_dict().items()},
        },
        buffer,
    )
    write_atomic(path, buffer.getvalue())
