"""The batches of this rank, epoch after epoch, made ready ahead of the steps that need them.

A sampler of the feed's own runs ahead; what counts for a resume is the training's sampler, which moves when a step is
taken. The next epoch's first batches are made ready while the last ones of this epoch are in use.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from exitwave.train.ahead import Ahead
from exitwave.train.loader import Batch, rank_batches
from exitwave.train.training import DTYPE, Training

__all__ = ["feeding"]


@contextmanager
def feeding(training: Training) -> Iterator[Iterator[Batch]]:
    """Yields the batches from the sampler's position on, without end, in the training's precision, on its device."""
    batches = _batches(training)
    depth = 0 if training.spec.data.workers or not training.plan.reads_alone else training.spec.data.ahead
    if not depth:
        yield batches
        return
    ahead = Ahead(batches, depth)
    try:
        yield ahead
    finally:
        ahead.close()


def _batches(training: Training) -> Iterator[Batch]:
    spec, sampler = training.spec, copy.copy(training.sampler)
    while True:
        source = training.plan.view(training.dataset)
        prepare = training.task.prepare(training.measured, epoch=sampler.epoch)
        for batch in rank_batches(source, sampler, prepare, workers=spec.data.workers):
            yield batch.to(DTYPE[spec.precision], training.device)
        sampler.commit(sampler.samples_per_epoch - sampler.committed)
