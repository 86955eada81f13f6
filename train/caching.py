"""A node's cache that runs ahead of the training, and what the run's log says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from exitwave.ingest import GlobalSampler
from exitwave.ingest.errors import UsageError
from exitwave.ingest.events import EventLog
from exitwave.ingest.prefetch import Prefetcher
from exitwave.ingest.prefetch_order import AccessOrder
from exitwave.train.training import Training

__all__ = ["prefetching"]


@contextmanager
def prefetching(training: Training, capacity: int | None) -> Iterator[Prefetcher | None]:
    """Keeps the node's cache ahead of this training; every rank has one, and the first of a node to come stages."""
    cache = training.cache
    if cache is None or capacity is None:
        yield None
        return
    sampler, error = training.sampler, None
    if not isinstance(sampler, GlobalSampler):
        raise UsageError("--cache-capacity: what a reservoir will draw is not known ahead; read the data set itself")
    made: Prefetcher | None = None
    try:
        made = Prefetcher(
            training.data,
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


def _cache_events(training: Training) -> Callable[..., None]:
    """Events of the cache into the run's log, from whichever rank stages; single shards are too many for it."""
    log = EventLog(training.out / "events.jsonl")

    def emit(kind: str, **fields: Any) -> None:
        if kind not in ("cache_ready", "cache_evicted"):
            log.emit(kind, rank=training.ranks.info.rank, **fields)

    return emit
