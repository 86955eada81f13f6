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

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from exitwave.ingest.events import EventLog
from exitwave.ingest.processes import die_with_parent
from exitwave.train.build import build, open_samples
from exitwave.train.caching import prefetching
from exitwave.train.closing import TrainResult, already_done, finish
from exitwave.train.loop import fit
from exitwave.train.mesh import RankInfo, Ranks, open_ranks
from exitwave.train.online import Online, open_arrivals
from exitwave.train.parallel import Parallel
from exitwave.train.recorder import Recorder
from exitwave.train.run import claim_run
from exitwave.train.spatial_mesh import SPLIT_TASKS, SpatialMesh
from exitwave.train.spec import TrainSpec
from exitwave.train.state import latest_checkpoint
from exitwave.train.task import task_of
from exitwave.train.trackers import open_trackers

__all__ = ["TrainResult", "train"]


def train(
    spec: TrainSpec,
    *,
    data: Path,
    out: Path,
    rank_info: RankInfo | None = None,
    parallel: Parallel | None = None,
    cache: Path | None = None,
    cache_capacity: int | None = None,
    fresh: bool = False,
    emit: Callable[[dict[str, Any]], None] | None = None,
    stop: Callable[[], bool] | None = None,
    threads: int | None = None,
    online: Online | None = None,
) -> TrainResult:
    """Trains a model on a data set, or goes on where the folder `out` was left. Every rank calls it.

    Args:
        data: the data set; only committed samples of `spec.train_split` are used.
        out: the run's folder, the same for all ranks (run.py says what it holds).
        parallel: how ranks share the work; None: each its own samples.
        cache: where `stage` put the shards, or None to read the data set itself.
        cache_capacity: bytes; the cache is then kept filled with what comes next, within them (`ingest.prefetch`).
        fresh: forget what `out` holds.
        emit: called with each event that rank 0 records.
        stop: asked before each step; when it is true on any rank, all checkpoint and leave.
        threads: torch threads of this rank; None leaves them.
        online: train while the data set grows, or as one did that is done again (online.py).

    Raises:
        UsageError: the data set or `out` do not fit the spec.
        DamagedDataError: a sample is damaged, or its loss is not finite.
        InterruptedRunError: stopped by `stop`; call again to resume.
        ExitwaveError: another rank failed, or gradients are not finite.
    """
    info, parallel, task = rank_info or RankInfo(), parallel or _parallel_of(spec), task_of(spec)
    if info.world_size > 1:
        die_with_parent()
    with _torch_settings(threads, spec), open_ranks(info, timeout_s=spec.engine.timeout_s) as ranks:
        plan = parallel.data_plan(ranks)
        dataset = open_samples(spec, task, data, cache, ranks, plan, online)
        other = None if online is None else online.identity()
        ranks.from_first(lambda: claim_run(out, spec, dataset_id=dataset.dataset_id, fresh=fresh, online=other))
        if ranks.from_first(lambda: (out / "model.pt").exists()):
            return already_done(out, info)
        with _recording(out, spec, ranks, emit) as recorder:
            training = build(
                spec, task, dataset, data=data, cache=cache, out=out,
                ranks=ranks, parallel=parallel, plan=plan, recorder=recorder,
                arrivals=None if online is None else open_arrivals(spec, data, out, ranks, online, stop or _never),
            )  # fmt: skip
            with closing(training.engine), prefetching(training, cache_capacity) as training.prefetcher:
                fit(training, stop or _never)
                return finish(training)


def _never() -> bool:
    return False


def _parallel_of(spec: TrainSpec) -> Parallel:
    """Data parallelism; tasks that read tiles have their own, of which one tile is the whole sample."""
    return SpatialMesh(spec, None) if spec.task in SPLIT_TASKS else Parallel()


@contextmanager
def _recording(
    out: Path, spec: TrainSpec, ranks: Ranks, emit: Callable[[dict[str, Any]], None] | None
) -> Iterator[Recorder | None]:
    """Rank 0's log and trackers; what is still to be written is written at the end, however that comes."""
    recorder: Recorder | None = None
    closers: list[Callable[[], None]] = []

    def open_all() -> None:
        nonlocal recorder
        latest = latest_checkpoint(out / "checkpoints")
        step = 0 if latest is None else int(latest.name[5:])
        listeners, closers[:] = open_trackers(spec.trackers, out, configuration=spec.canonical(), step=step)
        log = EventLog(out / "events.jsonl")
        log.listeners += [*([] if emit is None else [emit]), *listeners]
        recorder = Recorder(log)

    ranks.from_first(open_all)
    try:
        yield recorder
    finally:
        if recorder is not None:
            recorder.close()
        for close in closers:
            close()


@contextmanager
def _torch_settings(threads: int | None, spec: TrainSpec) -> Iterator[None]:
    """Threads and determinism for the time of the training; the process's settings come back afterwards.

    A convolution's sums depend on the number of threads, so that "any-ranks" means one on every rank.
    """
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    if spec.deterministic == "any-ranks":
        threads = 1
    if threads is not None:
        torch.set_num_threads(threads)
    if spec.deterministic:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])
