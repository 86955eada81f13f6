"""Sums without rounding, batches ahead, events behind: the small parts of the trainer's loop."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from torch import nn

from exitwave.ingest.errors import InterruptedRunError
from exitwave.ingest.events import EventLog, read_events
from exitwave.train.ahead import Ahead
from exitwave.train.exact_sums import ExactSums
from exitwave.train.recorder import Recorder


def _sum(gradients: list[torch.Tensor], dealt: list[list[int]], *, scale: float = 1.0) -> torch.Tensor:
    """The sum with samples dealt out to ranks; ranks are added in the order given."""
    parameter = nn.Parameter(torch.zeros_like(gradients[0]))
    unused = nn.Parameter(torch.zeros(2))
    sums = []
    for part in dealt:
        one = ExactSums([parameter, unused])
        for k in part:
            parameter.grad = gradients[k] * scale
            one.take(scale)
        sums.append(one)

    def all_reduce(mine: torch.Tensor) -> None:
        for other in sums[1:]:
            mine += other._all

    sums[0].give(all_reduce, factor=0.25)
    assert unused.grad is None
    assert parameter.grad is not None
    return parameter.grad


def test_the_sum_has_the_same_bits_in_any_order_and_is_right():
    torch.manual_seed(0)
    size = torch.logspace(-9, 3, 64)  # of very unlike magnitudes, which is where float32 loses most
    gradients = [torch.randn(64) * size * (-1) ** k for k in range(12)]
    whole = _sum(gradients, [list(range(12))])
    for dealt in ([[11, 3, 5], [0, 1, 2, 4], [6, 7, 8, 9, 10]], [list(range(6, 12)), list(range(6))]):
        assert torch.equal(_sum(gradients, dealt), whole)
    assert torch.equal(_sum(gradients, [list(range(12))], scale=2.0**12), whole)
    true = torch.stack([g.double() for g in gradients]).sum(0) * 0.25
    assert torch.equal(whole, true.float())


def test_a_gradient_that_is_not_finite_stays_so():
    whole = _sum([torch.tensor([1.0, float("inf"), float("nan")]), torch.ones(3)], [[0, 1]])
    assert torch.isfinite(whole).tolist() == [True, False, False]


def test_batches_come_in_order_and_an_error_at_its_place():
    def source():
        yield from range(5)
        raise ValueError("the sixth")

    ahead = Ahead(source(), 2)
    assert list(itertools.islice(ahead, 5)) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="the sixth"):
        next(ahead)
    ahead.close()


def test_an_unused_feed_ends_with_its_thread():
    ahead = Ahead(iter(itertools.count()), 3)
    assert next(ahead) == 0
    ahead.close()
    assert not any(thread.name == "exitwave-batches" for thread in threading.enumerate())


def test_events_are_on_the_disk_after_a_flush_in_their_order(tmp_path):
    recorder = Recorder(EventLog(tmp_path / "events.jsonl"))
    seen: list[int] = []
    recorder.listen(lambda event: seen.append(event["step"]))
    for step in range(20):
        recorder.emit("train_step", step=step)
    recorder.flush()
    assert [event["step"] for event in read_events(tmp_path / "events.jsonl")] == seen == list(range(20))
    recorder.close()


def test_what_writing_failed_with_is_raised(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")

    def fail(event):
        raise InterruptedRunError("the disk is full")

    log.listeners.append(fail)
    recorder = Recorder(log)
    recorder.emit("train_step", step=1)
    with pytest.raises(InterruptedRunError, match="the disk is full"):
        recorder.flush()
    recorder.close()
