"""The trainer with `engine: {overlap: step}`: the same curve, also after a kill and on another number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import train_data
import train_launch

from exitwave.train.run import load_model, read_curve
from exitwave.train.spec import TrainSpec
from exitwave.train.trainer import train

# in double precision, where nothing but rounding differs: a comparison that says something at a full learning rate
SPEC = {**train_launch.FP64_SPEC, "steps": 20, "checkpoint": {"every_steps": 5, "keep": 2}}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return train_data.make_dataset(tmp_path_factory.mktemp("data") / "set", train=2, val=1, test=1, per_material=12)


@pytest.mark.parametrize(
    "clip",
    [pytest.param(1.0, marks=pytest.mark.long), pytest.param(None, marks=pytest.mark.long)],
    ids=["clipped", "unclipped"],
)
def test_a_killed_step_mode_training_goes_on_with_another_number_of_ranks(data, tmp_path, clip):
    base = {**SPEC, "optimizer": {**SPEC["optimizer"], "clip": clip}}
    spec = {**base, "engine": {**base["engine"], "overlap": "step", "grouping": "bytes:0.01"}}
    code, output = train_launch.launch(2, spec=spec, data=data, out=tmp_path / "run", kill={"rank": 1, "step": 14})
    assert code != 0, output
    code, output = train_launch.launch(3, spec=spec, data=data, out=tmp_path / "run")
    assert code == 0, output
    events = [event["step"] for event in read_curve(tmp_path / "run")]
    assert events == list(range(1, 21))
    train(TrainSpec.model_validate(base), data=data, out=tmp_path / "one", threads=1)
    curves = [[event["loss"] for event in read_curve(tmp_path / run)] for run in ("run", "one")]
    assert np.allclose(*curves, rtol=1e-9, atol=0)
    ours, theirs = (load_model(tmp_path / run).module.state_dict() for run in ("run", "one"))
    assert all(torch.allclose(ours[name], value, rtol=1e-6, atol=1e-9) for name, value in theirs.items())
