"""What people do to a wrapped module and its optimizer: it works, or it is refused by name; it never trains wrongly."""

from __future__ import annotations

import copy
import os
import pickle
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

from exitwave.ingest.errors import ExitwaveError, UsageError
from exitwave.train import GroupedAllreduce
from exitwave.train.allreduce import MismatchError, StallError, pump, stall

OVERLAPS = ("backward", "step")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))


def inputs() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(7 + dist.get_rank()))


def mean(values: torch.Tensor) -> torch.Tensor:
    summed = values.detach().clone().contiguous()
    dist.all_reduce(summed)
    return summed / dist.get_world_size()


def wrapped(module: nn.Module, overlap: str = "backward", **options: object) -> tuple[GroupedAllreduce, object]:
    engine = GroupedAllreduce(module, overlap=overlap, timeout_s=8, **options)
    return engine, engine.wrap(torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1))


def train(engine: GroupedAllreduce, optimizer, steps: int = 2, x: torch.Tensor | None = None) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        engine(inputs() if x is None else x).square().mean().backward()
        optimizer.step()


class Sizes(nn.Module):
    """0-d, empty, one larger than any cap, mixed types, odd strides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty, self.empty2 = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(3, 0))
        self.linear = nn.Linear(8, 8)
        self.wide, self.narrow = nn.Parameter(torch.randn(8).double()), nn.Parameter(torch.randn(8).bfloat16())
        self.big = nn.Parameter(torch.randn(8, 70_000) / 100)
        self.strided = nn.Parameter(torch.randn(8, 16)[:, ::2])
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x: (n, 8)
        y = self.linear(x) * self.scalar + self.empty.sum() + self.empty2.sum()
        y = y @ self.strided + self.narrow.float()
        y = y + (y @ self.big).square().mean() + self.conv(y.reshape(-1, 2, 2, 2).repeat(1, 1, 2, 2)).mean()
        return y.double() * self.wide


# Each check is called as check(rank, size) on every rank.


def odd_sizes_are_reduced(rank: int, size: int) -> None:
    for options in (
        {"grouping": "bytes:0.0001"},
        {"grouping": "bytes:0.0001", "protocol": "bitvector"},
        {"grouping": "count:9", "compression": "fp16"},
        {"grouping": "count:9", "compression": "bf16"},
    ):
        model = Sizes()
        engine = GroupedAllreduce(model, timeout_s=8, **options)
        alone = copy.deepcopy(model)
        for _ in range(3):  # compression begins with the second
            model.zero_grad()
            engine(inputs()).sum().backward()
        alone(inputs()).sum().backward()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            expected = mean(q.grad)
            exact = "compression" not in options and p.dtype != torch.bfloat16
            largest = float(q.grad.abs().max()) if q.numel() else 0.0
            torch.testing.assert_close(p.grad, expected, rtol=0, atol=(1e-5 if exact else 2e-2) * largest)
        engine.close()


def odd_sizes_are_updated_behind_the_step(rank: int, size: int) -> None:
    for grouping in ("bytes:0.0001", "count:9"):
        model = Sizes()
        ddp = DistributedDataParallel(copy.deepcopy(model))
        plain = torch.optim.SGD(ddp.parameters(), lr=1e-4)
        engine = GroupedAllreduce(model, overlap="step", grouping=grouping, timeout_s=8)
        optimizer = engine.wrap(torch.optim.SGD(model.parameters(), lr=1e-4))
        for wrapper, steps in ((engine, optimizer), (ddp, plain)):
            for _ in range(2):
                steps.zero_grad()
                wrapper(inputs()).sum().backward()
                steps.step()
        with engine.full_parameters():
            for p, q in zip(model.parameters(), ddp.module.parameters(), strict=True):
                torch.testing.assert_close(p, q)
        optimizer.zero_grad()
        engine(inputs()).sum().backward()
        assert torch.isfinite(engine.clip_grad_norm_(1.0, float("inf")))
        engine.close()
        engine.close()  # once more is no harm


def only_sparse_parameters(rank: int, size: int) -> None:
    for protocol in ("static", "bitvector"):
        table = nn.Embedding(10, 4, sparse=True)
        engine = GroupedAllreduce(table, protocol=protocol, timeout_s=8)
        for _ in range(3):
            table.zero_grad()
            engine(torch.tensor([rank, 5])).sum().backward()
        expected = torch.zeros(10, 4)
        expected[:size], expected[5] = 1.0 / size, 1.0
        torch.testing.assert_close(table.weight.grad.to_dense(), expected)
        assert engine.finite()
        (engine(torch.tensor([rank, 5])).sum() * (float("nan") if rank == 1 else 1.0)).backward()
        assert not engine.finite(), "one rank's NaN in a sparse gradient is everyone's"
        engine.close()


def a_buffer_that_is_expanded(rank: int, size: int) -> None:
    model = net()
    model.register_buffer("c", torch.full((1,), float(rank + 3)).expand(5))
    GroupedAllreduce(model, timeout_s=8).close()
    assert model.c.tolist() == [3.0] * 5


def wrapped_twice_is_reduced_once(rank: int, size: int) -> None:
    model = net()
    first = GroupedAllreduce(model, timeout_s=8)
    with pytest.raises(UsageError, match=r"wrap engine\.module"):
        GroupedAllreduce(first, timeout_s=8)
    second = GroupedAllreduce(model, timeout_s=8)
    second(inputs()).square().mean().backward()
    alone = copy.deepcopy(model)
    alone.zero_grad()
    alone(inputs()).square().mean().backward()
    torch.testing.assert_close(model[0].weight.grad, mean(alone[0].weight.grad))
    with pytest.raises((UsageError, StallError), match="closed"):
        first(inputs())
    with pytest.raises(ExitwaveError, match="boom"):
        second.fail(ExitwaveError("boom"))
    dist.barrier()
    third = GroupedAllreduce(model, timeout_s=8)  # after a failure, without close
    train(third, torch.optim.SGD(model.parameters(), lr=0.1))
    third.close()


def _replace_parameter(m: nn.Sequential) -> None:
    m[1].weight = nn.Parameter(torch.randn(2, 8))


def _replace_layer(m: nn.Sequential) -> None:
    m[1] = nn.Linear(8, 2)


def _append(m: nn.Sequential) -> None:
    m.append(nn.Linear(2, 2))


def _unfreeze(m: nn.Sequential) -> None:
    m[0].weight.requires_grad_(True)


def what_the_engine_would_not_reduce_is_refused(rank: int, size: int) -> None:
    changes: list[tuple[Callable[[nn.Sequential], None], str]] = [
        (_replace_parameter, r"1\.weight was replaced"),
        (_replace_layer, r"1\.weight was replaced"),
        (_append, r"2\.weight came into the module"),
        (_unfreeze, r"0\.weight was frozen"),
    ]
    for overlap in OVERLAPS:
        for change, said in changes:
            model = net()
            model[0].weight.requires_grad_(change is not _unfreeze)
            engine, optimizer = wrapped(model, overlap)
            train(engine, optimizer, 1)
            if rank == 1:
                change(model)
            with pytest.raises((UsageError, StallError), match=f"rank 1: {said}"):  # on the others, too
                train(engine, optimizer)
            engine.close()
        model = net()
        engine, optimizer = wrapped(model, overlap)
        model.register_module("meter", nn.Identity())  # no harm
        model[0].bias.requires_grad_(False)  # nor this
        train(engine, optimizer)
        engine.close()


def other_memory_under_a_parameter(rank: int, size: int) -> None:
    def clone(m: nn.Sequential) -> None:
        m[1].weight.data = m[1].weight.data.clone()

    for change in (clone, lambda m: m.double()):
        model = net()
        engine, optimizer = wrapped(model, "step")
        train(engine, optimizer, 1)
        change(model)
        with pytest.raises((UsageError, StallError), match=r"has other memory than"):
            train(engine, optimizer, x=inputs().to(model[1].weight.dtype))
        engine.close()
    model = net()
    engine, optimizer = wrapped(model)
    clone(model)  # served where nothing was moved
    train(engine, optimizer)
    engine.close()
    tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    tied[1].weight.data = tied[0].weight.data
    with pytest.raises((UsageError, StallError), match=r"0\.weight and 1\.weight lie in the same memory"):
        wrapped(tied, "step")


def the_optimizer_that_was_wrapped(rank: int, size: int) -> None:
    engine = GroupedAllreduce(net(), overlap="step", timeout_s=8)
    old = torch.optim.SGD(engine.parameters(), lr=0.1)
    rates = torch.optim.lr_scheduler.ExponentialLR(old, 0.5)  # one made before goes on
    optimizer = engine.wrap(old)
    train(engine, optimizer, 1)
    rates.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    with pytest.raises(UsageError, match=r"the one that engine\.wrap"):
        train(engine, old, 1)
    engine.close()


def settings_that_differ_after_wrap(rank: int, size: int) -> None:
    engine, optimizer = wrapped(net(), "step")
    train(engine, optimizer)
    optimizer.param_groups[0]["lr"] = 0.05  # alike: as a schedule does
    train(engine, optimizer)
    optimizer.param_groups[0]["lr"] = 0.01 * (rank + 1)
    with pytest.raises(MismatchError, match=r"rank 0: .*lr=0\.01.*; rank 1: .*lr=0\.02"):
        train(engine, optimizer)
    engine.close()


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("my own")


def a_backward_pass_that_was_broken_off(rank: int, size: int) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.a(Breaks.apply(self.c(x))), self.b(x)

    for overlap in OVERLAPS:
        engine, _ = wrapped(Two(), overlap)
        broken, whole = engine(inputs())
        with pytest.raises(RuntimeError, match="my own"):
            broken.sum().backward()
        with pytest.raises((UsageError, StallError), match="did not reach its end"):
            whole.sum().backward()  # of parameters that the broken pass did not reach
        engine.close()


def a_sparse_gradient_that_nobody_foresaw(rank: int, size: int) -> None:
    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(10, 4))

        def forward(self, words):
            return nn.functional.embedding(words, self.table, sparse=True)

    for overlap in OVERLAPS:
        engine, optimizer = wrapped(Looked(), overlap)
        with pytest.raises((UsageError, StallError), match="sparse, expected dense"):
            train(engine, optimizer, 1, x=torch.tensor([rank, 5]))
        engine.close()


def copies_and_wrong_options(rank: int, size: int) -> None:
    engine = GroupedAllreduce(net(), timeout_s=8)
    for call in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match=r"copy engine\.module"):
            call(engine)
        call(engine.module)
    engine.close()
    for option in (
        {"timeout_s": float("inf")},
        {"timeout_s": "x"},
        {"grouping": None},
        {"node_size": "2"},
        {"average_over": 1.5},
        {"process_group": "x"},
    ):
        with pytest.raises(UsageError):
            GroupedAllreduce(net(), **option)


def a_forked_child_ends_without_a_word(rank: int, size: int) -> None:
    engine, optimizer = wrapped(net())
    train(engine, optimizer)
    if rank == 0:
        child = os.fork()
        if child == 0:  # as at its exit, without what others registered
            code = 1
            try:
                stall._close_all()
                pump._close_all()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
    dist.barrier()
    if rank == 0:
        time.sleep(1.5)  # the others look around while they wait
    train(engine, optimizer)
    engine.close()


CHECKS = [
    odd_sizes_are_reduced,
    odd_sizes_are_updated_behind_the_step,
    only_sparse_parameters,
    a_buffer_that_is_expanded,
    wrapped_twice_is_reduced_once,
    what_the_engine_would_not_reduce_is_refused,
    other_memory_under_a_parameter,
    the_optimizer_that_was_wrapped,
    settings_that_differ_after_wrap,
    a_backward_pass_that_was_broken_off,
    a_sparse_gradient_that_nobody_foresaw,
    copies_and_wrong_options,
    a_forked_child_ends_without_a_word,
]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict[str, str]]:
    return rank_checks.launch(__file__, 2, tmp_path_factory.mktemp("misuse"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_ranks(results, check):
    rank_checks.expect_passed(results, check)


if __name__ == "__main__":
    rank_checks.run_here(CHECKS, Path(sys.argv[1]))
