"""What the trained model is worth on samples it never saw, beside the classical methods.

All methods get the very same noisy patterns (noise keyed by the evaluation's own epoch and the sample's uid):

- model: the trained network.
- idpc, com: integrated quadrant DPC and integrated centre of mass (classical.py), each with one non-negative scale
  fitted on the validation split (on the training split where there is none).
- mean: the training set's mean of label over thickness, times the sample's thickness.
- ptycho, where a file of such reconstructions is given: those samples are scored apart, all methods on them alone.

Where the scan is coarser than λ/(4α), the classical methods can be given a denser scan of the same dose: `dense` is a
data set of the same campaign with more probe positions over the same fields; a pattern's dose is lowered by as much.

Scores as metrics.py defines them, over the pixels that scored.py names.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from exitwave.ingest import ShardDataset, open_dataset
from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import write_atomic
from exitwave.train.classical import reconstruct
from exitwave.train.dense_scan import DenseScan
from exitwave.train.loader import EVALUATION_EPOCH, open_split
from exitwave.train.preprocess import network_input, noisy_counts
from exitwave.train.ptychography import read_reconstructions
from exitwave.train.run import TrainedModel, load_model
from exitwave.train.scored import (
    CLASSICAL,
    METHODS,
    Region,
    Results,
    by_space_group,
    by_thickness,
    certainty,
    fit_scales,
    focus_note,
    label_std_V,
    scored_region,
    scores,
    step_note,
    targets,
)

__all__ = ["METHODS", "evaluate"]

_BATCH = 8
_CALIBRATION_SAMPLES = 128
_DOSE_SAMPLES = 64
_DOSE_FACTORS = (0.1, 1.0, 10.0)
_EXAMPLES = 4

Array = npt.NDArray[np.floating[Any]]


def evaluate(
    run: Path,
    data: Path,
    *,
    split: str = "test",
    cache: Path | None = None,
    threads: int | None = None,
    dense: Path | None = None,
    ptychography: Path | None = None,
) -> dict[str, Any]:
    """Scores of a run's model and of the classical methods on one split of a data set.

    Writes RUN/metrics.json (what is returned) and RUN/evaluation.npz (examples for pictures: `uid` (n,), `pattern`
    (n, Qy, Qx) mean counts, and (n, H, W) [V·Å] `truth`, `model`, `idpc`, `com`, `mean`), both whole or not at all, and
    a copy of the first as metrics-SPLIT.json, so that two test sets stand beside each other.

    Args:
        dense: a denser scan of the same samples for the classical methods (see `dense_scan`).
        ptychography: reconstructions of some of the samples by another program (see `ptychography`).

    Returns:
        split, n, metrics {method: scores}, by_thickness, by_dose, by_space_group, targets, ms_per_sample, and how it
        was done.

    Raises:
        UsageError: no trained model, no such split, or samples of another shape than the model's.
        DamagedDataError: a sample is damaged.
    """
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        return _evaluate(run, data, split=split, cache=cache, dense=dense, ptychography=ptychography)
    finally:
        torch.set_num_threads(before)


def _evaluate(
    run: Path, data: Path, *, split: str, cache: Path | None, dense: Path | None, ptychography: Path | None
) -> dict[str, Any]:
    model = load_model(run)
    test = open_split(data, split, cache=cache)
    _check_shapes(model, test, data)
    denser = None if dense is None else DenseScan.open(dense)
    dose = model.spec.data.dose_e_per_pattern
    fitted_on = _calibration_split(data, model, split)
    calibration = open_split(data, fitted_on, cache=cache)
    shape = model.preprocessing.label_shape
    known = _predict(
        model, calibration, _spread(len(calibration), _CALIBRATION_SAMPLES), dose=dose, dense=denser, ours=False
    )
    scales = fit_scales(known, scored_region(known.params, shape))
    results = _predict(model, test, range(len(test)), dose=dose, dense=denser).scaled(scales)
    region = scored_region(results.params, shape)
    pooled, bins, deviation = scores(results, region), by_thickness(results, region), label_std_V(results, region)
    outcome = {
        "split": split,
        "n": len(test),
        "metrics": pooled,
        **certainty(results, region, split),
        "targets": targets(pooled, bins, deviation),
        "by_thickness": bins,
        "by_dose": _by_dose(model, test, scales, region, denser),
        "by_space_group": by_space_group(results, region),
        "ms_per_sample": 1e3 * results.model_s / len(test),
        "dose_e_per_pattern": dose,
        "conditions": list(model.spec.data.conditions),
        "classical_scale": scales,
        "classical_scale_fitted_on": fitted_on,
        "edge_excluded_A": region.edge_A,
        "edge_note": region.note,
        "step_note": step_note(results.params) if denser is None else denser.note(results.params),
        "focus_note": focus_note(results.params),
        "label_std_V": deviation,
        "label_blur_A": float(results.params["label_blur_A"].mean()),
        "model": {
            "preset": model.spec.model.preset,
            "layout": model.spec.model.layout,
            "parameters": sum(p.numel() for p in model.module.parameters()),
            "step": model.step,
        },
        "data": {"dataset_id": test.dataset_id, "trained_on": model.dataset_id},
    }
    if ptychography is not None:
        outcome["ptychography"] = _beside_ptychography(ptychography, results, region)
    _write_examples(run / "evaluation.npz", results)
    content = (json.dumps(outcome, indent=1) + "\n").encode()
    write_atomic(run / f"metrics-{split}.json", content)
    write_atomic(run / "metrics.json", content)
    return outcome


# --- predictions ---------------------------------------------------------------------------------------------------


def _predict(
    model: TrainedModel,
    dataset: ShardDataset,
    indices: Sequence[int],
    *,
    dose: float | None,
    dense: DenseScan | None = None,
    ours: bool = True,
) -> Results:
    """All methods on the samples `indices`; classical methods without scale yet. `ours`: the network too."""
    spec = model.spec.data.model_copy(update={"dose_e_per_pattern": dose})
    seed, shape = model.spec.seed, model.preprocessing.label_shape
    made: dict[str, list[Array]] = {name: [] for name in METHODS if ours or name != "model"}
    truth: list[Array] = []
    params: list[np.void] = []
    uids: list[int] = []
    patterns: list[Array] = []
    model_s = 0.0
    for some in _chunks(indices, _BATCH):
        samples = [dataset[i] for i in some]
        counts = [
            noisy_counts(s["cbed"], spec, seed=seed, epoch=EVALUATION_EPOCH, uid=int(s["uid"]), params=s["params"])
            for s in samples
        ]
        if ours:
            began = time.perf_counter()
            inputs = [
                network_input(c, s["params"], spec, model.preprocessing) for c, s in zip(counts, samples, strict=True)
            ]
            with torch.inference_mode():
                out = model.module(torch.from_numpy(np.stack(inputs))).numpy()
            made["model"] += list(model.preprocessing.to_VA(out))
            model_s += time.perf_counter() - began
        for sample, noisy in zip(samples, counts, strict=True):
            theirs, there = (noisy, sample["params"]) if dense is None else dense.counts(sample["params"], spec, seed)
            for name in CLASSICAL:
                made[name].append(reconstruct(theirs, there, shape, method=name))
            made["mean"].append(model.mean_image_V.numpy() * float(sample["params"]["thickness_A"]))
            truth.append(sample["potential"])
            params.append(sample["params"])
            uids.append(int(sample["uid"]))
            patterns.append(noisy.mean(axis=(0, 1)))
    return Results(
        predictions={name: np.stack(images) for name, images in made.items()},
        truth=np.stack(truth).astype(np.float64),
        params=np.array(params, dtype=params[0].dtype),
        uids=uids,
        patterns=np.stack(patterns),
        model_s=model_s,
    )


def _calibration_split(data: Path, model: TrainedModel, split: str) -> str:
    splits = open_dataset(data).splits
    wanted = model.spec.val_split
    return wanted if wanted in splits and wanted != split else model.spec.train_split


def _check_shapes(model: TrainedModel, dataset: ShardDataset, data: Path) -> None:
    sample, expected = dataset[0], model.preprocessing
    want = (*expected.scan_shape, *expected.detector_shape), expected.label_shape
    have = sample["cbed"].shape, sample["potential"].shape
    if want != have:
        raise UsageError(
            f"{data}: the model was trained on patterns {want[0]} with labels {want[1]}, here are {have[0]} and "
            f"{have[1]}; simulate with the same scan, detector and label"
        )


def _by_dose(
    model: TrainedModel, test: ShardDataset, scales: dict[str, float], region: Region, dense: DenseScan | None
) -> list[dict[str, Any]]:
    """Scores at a tenth, once and ten times the training's dose, on at most 64 evenly spaced samples."""
    trained = model.spec.data.dose_e_per_pattern
    doses = [None] if trained is None else [trained * factor for factor in _DOSE_FACTORS]
    indices = _spread(len(test), _DOSE_SAMPLES)
    here = replace(region, cut=region.cut[indices])
    return [
        {
            "dose_e_per_pattern": dose,
            "n": len(indices),
            "metrics": scores(_predict(model, test, indices, dose=dose, dense=dense).scaled(scales), here),
        }
        for dose in doses
    ]


def _beside_ptychography(path: Path, results: Results, region: Region) -> dict[str, Any]:
    """All methods on the samples that were reconstructed by ptychography too."""
    theirs = read_reconstructions(path, results.truth.shape[1:])
    rows = [i for i, uid in enumerate(results.uids) if uid in theirs.images_VA]
    if not rows:
        raise UsageError(f"{path}: holds none of the samples of this split")
    some = results.only(rows)
    images = np.stack([theirs.images_VA[uid] for uid in some.uids])
    some = replace(some, predictions={**some.predictions, "ptycho": images})
    here = replace(region, cut=region.cut[rows])
    return {"n": len(rows), "library": theirs.library, "how": theirs.how, "metrics": scores(some, here)}


def _write_examples(path: Path, results: Results) -> None:
    indices = _spread(len(results.uids), _EXAMPLES)
    arrays: dict[str, Any] = {name: results.predictions[name][indices].astype(np.float32) for name in METHODS}
    arrays["truth"] = results.truth[indices].astype(np.float32)
    arrays["pattern"] = results.patterns[indices].astype(np.float32)
    arrays["uid"] = np.array([results.uids[i] for i in indices], dtype=np.uint64)
    for name in ("thickness_A", "energy_keV", "semiangle_mrad", "potential_sampling_A"):
        arrays[name] = results.params[name][indices].astype(np.float64)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_atomic(path, buffer.getvalue())


def _spread(count: int, most: int) -> list[int]:
    """At most `most` of `count` indices, evenly spaced."""
    n = min(count, most)
    return [i * count // n for i in range(n)]


def _chunks(indices: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(indices), size):
        yield indices[start : start + size]
