"""Train a little, evaluate on materials never seen, beside the classical methods."""

from __future__ import annotations

import json

import numpy as np
import pytest
import train_data

from exitwave.ingest.errors import UsageError
from exitwave.train.classical import reconstruct
from exitwave.train.evaluate import METHODS, evaluate
from exitwave.train.judge import judge
from exitwave.train.loader import EVALUATION_EPOCH, open_split
from exitwave.train.preprocess import noisy_counts
from exitwave.train.run import read_curve
from exitwave.train.spec import TrainSpec
from exitwave.train.trainer import train

SPEC = TrainSpec.model_validate(
    {
        "model": {"preset": "tiny", "growth": 8, "stem": [32]},
        "data": {"detector_bin": 8},
        "steps": 60,
        "optimizer": {"lr": 2e-3, "warmup_steps": 10},
        "eval_every_steps": 30,
        "seed": 4,
    }
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return train_data.make_dataset(tmp_path_factory.mktemp("data") / "set", train=6, val=1, test=2, per_material=12)


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    train(SPEC, data=data, out=out, threads=1)
    return out


@pytest.fixture(scope="module")
def outcome(run, data):
    return evaluate(run, data, threads=1)


def test_beats_the_mean_image_and_the_classical_methods_on_unseen_materials(outcome):
    rmse = {name: scores["rmse_V"] for name, scores in outcome["metrics"].items()}
    assert rmse["model"] < 0.8 * rmse["mean"]
    assert rmse["model"] < min(rmse["idpc"], rmse["com"])
    assert rmse["mean"] == pytest.approx(outcome["label_std_V"], rel=0.1)


def test_outcome_has_the_contract_s_fields(outcome, run):
    assert (outcome["split"], outcome["n"]) == ("test", 24)
    assert set(outcome["metrics"]) == set(METHODS)
    for scores in outcome["metrics"].values():
        assert set(scores) == {
            "rmse_V", "rmse_V_fitted", "rmse_VA", "r2", "psnr", "ssim", "column_pm", "columns_found",
        }  # fmt: skip
        assert all(np.isfinite(value) for name, value in scores.items() if value is not None)
    assert sum(row["n"] for row in outcome["by_thickness"]) == 24
    assert [row["dose_e_per_pattern"] for row in outcome["by_dose"]] == [1e3, 1e4, 1e5]
    assert outcome["ms_per_sample"] > 0
    assert outcome["classical_scale_fitted_on"] == "val"
    assert "nothing excluded" in outcome["edge_note"]
    assert "above λ/(4α)" in outcome["step_note"]
    assert json.loads((run / "metrics.json").read_text()) == outcome
    assert json.loads((run / "metrics-test.json").read_text()) == outcome
    assert [row["space_group"] for row in outcome["by_space_group"]] == [0]
    aims = {row["name"]: row for row in outcome["targets"]}
    best = min(outcome["metrics"][m]["rmse_V"] for m in ("idpc", "com"))
    assert aims["rmse_V over the best classical"]["value"] == outcome["metrics"]["model"]["rmse_V"] / best
    assert len(aims) == 3 + len(outcome["by_thickness"])


def test_pictures_hold_what_was_scored_from_the_very_same_patterns(outcome, run, data):
    with np.load(run / "evaluation.npz") as pictures:
        assert pictures["truth"].shape == (4, 32, 32)
        dataset = open_split(data, "test", cache=None)
        index = list(dataset.data.uids).index(pictures["uid"][1])
        sample = dataset[index]
        counts = noisy_counts(sample["cbed"], SPEC.data, seed=4, epoch=EVALUATION_EPOCH, uid=int(sample["uid"]))
        assert np.allclose(pictures["pattern"][1], counts.mean(axis=(0, 1)))
        image = reconstruct(counts, sample["params"], (32, 32), method="com")
        assert np.allclose(pictures["com"][1], image * outcome["classical_scale"]["com"], rtol=1e-4, atol=1e-3)
        assert np.allclose(pictures["truth"][1], sample["potential"])


def test_evaluating_again_gives_the_same_scores(outcome, run, data):
    again = evaluate(run, data, threads=1)
    assert again["metrics"] == outcome["metrics"]


def test_validation_was_recorded(run, data):
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    evals = [event for event in events if event["kind"] == "train_eval"]
    assert [(event["step"], event["n"]) for event in evals] == [(30, 12), (60, 12)]
    # the last one is that of the finished model: its error in V·Å over the same samples
    judged = [found.mse_VA2 for found in judge(run, data, "val")]
    assert evals[-1]["rmse_VA"] == pytest.approx((sum(judged) / len(judged)) ** 0.5, rel=1e-4)
    assert len(read_curve(run)) == 60


def test_samples_of_another_shape_and_unfinished_runs_are_refused(run, data, tmp_path):
    other = train_data.make_dataset(tmp_path / "other", train=1, val=0, test=1, per_material=2, scan=4, label=16)
    with pytest.raises(UsageError, match="the model was trained on patterns"):
        evaluate(run, other)
    with pytest.raises(UsageError, match="expected the trained model, found none"):
        evaluate(tmp_path, data)
    with pytest.raises(UsageError, match="holiday"):
        evaluate(run, data, split="holiday")


@pytest.mark.parametrize(("change", "message"), [({"batch": 500}, "at most the 72"), ({"train_split": "x"}, "'x'")])
def test_a_spec_that_does_not_fit_the_data_is_refused_before_anything_is_written(data, tmp_path, change, message):
    with pytest.raises(UsageError, match=message):
        train(SPEC.model_copy(update=change), data=data, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_time_may_end_a_training(data, tmp_path):
    spec = TrainSpec.model_validate(
        {**SPEC.canonical(), "steps": None, "eval_every_steps": None, "max_seconds": 2.0, "deterministic": False}
    )
    result = train(spec, data=data, out=tmp_path / "run", threads=1)
    assert result.step >= 1
    assert result.seconds < 20
    curve = read_curve(tmp_path / "run")
    assert curve[-1]["lr"] < curve[len(curve) // 2]["lr"]


def test_probes_as_channels_train_too(data, tmp_path):
    spec = {**SPEC.canonical(), "steps": 3, "eval_every_steps": None, "checkpoint": {"every_steps": 3}}
    spec["model"] = {"layout": "probes-as-channels", "growth": 4}
    spec["data"] = {"workers": 1, "detector_bin": 16}
    result = train(TrainSpec.model_validate(spec), data=data, out=tmp_path / "run", threads=1)
    assert np.isfinite(result.loss)
    assert evaluate(tmp_path / "run", data, split="val")["n"] == 12


def test_ptychography_of_some_samples_is_scored_on_these_alone(outcome, run, data, tmp_path):
    dataset = open_split(data, "test", cache=None)
    some = [dataset[i] for i in (1, 5, 7)]
    np.savez(
        tmp_path / "ptycho.npz",
        uid=np.array([s["uid"] for s in some]),
        image_VA=np.stack([0.9 * s["potential"] for s in some]),
        library="the truth itself",
        how="times 0.9",
    )
    beside = evaluate(run, data, threads=1, ptychography=tmp_path / "ptycho.npz")["ptychography"]
    assert (beside["n"], beside["library"]) == (3, "the truth itself")
    assert set(beside["metrics"]) == {*METHODS, "ptycho"}
    assert beside["metrics"]["ptycho"]["rmse_V_fitted"] == pytest.approx(0, abs=1e-6)
    assert beside["metrics"]["ptycho"]["rmse_V"] == pytest.approx(
        0.1 * np.sqrt(np.mean([(s["potential"] / s["params"]["thickness_A"]).var() for s in some])), rel=1e-3
    )
    (tmp_path / "words.npz").write_text("not an archive")
    with pytest.raises(UsageError, match="expected reconstructions"):
        evaluate(run, data, threads=1, ptychography=tmp_path / "words.npz")


@pytest.mark.long
def test_a_denser_scan_of_the_same_dose_serves_the_classical_methods_alone(outcome, run, data, tmp_path):
    twice = train_data.make_dataset(tmp_path / "dense", train=6, val=1, test=2, per_material=12, scan=16, step_A=0.3)
    got = evaluate(run, data, threads=1, dense=twice)
    assert got["metrics"]["model"] == outcome["metrics"]["model"]
    assert got["metrics"]["idpc"]["rmse_V"] != outcome["metrics"]["idpc"]["rmse_V"]
    assert "a step of 0.30 Å" in got["step_note"] and "0.60 Å" in got["step_note"]
    fewer = train_data.make_dataset(tmp_path / "fewer", train=1, val=1, test=2, per_material=2, scan=16, step_A=0.3)
    with pytest.raises(UsageError, match="not in this denser scan"):
        evaluate(run, data, threads=1, dense=fewer)
