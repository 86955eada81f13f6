"""From the first step to the last: read, agree, step, commit, record, and what is due every so many steps.

Ranks agree before each step: does one want to stop, or failed to read? No gradient travels before that is known. But a
rank does not stand still for the answer, it computes its forward pass meanwhile, where that leaves nothing behind and
needs no other rank (`_may_run_ahead`); when the answer is to stop, what it computed is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from exitwave.ingest import GlobalSampler
from exitwave.ingest.errors import InterruptedRunError
from exitwave.train.closing import checkpoint
from exitwave.train.feed import feeding
from exitwave.train.loader import Batch
from exitwave.train.mesh import Agreement
from exitwave.train.optim import learning_rate, set_learning_rate
from exitwave.train.step import StepOutcome, take_step
from exitwave.train.training import Training, exposed_s
from exitwave.train.validation import validate

__all__ = ["fit", "take_steps"]


def fit(training: Training, stop: Callable[[], bool]) -> None:
    """Trains to the end. InterruptedRunError, after a checkpoint, when `stop` is true on any rank."""
    with feeding(training) as batches:
        take_steps(training, batches, stop)


def take_steps(training: Training, batches: Iterator[Batch], stop: Callable[[], bool]) -> None:
    """Steps on `batches` until the training is finished, with all that belongs to them."""
    spec, ranks = training.spec, training.ranks
    ahead = _may_run_ahead(training)
    training.module.train()
    clock_s = ranks.agree(clock_s=training.clock_s()).clock_s
    while not training.finished(clock_s):
        began = time.perf_counter()
        batch, error = _next(batches)
        data_wait_s = time.perf_counter() - began
        stopping = stop()
        # Slurm sends SIGTERM to all processes of a job, also to those that read for this rank: a rank that is told to
        # stop needs no batch any more.
        answer = ranks.start_agree(error=None if stopping else error, stop=stopping, clock_s=training.clock_s())
        agreed = _Agreed(training, answer)
        if batch is None or stopping or not ahead:
            agreed()
        assert batch is not None
        exposed_before = exposed_s(training.engine)
        outcome = take_step(training, batch, agreed)
        clock_s = agreed.clock_s
        training.loss = outcome.loss
        training.sampler.commit(spec.batch)
        if training.prefetcher is not None and isinstance(training.sampler, GlobalSampler):
            training.prefetcher.advance(training.sampler.epoch, training.sampler.committed)
        training.step += 1
        training.samples += spec.batch
        _tell(
            training,
            outcome,
            lr=agreed.lr,
            step_s=time.perf_counter() - began,
            data_wait_s=data_wait_s,
            exposed_comm_s=exposed_s(training.engine) - exposed_before,
        )
        if spec.eval_every_steps and training.step % spec.eval_every_steps == 0:
            validate(training)
        if training.step % spec.checkpoint.every_steps == 0:
            checkpoint(training)


class _Agreed:
    """What the ranks agreed on before a step. The first call waits for it, and either ends the training or sets the
    step's learning rate; later calls do nothing.
    """

    def __init__(self, training: Training, answer: Callable[[], Agreement]) -> None:
        self._training, self._answer, self._done = training, answer, False
        self.clock_s = self.lr = 0.0

    def __call__(self) -> None:
        if self._done:
            return
        training, agreed = self._training, self._answer()
        self._done = True
        if agreed.stop:
            checkpoint(training)
            training.emit("train_interrupted", step=training.step)
            raise InterruptedRunError(
                f"{training.out}: stopped after step {training.step}, with a checkpoint; the same command resumes there"
            )
        self.clock_s = agreed.clock_s
        spec, progress = training.spec, training.progress(agreed.clock_s)
        self.lr = learning_rate(spec.optimizer, step=training.step, progress=progress, batch=spec.batch)
        set_learning_rate(training.optimizer, self.lr)


def _may_run_ahead(training: Training) -> bool:
    """Whether a forward pass may begin before it is known that all ranks take the step.

    Not where ranks share samples, or gather parameters on the way: those wait for each other in it, and one that failed
    would be waited for. Not with running statistics (BatchNorm): what is dropped would leave its mark in a checkpoint.
    """
    if training.plan.size != training.ranks.info.world_size or training.spec.engine.overlap == "step":
        return False
    parameters = {name for name, _ in training.module.named_parameters(remove_duplicate=False)}
    return training.module.state_dict().keys() <= parameters


def _next(batches: Iterator[Batch]) -> tuple[Batch | None, Exception | None]:
    """A reading error is handed back, to be agreed on."""
    try:
        return next(batches), None
    except Exception as error:
        return None, error


def _tell(
    training: Training, outcome: StepOutcome, *, lr: float, step_s: float, data_wait_s: float, exposed_comm_s: float
) -> None:
    """The step's event; what is not known, or not in use, is left out of it."""
    if training.recorder is None:
        return
    more: dict[str, float] = {}
    if training.arrivals is not None and (known := training.arrivals.known(training.step - 1)) is not None:
        more["known_samples"] = known
    if outcome.gradient_norm is not None:
        more["gradient_norm"] = outcome.gradient_norm
    if training.scaler is not None:
        more |= {"loss_scale": training.scale(), "skipped": training.skipped}
    if training.flops_a_sample and training.peak_flops_per_s:
        possible = training.peak_flops_per_s * training.ranks.info.world_size * step_s
        more["mfu"] = training.flops_a_sample * training.spec.batch / possible
    if training.cache is not None:
        counts = training.dataset.data.cache_counts()
        reads = counts["hits"] + counts["misses"]
        if reads:
            more["cache_hit_rate"] = counts["hits"] / reads
    training.emit(
        "train_step",
        step=training.step,
        loss=training.loss,
        lr=lr,
        samples_per_s=training.spec.batch / step_s,
        step_s=step_s,
        data_wait_s=data_wait_s,
        exposed_comm_s=exposed_comm_s,
        **more,
    )
