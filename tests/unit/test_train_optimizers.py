"""Optimizers, schedules and the mean of the weights, against their formulas written out."""

from __future__ import annotations

import pydantic
import pytest
import torch
from torch import nn

from exitwave.ingest.errors import UsageError
from exitwave.train import GroupedAllreduce
from exitwave.train.ema import Ema
from exitwave.train.larc import blocks_of
from exitwave.train.loss import per_sample_loss
from exitwave.train.optim import learning_rate, make_optimizer
from exitwave.train.recompute import recompute_blocks
from exitwave.train.spec import LossSpec, OptimizerSpec, TrainSpec


def _network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5)), nn.ReLU(), nn.Linear(5, 1))


def _backward(module: nn.Module, seed: int) -> None:
    module.zero_grad()
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    module(inputs).square().mean().backward()


def test_a_block_is_the_first_part_of_a_name_as_a_whole():
    names = ["down1.conv.weight", "down10.conv.weight", "down1.conv.bias", "final.weight"]
    blocks = blocks_of(names)
    assert blocks == {
        "down1": ["down1.conv.weight", "down1.conv.bias"],
        "down10": ["down10.conv.weight"],
        "final": ["final.weight"],
    }


def test_larc_is_its_formula_over_blocks():
    spec = OptimizerSpec.model_validate(
        {"name": "sgd", "lr": 0.5, "momentum": 0.9, "weight_decay": 0.01, "larc": {"trust": 0.02}}
    )
    ours, plain = _network(), _network()
    optimizer = make_optimizer(spec, ours.named_parameters())
    velocity = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
    ratios = set()
    for step in range(3):
        _backward(ours, step)
        optimizer.step()
        _backward(plain, step)
        for block in ("0", "2"):
            own = {n: p for n, p in plain.named_parameters() if n.split(".")[0] == block}
            w = torch.cat([p.detach().flatten() for p in own.values()]).norm()
            g = torch.cat([p.grad.flatten() for p in own.values()]).norm()
            ratio = min(1.0, float(0.02 * w / (0.5 * (g + 0.01 * w))))
            ratios.add(ratio)
            for name, p in own.items():
                update = ratio * (p.grad + (0.01 * p.detach() if p.ndim > 1 else 0.0))
                velocity[name] = 0.9 * velocity[name] + update
                p.data -= 0.5 * velocity[name]
    assert any(ratio < 1.0 for ratio in ratios)
    for ours_p, plain_p in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours_p, plain_p, rtol=1e-5, atol=1e-7)


def test_lamb_is_its_formula():
    spec = OptimizerSpec(name="lamb", lr=0.1, weight_decay=0.01, betas=(0.9, 0.99), eps=1e-6)
    ours, plain = _network().double(), _network().double()
    optimizer = make_optimizer(spec, ours.named_parameters())
    m = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
    v = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
    for step in range(1, 4):
        for module in (ours, plain):
            module.zero_grad()
            module(torch.ones(2, 4, dtype=torch.float64) * step).square().mean().backward()
        optimizer.step()
        for name, p in plain.named_parameters():
            m[name] = 0.9 * m[name] + 0.1 * p.grad
            v[name] = 0.99 * v[name] + 0.01 * p.grad**2
            r = m[name] / (1 - 0.9**step) / ((v[name] / (1 - 0.99**step)).sqrt() + 1e-6)
            r = r + (0.01 * p.detach() if p.ndim > 1 else 0.0)
            trust = p.detach().norm() / r.norm() if p.detach().norm() > 0 and r.norm() > 0 else 1.0
            p.data -= 0.1 * trust * r
    for ours_p, plain_p in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours_p, plain_p, rtol=1e-10, atol=1e-12)


def test_options_that_contradict_are_refused():
    with pytest.raises(pydantic.ValidationError, match="expected name: sgd"):
        OptimizerSpec.model_validate({"name": "adamw", "larc": {}})
    for optimizer in ({"name": "lamb"}, {"name": "sgd", "larc": {}}):
        with pytest.raises(pydantic.ValidationError, match="use backward"):
            TrainSpec.model_validate({"steps": 1, "optimizer": optimizer, "engine": {"overlap": "step"}})
    with pytest.raises(pydantic.ValidationError, match="one sample at a time"):
        TrainSpec.model_validate({"steps": 1, "deterministic": "any-ranks", "accumulate": 2})


def test_an_optimizer_by_tensors_is_refused_by_overlap_step(tmp_path):
    """Also where somebody builds it by hand: LARC inherits from SGD and is no element-wise optimizer."""
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path / 'meet'}")
    try:
        module = _network()
        engine = GroupedAllreduce(module, overlap="step")
        spec = OptimizerSpec.model_validate({"name": "sgd", "larc": {}})
        optimizer = make_optimizer(spec, module.named_parameters())
        assert engine.wrap(optimizer) is optimizer  # one rank: nothing is dealt out
        from exitwave.train.allreduce.sharded_optimizer import check_optimizer

        with pytest.raises(UsageError, match="Larc is not known as one"):
            check_optimizer(optimizer, dict(module.named_parameters()), elementwise=False)
        engine.close()
    finally:
        torch.distributed.destroy_process_group()


def test_step_decay_and_linear_scaling():
    spec = OptimizerSpec(lr=1.0, lr_batch=16, warmup_steps=0, schedule="step", decay_every_steps=10, decay_factor=0.5)
    rates = [learning_rate(spec, step=step, progress=0.0, batch=64) for step in (0, 9, 10, 25, 1000)]
    assert rates == pytest.approx([4.0, 4.0, 2.0, 1.0, 0.04])
    assert learning_rate(OptimizerSpec(lr=1.0, warmup_steps=0, schedule="constant"), step=3, progress=0, batch=64) == 1


def test_the_mean_of_the_weights():
    module = nn.Linear(2, 1)
    ema = Ema(module, 0.99)
    expected = module.weight.detach().clone()
    for n in range(5):
        with torch.no_grad():
            module.weight += 1.0
        ema.update(n)
        d = min(0.99, (1 + n) / (10 + n))
        expected = d * expected + (1 - d) * module.weight.detach()
    last = module.weight.detach().clone()
    with ema.in_place():
        assert torch.allclose(module.weight, expected)
    assert torch.equal(module.weight, last)


def test_pairwise_is_the_mean_over_all_pairs():
    torch.manual_seed(0)
    prediction, target, weight = torch.randn(2, 3, 3), torch.randn(2, 3, 3), torch.ones(2, 3, 3)
    weight[1, 0] = 0
    loss = per_sample_loss(LossSpec(name="pairwise", offset_weight=0.0), prediction, target, weight)
    for b in range(2):
        e = (prediction - target)[b][weight[b] > 0]
        pairs = [(e[i] - e[j]) ** 2 for i in range(len(e)) for j in range(len(e)) if i != j]
        assert float(loss[b]) == pytest.approx(float(torch.stack(pairs).mean()), rel=1e-5)


def test_recomputed_blocks_give_the_same_gradients_and_keep_less():
    def run(module: nn.Module) -> tuple[list[torch.Tensor], int]:
        kept: list[int] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            module(torch.ones(512, 4)).square().mean().backward()
        return [p.grad.clone() for p in module.parameters()], sum(kept)

    plain, kept = run(_network())
    again, kept_less = run(recompute_blocks(_network()))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert kept_less < 0.7 * kept
