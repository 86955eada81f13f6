"""From the first step to the last: read, agree, step, commit, record, and what is due every so many steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from exitwave.ingest.errors import InterruptedRunError
from exitwave.train.build import DTYPE
from exitwave.train.closing import checkpoint
from exitwave.train.loader import Batch, rank_batches
from exitwave.train.optim import learning_rate, set_learning_rate
from exitwave.train.step import take_step
from exitwave.train.training import Training, exposed_s
from exitwave.train.validation import validate

__all__ = ["fit"]


def fit(training: Training, stop: Callable[[], bool]) -> None:
    """Trains to the end. InterruptedRunError, after a checkpoint, when `stop` is true on any rank."""
    spec, ranks = training.spec, training.ranks
    batches: Iterator[Batch] = iter(())
    clock_s = ranks.agree(clock_s=training.clock_s()).clock_s
    while not training.finished(clock_s):
        began = time.perf_counter()
        batch, batches, error = _next_batch(training, batches)
        data_wait_s = time.perf_counter() - began
        agreed = ranks.agree(error=error, stop=stop(), clock_s=training.clock_s())
        clock_s = agreed.clock_s
        if agreed.stop:
            checkpoint(training)
            training.emit("train_interrupted", step=training.step)
            raise InterruptedRunError(
                f"{training.out}: stopped after step {training.step}, with a checkpoint; the same command resumes there"
            )
        assert batch is not None
        lr = learning_rate(spec.optimizer, step=training.step, progress=training.progress(clock_s))
        set_learning_rate(training.optimizer, lr)
        exposed_before = exposed_s(training.engine)
        training.loss = take_step(training, batch)
        training.sampler.commit(spec.batch)
        if training.prefetcher is not None:
            training.prefetcher.advance(training.sampler.epoch, training.sampler.committed)
        training.step += 1
        training.samples += spec.batch
        training.emit(
            "train_step",
            step=training.step,
            loss=training.loss,
            lr=lr,
            samples_per_s=spec.batch / (time.perf_counter() - began),
            data_wait_s=data_wait_s,
            exposed_comm_s=exposed_s(training.engine) - exposed_before,
        )
        if spec.eval_every_steps and training.step % spec.eval_every_steps == 0:
            validate(training)
        if training.step % spec.checkpoint.every_steps == 0:
            checkpoint(training)


def _next_batch(training: Training, batches: Iterator[Batch]) -> tuple[Batch | None, Iterator[Batch], Exception | None]:
    """The next batch of this epoch or the first of the next; a reading error is handed back, to be agreed on."""
    try:
        batch: Batch | None = next(batches, None)
        if batch is None:
            prepare = training.task.prepare(training.measured, epoch=training.sampler.epoch)
            source = training.plan.view(training.dataset)
            batches = rank_batches(source, training.sampler, prepare, workers=training.spec.data.workers)
            batch = next(batches)
        return batch.to(DTYPE[training.spec.precision]), batches, None
    except Exception as error:
        return None, batches, error
