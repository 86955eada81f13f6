"""Batches of this rank: read, made noisy, augmented and laid out as the network's input.

The order comes from the global sampler and the random numbers from keys, so a batch's content depends on (seed, epoch,
uid) alone: not on the rank, nor on how many ranks or loader processes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from exitwave.ingest import GlobalSampler, ShardDataset
from exitwave.ingest.errors import DamagedDataError, UsageError
from exitwave.train.preprocess import (
    Preprocessing,
    augment,
    centre_of_mass_images,
    network_input,
    noisy_counts,
)
from exitwave.train.spec import DataSpec

__all__ = ["EVALUATION_EPOCH", "Batch", "Measured", "Prepare", "check_numbers", "measure", "open_split", "rank_batches"]

# The noise of validation and test patterns: no training epoch has this number.
EVALUATION_EPOCH = -1
# Statistics are taken over at most so many training samples, evenly spaced.
_MEASURED_SAMPLES = 1024
# What a trained model says of the experiments that it knows: name -> the parameter's column.
_TRAINED = {
    "energy_keV": "energy_keV",
    "semiangle_mrad": "semiangle_mrad",
    "thickness_A": "thickness_A",
    "defocus_A": "defocus_A",
    "R_sampling_A": "R_sampling_y_A",
    "Q_sampling_per_A": "Q_sampling_y_per_A",
    "label_blur_A": "label_blur_A",
}


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Inputs (B, C, h, w), target (B, H, W) standardised, weight (B, H, W), and the uids in the same order.

    `scale` (B,): what an error of each sample is multiplied with before it is judged; None: one.
    """

    inputs: Tensor
    target: Tensor
    weight: Tensor
    uids: tuple[int, ...]
    scale: Tensor | None = None

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> Batch:
        """The same batch in another precision; itself where it has that already. Whole numbers stay what they are."""
        target = self.target.to(device, dtype if self.target.is_floating_point() else None)
        scale = None if self.scale is None else self.scale.to(device, dtype)
        weight = self.weight.to(device, dtype)
        return replace(self, inputs=self.inputs.to(device, dtype), target=target, weight=weight, scale=scale)

    def split(self, parts: int) -> list[Batch]:
        """So many consecutive parts whose sizes differ by one at most, the empty ones left out."""
        n = len(self.uids)
        if parts <= 1:
            return [self]
        ends = [n * k // parts for k in range(parts + 1)]
        return [
            replace(
                self,
                inputs=self.inputs[a:b],
                target=self.target[a:b],
                weight=self.weight[a:b],
                uids=self.uids[a:b],
                scale=None if self.scale is None else self.scale[a:b],
            )
            for a, b in pairwise(ends)
            if b > a
        ]


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Stored samples -> `Batch`; the `collate_fn` of the loader (it is pickled to loader processes)."""

    data: DataSpec
    preprocessing: Preprocessing
    seed: int
    epoch: int
    per_thickness: bool = False

    def __call__(self, samples: Sequence[dict[str, Any]]) -> Batch:
        inputs, targets, weights = [], [], []
        for sample in samples:
            uid, params = int(sample["uid"]), sample["params"]
            check_numbers(sample, "cbed", least=0.0)
            check_numbers(sample, "potential")
            counts = noisy_counts(
                sample["cbed"], self.data, seed=self.seed, epoch=self.epoch, uid=uid, params=sample["params"]
            )
            potential: Any = sample["potential"]
            weight = np.ones(potential.shape, dtype=np.float32)
            if self.epoch != EVALUATION_EPOCH:
                counts, potential, weight, params = augment(
                    counts, potential, params, self.data, seed=self.seed, epoch=self.epoch, uid=uid
                )
            inputs.append(network_input(counts, params, self.data, self.preprocessing))
            targets.append(self.preprocessing.standardise(potential))
            weights.append(np.ascontiguousarray(weight))
        return Batch(
            inputs=torch.from_numpy(np.stack(inputs)),
            target=torch.from_numpy(np.stack(targets)),
            weight=torch.from_numpy(np.stack(weights)),
            uids=tuple(int(sample["uid"]) for sample in samples),
            scale=self._scale(samples) if self.per_thickness else None,
        )

    def _scale(self, samples: Sequence[dict[str, Any]]) -> Tensor:
        """Mean thickness (the geometric one of the training's bounds) over each sample's own."""
        low, high = self.preprocessing.trained["thickness_A"]
        depth = [float(sample["params"]["thickness_A"]) for sample in samples]
        return torch.tensor([(low * high) ** 0.5 / max(d, 1e-3) for d in depth], dtype=torch.float32)


def check_numbers(sample: dict[str, Any], field: str, *, least: float = -np.inf) -> None:
    """Refuses a field that cannot be trained on before it spoils a batch.

    Raises:
        DamagedDataError: NaN, an infinity or a value below `least`, with the sample's uid.
    """
    values = sample[field]
    low, high = float(values.min()), float(values.max())  # both are NaN where one value is
    if np.isfinite(low) and np.isfinite(high) and low >= least:
        return
    bound = "finite numbers" if least == -np.inf else f"finite numbers of at least {least:g}"
    bad = int(np.count_nonzero(~np.isfinite(values) | (values < least)))
    raise DamagedDataError(
        f"sample {int(sample['uid']):016x}: expected {bound} in {field}, {bad} of {values.size} values are not. Find "
        "what wrote them; `exitwave subset` leaves samples out"
    )


def open_split(
    data: Path, split: str, *, cache: Path | None, fields: Sequence[str] = ("cbed", "potential")
) -> ShardDataset:
    """The samples of one split with those fields: patterns and label unless others are named.

    Raises:
        UsageError: the split has none.
    """
    dataset = ShardDataset(data, fields=fields, split=split, cache=cache)
    if len(dataset) == 0:
        raise UsageError(f"{data}: expected samples in split {split!r}, it has none")
    return dataset


def rank_batches(
    source: Any, sampler: GlobalSampler, collate: Callable[[Sequence[dict[str, Any]]], Batch], *, workers: int
) -> Iterator[Batch]:
    """This rank's batches from the sampler's position to the end of the epoch.

    Args:
        source: map-style, by the sampler's numbers: a ShardDataset, or what gives tiles of its samples.
        collate: pickled to the `workers` loader processes; with none, the rank reads by itself.
    """
    options: dict[str, Any] = {}
    if workers:
        # forkserver: a rank has threads (gradients in flight), which a fork would freeze in the middle of things
        options = {"num_workers": workers, "multiprocessing_context": "forkserver", "prefetch_factor": 2}
    return iter(DataLoader(source, batch_sampler=sampler, collate_fn=collate, **options))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Statistics of the training set: the preprocessing, and the mean label (H, W) [V] over its thickness."""

    preprocessing: Preprocessing
    mean_image_V: Any


def measure(dataset: ShardDataset, *, layout: str) -> Measured:
    """One deterministic pass over (at most 1024 evenly spaced) training samples, noise-free."""
    n = min(len(dataset), _MEASURED_SAMPLES)
    indices = [i * len(dataset) // n for i in range(n)]
    total = variance = com_square = icom_square = 0.0
    mean_image: Any = 0.0
    seen: list[tuple[float, ...]] = []
    for index in indices:
        sample = dataset[index]
        check_numbers(sample, "cbed", least=0.0)
        check_numbers(sample, "potential")
        potential = sample["potential"].astype(np.float64)
        total += float(potential.mean())
        variance += float(potential.var()) / n
        mean_image = mean_image + potential / float(sample["params"]["thickness_A"]) / n
        seen.append(tuple(float(sample["params"][column]) for column in _TRAINED.values()))
        com, icom = centre_of_mass_images(sample["cbed"], sample["params"])
        com_square += float((com**2).mean())
        icom_square += float((icom**2).mean())
    ry, rx, qy, qx = sample["cbed"].shape
    preprocessing = Preprocessing(
        layout=layout,
        scan_shape=(ry, rx),
        detector_shape=(qy, qx),
        label_shape=(potential.shape[0], potential.shape[1]),
        target_mean_VA=total / n,
        target_std_VA=max(variance**0.5, 1e-6),
        com_std=max((com_square / n) ** 0.5, 1e-9),
        icom_std_VA=max((icom_square / n) ** 0.5, 1e-9),
        trained={
            name: (min(values), max(values)) for name, values in zip(_TRAINED, zip(*seen, strict=True), strict=True)
        },
    )
    return Measured(preprocessing=preprocessing, mean_image_V=np.asarray(mean_image, dtype=np.float32))
