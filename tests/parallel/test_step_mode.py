"""overlap="step" on real ranks: the same weights as DDP and as one process, whatever the module does."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import rank_checks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from exitwave.ingest.errors import UsageError
from exitwave.train import GroupedAllreduce
from exitwave.train.allreduce import MismatchError


class Odd(nn.Module):
    """Shared, unused, frozen, 0-d and channels-last parameters, some read by others than their module, two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.layer1 = nn.Linear(16, 16)
        self.layer10 = nn.Linear(16, 16, bias=False)
        self.layer10.weight = self.layer1.weight
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)  # reads out_proj's weight itself
        self.memory = nn.LSTM(16, 16, batch_first=True)  # keeps references to its weights
        self.branches = nn.ModuleList([nn.Linear(16, 8), nn.Linear(16, 8)])
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:  # x: (n, 2, 4, 4)
        y = self.conv(x).tanh().mean(1).flatten(1)  # (n, 16)
        y = self.layer10(self.layer1(y).tanh()) + self.frozen(y)
        z = y[:, None].expand(-1, 3, -1)  # (n, 3, 16)
        z = self.memory(self.attention(z, z, z, need_weights=False)[0])[0].mean(1)
        return self.branches[branch](y + z) * self.scale


def fresh() -> Odd:
    torch.manual_seed(0)
    return Odd()


def batch(step: int, n: int) -> torch.Tensor:
    return torch.randn(n, 2, 4, 4, generator=torch.Generator().manual_seed(100 + step))


def decayed(module: nn.Module) -> list[dict[str, object]]:
    trained = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.05},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]


EPS = 1e-3  # the gradient of an attention's key bias is zero but for rounding, which a small one would blow up
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.05, momentum=0.9),
    "adamw": lambda m: torch.optim.AdamW(decayed(m), lr=3e-3, eps=EPS),
    "adagrad": lambda m: torch.optim.Adagrad(decayed(m), lr=3e-3, eps=EPS),
    "nadam": lambda m: torch.optim.NAdam(decayed(m), lr=3e-3, eps=EPS),
}


def step_engine(model: nn.Module, **options: object) -> GroupedAllreduce:
    options = {"grouping": "bytes:0.002", "timeout_s": 20, **options}
    return GroupedAllreduce(model, overlap="step", **options)


def assert_weights(ours: nn.Module, theirs: nn.Module, *, bitwise: bool) -> None:
    for name, value in theirs.state_dict().items():  # state_dict waits for what is under way
        mine = ours.state_dict()[name]
        if bitwise:
            assert torch.equal(mine, value), f"{name} differs by {(mine - value).abs().max()}"
        else:
            torch.testing.assert_close(mine, value, rtol=2e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def assert_states(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    mine, expected = ours.state_dict(), theirs.state_dict()
    assert mine["param_groups"] == expected["param_groups"]
    assert sorted(mine["state"]) == sorted(expected["state"])
    for number, state in expected["state"].items():
        assert set(mine["state"][number]) == set(state)
        for key, value in state.items():
            torch.testing.assert_close(mine["state"][number][key], value, rtol=2e-4, atol=2e-5)


# Each check is called as check(rank, size) on every rank.


def weights_and_states_equal_ddps(rank: int, size: int) -> None:
    """Branches that differ between ranks, and from step to step, so that tensors are now used, now not."""
    for make in OPTIMIZERS.values():
        torch.manual_seed(rank)  # construction makes the ranks equal
        model = fresh() if rank == 0 else Odd()
        engine = step_engine(model)
        ddp = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
        ours, theirs = engine.wrap(make(model)), make(ddp.module)
        rates = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (ours, theirs)]
        for step in range(12):
            x = batch(step, 4 * size)[4 * rank : 4 * rank + 4]
            branch = {0: 0, 1: rank % 2, 2: 1}[step % 3]
            for wrapped, optimizer in ((engine, ours), (ddp, theirs)):
                optimizer.zero_grad()
                wrapped(x, branch).square().mean().backward()
                optimizer.step()
            for rate in rates:
                rate.step()
            assert all(p.grad is None for p in model.parameters())
            if step % 5 == 4:
                assert_weights(model, ddp.module, bitwise=size == 2)
        assert_weights(model, ddp.module, bitwise=size == 2)
        assert_states(ours, theirs)
        assert engine.counters.steps == 12
        engine.close()
        assert type(model.layer1._parameters) is dict


def evaluation_reads_whole_parameters_at_once(rank: int, size: int) -> None:
    engine = step_engine(nn.Sequential(*[nn.Linear(64, 64) for _ in range(20)]))
    optimizer = engine.wrap(torch.optim.SGD(engine.parameters(), lr=0.1))
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
    for step in range(10):
        optimizer.zero_grad()
        engine(x).square().mean().backward()
        optimizer.step()
        if step % 3 == 0:
            with torch.no_grad():
                seen = engine.module(torch.ones(2, 64))
        elif step % 3 == 1:
            seen = torch.cat([value.flatten() for value in engine.state_dict().values()])
        else:
            with engine.full_parameters():
                seen = torch.cat([p.detach().flatten() for p in engine.parameters()])
        rows = [torch.empty_like(seen) for _ in range(size)]
        dist.all_gather(rows, seen)
        assert all(torch.equal(row, seen) for row in rows)
    engine.close()


def accumulation_and_uneven_batches(rank: int, size: int) -> None:
    shares = {2: [5, 1], 3: [4, 0, 2]}[size]
    first = sum(shares[:rank])
    model, whole = fresh(), fresh()
    engine = step_engine(model)
    ours, theirs = engine.wrap(OPTIMIZERS["sgd"](model)), OPTIMIZERS["sgd"](whole)
    for step in range(6):
        ours.zero_grad()
        theirs.zero_grad()
        x = batch(step, 6)
        engine.set_local_batch(shares[rank], 6)
        mine = x[first : first + shares[rank]]
        if shares[rank]:
            with engine.no_sync():
                engine(mine, 0).square().mean().backward()
            engine(mine, 1).square().mean().backward()
        elif step % 2:
            engine.contribute_zeros()
        else:
            engine(mine, 1).square().mean().backward()  # the mean of nothing is NaN: it must not travel
        for branch in (0, 1):
            whole(x, branch).square().mean().backward()
        ours.step()
        theirs.step()
    assert_weights(model, whole, bitwise=False)
    engine.close()


def clipping_equals_ddps(rank: int, size: int) -> None:
    model = fresh()
    engine = step_engine(model)
    ddp = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    ours, theirs = engine.wrap(OPTIMIZERS["adamw"](model)), OPTIMIZERS["adamw"](ddp.module)
    for step, (limit, kind) in enumerate([(0.1, 2.0), (100.0, 2.0), (0.05, float("inf")), (0.1, 1.0)]):
        for wrapped, optimizer in ((engine, ours), (ddp, theirs)):
            optimizer.zero_grad()
            wrapped(batch(step, 4), rank % 2).square().mean().backward()
        norm = engine.clip_grad_norm_(limit, kind)
        expected = nn.utils.clip_grad_norm_(ddp.parameters(), limit, kind)
        torch.testing.assert_close(norm, expected)
        ours.step()
        theirs.step()
    assert_weights(model, ddp.module, bitwise=False)
    engine.close()


def a_scaled_loss_and_bfloat16_autocast(rank: int, size: int) -> None:
    """GradScaler and autocast as with DDP; an infinite gradient on one rank skips the step on all."""
    model = fresh()
    engine = step_engine(model)
    ddp = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    rows = []
    for wrapped, optimizer in (
        (engine, engine.wrap(OPTIMIZERS["sgd"](model))),
        (ddp, OPTIMIZERS["sgd"](ddp.module)),
    ):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        scales = []
        for step in range(8):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = wrapped(batch(step, 4), 0).float().square().mean()
            bad = float("inf") if step == 4 and rank == size - 1 else 1.0
            scaler.scale(loss * bad).backward()
            if isinstance(wrapped, GroupedAllreduce):
                wrapped.unscale_(scaler, optimizer)
                wrapped.clip_grad_norm_(0.1)
            else:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        rows.append(scales)
    assert rows[0] == rows[1]
    assert rows[0][4] < rows[0][3]
    assert_weights(model, ddp.module, bitwise=False)
    engine.close()


def a_state_goes_on_in_another_engine_and_in_one_process(rank: int, size: int) -> None:
    def advance(wrapped: nn.Module, optimizer: torch.optim.Optimizer, steps: range, parts: int) -> None:
        for step in steps:
            optimizer.zero_grad()
            x = batch(step, 4 * size)
            (wrapped(x[4 * rank : 4 * rank + 4] if parts > 1 else x, 0)).square().mean().backward()
            optimizer.step()

    for make in OPTIMIZERS.values():
        first, second, third, whole = fresh(), fresh(), fresh(), fresh()
        engine = step_engine(first)
        ours, plain = engine.wrap(make(first)), make(whole)
        advance(engine, ours, range(4), size)
        advance(whole, plain, range(8), 1)
        saved = copy.deepcopy((first.state_dict(), ours.state_dict()))
        other = step_engine(second, grouping="layer-blocks")  # other groups, other cuts
        second.load_state_dict(saved[0])
        resumed = other.wrap(make(second))
        resumed.load_state_dict(saved[1])
        advance(other, resumed, range(4, 8), size)
        assert_weights(second, whole, bitwise=False)
        third.load_state_dict(saved[0])
        alone = make(third)
        alone.load_state_dict(saved[1])
        advance(third, alone, range(4, 8), 1)
        assert_weights(third, whole, bitwise=False)
        advance(engine, ours, range(4, 8), size)
        assert_weights(first, second, bitwise=size == 2)
        engine.close()
        other.close()


def what_is_not_right_is_refused_on_every_rank(rank: int, size: int) -> None:
    def engine_of(**options: object) -> tuple[GroupedAllreduce, nn.Module]:
        model = nn.Linear(4, 4)
        return step_engine(model, **options), model

    engine, model = engine_of()
    with pytest.raises(UsageError, match="LBFGS is not known"):
        engine.wrap(torch.optim.LBFGS(model.parameters()))
    engine, model = engine_of()
    with pytest.raises(UsageError, match=r"bias requires a gradient but is not in the optimizer"):
        engine.wrap(torch.optim.SGD([model.weight], lr=0.1))
    engine, model = engine_of()
    with pytest.raises(MismatchError, match=r"lr=0\.1.*lr=0\.2|lr=0\.2.*lr=0\.1"):
        engine.wrap(torch.optim.SGD(model.parameters(), lr=0.2 if rank == 0 else 0.1))
    engine, model = engine_of()
    with pytest.raises(UsageError, match=r"call optimizer = engine\.wrap"):
        engine(torch.ones(1, 4)).sum().backward()

    engine, model = engine_of()
    optimizer = engine.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="without a reduced backward pass"):
        optimizer.step()
    engine(torch.ones(1, 4)).sum().backward()
    optimizer.zero_grad()  # drops the reduction
    engine(torch.ones(1, 4)).sum().backward()
    with pytest.raises(UsageError, match="without optimizer"):
        engine(torch.ones(1, 4)).sum().backward()

    kept, hidden = [], nn.Linear(4, 4)
    kept.append(hidden.weight)  # a reference of one's own: the new value is never asked for
    engine = step_engine(hidden)
    optimizer = engine.wrap(torch.optim.SGD(hidden.parameters(), lr=0.1))
    for step in range(2):
        optimizer.zero_grad()
        loss = (kept[0] * 2).sum()
        if step == 0:
            loss.backward()
            optimizer.step()
        else:
            with pytest.raises(UsageError, match=r"weight was used before its new value was asked for"):
                loss.backward()


def a_rank_that_never_comes_is_named(rank: int, size: int) -> None:
    """The last check: the ranks part. A forward pass that waits for a gather names the rank and says what it lacks."""
    from exitwave.train.allreduce import StallError

    engine = step_engine(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), timeout_s=3)
    optimizer = engine.wrap(torch.optim.SGD(engine.parameters(), lr=0.1))

    def step() -> None:
        optimizer.zero_grad()
        engine(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    step()
    if rank == size - 1:
        time.sleep(4.5)
        return
    with pytest.raises(StallError, match=f"rank {size - 1} (is alive but has not submitted|died)"):
        step()
        engine(torch.ones(1, 4))


CHECKS = [
    weights_and_states_equal_ddps,
    evaluation_reads_whole_parameters_at_once,
    accumulation_and_uneven_batches,
    clipping_equals_ddps,
    a_scaled_loss_and_bfloat16_autocast,
    a_state_goes_on_in_another_engine_and_in_one_process,
    what_is_not_right_is_refused_on_every_rank,
    a_rank_that_never_comes_is_named,
]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.long)])
def results(request, tmp_path_factory) -> list[dict[str, str]]:
    return rank_checks.launch(__file__, request.param, tmp_path_factory.mktemp(f"step{request.param}"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_ranks(results, check):
    rank_checks.expect_passed(results, check)


if __name__ == "__main__":
    rank_checks.run_here(CHECKS, Path(sys.argv[1]))
