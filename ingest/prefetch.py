"""A cache smaller than the data set, which runs ahead of the training: shards come before they are needed.

(1) Every training process of a node starts a `Prefetcher`; the one that gets the stager's lock copies and evicts for
    all of them. When it ends, however it ends, the kernel gives the lock to another one, which goes on.
(2) The trainer tells the position it has committed. From there on the order of need is known (`prefetch_order`), and
    the planner keeps as much of it in the cache as the capacity holds.
(3) Readers never wait for it: what is not there is read from the data set itself. Nor does its trouble end the
    training: it is told as an event, and tried again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

from exitwave.ingest.errors import ExitwaveError
from exitwave.ingest.files import FileLock
from exitwave.ingest.manifest import load_manifest
from exitwave.ingest.prefetch_order import AccessOrder
from exitwave.ingest.staging import fill_planner
from exitwave.ingest.staging_home import CacheHome
from exitwave.ingest.staging_plan import CachePlanner, State, check_capacity, window_bytes
from exitwave.ingest.staging_run import Limits, StagingRun
from exitwave.ingest.staging_sources import StorageSource
from exitwave.ingest.storage import PosixStorage, holds
from exitwave.ingest.verify import check_shard

__all__ = ["Prefetcher", "minimum_capacity"]

Emit = Callable[..., Any]

_TAKE_OVER_S = 0.2
_AGAIN_S = 1.0
_LONGEST_PAUSE_S = 60.0
_RECHECK_S = 10.0
_LOOK_S = 1.0
_TELL_S = 10.0
_WINDOW_SAMPLES = 100_000  # the minimum is taken over so many accesses


def minimum_capacity(order: AccessOrder, sizes: dict[str, int], *, batches: int = 2) -> int:
    """The bytes that a streaming cache must hold: all shards of `batches` global batches in a row, and one on its way.

    Looked at over the first accesses of epoch 0.
    """
    first, last = order.ranks
    window = batches * max(1, order.global_batch * (last - first) // order.world_size)
    most = window_bytes(islice(order.accesses(0), max(_WINDOW_SAMPLES, window)), sizes, window)
    total = sum(sizes[i] for i in order.ids)
    return min(total, most + max((sizes[i] for i in order.ids), default=0))


class Prefetcher:
    """Keeps a node's cache ahead of the training; a context manager.

    `order`: which samples are read when, by which ranks of this node. `emit(kind, **fields)`: told cache_stager (this
    process stages now), cache_ready, cache_evicted, cache_progress, cache_stager_failed, …, from a thread of its own.
    UsageError: the capacity is below what two batches need, or the folder cannot be the cache.
    """

    def __init__(
        self,
        dataset: str | Path,
        cache: str | Path,
        order: AccessOrder,
        *,
        capacity_bytes: int | None,
        emit: Emit | None = None,
        limits: Limits | None = None,
        epoch: int = 0,
        committed: int = 0,
    ) -> None:
        self.dataset = Path(dataset)
        self.order = order
        self.capacity_bytes = capacity_bytes
        manifest = load_manifest(self.dataset)
        sizes = {shard.shard_id: shard.nbytes for shard in manifest.shards}
        needed = minimum_capacity(order, sizes)
        check_capacity(capacity_bytes, needed, "the shards that two batches in a row need, and one on its way")
        self.home = CacheHome(Path(cache), manifest.header)
        self.home.make()
        self.is_stager = False
        self._emit = emit or (lambda kind, **fields: None)
        self._limits = limits or Limits()
        self._position = (epoch, committed)
        self._told = float("-inf")
        self._told_copied = -1
        self._rechecked = float("-inf")
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)

    def start(self) -> Prefetcher:
        self._thread.start()
        return self

    def advance(self, epoch: int, committed: int) -> None:
        """The trainer has committed so many samples of this epoch, over all ranks."""
        self._position = (epoch, committed)
        self._changed.set()

    def close(self) -> None:
        """Stops copying; what is ready stays, and another process of the node may go on."""
        self._closing.set()
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join(20)

    def __enter__(self) -> Prefetcher:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = _AGAIN_S
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                self._stage_when_elected()
            except Exception as error:  # whatever it is, the training goes on, and so does the trying
                why = str(error) if isinstance(error, (ExitwaveError, OSError)) else repr(error)
                with contextlib.suppress(Exception):  # the log's own disk may be what is full
                    self._emit("cache_stager_failed", why=why)
                pause = _AGAIN_S if time.monotonic() - began > _LONGEST_PAUSE_S else min(2 * pause, _LONGEST_PAUSE_S)
                self._closing.wait(pause)

    def _stage_when_elected(self) -> None:
        self.home.make()  # it may have been removed meanwhile
        lock = FileLock(self.home.lock_path)
        while not lock.acquire():
            if self._closing.wait(_TAKE_OVER_S):
                return
        try:
            self.is_stager = True
            self._emit("cache_stager", holder=lock.holder())
            self._stage()
        finally:
            self.is_stager = False
            lock.release()

    def _stage(self) -> None:
        manifest = load_manifest(self.dataset)
        planner = CachePlanner({}, capacity_bytes=self.capacity_bytes, in_flight=self._limits.in_flight)
        fill_planner(planner, self.home, manifest, emit=self._emit)
        storage = PosixStorage(self.dataset)
        run = StagingRun(
            self.home,
            manifest.shards,
            planner,
            StorageSource(storage),
            limits=self._limits,
            emit=self._emit,
            stop=self._closing.is_set,
            diagnose=lambda shard: check_shard(self.dataset, shard),
            raise_damage=False,
            obtainable=lambda shard: holds(storage, shard.path, shard.nbytes),
        )
        sizes = {shard.shard_id: shard.nbytes for shard in manifest.shards}
        looked = time.monotonic()
        look_ahead_at = 0.0
        self._changed.set()
        try:
            while not self._closing.is_set():
                now = time.monotonic()
                if self._changed.is_set() and now >= look_ahead_at:
                    self._changed.clear()
                    planner.needs(self._upcoming(sizes))
                    look_ahead_at = now + 10 * (time.monotonic() - now)  # at most a tenth of the time goes into this
                run.turn(0.1)
                if run.idle():
                    self._closing.wait(0.02) if self._changed.is_set() else self._changed.wait(0.2)
                if time.monotonic() - looked >= _LOOK_S:
                    looked = time.monotonic()
                    self._look(planner, run)
        finally:
            run.close()

    def _upcoming(self, sizes: dict[str, int]) -> list[str]:
        """The shards in order of need, as far as the cache may reach, and as far again.

        What it holds and is not among them is needed later than all of them, so that it is the first to be evicted.
        """
        horizon = None if self.capacity_bytes is None else 2 * self.capacity_bytes
        return [i for i in self.order.upcoming(*self._position, sizes=sizes, at_most_bytes=horizon) if i in sizes]

    def _look(self, planner: CachePlanner, run: StagingRun) -> None:
        """Readers may have let go of a pin, or set a damaged copy aside."""
        run.recheck_pins()
        if time.monotonic() - self._rechecked >= _RECHECK_S:
            self._rechecked = time.monotonic()
            run.recheck_last_copies()
        there = self.home.scan()
        for shard_id in planner.ids(State.READY):
            if shard_id not in there:
                planner.gone(shard_id)
                run.counts.quarantined += 1
                self._emit("cache_quarantined", shard=shard_id, why="a reader found it damaged and set it aside")
        if time.monotonic() - self._told < _TELL_S or run.counts.copied == self._told_copied:
            return
        self._told, self._told_copied = time.monotonic(), run.counts.copied
        self._emit(
            "cache_progress",
            used=planner.used_bytes,
            capacity=planner.capacity_bytes,
            ready=len(there),
            copied=run.counts.copied,
            evicted=run.counts.evicted,
            from_source=run.counts.from_source,
            from_peers=run.counts.from_peers,
        )
