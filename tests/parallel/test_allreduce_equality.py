"""Real ranks over gloo: gradients and loss curves equal DDP's, and one process's with the whole batch.

This file launches itself under torchrun, once for each world size; every rank runs all checks, and each check becomes a
test of its own.
"""

from __future__ import annotations

import copy
import sys
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
from exitwave.train.allreduce import (
    Average,
    Max,
    MismatchError,
    Sum,
    allreduce,
    broadcast_parameters,
    grouped_allreduce,
)

MODES = [(p, g) for p in ("static", "bitvector") for g in ("bytes", "bytes:0.002", "layer-blocks", "count:4")]
MODES.append(("coordinator", "count:4"))


class Odd(nn.Module):
    """Shared, unused, frozen, 0-d and channels-last parameters; `layer1` beside `layer10`; branches by choice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.layer1 = nn.Linear(16, 16)
        self.layer10 = nn.Linear(16, 16, bias=False)
        self.layer10.weight = self.layer1.weight
        self.branches = nn.ModuleList([nn.Linear(16, 8), nn.Linear(16, 8)])
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("running", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:  # x: (n, 2, 4, 4)
        y = self.conv(x).tanh().mean(1).flatten(1)  # (n, 16)
        y = self.layer10(self.layer1(y).tanh()) + self.frozen(y)
        return self.branches[branch](y) * self.scale


def batch(step: int, n: int) -> torch.Tensor:
    return torch.randn(n, 2, 4, 4, generator=torch.Generator().manual_seed(100 + step))


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: None if p.grad is None else p.grad.detach().clone() for n, p in module.named_parameters()}


def assert_same(ours: dict, theirs: dict, *, bitwise: bool) -> None:
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        if value is None:
            assert ours[name] is None, f"{name}: a gradient where none belongs"
        elif bitwise:
            assert torch.equal(ours[name], value), f"{name} differs by {(ours[name] - value).abs().max()}"
        else:
            torch.testing.assert_close(ours[name], value, rtol=2e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def fresh() -> Odd:
    torch.manual_seed(0)
    return Odd()


# Each check is called as check(rank, size) on every rank.


def one_reduction_equals_ddp_and_the_whole_batch(rank: int, size: int) -> None:
    for protocol, grouping in MODES:
        torch.manual_seed(rank)  # construction makes the ranks equal
        model = fresh() if rank == 0 else Odd()
        engine = GroupedAllreduce(model, protocol=protocol, grouping=grouping, timeout_s=20)
        ddp = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
        whole = fresh()
        for step, spread in enumerate([False, True, True]):  # the same branch on all ranks, then different ones
            for module in (model, ddp.module, whole):
                module.zero_grad(set_to_none=step != 1)
            x = batch(step, 4 * size)
            mine = x[4 * rank : 4 * rank + 4]
            branch = rank % 2 if spread else 0
            engine(mine, branch).square().mean().backward()
            ddp(mine, branch).square().mean().backward()
            for r in range(size):
                (whole(x[4 * r : 4 * r + 4], r % 2 if spread else 0).square().mean() / size).backward()
            assert_same(gradients(model), gradients(ddp.module), bitwise=size == 2)
            assert_same(gradients(model), gradients(whole), bitwise=False)
            views = {name: view.data_ptr() for name, view in engine._reducer.buffers.views.items()}
            for name, p in model.named_parameters():
                assert p.grad is None or p.grad.data_ptr() == views[name], f"{name} is a copy"
                if p.grad is not None:
                    assert p.grad.stride() == p.stride()
        assert model.unused.weight.grad is None and model.frozen.weight.grad is None
        assert [n for g in engine.plan.groups for n in g.names].count("layer1.weight") == 1
        engine.close()


def a_switch_to_the_optimal_plan_changes_no_gradient(rank: int, size: int) -> None:
    """Before and after, with large tensors (placed one by one) between small ones (placed together)."""
    for protocol in ("static", "bitvector", "coordinator"):
        torch.manual_seed(1)
        model = nn.Sequential(*[nn.Linear(a, b) for a, b in [(8, 16), (16, 512), (512, 40), (40, 8), (8, 1)]])
        model[3].weight.requires_grad_(False)
        engine = GroupedAllreduce(model, protocol=protocol, grouping="optimal:0.05", timeout_s=20)
        ddp = DistributedDataParallel(copy.deepcopy(model))
        for step in range(10):
            keep = step % 3 == 1  # the gradients that an optimizer left in place are overwritten, not replaced
            engine.zero_grad(set_to_none=not keep)
            ddp.zero_grad(set_to_none=not keep)
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            for wrapped in (engine, ddp):
                if step % 4 == 3:
                    with wrapped.no_sync():
                        wrapped(2 * x).square().mean().backward()
                wrapped(x).square().mean().backward()
            assert_same(gradients(model), gradients(ddp.module), bitwise=size == 2)
            assert (engine.planning is None) == (step < 6)
        assert sorted(n for g in engine.plan.groups for n in g.names) == sorted(
            n for n, p in model.named_parameters() if p.requires_grad
        )
        engine.close()


def accumulation_equals_ddp(rank: int, size: int) -> None:
    for protocol, grouping in MODES[::2]:
        model = fresh()
        engine = GroupedAllreduce(model, protocol=protocol, grouping=grouping, timeout_s=20)
        ddp = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
        for step in range(2):
            model.zero_grad()
            ddp.zero_grad()
            for wrapped in (engine, ddp):
                with wrapped.no_sync():
                    for micro in range(2):
                        wrapped(batch(10 * step + micro, 4 * size)[rank::size], 0).square().mean().backward()
                wrapped(batch(10 * step + 5, 4 * size)[rank::size], 1).square().mean().backward()
            assert_same(gradients(model), gradients(ddp.module), bitwise=size == 2)
        assert engine.counters.steps == 2
        engine.close()


def uneven_batches_are_weighted_by_their_samples(rank: int, size: int) -> None:
    shares = {2: [5, 1], 3: [4, 0, 2]}[size]
    first = sum(shares[:rank])
    for protocol in ("static", "bitvector"):
        model, whole = fresh(), fresh()
        engine = GroupedAllreduce(model, protocol=protocol, grouping="count:3", timeout_s=20)
        for step in range(2):
            model.zero_grad()
            whole.zero_grad()
            x = batch(step, 6)
            engine.set_local_batch(shares[rank], 6)
            if shares[rank]:
                engine(x[first : first + shares[rank]], 0).square().mean().backward()
            elif step:
                engine.contribute_zeros()
            else:
                (engine(x[:0], 0).square().mean()).backward()  # the mean of nothing is NaN: it must not travel
            whole(x, 0).square().mean().backward()
            assert_same(gradients(model), gradients(whole), bitwise=False)
            assert engine.finite()
        engine.close()


def not_finite_on_one_rank_is_known_to_all(rank: int, size: int) -> None:
    for protocol in ("static", "bitvector"):
        engine = GroupedAllreduce(fresh(), protocol=protocol, timeout_s=20)
        for step, factor in enumerate([1.0, float("inf"), float("nan"), 1.0]):
            engine.module.zero_grad()
            loss = engine(batch(step, 4), 0).square().mean()
            (loss * (factor if rank == size - 1 else 1.0)).backward()
            assert engine.finite() == (factor == 1.0), step
        engine.close()


def state_is_the_modules_own(rank: int, size: int) -> None:
    model = fresh() if rank == 0 else Odd()
    if rank == 0:
        model.running.fill_(7)
    engine = GroupedAllreduce(model, timeout_s=20)
    assert engine.module is model
    assert list(engine.state_dict()) == list(model.state_dict())
    for name, value in fresh().state_dict().items():
        assert torch.equal(engine.state_dict()[name], torch.full((3,), 7) if name == "running" else value)
    model.running.fill_(rank + 1)
    engine.broadcast_buffers()
    assert model.running.tolist() == [1, 1, 1]
    engine.load_state_dict(Odd().state_dict())
    engine.close()


def average_over_sums_what_shares_a_sample(rank: int, size: int) -> None:
    model = fresh()
    engine = GroupedAllreduce(model, average_over=1, timeout_s=20)
    engine(batch(0, 4), 0).square().mean().backward()
    alone = fresh()
    alone(batch(0, 4), 0).square().mean().backward()
    expected = {n: None if g is None else g * size for n, g in gradients(alone).items()}
    assert_same(gradients(model), expected, bitwise=False)
    engine.close()


def a_group_of_some_ranks(rank: int, size: int) -> None:
    members = list(range(1, size))
    group = dist.new_group(members)
    if rank == 0:
        with pytest.raises(UsageError, match="not a member"):
            allreduce(torch.ones(1), process_set=group)
        return
    model = fresh()
    engine = GroupedAllreduce(model, process_group=group, timeout_s=20)
    assert engine.world_size == size - 1
    engine(batch(0, 4), 0).square().mean().backward()
    alone = fresh()
    alone(batch(0, 4), 0).square().mean().backward()
    assert_same(gradients(model), gradients(alone), bitwise=False)
    if size > 2:
        assert allreduce(torch.tensor([float(rank)]), op=Sum, process_set=group).item() == sum(members)
    engine.close()


def loss_curves_over_50_steps_are_those_of_one_process(rank: int, size: int) -> None:
    optimizers: list[Callable] = [
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.05),
    ]
    for protocol, make in [("static", optimizers[0]), ("bitvector", optimizers[0]), ("static", optimizers[1])]:
        model, whole = fresh(), fresh()
        engine = GroupedAllreduce(model, protocol=protocol, grouping="bytes:0.002", timeout_s=20)
        ours, theirs = make(engine.parameters()), make(whole.parameters())
        curve = []
        for step in range(50):
            x = batch(step % 5, 4 * size)
            ours.zero_grad()
            theirs.zero_grad()
            local = (engine(x[4 * rank : 4 * rank + 4], 0) - 1).square().mean()
            local.backward()
            reference = (whole(x, 0) - 1).square().mean()
            reference.backward()
            ours.step()
            theirs.step()
            mean = allreduce(local.detach(), name="loss").item()
            curve.append(abs(mean - reference.item()) / reference.item())
        assert max(curve) <= 1e-4, max(curve)
        assert reference.item() < 0.7, "it did not learn; the comparison says little"
        engine.close()


def functions_mean_what_horovods_mean(rank: int, size: int) -> None:
    x = torch.full((2, 3), float(rank + 1))
    total = size * (size + 1) / 2
    assert torch.equal(allreduce(x), torch.full((2, 3), total / size))
    assert torch.equal(x, torch.full((2, 3), float(rank + 1)))
    assert torch.equal(allreduce(x, average=False), torch.full((2, 3), total))
    assert torch.equal(allreduce(x, op=Max), torch.full((2, 3), float(size)))
    scaled = allreduce(x, op=Average, prescale_factor=4.0, postscale_factor=0.5, name="scaled")
    assert torch.equal(scaled, torch.full((2, 3), 2 * total / size))
    a, b, c = grouped_allreduce([x, torch.ones(()), torch.ones(2, dtype=torch.int64)], op=Sum, name="three")
    assert (a[0, 0].item(), b.item(), c.tolist()) == (total, size, [size] * 2)
    assert grouped_allreduce([]) == []
    leaf = torch.ones(3, requires_grad=True)
    (allreduce(leaf * (rank + 1), op=Sum, name="with gradient").sum() * (rank + 1)).backward()
    assert torch.equal(leaf.grad, torch.full((3,), (rank + 1) * total))
    with pytest.raises(UsageError, match="not both"):
        allreduce(x, average=True, op=Sum)
    with pytest.raises(MismatchError) as caught:
        allreduce(torch.ones(3 + (rank == 1)), name="odd")
    assert "'odd'" in str(caught.value) and "rank 1" in str(caught.value)
    with pytest.raises(MismatchError, match=r"prescale 2\.0"):
        allreduce(x, name="scale", prescale_factor=2.0 if rank == 0 else 1.0)
    assert allreduce(torch.ones(1), name="odd", op=Sum).item() == size  # still usable


def parameters_are_broadcast_and_compared_first(rank: int, size: int) -> None:
    model = fresh() if rank == size - 1 else Odd()
    broadcast_parameters(model.state_dict(), root_rank=size - 1)
    for name, value in fresh().state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    named = [("a", torch.ones(2)), ("b", torch.ones(3 if rank else 4))]
    with pytest.raises(MismatchError, match="'b'"):
        broadcast_parameters(named)
    with pytest.raises(UsageError, match="root_rank 9"):
        broadcast_parameters(named, root_rank=9)


CHECKS: list[Callable[[int, int], None]] = [
    one_reduction_equals_ddp_and_the_whole_batch,
    a_switch_to_the_optimal_plan_changes_no_gradient,
    accumulation_equals_ddp,
    uneven_batches_are_weighted_by_their_samples,
    not_finite_on_one_rank_is_known_to_all,
    state_is_the_modules_own,
    average_over_sums_what_shares_a_sample,
    a_group_of_some_ranks,
    loss_curves_over_50_steps_are_those_of_one_process,
    functions_mean_what_horovods_mean,
    parameters_are_broadcast_and_compared_first,
]


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.long), 3])
def results(request, tmp_path_factory) -> list[dict[str, str]]:
    return rank_checks.launch(__file__, request.param, tmp_path_factory.mktemp(f"ranks{request.param}"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_ranks(results, check):
    rank_checks.expect_passed(results, check)


if __name__ == "__main__":
    rank_checks.run_here(CHECKS, Path(sys.argv[1]))
