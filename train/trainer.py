"""The trainer: parse, build, train, close.

`train` runs inside each rank. What a step does, in this order on every rank:

1. Take this rank's part of the global batch.
2. Agree: does a rank want to stop, did one fail to read its samples? (mesh.py)
3. Forward, loss of each sample, backward. The engine averages gradients over ranks, weighted by n_local / n_global.
4. Sum the loss over ranks. A loss that is not finite stops all ranks, naming samples and the first bad layer.
5. Clip, optimizer step, commit the samples, record the step, checkpoint when due.

Deterministic by construction: samples come from (seed, epoch, position), noise, augmentation and dropout from (seed,
epoch or step, uid). On one rank two runs are the same to the bit; on several they differ by the order in which
floating-point sums over ranks are taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from exitwave.ingest import GlobalSampler, ShardDataset, Window
from exitwave.ingest.errors import ExitwaveError, InterruptedRunError, UsageError
from exitwave.ingest.events import EventLog
from exitwave.ingest.prefetch import Prefetcher
from exitwave.ingest.prefetch_order import AccessOrder
from exitwave.ingest.processes import die_with_parent
from exitwave.train.allreduce.engine import GroupedAllreduce
from exitwave.train.allreduce.sharded_optimizer import whole_optimizer
from exitwave.train.dropout import set_dropout_key
from exitwave.train.loader import EVALUATION_EPOCH, Batch, Measured, Prepare, measure, open_split, rank_batches
from exitwave.train.loss import per_sample_loss
from exitwave.train.mesh import RankInfo, Ranks, open_ranks
from exitwave.train.nonfinite import not_finite
from exitwave.train.optim import learning_rate, make_optimizer, set_learning_rate
from exitwave.train.run import claim_run, load_model, make_model, read_curve, save_model
from exitwave.train.spec import TrainSpec
from exitwave.train.state import Progress, latest_checkpoint, load_checkpoint, save_checkpoint

__all__ = ["TrainResult", "train"]

_DTYPE = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a training ended. `resumed_from`: the step of the checkpoint that it began with (0: from the start)."""

    run: Path
    step: int
    loss: float
    samples_per_s: float
    seconds: float
    parameters: int
    resumed_from: int
    world_size: int


def train(
    spec: TrainSpec,
    *,
    data: Path,
    out: Path,
    rank_info: RankInfo | None = None,
    cache: Path | None = None,
    cache_capacity: int | None = None,
    fresh: bool = False,
    emit: Callable[[dict[str, Any]], None] | None = None,
    stop: Callable[[], bool] | None = None,
    threads: int | None = None,
) -> TrainResult:
    """Trains a model on a data set, or goes on where the folder `out` was left. Every rank calls it.

    Args:
        data: the data set; only committed samples of `spec.train_split` are used.
        out: the run's folder, the same for all ranks (run.py says what it holds).
        cache: where `stage` put the shards, or None to read the data set itself.
        cache_capacity: bytes; the cache is then kept filled with what comes next, within them (`ingest.prefetch`).
        fresh: forget what `out` holds.
        emit: called with each event that rank 0 records.
        stop: asked before each step; when it is true on any rank, all checkpoint and leave.
        threads: torch threads of this rank; None leaves them.

    Raises:
        UsageError: the data set or `out` do not fit the spec.
        DamagedDataError: a sample is damaged, or its loss is not finite.
        InterruptedRunError: stopped by `stop`; call again to resume.
        ExitwaveError: another rank failed, or gradients are not finite.
    """
    info = rank_info or RankInfo()
    if info.world_size > 1:
        die_with_parent()
    with _torch_settings(threads, spec.deterministic), open_ranks(info, timeout_s=spec.engine.timeout_s) as ranks:
        dataset = _open(spec, data, cache, ranks)
        ranks.from_first(lambda: claim_run(out, spec, dataset_id=dataset.dataset_id, fresh=fresh))
        if ranks.from_first(lambda: (out / "model.pt").exists()):
            return _already_done(out, info)
        events = EventLog(out / "events.jsonl") if ranks.is_first else None
        if events is not None and emit is not None:
            events.listeners.append(emit)
        training = _build(spec, dataset, out, ranks, events)
        with closing(training.engine), _prefetcher(training, data, cache, cache_capacity) as training.prefetcher:
            _fit(training, stop or (lambda: False), data=data, cache=cache)
            return _finish(training)


@dataclass(kw_only=True)
class _Training:
    """What `_build` makes and `_fit` advances."""

    spec: TrainSpec
    out: Path
    ranks: Ranks
    events: EventLog | None
    dataset: ShardDataset
    measured: Measured
    module: nn.Module
    engine: GroupedAllreduce
    optimizer: torch.optim.Optimizer
    sampler: GlobalSampler
    total_steps: int | None
    step: int
    resumed_from: int
    elapsed_s: float
    saved_step: int = -1
    loss: float = float("nan")
    samples: int = 0
    prefetcher: Prefetcher | None = None
    started: float = field(default_factory=time.perf_counter)

    def emit(self, kind: str, **fields: Any) -> None:
        if self.events is not None:
            self.events.emit(kind, **fields)

    def clock_s(self) -> float:
        """Seconds of training, those before the last interruption included."""
        return self.elapsed_s + time.perf_counter() - self.started

    def finished(self, clock_s: float) -> bool:
        limit = self.spec.max_seconds
        return (self.total_steps is not None and self.step >= self.total_steps) or (
            limit is not None and clock_s >= limit
        )

    def progress(self, clock_s: float) -> float:
        """Fraction of the training that lies behind, by steps or by time, whichever is further."""
        by_steps = self.step / self.total_steps if self.total_steps else 0.0
        by_time = clock_s / self.spec.max_seconds if self.spec.max_seconds else 0.0
        return max(by_steps, by_time)


# --- build ---------------------------------------------------------------------------------------------------------


def _open(spec: TrainSpec, data: Path, cache: Path | None, ranks: Ranks) -> ShardDataset:
    """The training samples; what one rank cannot open, none trains on."""
    dataset: ShardDataset | None = None
    error: Exception | None = None
    try:
        dataset = open_split(data, spec.train_split, cache=cache)
        if spec.batch > len(dataset):
            raise UsageError(f"batch: expected at most the {len(dataset)} training samples, got {spec.batch}")
        if spec.batch < ranks.info.world_size:
            raise UsageError(
                f"batch: expected at least one sample a rank, got {spec.batch} for {ranks.info.world_size}"
            )
    except Exception as caught:
        error = caught
    ranks.agree(error=error)
    assert dataset is not None
    return dataset


def _build(spec: TrainSpec, dataset: ShardDataset, out: Path, ranks: Ranks, events: EventLog | None) -> _Training:
    measured = ranks.from_first(lambda: measure(dataset, layout=spec.model.layout))
    module = make_model(spec, measured.preprocessing).to(_DTYPE[spec.precision])
    optimizer = make_optimizer(spec.optimizer, module.named_parameters())
    sampler = GlobalSampler(
        dataset,
        rank=ranks.info.rank,
        world_size=ranks.info.world_size,
        global_batch=spec.batch,
        seed=spec.seed,
        window=None if spec.data.window is None else Window(**spec.data.window.model_dump()),
    )
    progress = Progress(step=0, elapsed_s=0.0, sampler=sampler.state_dict())
    checkpoint = ranks.from_first(lambda: latest_checkpoint(out / "checkpoints"))
    if checkpoint is not None:
        progress = load_checkpoint(checkpoint, ranks, module, optimizer)
        sampler.load_state_dict(progress.sampler)
    engine = GroupedAllreduce(
        module,
        protocol=spec.engine.protocol,
        grouping=spec.engine.grouping,
        overlap=spec.engine.overlap,
        timeout_s=spec.engine.timeout_s,
    )
    optimizer = engine.wrap(optimizer)  # overlap "step" deals it out, state and all
    training = _Training(
        spec=spec,
        out=out,
        ranks=ranks,
        events=events,
        dataset=dataset,
        measured=measured,
        module=module,
        engine=engine,
        optimizer=optimizer,
        sampler=sampler,
        total_steps=_total_steps(spec, len(dataset)),
        step=progress.step,
        resumed_from=progress.step,
        elapsed_s=progress.elapsed_s,
        saved_step=progress.step if checkpoint is not None else -1,
    )
    training.emit(
        "train_started" if checkpoint is None else "train_resumed",
        step=training.step,
        total_steps=training.total_steps,
        max_seconds=spec.max_seconds,
        samples=len(dataset),
        batch=spec.batch,
        world_size=ranks.info.world_size,
        parameters=_count(module),
    )
    return training


@contextmanager
def _prefetcher(
    training: _Training, data: Path, cache: Path | None, capacity: int | None
) -> Iterator[Prefetcher | None]:
    """Keeps the node's cache ahead of this training; every rank has one, and the first of a node to come stages."""
    if cache is None or capacity is None:
        yield None
        return
    sampler, error = training.sampler, None
    made: Prefetcher | None = None
    try:
        made = Prefetcher(
            data,
            cache,
            AccessOrder.of(training.dataset.data, sampler),
            capacity_bytes=capacity,
            epoch=sampler.epoch,
            committed=sampler.committed,
            emit=_cache_events(training),
        )
    except Exception as caught:
        error = caught
    training.ranks.agree(error=error)
    assert made is not None
    with made:
        yield made
    training.emit("cache_read", **training.dataset.data.cache_counts())


def _cache_events(training: _Training) -> Callable[..., None]:
    """Events of the cache into the run's log, from whichever rank stages; single shards are too many for it."""
    log = EventLog(training.out / "events.jsonl")

    def emit(kind: str, **fields: Any) -> None:
        if kind not in ("cache_ready", "cache_evicted"):
            log.emit(kind, rank=training.ranks.info.rank, **fields)

    return emit


def _total_steps(spec: TrainSpec, samples: int) -> int | None:
    """Steps to train, or None where only time ends it. An epoch is the whole global batches that the samples fill."""
    by_epochs = spec.epochs * (samples // spec.batch) if spec.epochs is not None else None
    limits = [steps for steps in (spec.steps, by_epochs) if steps is not None]
    return min(limits) if limits else None


# --- train ---------------------------------------------------------------------------------------------------------


def _fit(training: _Training, stop: Callable[[], bool], *, data: Path, cache: Path | None) -> None:
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
            _checkpoint(training)
            training.emit("train_interrupted", step=training.step)
            raise InterruptedRunError(
                f"{training.out}: stopped after step {training.step}, with a checkpoint; the same command resumes there"
            )
        assert batch is not None
        lr = learning_rate(spec.optimizer, step=training.step, progress=training.progress(clock_s))
        set_learning_rate(training.optimizer, lr)
        hidden_before = _exposed_s(training.engine)
        training.loss = _step(training, batch)
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
            exposed_comm_s=_exposed_s(training.engine) - hidden_before,
        )
        if spec.eval_every_steps and training.step % spec.eval_every_steps == 0:
            _validate(training, data, cache)
        if training.step % spec.checkpoint.every_steps == 0:
            _checkpoint(training)


def _next_batch(
    training: _Training, batches: Iterator[Batch]
) -> tuple[Batch | None, Iterator[Batch], Exception | None]:
    """The next batch of this epoch or the first of the next; a reading error is handed back, to be agreed on."""
    try:
        batch: Batch | None = next(batches, None)
        if batch is None:
            epoch = int(training.sampler.state_dict()["epoch"])
            preprocessing = training.measured.preprocessing
            batches = rank_batches(training.dataset, training.sampler, training.spec, preprocessing, epoch=epoch)
            batch = next(batches)
        return batch.to(_DTYPE[training.spec.precision]), batches, None
    except Exception as error:
        return None, batches, error


def _step(training: _Training, batch: Batch) -> float:
    """One optimizer step; returns the loss averaged over the global batch."""
    spec = training.spec
    n_local, n_global = len(batch.uids), spec.batch
    training.module.train()
    set_dropout_key(training.module, seed=spec.seed, step=training.step, uids=batch.uids)
    training.engine.set_local_batch(n_local, n_global)
    training.optimizer.zero_grad(set_to_none=True)
    losses = per_sample_loss(spec.loss, training.engine(batch.inputs), batch.target, batch.weight)
    losses.mean().backward()
    bad = ~torch.isfinite(losses.detach())
    loss_sum, n_bad = training.ranks.sum(float(losses.detach().sum()), float(bad.sum()))
    if n_bad:
        raise not_finite(training.ranks, training.module, batch, bad, step=training.step + 1)
    # With overlap "step" a norm is a barrier; without clipping a gradient that is not finite shows in the next loss.
    if spec.optimizer.clip is not None or spec.engine.overlap != "step":
        # the norm is that of the averaged gradient, so every rank sees the same and decides the same
        norm = training.engine.clip_grad_norm_(spec.optimizer.clip or float("inf"))
        if not torch.isfinite(norm):
            raise ExitwaveError(
                f"step {training.step + 1}: the loss is finite but its gradient is not; lower optimizer.lr"
            )
    training.optimizer.step()
    return loss_sum / n_global


def _validate(training: _Training, data: Path, cache: Path | None) -> None:
    """Loss over the validation split, its samples dealt out to the ranks; evaluation noise, no augmentation."""
    spec, ranks = training.spec, training.ranks
    loss = count = 0.0
    error: Exception | None = None
    try:
        dataset = open_split(data, spec.val_split, cache=cache)
        prepare = Prepare(
            data=spec.data, preprocessing=training.measured.preprocessing, seed=spec.seed, epoch=EVALUATION_EPOCH
        )
        training.module.eval()
        mine = range(ranks.info.rank, len(dataset), ranks.info.world_size)
        with torch.no_grad():
            for index in mine:
                batch = prepare([dataset[index]]).to(_DTYPE[spec.precision])
                loss += float(per_sample_loss(spec.loss, training.module(batch.inputs), batch.target, batch.weight))
                count += 1
    except Exception as caught:
        error = caught
    ranks.agree(error=error)
    loss, count = ranks.sum(loss, count)
    training.emit("train_eval", step=training.step, split=spec.val_split, loss=loss / count, n=int(count))


# --- close ---------------------------------------------------------------------------------------------------------


def _checkpoint(training: _Training) -> None:
    if training.saved_step == training.step:
        return
    began = time.perf_counter()
    progress = Progress(step=training.step, elapsed_s=training.clock_s(), sampler=training.sampler.state_dict())
    with whole_optimizer(training.optimizer) as optimizer:
        path = save_checkpoint(
            training.out / "checkpoints",
            training.ranks,
            training.module,
            optimizer,
            progress,
            keep=training.spec.checkpoint.keep,
        )
    training.saved_step = training.step
    training.emit("train_checkpoint", step=training.step, path=path.name, seconds=time.perf_counter() - began)


def _finish(training: _Training) -> TrainResult:
    _checkpoint(training)
    out, spec = training.out, training.spec
    training.ranks.from_first(
        lambda: save_model(
            out / "model.pt",
            training.module,
            spec,
            training.measured,
            dataset_id=training.dataset.dataset_id,
            step=training.step,
        )
    )
    seconds = time.perf_counter() - training.started
    result = TrainResult(
        run=out,
        step=training.step,
        loss=training.loss,
        samples_per_s=training.samples / seconds,
        seconds=seconds,
        parameters=_count(training.module),
        resumed_from=training.resumed_from,
        world_size=training.ranks.info.world_size,
    )
    training.emit(
        "train_finished",
        step=result.step,
        loss=result.loss,
        samples_per_s=result.samples_per_s,
        seconds=training.clock_s(),
        parameters=result.parameters,
    )
    return result


def _already_done(out: Path, info: RankInfo) -> TrainResult:
    model, curve = load_model(out), read_curve(out)
    return TrainResult(
        run=out,
        step=model.step,
        loss=curve[-1]["loss"] if curve else float("nan"),
        samples_per_s=0.0,
        seconds=0.0,
        parameters=_count(model.module),
        resumed_from=model.step,
        world_size=info.world_size,
    )


def _exposed_s(engine: GroupedAllreduce) -> float:
    return float(engine.counters.exposed_s)


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@contextmanager
def _torch_settings(threads: int | None, deterministic: bool) -> Iterator[None]:
    """Threads and determinism for the time of the training; the process's settings come back afterwards."""
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    if threads is not None:
        torch.set_num_threads(threads)
    if deterministic:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])
