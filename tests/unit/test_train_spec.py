"""Configuration, loss and learning rate."""

from __future__ import annotations

import pydantic
import pytest
import torch

from exitwave.train.loss import per_sample_loss
from exitwave.train.optim import learning_rate, make_optimizer
from exitwave.train.spec import LossSpec, OptimizerSpec, TrainSpec, spec_difference


def test_unknown_keys_and_an_endless_training_are_refused():
    with pytest.raises(pydantic.ValidationError, match="lrr"):
        TrainSpec.model_validate({"steps": 1, "optimizer": {"lrr": 1}})
    with pytest.raises(pydantic.ValidationError, match="how long to train"):
        TrainSpec.model_validate({})
    with pytest.raises(pydantic.ValidationError, match="deterministic: false"):
        TrainSpec.model_validate({"max_seconds": 5})
    TrainSpec.model_validate({"max_seconds": 5, "deterministic": False})


def test_canonical_form_round_trips_and_differences_are_named():
    spec = TrainSpec(steps=10)
    assert TrainSpec.model_validate(spec.canonical()) == spec
    other = TrainSpec.model_validate({"steps": 10, "optimizer": {"lr": 0.5}})
    assert other.fingerprint() != spec.fingerprint()
    assert spec_difference(spec.canonical(), other.canonical()) == ["optimizer.lr: 0.002 -> 0.5"]
    assert spec_difference(spec.canonical(), spec.canonical()) == []


def test_a_window_of_the_shuffle_is_an_option_that_older_runs_do_not_miss():
    spec = TrainSpec.model_validate({"steps": 1, "data": {"window": {"shards": 4}}})
    assert spec.data.window is not None
    assert (spec.data.window.shards, spec.data.window.structures) == (4, 64)
    with pytest.raises(pydantic.ValidationError, match="shards"):
        TrainSpec.model_validate({"steps": 1, "data": {"window": {"shards": 0}}})
    old = TrainSpec(steps=1).canonical()
    del old["data"]["window"]
    assert spec_difference(old, TrainSpec(steps=1).canonical()) == []
    changed = spec_difference(old, spec.canonical())
    assert changed == ["data.window: (absent) -> {'shards': 4, 'structures': 64}"]


@pytest.mark.parametrize(("name", "structure", "offset"), [("mse", 1.0, 4.0), ("l1", 1.0, 2.0), ("huber", 0.5, 1.5)])
def test_loss_splits_structure_from_offset(name, structure, offset):
    target = torch.zeros(1, 2, 2)
    error = torch.tensor([[[1.0, -1.0], [1.0, -1.0]]])
    spec = LossSpec(name=name, offset_weight=0.25)
    loss = per_sample_loss(spec, error + 2.0, target, torch.ones_like(target))
    assert loss.tolist() == pytest.approx([structure + 0.25 * offset])


def test_masked_pixels_do_not_count():
    torch.manual_seed(0)
    prediction, target = torch.randn(2, 4, 4), torch.randn(2, 4, 4)
    weight = torch.ones(2, 4, 4)
    weight[:, :, 3] = 0
    spoiled = prediction.clone()
    spoiled[:, :, 3] = 1e6
    spec = LossSpec()
    whole = per_sample_loss(spec, prediction[:, :, :3], target[:, :, :3], weight[:, :, :3])
    assert torch.allclose(per_sample_loss(spec, spoiled, target, weight), whole)


def test_learning_rate_warms_up_and_decays():
    spec = OptimizerSpec(lr=1.0, warmup_steps=10, final_lr_fraction=0.1)
    assert learning_rate(spec, step=0, progress=0.0) == pytest.approx(0.1)
    assert learning_rate(spec, step=9, progress=0.0) == pytest.approx(1.0)
    assert learning_rate(spec, step=500, progress=0.5) == pytest.approx(0.55)
    assert learning_rate(spec, step=1000, progress=1.0) == pytest.approx(0.1)
    constant = OptimizerSpec(lr=1.0, warmup_steps=0, schedule="constant")
    assert learning_rate(constant, step=0, progress=0.7) == 1.0


def test_weight_decay_spares_biases():
    layer = torch.nn.Linear(3, 2)
    optimizer = make_optimizer(OptimizerSpec(weight_decay=0.3), layer.named_parameters())
    decays = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decays == {id(layer.weight): 0.3, id(layer.bias): 0.0}
