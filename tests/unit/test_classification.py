"""Space groups from patterns: scores by hand, a training that learns, baselines, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import train_data

from exitwave.ingest.errors import UsageError
from exitwave.train.evaluate_classes import class_scores, evaluate_classes
from exitwave.train.parallel import Parallel
from exitwave.train.run import load_model, saved_task
from exitwave.train.spatial_mesh import mesh_of
from exitwave.train.spec import TrainSpec
from exitwave.train.trainer import train

SPEC = TrainSpec.model_validate(
    {
        "task": "classify",
        "model": {"growth": 6},
        "data": {"detector_bin": 16, "physics": [], "conditions": ["energy_keV"]},
        "batch": 8,
        "steps": 12,
        "optimizer": {"lr": 3e-3, "warmup_steps": 2},
        "eval_every_steps": 6,
        "seed": 1,
    }
)


def test_scores_by_hand():
    truth, guess = np.array([1, 1, 1, 2]), np.array([1, 1, 2, 2])
    got = class_scores(guess, truth)
    assert got["top1"] == 0.75 and got["f1"] == pytest.approx((4 / 5 + 2 / 3) / 2)
    assert class_scores(np.full(4, 1), truth)["f1"] == pytest.approx(6 / 7 / 2)


def test_a_classifier_is_trained_and_scored_beside_the_baselines(tmp_path):
    data = train_data.make_dataset(tmp_path / "set", train=4, val=2, test=2, per_material=8, scan=1, label=4, classes=2)
    train(SPEC, data=data, out=tmp_path / "run", threads=1)
    curve = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in curve if event["kind"] == "train_step"]
    assert np.isfinite(losses).all() and len(losses) == 12
    outcome = evaluate_classes(tmp_path / "run", data)
    assert outcome["n"] == 16 and outcome["classes"] == [200, 201]
    assert set(outcome["metrics"]) == {"model", "template", "majority"}
    assert outcome["metrics"]["majority"] == {"top1": 0.5, "f1": pytest.approx(1 / 3)}
    assert 0 <= outcome["metrics"]["model"]["top1"] <= 1
    assert sum(row["n"] for row in outcome["by_class"]) == 16
    assert evaluate_classes(tmp_path / "run", data)["metrics"] == outcome["metrics"]
    assert saved_task(tmp_path / "run") == "classify"
    with pytest.raises(UsageError, match="expected a model from patterns to potentials"):
        load_model(tmp_path / "run")


def test_one_class_is_refused(tmp_path):
    data = train_data.make_dataset(tmp_path / "set", train=2, val=1, test=1, per_material=4, scan=1, label=4)
    with pytest.raises(UsageError, match="one space group"):
        train(SPEC, data=data, out=tmp_path / "run", threads=1)


@pytest.mark.parametrize("task", ["classify", "reconstruct"])
def test_ranks_share_batches_and_never_split_a_pattern(task, tmp_path):
    spec = TrainSpec.model_validate({"task": task, "steps": 1})
    assert type(mesh_of(spec, None, tmp_path)) is Parallel
    assert type(mesh_of(spec, (2, 1), tmp_path)) is Parallel
    with pytest.raises(UsageError, match=f"--mesh 1x2: the task {task} looks at whole samples.*expected 2x1"):
        mesh_of(spec, (1, 2), tmp_path)
