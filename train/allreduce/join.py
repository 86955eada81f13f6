"""`join()`: ranks with unequal numbers of batches. Who has no more takes part in the others' reductions with zeros.

1.  Within the context every reduction begins with one small message: how many ranks are still active?
2.  A rank that leaves its loop answers for as long as any is active, and contributes zeros to each reduction.
3.  When none is active any more, all take over parameters and buffers of a rank that made the most steps.

The mean is over all ranks, as before (`divide_by_initial_world_size`, as in DDP), or over the active ones. The
optimizer's state is not sent: a rank that joined early keeps the one of its last step.

A rank that has joined can serve the reductions of this engine and nothing else: other collectives (`allreduce` and its
like, `finite`, `broadcast_buffers`, `write_timeline`) raise on every rank, and name what was asked for.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from exitwave.ingest.errors import UsageError
from exitwave.train.allreduce.agreement import broadcast_tensors

if TYPE_CHECKING:
    from exitwave.train.allreduce.engine import GroupedAllreduce

__all__ = ["join", "refuse_while_joining"]

_joining: weakref.WeakSet[GroupedAllreduce] = weakref.WeakSet()


@contextmanager
def join(engine: GroupedAllreduce, *, over_all: bool) -> Iterator[None]:
    """The context of `GroupedAllreduce.join`."""
    _joining.add(engine)
    steps = engine.counters.steps
    engine.announce = lambda: _announce(engine, over_all)
    try:
        yield
        engine.announce = None
        made = engine.counters.steps - steps
        while _count_active(engine, False):
            engine.contribute_nothing(1.0 if over_all else 0.0)
        _take_over_the_last(engine, made)
    finally:
        engine.announce = None
        _joining.discard(engine)


def _count_active(engine: GroupedAllreduce, active: bool) -> int:
    control = engine.control
    flag = torch.tensor([int(active)], dtype=torch.int64)
    return int(engine.wait(control.allreduce(flag, "sum"), "the count of ranks that have not joined").item())


def _announce(engine: GroupedAllreduce, over_all: bool) -> float:
    """Step 1: called by an active rank at the beginning of a reduction; the factor of its weight."""
    active = _count_active(engine, True)
    return 1.0 if over_all else engine.world_size / active


def _take_over_the_last(engine: GroupedAllreduce, made: int) -> None:
    rows = engine.wait(engine.control.gather(str(made).encode()), "the numbers of steps of all ranks")
    counts = [int(row) for row in rows]
    if len(set(counts)) > 1:
        tensors = [*engine.module.parameters(), *engine.module.buffers()]
        broadcast_tensors(engine.data, tensors, counts.index(max(counts)), engine.wait)


def refuse_while_joining(what: str) -> None:
    """Raise, here and on the ranks that wait, when some engine of this process is within `join()`."""
    for engine in list(_joining):
        engine.fail(UsageError(f"{what} cannot be served within join(): ranks that have joined do not take part in it"))
