"""Compression, two levels, sparse gradients, autocast, join, process sets on four real ranks, against DDP or sums."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import rank_checks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from exitwave.ingest.errors import UsageError
from exitwave.train import GroupedAllreduce
from exitwave.train.allreduce import StallError, Sum, allreduce


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 3))


def inputs(step: int, rank: int, n: int = 4) -> torch.Tensor:
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def whole(values: torch.Tensor, size: int) -> list[torch.Tensor]:
    rows = [torch.empty_like(values) for _ in range(size)]
    dist.all_gather(rows, values.contiguous())
    return rows


def flat_gradients(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.detach().flatten() for p in module.parameters()])


# Each check is called as check(rank, size) on every rank.


def compression_keeps_its_bound(rank: int, size: int) -> None:
    """|error| <= W·u·sum |x_r|, over gradients of widely different sizes; the same bits on every rank."""
    for kind, unit in (("fp16", 2.0**-11), ("bf16", 2.0**-8)):
        model = net()
        engine = GroupedAllreduce(model, compression=kind, grouping="count:3", timeout_s=20)
        for step, scale in enumerate([1.0, 1e-6, 3e4, 1e8, 1e-8, 1.0, 1.0]):
            model.zero_grad()
            # what each rank contributes, by a backward pass of its own
            alone = copy.deepcopy(model)
            (alone(inputs(step, rank)).square().mean() * scale).backward()
            own = whole(flat_gradients(alone) / size, size)
            if step == 5:
                with engine.no_sync():
                    (engine(inputs(step, rank)).square().mean() * (scale / 2)).backward()
                (engine(inputs(step, rank)).square().mean() * (scale / 2)).backward()
            else:
                (engine(inputs(step, rank)).square().mean() * scale).backward()
            reduced = flat_gradients(model)
            assert all(torch.equal(reduced, row) for row in whole(reduced, size))
            assert reduced.dtype == torch.float32 and all(p.dtype == torch.float32 for p in model.parameters())
            exact, magnitude = sum(x.double() for x in own), sum(x.double().abs() for x in own)
            floor = float(exact.abs().max()) * 2.0**-21 * size if kind == "fp16" else 0.0  # what underflows
            bound = (size + 1) * unit * magnitude + floor  # + 1: the second order, and the way back
            assert bool(((reduced.double() - exact).abs() <= bound).all()), (kind, step)
            assert engine.finite()
        halved = engine.counters.bytes
        engine.close()
        plain = GroupedAllreduce(net(), grouping="count:3", timeout_s=20)
        for _ in range(7):
            plain(inputs(0, rank)).sum().backward()
        assert halved < 0.7 * plain.counters.bytes, "little was saved"
        plain.close()


def compression_under_a_gradient_scaler(rank: int, size: int) -> None:
    """A loss scaled to the edge of float16: sums that do not fit are reduced again; a true infinity skips on all."""
    model = net()
    engine = GroupedAllreduce(model, compression="fp16", timeout_s=20)
    ddp = DistributedDataParallel(copy.deepcopy(model))
    rows = []
    for wrapped in (engine, ddp):
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
        scales = []
        for step in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = wrapped(inputs(step, rank)).float().square().mean()
            scaler.scale(loss * (float("inf") if step == 3 and rank == 1 else 1.0)).backward()
            if wrapped is engine:
                assert engine.finite() == (step != 3), (step, flat_gradients(model).abs().max())
                engine.unscale_(scaler, optimizer)
                engine.clip_grad_norm_(1.0)
            else:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        rows.append(scales)
    assert rows[0] == rows[1] and rows[0][3] < rows[0][2]
    for mine, theirs in zip(model.parameters(), ddp.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-3)
        assert all(torch.equal(mine.detach(), row) for row in whole(mine.detach(), size))
    engine.close()


def two_levels_sum_exactly(rank: int, size: int) -> None:
    """Gradients that are small whole numbers: whatever the order of addition, sums are exact."""
    for grouping in ("count:1", "count:4", "bytes:0.0005"):
        model = net()
        engine = GroupedAllreduce(model, node_size=2, grouping=grouping, average_over=1, timeout_s=20)
        for step in range(3):
            model.zero_grad()
            factors = [
                torch.randint(-50, 50, p.shape, generator=torch.Generator().manual_seed(1000 * step + 10 * i + rank))
                for i, p in enumerate(model.parameters())
            ]
            sum((p * f).sum() for p, f in zip(model.parameters(), factors, strict=True)).backward()
            for p, f in zip(model.parameters(), factors, strict=True):
                expected = sum(whole(f, size))
                assert torch.equal(p.grad, expected.to(p.dtype))
        engine.close()
    for wrong in (3, 4, 1):
        with pytest.raises(UsageError, match=f"node_size={wrong}"):
            GroupedAllreduce(net(), node_size=wrong, timeout_s=20)


def sparse_gradients_equal_ddps_and_one_process(rank: int, size: int) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 8, sparse=True)
            self.rare = nn.EmbeddingBag(20, 8, sparse=True)
            self.top = nn.Linear(8, 2)

        def forward(self, words: torch.Tensor, with_rare: bool) -> torch.Tensor:  # words: (n, 3)
            y = self.table(words).mean(1)
            return self.top(y + self.rare(words % 20) if with_rare else y)

    torch.manual_seed(0)
    model = Words()
    engine = GroupedAllreduce(model, timeout_s=20)
    alone = copy.deepcopy(model)  # one process with the samples of all ranks
    ddp = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    for step in range(4):
        words = [torch.randint(50, (4, 3), generator=torch.Generator().manual_seed(10 * step + r)) for r in range(size)]
        with_rare = [step > 0 and (step != 3 or r == 1) for r in range(size)]  # by no rank, by all, by one
        compared = [(engine, model, words[rank], with_rare[rank])]
        if all(with_rare):  # DDP has no answer to a sparse gradient that a rank lacks
            compared.append((ddp, ddp.module, words[rank], True))
        for wrapped, module, mine, rare in compared:
            module.zero_grad()
            if step == 2:
                with wrapped.no_sync():
                    wrapped(mine, True).square().mean().backward()
            wrapped(mine, rare).square().mean().backward()
        alone.zero_grad()
        for r in range(size):
            for _ in range(2 if step == 2 else 1):
                (alone(words[r], with_rare[r]).square().mean() / size).backward()
        for module in [alone, *([ddp.module] if all(with_rare) else [])]:
            for (name, p), q in zip(model.named_parameters(), module.parameters(), strict=True):
                if q.grad is None:
                    assert p.grad is None and (name, step) == ("rare.weight", 0)
                    continue
                assert p.grad.is_sparse == (not name.startswith("top"))
                torch.testing.assert_close(p.grad.to_dense(), q.grad.to_dense(), rtol=2e-5, atol=1e-7)
    with pytest.raises(UsageError, match=r"table\.weight, rare\.weight"):
        GroupedAllreduce(Words(), overlap="step", timeout_s=20)
    engine.close()


def autocast_equals_ddps(rank: int, size: int) -> None:
    for autocast in (torch.bfloat16, None):
        model = net() if autocast else net().to(torch.bfloat16)  # mixed, and all of it
        engine = GroupedAllreduce(model, grouping="count:3", timeout_s=20)
        ddp = DistributedDataParallel(copy.deepcopy(model))
        for wrapped in (engine, ddp):
            x = inputs(0, rank) if autocast else inputs(0, rank).to(torch.bfloat16)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
                loss = wrapped(x).float().square().mean()
            loss.backward()
        for p, q in zip(model.parameters(), ddp.module.parameters(), strict=True):
            assert p.grad.dtype == q.grad.dtype
            tolerance = {"rtol": 2e-5, "atol": 1e-6} if autocast else {"rtol": 3e-2, "atol": 1e-3}
            torch.testing.assert_close(p.grad, q.grad, **tolerance)
        engine.close()


def join_serves_ranks_that_end_early(rank: int, size: int) -> None:
    """Exactly the sums of the ranks that were there (whole numbers again), then all have the last one's weights."""
    batches = [3, 1, 4, 0][rank]
    for protocol in ("static", "bitvector"):
        for over_all in (True, False):
            model = nn.Linear(4, 4)
            engine = GroupedAllreduce(model, protocol=protocol, grouping="count:2", timeout_s=20)
            with torch.no_grad():
                model.weight.zero_()
                model.bias.zero_()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            with engine.join(divide_by_initial_world_size=over_all):
                for step in range(batches):
                    optimizer.zero_grad()
                    (engine(torch.zeros(1, 4)) * (rank + 1) * 12).sum().backward()
                    there = [r for r, n in enumerate([3, 1, 4, 0]) if n > step]
                    mean = sum((r + 1) * 12 for r in there) / (size if over_all else len(there))
                    assert torch.equal(model.bias.grad, torch.full((4,), mean)), (step, mean)
                    optimizer.step()
            rows = whole(model.bias.detach(), size)
            assert all(torch.equal(row, rows[2]) for row in rows)
            engine(torch.ones(1, 4)).sum().backward()  # as before
            engine.close()


def process_sets_reduce_among_themselves(rank: int, size: int) -> None:
    sets = [[0, 2], [1, 3]]
    groups = [dist.new_group(members) for members in sets]
    mine = rank % 2
    model = nn.Linear(4, 4)
    for overlap in ("backward", "step"):
        engine = GroupedAllreduce(model, process_group=groups[mine], overlap=overlap, timeout_s=20)
        with torch.no_grad():
            model.bias.zero_()
        optimizer = engine.wrap(torch.optim.SGD(model.parameters(), lr=1.0))
        optimizer.zero_grad()
        (engine(torch.zeros(1, 4)) * (rank + 1)).sum().backward()
        optimizer.step()
        with engine.full_parameters():
            assert torch.equal(model.bias, torch.full((4,), -sum(r + 1 for r in sets[mine]) / 2.0))
        engine.close()
    total = allreduce(torch.tensor([float(rank)]), op=Sum, process_set=groups[mine])
    assert total.item() == sum(sets[mine])


def join_refuses_what_it_cannot_serve(rank: int, size: int) -> None:
    """Last, since it ends the engine: rank 0 asks, all are told."""
    engine = GroupedAllreduce(nn.Linear(4, 4), timeout_s=4)
    with (
        pytest.raises((UsageError, StallError), match=r"allreduce of metric cannot be served within join"),
        engine.join(),
    ):
        if rank == 0:
            allreduce(torch.ones(1), name="metric")


CHECKS = [
    compression_keeps_its_bound,
    compression_under_a_gradient_scaler,
    two_levels_sum_exactly,
    sparse_gradients_equal_ddps_and_one_process,
    autocast_equals_ddps,
    join_serves_ranks_that_end_early,
    process_sets_reduce_among_themselves,
    join_refuses_what_it_cannot_serve,
]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict[str, str]]:
    return rank_checks.launch(__file__, 4, tmp_path_factory.mktemp("features"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_ranks(results, check):
    rank_checks.expect_passed(results, check)


if __name__ == "__main__":
    rank_checks.run_here(CHECKS, Path(sys.argv[1]))
