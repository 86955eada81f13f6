"""The batches of this rank, epoch after epoch, made ready ahead of the steps that need them.

A sampler of the feed's own runs ahead; what counts for a resume is the training's sampler, which moves when a step is
taken. The next epoch's first batches are made ready while the last ones of this epoch are in use.

While the data set grows, a step's batch is made when it is decided what the step knows (online.py); there are no epochs
then, and noise and augmentation are drawn by (step, uid).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from exitwave.ingest import GlobalSampler, GrowingDataset, ReservoirSampler, ShardDataset
from exitwave.train.ahead import Ahead
from exitwave.train.loader import Batch, rank_batches
from exitwave.train.online import gated
from exitwave.train.training import DTYPE, Training

__all__ = ["feeding"]


@contextmanager
def feeding(training: Training) -> Iterator[Iterator[Batch]]:
    """Yields the batches from the sampler's position on, without end, in the training's precision, on its device."""
    arrivals = training.arrivals
    batches = _batches(training) if arrivals is None else _arriving(training)
    depth = 0 if training.spec.data.workers or not training.plan.reads_alone else training.spec.data.ahead
    with _made_ahead(batches, depth) if depth else nullcontext(batches) as ready:
        if arrivals is None:
            yield ready
            return
        try:
            last = training.total_steps
            yield gated(ready, lambda: arrivals.advance(training.step, ahead=depth, last=last))
        finally:
            arrivals.close()


@contextmanager
def _made_ahead(batches: Iterator[Batch], depth: int) -> Iterator[Iterator[Batch]]:
    ahead = Ahead(batches, depth)
    try:
        yield ahead
    finally:
        ahead.close()


def _batches(training: Training) -> Iterator[Batch]:
    spec, sampler = training.spec, copy.copy(training.sampler)
    assert isinstance(sampler, GlobalSampler)
    assert isinstance(training.dataset, ShardDataset)
    while True:
        source = training.plan.view(training.dataset)
        prepare = training.task.prepare(training.measured, epoch=sampler.epoch)
        for batch in rank_batches(source, sampler, prepare, workers=spec.data.workers):
            yield batch.to(DTYPE[spec.precision], training.device)
        sampler.commit(sampler.samples_per_epoch - sampler.committed)


def _arriving(training: Training) -> Iterator[Batch]:
    spec, sampler, dataset = training.spec, copy.copy(training.sampler), training.dataset
    assert isinstance(sampler, ReservoirSampler)
    assert isinstance(dataset, GrowingDataset)
    assert training.arrivals is not None
    training.arrivals.waiting = lambda: sampler.waiting
    training.arrivals.reuse = sampler.reuse
    for step, numbers in enumerate(sampler, start=training.step):
        prepare = training.task.prepare(training.measured, epoch=step)
        yield prepare(dataset.__getitems__(numbers)).to(DTYPE[spec.precision], training.device)
