"""Carries out what the planner decides: one thread a copy (`staging_copy`), ready only when synced and verified.

The thread that calls `turn` keeps all states; a copying thread reads, hashes and writes, and reports once at its end.
A copy that makes too little progress is given up: its thread may hang in the kernel, so it is left behind and its
part file, which bears a name of its own, goes away without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from exitwave.ingest.errors import DamagedDataError, InterruptedRunError
from exitwave.ingest.files import fsync_dir, write_atomic
from exitwave.ingest.records import ShardRecord
from exitwave.ingest.staging_copy import Copy, run_copy
from exitwave.ingest.staging_home import CacheHome, on_cache_disk
from exitwave.ingest.staging_plan import CachePlanner, State
from exitwave.ingest.staging_sources import Sources
from exitwave.ingest.verify import Bad

__all__ = ["Counts", "Limits", "StagingRun"]

Emit = Callable[..., Any]

PROGRESS_EVERY_S = 0.25
OPEN_WITHIN_S = 20.0  # a peer may be waited for before it sends
_LONGEST_PAUSE_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How patient staging is. `stall_s`: a copy must move `stall_bytes_per_s` over that long.

    A shard missing at its source is tried again for `missing_deadline_s`, one of a wrong hash `tries` times in all. A
    peer that is getting a shard itself is waited for `busy_s` at most. Where damage does not end the staging, such a
    shard is looked at again after `damaged_s`, then after twice as long, and so on up to an hour: the source may have
    been away only.
    """

    in_flight: int = 4
    missing_deadline_s: float = 10.0
    stall_s: float = 30.0
    stall_bytes_per_s: float = 100e3
    busy_s: float = 300.0
    damaged_s: float = 30.0
    tries: int = 3


@dataclass(kw_only=True)
class Counts:
    """What a run of staging did so far. Bytes of tries that came to nothing count in `from_…`, not in `copied`."""

    copied: int = 0
    from_source: int = 0
    from_peers: int = 0
    quarantined: int = 0
    evicted: int = 0
    retries: int = 0


@dataclass
class _Trouble:
    """What a shard has been through."""

    failures: int = 0
    wrong: int = 0
    deadline: float | None = None
    busy_since: float | None = None
    not_before: float = 0.0
    given_up: int = 0


class StagingRun:
    """The copies of one stager. `shards`: all that may be needed. `diagnose(shard)` looks closely at a bad source.

    `raise_damage`: DamagedDataError for a source that stays bad; else it is recorded and left for readers to meet.
    `obtainable(shard)`: whether it could be got again; the last copy there is is never evicted.
    """

    def __init__(
        self,
        home: CacheHome,
        shards: Sequence[ShardRecord],
        planner: CachePlanner,
        sources: Sources,
        *,
        limits: Limits,
        emit: Emit,
        stop: Callable[[], bool],
        diagnose: Callable[[ShardRecord], list[Bad]],
        raise_damage: bool = True,
        obtainable: Callable[[ShardRecord], bool] = lambda shard: True,
    ) -> None:
        self.home = home
        self.planner = planner
        self.limits = limits
        self.counts = Counts()
        self.blocked: str | None = None
        self.disk_full = False
        self._shards = {shard.shard_id: shard for shard in shards}
        self._sources = sources
        self._emit = emit
        self._stop = stop
        self._diagnose = diagnose
        self._raise_damage = raise_damage
        self._obtainable = obtainable
        self._copies: dict[str, Copy] = {}
        self._trouble: dict[str, _Trouble] = {}
        self._ended: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        self._closing = False
        self._tries = 0

    # --- the thread that decides ----------------------------------------------------------------------------------

    def turn(self, wait_s: float) -> None:
        """Begins what may begin, then waits up to `wait_s` for a copy to end and takes in all that have ended."""
        self._give_up_stalled()
        self._begin()
        if self._copies or self._held():
            self._take_ended(wait_s)

    def idle(self) -> bool:
        """Nothing is under way and nothing will be tried again."""
        return not self._copies and not self._held()

    def bytes_in_flight(self) -> int:
        return sum(copy.done for copy in self._copies.values())

    def add(self, shard: ShardRecord) -> None:
        self._shards[shard.shard_id] = shard
        self.planner.add(shard.shard_id, shard.nbytes)

    def close(self, timeout_s: float = 10.0) -> None:
        """Ends all copies, between two chunks; nothing of them stays."""
        self._closing = True
        deadline = time.monotonic() + timeout_s
        while self._copies and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                copy = self._ended.get(timeout=0.1)
                self._copies.pop(copy.shard.shard_id, None)
                self.planner.failed(copy.shard.shard_id)
                self._drop(copy)
        for copy in self._copies.values():
            copy.given_up = True
            copy.part.unlink(missing_ok=True)

    def _held(self) -> list[str]:
        now = time.monotonic()
        return [i for i, trouble in self._trouble.items() if trouble.not_before > now]

    def _begin(self) -> None:
        while not self._closing:
            decision = self.planner.decide(hold=self._held())
            self.blocked = decision.blocked
            for shard_id in decision.start:
                self._start(self._shards[shard_id])
            if not decision.evict:
                return
            for shard_id in decision.evict:
                self._evict(shard_id)

    def _evict(self, shard_id: str) -> None:
        shard = self._shards.get(shard_id)
        if shard is not None and not self._obtainable(shard):
            self.planner.irreplaceable.add(shard_id)
            self.planner.not_evicted(shard_id)
            self.planner.unpin(shard_id)
            self._emit("cache_last_copy", shard=shard_id)
        elif self.home.evict(shard_id):
            self.planner.evicted(shard_id)
            self.counts.evicted += 1
            self._emit("cache_evicted", shard=shard_id)
        else:
            self.planner.not_evicted(shard_id)

    def recheck_pins(self) -> None:
        """Lets go of pins whose readers have."""
        for shard_id in self.planner.ids(State.PINNED):
            while self.planner.pins(shard_id):
                self.planner.unpin(shard_id)

    def recheck_last_copies(self) -> None:
        """What was kept as the last copy may be evicted again once its source is back."""
        for shard_id in list(self.planner.irreplaceable):
            shard = self._shards.get(shard_id)
            if shard is not None and self._obtainable(shard):
                self.planner.irreplaceable.discard(shard_id)

    def _start(self, shard: ShardRecord) -> None:
        self._tries += 1
        part = self.home.part / f"{shard.shard_id}.{self._tries}.h5"
        self._trouble.setdefault(shard.shard_id, _Trouble())
        fd = -1
        try:
            with on_cache_disk(part, shard.nbytes):
                fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
                if shard.nbytes:
                    os.posix_fallocate(fd, 0, shard.nbytes)  # a full disk shows before the copy
        except BaseException as error:
            if fd >= 0:
                os.close(fd)
            part.unlink(missing_ok=True)
            self.planner.failed(shard.shard_id)
            if not isinstance(error, InterruptedRunError):
                raise
            self._no_room(str(error))
            return
        self.planner.copying(shard.shard_id)
        copy = Copy(shard=shard, source=self._sources.choose(shard), part=part, fd=fd)
        self._copies[shard.shard_id] = copy
        arguments = (copy, self._ended.put, lambda: self._closing or self._stop())
        threading.Thread(target=run_copy, args=arguments, name=f"stage {shard.shard_id}", daemon=True).start()

    def _take_ended(self, wait_s: float) -> None:
        published = False
        try:
            copy = self._ended.get(timeout=wait_s)
            while True:
                published |= self._take(copy)
                copy = self._ended.get_nowait()
        except queue.Empty:
            pass
        finally:
            if published:
                with on_cache_disk(self.home.ready):
                    fsync_dir(self.home.ready)

    def _take(self, copy: Copy) -> bool:
        """What one ended copy leads to; whether a shard became ready."""
        shard = copy.shard
        if copy.given_up:
            self._drop(copy)
            return False
        del self._copies[shard.shard_id]
        self._count(copy)
        if copy.digest is not None and copy.digest == shard.xxh3_128:
            self.planner.verifying(shard.shard_id)
            with on_cache_disk(copy.part, shard.nbytes):
                copy.part.rename(self.home.ready_path(shard.shard_id))
            self.planner.ready(shard.shard_id)
            self._sources.worked(copy.source)
            self._trouble.pop(shard.shard_id, None)
            self.counts.copied += shard.nbytes
            self._emit(
                "cache_ready",
                shard=shard.shard_id,
                bytes=shard.nbytes,
                source="" if copy.source.shared else copy.source.name,
            )
            return True
        self._drop(copy)
        self.planner.failed(shard.shard_id)
        if copy.disk_error is not None:
            try:
                with on_cache_disk(copy.part, shard.nbytes):
                    raise copy.disk_error
            except InterruptedRunError as error:
                self._no_room(str(error))
        elif copy.digest is not None:
            self._wrong(copy)
        elif not self._closing and not self._stop():
            self._again(copy, copy.error)
        return False

    def _count(self, copy: Copy) -> None:
        if copy.source.shared:
            self.counts.from_source += copy.done
        else:
            self.counts.from_peers += copy.done

    def _no_room(self, why: str) -> None:
        """The disk is full: what was set aside goes, or else the cache makes do with what it has."""
        freed = False
        for aside in self.home.quarantine.glob("*.h5"):
            aside.unlink(missing_ok=True)
            freed = True
        if not freed:
            self.planner.disk_is_full()
            self.disk_full = True
        self._emit("cache_disk_full", why=why)

    def _wrong(self, copy: Copy) -> None:
        trouble = self._trouble[copy.shard.shard_id]
        why = f"xxh3_128 {copy.digest}, expected {copy.shard.xxh3_128}"
        trouble.failures += 1
        self.counts.retries += 1
        self._sources.failed(copy.source)
        if copy.source.shared:
            trouble.wrong += 1
            if trouble.wrong >= self.limits.tries:
                self._source_damaged(copy.shard, why)
                return
        self._emit("cache_retry", shard=copy.shard.shard_id, source=copy.source.name, why=why)

    def _again(self, copy: Copy, why: str) -> None:
        """Another try after a pause that grows, with jitter; a peer's failure says nothing about the shard itself."""
        trouble, now = self._trouble[copy.shard.shard_id], time.monotonic()
        if copy.busy:
            trouble.busy_since = trouble.busy_since or now
            if now - trouble.busy_since < self.limits.busy_s:
                self._sources.worked(copy.source)
                trouble.not_before = now + random.uniform(0.02, 0.2)
                return
        trouble.busy_since = None
        if copy.lacked:
            self._sources.lacks(copy.source, copy.shard)
            return
        trouble.failures += 1
        self._sources.failed(copy.source)
        self.counts.retries += 1
        if copy.source.shared:
            if trouble.deadline is None:
                trouble.deadline = now + self.limits.missing_deadline_s
            elif now >= trouble.deadline:
                self._source_damaged(copy.shard, why)
                return
        pause = min(0.05 * 2 ** min(trouble.failures - 1, 6), 1.0) * random.uniform(0.5, 1.5)
        trouble.not_before = now + pause
        self._emit("cache_retry", shard=copy.shard.shard_id, source=copy.source.name, why=why)

    def _source_damaged(self, shard: ShardRecord, why: str) -> None:
        bad = self._diagnose(shard)
        samples = "; ".join(f"sample uid {b.uid:#018x}, {b.field}: {b.why}" for b in bad if b.uid is not None)
        record = {"shard": shard.shard_id, "why": why, "bad": [b.to_json() for b in bad]}
        write_atomic(self.home.quarantine / f"{shard.shard_id}.json", json.dumps(record, indent=1).encode())
        self._emit("cache_source_damaged", shard=shard.shard_id, why=why)
        if self._raise_damage:
            raise DamagedDataError(
                f"shard {shard.shard_id} is damaged in the data set: {why}{'; ' + samples if samples else ''}. "
                "`exitwave verify` lists all damage; restore the file from a copy, or take the shard out and simulate "
                "it again."
            )
        given_up = self._trouble[shard.shard_id].given_up
        pause = min(self.limits.damaged_s * 2 ** min(given_up, 20), _LONGEST_PAUSE_S) * random.uniform(0.9, 1.1)
        self._trouble[shard.shard_id] = _Trouble(given_up=given_up + 1, not_before=time.monotonic() + pause)

    def _give_up_stalled(self) -> None:
        now = time.monotonic()
        for copy in list(self._copies.values()):
            patience_s = self.limits.stall_s if copy.opened else max(self.limits.stall_s, OPEN_WITHIN_S)
            if now - copy.watched_at < patience_s:
                continue
            moved = copy.done - copy.watched_done
            copy.watched_at, copy.watched_done = now, copy.done
            if moved >= self.limits.stall_bytes_per_s * self.limits.stall_s or copy.done == copy.shard.nbytes:
                continue
            copy.given_up = True
            copy.part.unlink(missing_ok=True)
            del self._copies[copy.shard.shard_id]
            self._count(copy)
            self.planner.failed(copy.shard.shard_id)
            why = f"{copy.source.name}: {moved} bytes in {self.limits.stall_s:g} s, at byte {copy.done}"
            self._again(copy, why)

    @staticmethod
    def _drop(copy: Copy) -> None:
        copy.part.unlink(missing_ok=True)
