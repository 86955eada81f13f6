"""How often the classifier is right on compositions that it never saw, beside two baselines on the same noisy patterns.

- model: the trained network.
- template: the class of the training structure whose mean pattern correlates best with the sample's.
- majority: the class with the most training samples, always.

top1 is the part of samples that are right; f1 the mean over the classes that occur of 2·TP / (2·TP + FP + FN), so that
a rare class counts as much as a frequent one.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from exitwave.ingest.files import write_atomic
from exitwave.train.classification import load_classifier, patterns_of
from exitwave.train.loader import EVALUATION_EPOCH, open_split

__all__ = ["class_scores", "evaluate_classes"]

Array = np.ndarray[Any, Any]


def evaluate_classes(run: Path, data: Path, *, split: str = "test", cache: Path | None = None) -> dict[str, Any]:
    """Scores of a run's classifier and of the baselines; also written to RUN/metrics.json and metrics-SPLIT.json.

    Raises UsageError where there is no classifier or no such split, DamagedDataError for damaged samples.
    """
    model = load_classifier(run)
    measured, prepared = model.measured, model.measured.preprocessing
    test = open_split(data, split, cache=cache, fields=("cbed",))
    truth, ours, theirs, seconds = [], [], [], 0.0
    positions = prepared.scan_shape[0] * prepared.scan_shape[1]
    flat = _unit(measured.templates.reshape(len(measured.templates), -1))
    for index in range(len(test)):
        sample = test[index]
        began = time.perf_counter()
        inputs = patterns_of(sample, model.spec, prepared, epoch=EVALUATION_EPOCH)
        with torch.inference_mode():
            ours.append(measured.classes[int(model.module(torch.from_numpy(inputs[None])).argmax())])
        seconds += time.perf_counter() - began
        best = int((flat @ _unit(inputs[:positions].reshape(1, -1))[0]).argmax())
        theirs.append(measured.template_class[best])
        truth.append(int(sample["params"]["space_group"]))
    majority = measured.classes[int(np.argmax(measured.counts))]
    made = {"model": np.array(ours), "template": np.array(theirs), "majority": np.full(len(truth), majority)}
    wanted = np.array(truth)
    outcome = {
        "task": "classify",
        "split": split,
        "n": len(truth),
        "classes": list(measured.classes),
        "metrics": {name: class_scores(guess, wanted) for name, guess in made.items()},
        "by_class": [
            {
                "space_group": int(group),
                "n": int((wanted == group).sum()),
                "metrics": {name: {"top1": float((g[wanted == group] == group).mean())} for name, g in made.items()},
            }
            for group in np.unique(wanted)
        ],
        "ms_per_sample": 1e3 * seconds / len(truth),
        "dose_e_per_pattern": model.spec.data.dose_e_per_pattern,
        "model": {"parameters": sum(p.numel() for p in model.module.parameters()), "step": model.step},
        "data": {"dataset_id": test.dataset_id, "trained_on": model.dataset_id},
    }
    content = (json.dumps(outcome, indent=1) + "\n").encode()
    write_atomic(run / f"metrics-{split}.json", content)
    write_atomic(run / "metrics.json", content)
    return outcome


def class_scores(guess: Array, truth: Array) -> dict[str, float]:
    """Part that is right, and F1 averaged over the classes of the truth."""
    f1 = []
    for group in np.unique(truth):
        hit = float(((guess == group) & (truth == group)).sum())
        f1.append(2 * hit / max(float((guess == group).sum() + (truth == group).sum()), 1.0))
    return {"top1": float((guess == truth).mean()), "f1": float(np.mean(f1))}


def _unit(rows: Array) -> Array:
    rows = rows - rows.mean(axis=1, keepdims=True)
    out: Array = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return out
