"""What the trained model is worth on samples it never saw, beside the classical methods.

All methods get the very same noisy patterns (noise keyed by the evaluation's own epoch and the sample's uid):

- model: the trained network.
- idpc, com: integrated quadrant DPC and integrated centre of mass (classical.py), each with one non-negative scale
  fitted on the validation split (on the training split where there is none).
- mean: the training set's mean of label over thickness, times the sample's thickness.

Scores as metrics.py defines them. A frame of one probe diameter is not scored, where that leaves at least 8 x 8 pixels
of every sample; the result says what was cut.
"""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from exitwave.ingest import ShardDataset, open_dataset
from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import write_atomic
from exitwave.train.classical import coarsest_step_A, probe_diameter_A, reconstruct
from exitwave.train.intervals import FEW_GROUPS, groups_of, intervals
from exitwave.train.loader import EVALUATION_EPOCH, open_split
from exitwave.train.metrics import centred, fit_scale, score
from exitwave.train.preprocess import network_input, noisy_counts
from exitwave.train.run import TrainedModel, load_model

__all__ = ["METHODS", "evaluate"]

METHODS = ("model", "idpc", "com", "mean")
_CLASSICAL = ("idpc", "com")
_BATCH = 8
_CALIBRATION_SAMPLES = 64
_DOSE_SAMPLES = 64
_DOSE_FACTORS = (0.1, 1.0, 10.0)
_EXAMPLES = 4
_LEAST_PIXELS = 8

Array = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True)
class _Results:
    """Predictions [V·Å] by method and the truth, all (N, H, W); params (N,); mean patterns (N, Qy, Qx) [counts]."""

    predictions: dict[str, Array]
    truth: Array
    params: np.ndarray[Any, Any]
    uids: list[int]
    patterns: Array
    model_s: float

    def thickness_A(self) -> Array:
        return np.asarray(self.params["thickness_A"], dtype=np.float64)


def evaluate(
    run: Path, data: Path, *, split: str = "test", cache: Path | None = None, threads: int | None = None
) -> dict[str, Any]:
    """Scores of a run's model and of the classical methods on one split of a data set.

    Writes RUN/metrics.json (what is returned) and RUN/evaluation.npz (examples for pictures: `uid` (n,), `pattern`
    (n, Qy, Qx) mean counts, and (n, H, W) [V·Å] `truth`, `model`, `idpc`, `com`, `mean`), both whole or not at all.

    Returns:
        split, n, metrics {method: scores}, by_thickness, by_dose, ms_per_sample, and how it was done.

    Raises:
        UsageError: no trained model, no such split, or samples of another shape than the model's.
        DamagedDataError: a sample is damaged.
    """
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        return _evaluate(run, data, split=split, cache=cache)
    finally:
        torch.set_num_threads(before)


def _evaluate(run: Path, data: Path, *, split: str, cache: Path | None) -> dict[str, Any]:
    model = load_model(run)
    test = open_split(data, split, cache=cache)
    _check_shapes(model, test, data)
    dose = model.spec.data.dose_e_per_pattern
    fitted_on = _calibration_split(data, model, split)
    calibration = open_split(data, fitted_on, cache=cache)
    scales = _fit_scales(_predict(model, calibration, _spread(len(calibration), _CALIBRATION_SAMPLES), dose=dose))
    results = _scaled(_predict(model, test, range(len(test)), dose=dose), scales)
    cut, edge_A, edge_note = _scored_region(results.params, model.preprocessing.label_shape)
    outcome = {
        "split": split,
        "n": len(test),
        "metrics": _scores(results, cut),
        **_certainty(results, cut, split),
        "by_thickness": _by_thickness(results, cut),
        "by_dose": _by_dose(model, test, scales, cut),
        "ms_per_sample": 1e3 * results.model_s / len(test),
        "dose_e_per_pattern": dose,
        "classical_scale": scales,
        "classical_scale_fitted_on": fitted_on,
        "edge_excluded_A": edge_A,
        "edge_note": edge_note,
        "step_note": _step_note(results.params),
        "label_std_V": _label_std_V(results, cut),
        "model": {
            "preset": model.spec.model.preset,
            "parameters": sum(p.numel() for p in model.module.parameters()),
            "step": model.step,
        },
        "data": {"dataset_id": test.dataset_id, "trained_on": model.dataset_id},
    }
    _write_examples(run / "evaluation.npz", results)
    write_atomic(run / "metrics.json", (json.dumps(outcome, indent=1) + "\n").encode())
    return outcome


# --- predictions ---------------------------------------------------------------------------------------------------


def _predict(model: TrainedModel, dataset: ShardDataset, indices: Sequence[int], *, dose: float | None) -> _Results:
    """All methods on the samples `indices`; classical methods without scale yet."""
    spec = model.spec.data.model_copy(update={"dose_e_per_pattern": dose})
    shape = model.preprocessing.label_shape
    made: dict[str, list[Array]] = {name: [] for name in METHODS}
    truth: list[Array] = []
    params: list[np.void] = []
    uids: list[int] = []
    patterns: list[Array] = []
    model_s = 0.0
    for some in _chunks(indices, _BATCH):
        samples = [dataset[i] for i in some]
        counts = [
            noisy_counts(
                s["cbed"], spec, seed=model.spec.seed, epoch=EVALUATION_EPOCH, uid=int(s["uid"]), params=s["params"]
            )
            for s in samples
        ]
        began = time.perf_counter()
        inputs = [
            network_input(c, s["params"], spec, model.preprocessing) for c, s in zip(counts, samples, strict=True)
        ]
        with torch.inference_mode():
            out = model.module(torch.from_numpy(np.stack(inputs))).numpy()
        made["model"] += list(model.preprocessing.to_VA(out))
        model_s += time.perf_counter() - began
        for sample, noisy in zip(samples, counts, strict=True):
            for name in _CLASSICAL:
                made[name].append(reconstruct(noisy, sample["params"], shape, method=name))
            made["mean"].append(model.mean_image_V.numpy() * float(sample["params"]["thickness_A"]))
            truth.append(sample["potential"])
            params.append(sample["params"])
            uids.append(int(sample["uid"]))
            patterns.append(noisy.mean(axis=(0, 1)))
    return _Results(
        predictions={name: np.stack(images) for name, images in made.items()},
        truth=np.stack(truth).astype(np.float64),
        params=np.array(params, dtype=params[0].dtype),
        uids=uids,
        patterns=np.stack(patterns),
        model_s=model_s,
    )


def _fit_scales(results: _Results) -> dict[str, float]:
    depth = results.thickness_A()[:, None, None]
    return {name: fit_scale(results.predictions[name] / depth, results.truth / depth) for name in _CLASSICAL}


def _scaled(results: _Results, scales: dict[str, float]) -> _Results:
    predictions = {name: image * scales.get(name, 1.0) for name, image in results.predictions.items()}
    return _Results(
        predictions=predictions,
        truth=results.truth,
        params=results.params,
        uids=results.uids,
        patterns=results.patterns,
        model_s=results.model_s,
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


# --- scores --------------------------------------------------------------------------------------------------------


def _scored_region(params: np.ndarray[Any, Any], shape: tuple[int, int]) -> tuple[int, float, str]:
    """Pixels cut from each side, that width in Å (at most, over samples), and why."""
    diameter = max(probe_diameter_A(float(p["energy_keV"]), float(p["semiangle_mrad"])) for p in params)
    sampling = float(params["potential_sampling_A"].min())
    cut = math.ceil(diameter / sampling)
    if min(shape) - 2 * cut < _LEAST_PIXELS:
        return (
            0,
            0.0,
            (
                f"nothing excluded: the pixels within one probe diameter ({diameter:.2f} Å) of the edge, which the "
                f"scan hardly sees, are scored like all others, since without them fewer than {_LEAST_PIXELS} x "
                f"{_LEAST_PIXELS} of the {shape[0]} x {shape[1]} pixels would be left"
            ),
        )
    return (
        cut,
        diameter,
        f"pixels within one probe diameter ({diameter:.2f} Å, {cut} pixels) of the edge are not scored",
    )


def _step_note(params: np.ndarray[Any, Any]) -> str:
    """Whether the scan is dense enough for the classical methods to have their due; empty where it is."""
    limits = [coarsest_step_A(float(p["energy_keV"]), float(p["semiangle_mrad"])) for p in params]
    steps = [max(float(p["R_sampling_y_A"]), float(p["R_sampling_x_A"])) for p in params]
    coarse = [limit for step, limit in zip(steps, limits, strict=True) if step > 1.001 * limit]
    if not coarse:
        return ""
    return (
        f"the scan step ({max(steps):.2f} Å) is above λ/(4α) (down to {min(coarse):.2f} Å) for {len(coarse)} of "
        f"{len(steps)} samples: there iDPC and centre of mass are at a disadvantage"
    )


def _scores(results: _Results, cut: int, chosen: npt.NDArray[np.bool_] | None = None) -> dict[str, dict[str, float]]:
    rows = slice(None) if chosen is None else chosen
    truth, thickness = _inside(results.truth[rows], cut), results.thickness_A()[rows]
    return {name: score(_inside(results.predictions[name][rows], cut), truth, thickness).to_json() for name in METHODS}


def _certainty(results: _Results, cut: int, split: str) -> dict[str, Any]:
    """95 % intervals of `rmse_VA` over the held-out groups, how many these are, and whether that is too few."""
    kind, group = groups_of(results.params, split)
    truth = centred(_inside(results.truth, cut))
    errors = {
        name: ((centred(_inside(results.predictions[name], cut)) - truth) ** 2).mean(axis=(1, 2)) for name in METHODS
    }
    count = int(group.max()) + 1
    return {
        "rmse_VA_interval_95": intervals(errors, group),
        "groups": {"by": kind, "n": count, "anecdotal": kind == "prototype" and count < FEW_GROUPS},
    }


def _by_thickness(results: _Results, cut: int) -> list[dict[str, Any]]:
    """Scores in three bins of thickness that hold as nearly equal numbers of samples as can be."""
    thickness = results.thickness_A()
    edges = np.unique(np.quantile(thickness, [0, 1 / 3, 2 / 3, 1]))
    if len(edges) == 1:
        edges = np.array([edges[0], edges[0]])
    rows = []
    for k, (low, high) in enumerate(pairwise(edges)):
        last = k == len(edges) - 2
        chosen = (thickness >= low) & ((thickness <= high) if last else (thickness < high))
        if chosen.any():
            rows.append(
                {
                    "thickness_A": [float(low), float(high)],
                    "n": int(chosen.sum()),
                    "metrics": _scores(results, cut, chosen),
                }
            )
    return rows


def _by_dose(model: TrainedModel, test: ShardDataset, scales: dict[str, float], cut: int) -> list[dict[str, Any]]:
    """Scores at a tenth, once and ten times the training's dose, on at most 64 evenly spaced samples."""
    trained = model.spec.data.dose_e_per_pattern
    doses = [None] if trained is None else [trained * factor for factor in _DOSE_FACTORS]
    indices = _spread(len(test), _DOSE_SAMPLES)
    return [
        {
            "dose_e_per_pattern": dose,
            "n": len(indices),
            "metrics": _scores(_scaled(_predict(model, test, indices, dose=dose), scales), cut),
        }
        for dose in doses
    ]


def _label_std_V(results: _Results, cut: int) -> float:
    """Deviation of the labels from their own means [V], pooled: the error of a method that sees nothing."""
    truth = _inside(results.truth, cut) / results.thickness_A()[:, None, None]
    return float(np.sqrt(((truth - truth.mean(axis=(1, 2), keepdims=True)) ** 2).mean()))


def _inside(images: Array, cut: int) -> Array:
    return images[:, cut : images.shape[1] - cut, cut : images.shape[2] - cut]


def _write_examples(path: Path, results: _Results) -> None:
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
