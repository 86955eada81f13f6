"""16 bits with dynamic loss scaling, accumulation, recomputation and the mean of the weights, in whole trainings."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
import train_data
import train_launch

from exitwave.ingest.errors import ExitwaveError, InterruptedRunError, UsageError
from exitwave.train.run import load_model, read_curve
from exitwave.train.spec import TrainSpec
from exitwave.train.trainer import train

SPEC = {**train_launch.SPEC, "steps": 30, "optimizer": {"lr": 2e-3, "warmup_steps": 5}}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return train_data.make_dataset(tmp_path_factory.mktemp("data") / "set", train=2, val=1, test=1, per_material=12)


def _run(spec, data, out, **options):
    train(TrainSpec.model_validate(spec), data=data, out=out, threads=1, **options)
    return read_curve(out)


def _losses(curve):
    return np.array([event["loss"] for event in curve])


def test_an_overflow_is_skipped_by_all_ranks_counted_and_the_scale_follows_the_rule(data, tmp_path):
    """2^24 overflows fp16 at first; growth after 4 clean steps shows the other half of the rule."""
    spec = {**SPEC, "precision": "fp16", "loss_scale": {"start": 2.0**24, "growth_steps": 4}}
    code, output = train_launch.launch(2, spec=spec, data=data, out=tmp_path / "run")
    assert code == 0, output
    curve = read_curve(tmp_path / "run")
    scale, clean, skipped = 2.0**24, 0, 0
    for event in curve:
        if event["skipped"] > skipped:
            scale, clean, skipped = scale / 2, 0, skipped + 1
            assert "gradient_norm" not in event
        else:
            clean += 1
            if clean == 4:
                scale, clean = scale * 2, 0
        assert (event["loss_scale"], event["skipped"]) == (scale, skipped)
    assert 0 < skipped < 20
    model = load_model(tmp_path / "run").module
    assert all(p.dtype == torch.float32 and bool(torch.isfinite(p).all()) for p in model.parameters())
    assert _losses(curve)[-5:].mean() < 0.8 * _losses(curve)[:5].mean()


@pytest.mark.long  # 16 bits, one sample at a time, are slow on a processor
def test_the_scale_and_the_count_survive_a_stop_and_another_number_of_ranks(data, tmp_path):
    spec = {**SPEC, "precision": "fp16", "steps": 20, "deterministic": "any-ranks"}
    whole = _run(spec, data, tmp_path / "whole")
    steps = iter(range(100))
    with pytest.raises(InterruptedRunError):
        _run(spec, data, tmp_path / "run", stop=lambda: next(steps) == 13)
    saved = json.loads((tmp_path / "run" / "checkpoints" / "step-00000013" / "progress.json").read_text())
    assert saved["skipped"] == whole[12]["skipped"] > 0
    assert saved["scaler"]["scale"] == whole[12]["loss_scale"]
    code, output = train_launch.launch(2, spec=spec, data=data, out=tmp_path / "run")
    assert code == 0, output
    told = [(event["loss"], event["loss_scale"], event["skipped"]) for event in read_curve(tmp_path / "run")]
    assert told == [(event["loss"], event["loss_scale"], event["skipped"]) for event in whole]


def test_an_overflow_that_never_ends_is_an_error(data, tmp_path):
    spec = {**SPEC, "precision": "fp16", "loss_scale": {"start": 2.0**-14}}
    spec["loss"] = {"name": "mse", "offset_weight": 1e38}
    with pytest.raises(ExitwaveError, match=r"step \d+: "):
        _run(spec, data, tmp_path / "run")


@pytest.mark.long
def test_bf16_learns_with_float32_weights(data, tmp_path):
    curve = _run({**SPEC, "precision": "bf16"}, data, tmp_path / "run")
    assert "loss_scale" not in curve[0]
    assert _losses(curve)[-5:].mean() < 0.7 * _losses(curve)[:5].mean()
    assert next(load_model(tmp_path / "run").module.parameters()).dtype == torch.float32


@pytest.mark.long
def test_accumulation_and_recomputation_are_the_plain_training(data, tmp_path):
    spec = {**SPEC, "precision": "fp64", "steps": 8}
    plain = _losses(_run(spec, data, tmp_path / "plain"))
    other = {**spec, "accumulate": 3, "gradient_checkpointing": True}
    code, output = train_launch.launch(2, spec=other, data=data, out=tmp_path / "other")
    assert code == 0, output
    assert np.allclose(_losses(read_curve(tmp_path / "other")), plain, rtol=1e-10, atol=0)


def test_the_saved_model_is_the_mean_and_a_resumed_mean_is_the_same(data, tmp_path):
    spec = {**SPEC, "steps": 12, "optimizer": {**SPEC["optimizer"], "ema": 0.9}, "eval_every_steps": 6}
    _run(spec, data, tmp_path / "whole")
    _run({**spec, "optimizer": SPEC["optimizer"]}, data, tmp_path / "last")
    steps = iter(range(100))
    with pytest.raises(InterruptedRunError):
        _run(spec, data, tmp_path / "run", stop=lambda: next(steps) == 7)
    _run(spec, data, tmp_path / "run")
    whole, last, run = (load_model(tmp_path / name).module.state_dict() for name in ("whole", "last", "run"))
    assert all(torch.equal(whole[name], run[name]) for name in whole)
    assert not any(torch.equal(whole[name], last[name]) for name in whole)


@pytest.mark.long
@pytest.mark.parametrize(
    "optimizer",
    [{"name": "lamb", "lr": 1e-2}, {"name": "sgd", "lr": 0.1, "larc": {}}],
    ids=["lamb", "larc"],
)
def test_other_optimizers_learn_and_resume(data, tmp_path, optimizer):
    spec = {**SPEC, "steps": 20, "optimizer": {"warmup_steps": 5, **optimizer}}
    whole = _losses(_run(spec, data, tmp_path / "whole"))
    assert whole[-5:].mean() < 0.9 * whole[:5].mean()
    steps = iter(range(100))
    with pytest.raises(InterruptedRunError):
        _run(spec, data, tmp_path / "run", stop=lambda: next(steps) == 11)
    assert np.array_equal(_losses(_run(spec, data, tmp_path / "run")), whole)


def test_a_gpu_that_is_not_there_is_one_clear_message(data, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UsageError, match=r"device: cuda was asked for, but .*use device: cpu"):
        _run({**SPEC, "device": "cuda"}, data, tmp_path / "run")


def test_a_checkpoint_of_another_model_is_one_clear_message(data, tmp_path):
    _run({**SPEC, "steps": 2}, data, tmp_path / "run")
    wider = {**SPEC, "steps": 2, "model": {**SPEC["model"], "growth": 8}}
    out = tmp_path / "wider"
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "kept")
    (out / "checkpoints").parent.mkdir()
    (tmp_path / "kept").rename(out / "checkpoints")
    with pytest.raises(UsageError, match=r"step-00000002: expected a checkpoint of this model, it is of another: \S+ "):
        _run(wider, data, out)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler, there is none")
def test_a_compiled_network_is_the_same_training_but_for_rounding(data, tmp_path):
    spec = {**SPEC, "steps": 4, "model": {**SPEC["model"], "dropout": 0.0}}
    plain = _losses(_run(spec, data, tmp_path / "plain"))
    assert np.allclose(_losses(_run({**spec, "compile": True}, data, tmp_path / "compiled")), plain, rtol=1e-4, atol=0)
