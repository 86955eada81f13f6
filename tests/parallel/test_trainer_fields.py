"""`data: {input, target}`: the trainer on fields of one's own simulator, whatever their science."""

from __future__ import annotations

import numpy as np
import pytest
import train_data
import train_launch

from exitwave.ingest import ShardDataset
from exitwave.ingest.errors import UsageError
from exitwave.train.fields import load_fields
from exitwave.train.run import load_model, read_curve
from exitwave.train.spec import TrainSpec
from exitwave.train.trainer import train

SPEC = {
    **train_launch.SPEC,
    "data": {"input": "cbed", "target": "potential"},
    "model": {"preset": "tiny", "growth": 4, "stem": [16]},
    "loss": {"name": "mse", "offset_weight": 1.0},
    "steps": 50,
    "optimizer": {"lr": 4e-3, "warmup_steps": 5},
    "trackers": ["tensorboard"],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data") / "set"

    def spoil(sample):
        """What is to be learnt: the mean pattern, in a unit of its own."""
        sample["potential"] = (5e4 * sample["cbed"].mean(axis=(0, 1))).astype(np.float32)

    return train_data.make_dataset(root, train=2, val=1, test=1, per_material=12, spoil=spoil)


def test_it_learns_in_the_target_s_unit_and_shows_curves(data, tmp_path):
    """The 64 patterns are 64 channels over the detector's 32 x 32 pixels here."""
    train(TrainSpec.model_validate(SPEC), data=data, out=tmp_path / "run", threads=1)
    losses = [event["loss"] for event in read_curve(tmp_path / "run")]
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    model = load_fields(tmp_path / "run")
    assert not model.measured.residual
    samples = ShardDataset(data, split="train")
    some = [samples[i] for i in range(12)]
    truth = np.stack([sample["potential"] for sample in some])
    error = np.sqrt(np.mean((model(some) - truth) ** 2))
    assert error < 0.7 * truth.std()
    with pytest.raises(UsageError, match="this one is of task fields"):
        load_model(tmp_path / "run")
    (events,) = (tmp_path / "run" / "tensorboard").glob("events.out.tfevents.*")
    written = events.read_bytes()
    assert all(name in written for name in (b"train/loss", b"train/lr", b"train/data_wait_s", b"train/mfu"))


def test_a_target_of_the_input_s_kind_is_learnt_as_a_difference(data, tmp_path):
    spec = {**SPEC, "data": {"input": "potential", "target": "potential"}, "steps": 2, "trackers": []}
    train(TrainSpec.model_validate(spec), data=data, out=tmp_path / "run", threads=1)
    model = load_fields(tmp_path / "run")
    assert model.measured.residual
