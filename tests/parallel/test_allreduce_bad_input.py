"""Bad input on 2 and 4 real ranks: an exception on every rank, soon, that names tensor, ranks and both values."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import rank_checks
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from exitwave.ingest.errors import UsageError
from exitwave.train import GroupedAllreduce
from exitwave.train.allreduce import (
    GroupPlan,
    Max,
    MismatchError,
    StallError,
    StallWarning,
    Sum,
    TensorGroup,
    allreduce,
    broadcast_parameters,
    grouped_allreduce,
)

LIMIT_S = 3.0


class Two(nn.Module):
    def __init__(self, width: int = 4, dtype: torch.dtype = torch.float32, frozen: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, width, dtype=dtype).requires_grad_(not frozen)
        self.last = nn.Linear(width, 2, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def refused(kind: type[BaseException] | tuple[type[BaseException], ...], words: list[str], call: Callable) -> None:
    """`call` raises `kind` within the limit, and the message holds all `words`."""
    begun = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    assert time.monotonic() - begun < LIMIT_S + 4
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


# Each check is called as check(rank, size) on every rank.


def modules_that_differ(rank: int, size: int) -> None:
    last = rank == size - 1
    odd = f"rank {size - 1}"
    for make, words in (
        (lambda: Two(width=5 if last else 4), ["'first.weight'", "float32 (4, 4)", "float32 (5, 4)", odd]),
        (lambda: Two(dtype=torch.float64 if last else torch.float32), ["'first.weight'", "float64", "float32", odd]),
        (lambda: Two(frozen=last), ["'first.weight'", "frozen", odd]),
    ):
        refused(MismatchError, words, lambda make=make: GroupedAllreduce(make(), timeout_s=LIMIT_S))
    for options, words in (
        ({"average_over": 1 if last else size}, ["'option average_over'", odd, f": {size}"]),
        ({"grouping": "count:2" if last else "count:1"}, ["'option grouping'", "count:2", "count:1", odd]),
        ({"compression": "fp16" if last else None}, ["'option compression'", "fp16", "None", odd]),
    ):
        refused(MismatchError, words, lambda o=options: GroupedAllreduce(Two(), timeout_s=LIMIT_S, **o))


def calls_that_differ(rank: int, size: int) -> None:
    last = rank == size - 1
    odd = f"rank {size - 1}"
    one = torch.ones(3)
    for call, words in (
        (lambda: allreduce(torch.ones(4 if last else 3), name="shape"), ["'shape'", "(4,)", "(3,)"]),
        (lambda: allreduce(one.double() if last else one, name="dtype"), ["'dtype'", "float64", "float32"]),
        (lambda: allreduce(one, op=Max if last else Sum, name="operation"), ["'operation'", "max", "sum"]),
        (lambda: allreduce(one, name="before", prescale_factor=2.0 if last else 1.0), ["'before'", "prescale 2.0"]),
        (lambda: allreduce(one, name="after", postscale_factor=0.5 if last else 1.0), ["'after'", "postscale 0.5"]),
        (lambda: grouped_allreduce([one] * (3 if last else 2), name="group"), ["'group.0'", "of 3", "of 2"]),
        (lambda: broadcast_parameters({"w": one}, root_rank=int(last)), ["'w'", "from 0", "from 1"]),
    ):
        refused(MismatchError, [*words, odd], call)
    assert allreduce(one, op=Sum, name="shape")[0].item() == size  # still usable


def what_is_wrong_on_this_rank_alone(rank: int, size: int) -> None:
    """The rank itself says what; all others hear the same words."""
    both = (UsageError, StallError)
    last = rank == size - 1

    def twice(process_set: dist.ProcessGroup) -> None:
        names = ["again", "again"] if last else ["again", "other"]
        from exitwave.train.allreduce import functional

        how = functional._How(op=Sum, prescale=1.0, postscale=1.0)
        functional._exchange(functional._session(process_set, LIMIT_S), how, names, [torch.ones(1)] * 2)

    refused(both, ["a name occurs twice", "again"], lambda: twice(dist.new_group()))

    group = dist.new_group()
    mixed = [torch.ones(1), torch.ones(1, device="meta" if last else "cpu")]
    refused(
        both,
        ["mixed.0 on cpu", "mixed.1 on meta"],
        lambda: grouped_allreduce(mixed, name="mixed", process_set=group, timeout_s=LIMIT_S),
    )

    engine = GroupedAllreduce(Two(), timeout_s=LIMIT_S)

    def submitted_twice() -> None:
        x = torch.ones(1, 4, requires_grad=True)
        if last:  # a layer used inside and outside of a reentrant checkpoint accumulates twice
            y = checkpoint(engine.module.first, x, use_reentrant=True)
            engine.module.last(engine.module.first(y)).sum().backward()
        for _ in range(2):  # the others may have had all they needed; then they are told in the pass that follows
            engine(x).sum().backward()

    refused(both, ["first.", "became ready twice"], submitted_twice)


def what_every_rank_can_tell(rank: int, size: int) -> None:
    def group(index: int, *names: str, device: str = "cpu") -> TensorGroup:
        return TensorGroup(index=index, names=names, dtype="float32", device=device, nbytes=4)

    names = ("last.bias", "last.weight", "first.bias", "first.weight")
    refused(
        UsageError,
        ["first.bias is in tensor groups 0 and 1"],
        lambda: GroupPlan(grouping="own", groups=(group(0, *names[:3]), group(1, *names[2:]))),
    )
    elsewhere = GroupPlan(grouping="own", groups=(group(0, *names[:2], device="cuda"), group(1, *names[2:])))
    refused(
        UsageError,
        ["last.bias is ('float32', 'cuda')", "('float32', 'cpu')"],
        lambda: GroupedAllreduce(Two(), grouping=elsewhere, timeout_s=LIMIT_S),
    )
    refused(UsageError, ["process_set", "'workers'"], lambda: allreduce(torch.ones(1), process_set="workers"))
    engine = GroupedAllreduce(Two(), timeout_s=LIMIT_S)
    engine.close()
    refused(UsageError, ["the engine was closed"], lambda: engine(torch.ones(1, 4)))
    refused(UsageError, ["the engine was closed"], engine.broadcast_buffers)


def a_rank_that_never_submits(rank: int, size: int) -> None:
    """Warned of first, then named on every rank with what it lacks; the last check, since ranks part."""
    engine = GroupedAllreduce(Two(), timeout_s=LIMIT_S, grouping="count:2")
    step = lambda: engine(torch.ones(2, 4)).sum().backward()  # noqa: E731
    step()
    if rank == size - 1:
        time.sleep(1.4 * LIMIT_S)
        refused(StallError, [f"rank {size - 1}", "first.weight"], step)
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        refused(StallError, [f"rank {size - 1}", "first.weight", "last.bias"], step)
    said = [str(w.message) for w in caught if issubclass(w.category, StallWarning)]
    # a rank that is told by another's verdict may not have waited for long enough to warn
    assert not said or f"rank {size - 1} is alive but has not submitted" in said[0]
    time.sleep(LIMIT_S)


def use_after_shutdown(rank: int, size: int) -> None:
    dist.destroy_process_group()
    refused(UsageError, ["was shut down"], lambda: allreduce(torch.ones(1)))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


CHECKS = [
    modules_that_differ,
    calls_that_differ,
    what_is_wrong_on_this_rank_alone,
    what_every_rank_can_tell,
    a_rank_that_never_submits,
    use_after_shutdown,
]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.long)])
def results(request, tmp_path_factory) -> list[dict[str, str]]:
    return rank_checks.launch(__file__, request.param, tmp_path_factory.mktemp(f"bad{request.param}"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_ranks(results, check):
    rank_checks.expect_passed(results, check)


if __name__ == "__main__":
    rank_checks.run_here(CHECKS, Path(sys.argv[1]))
