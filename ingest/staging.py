"""Copies a data set's shards to a node-local folder, so that training reads local disk.

    CACHE/<dataset_id>/ready/<shard_id>.h5      verified: being here is the proof
                       part/                    copies under way; what a killed stager left is swept at start
                       quarantine/              local copies that were damaged; records of damaged sources
                       stager.lock              one stager per node (a kernel lock, it dies with its process)

A shard goes absent -> reserved (its size allocated) -> copying (hashed on the way) -> verified -> ready (synced, then
renamed). A second stager waits for the lock and then finds everything ready.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from exitwave.ingest.errors import DamagedDataError, InterruptedRunError, UsageError
from exitwave.ingest.files import FileLock, disk_full_means_interrupted, fsync_dir, open_to_read, write_atomic
from exitwave.ingest.manifest import load_manifest
from exitwave.ingest.records import ShardRecord
from exitwave.ingest.staging_plan import plan_staging
from exitwave.ingest.verify import check_shard

__all__ = ["StageReport", "stage"]

Emit = Callable[..., Any]
Stop = threading.Event | Callable[[], bool]

_CHUNK = 8 << 20
_TRIES = 3
_PROGRESS_EVERY_S = 0.25


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """What staging did. `shards` are ready now; `quarantined` local copies were set aside and copied again."""

    shards: int
    bytes_copied: int
    bytes_reused: int
    quarantined: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def stage(
    dataset: str | Path,
    cache: str | Path,
    *,
    capacity_bytes: int | None = None,
    emit: Emit | None = None,
    stop: Stop | None = None,
    missing_deadline_s: float = 10.0,
) -> StageReport:
    """Makes every shard of `dataset` ready in `cache`; called again, it copies only what is not.

    `emit(kind, **fields)` is told stage_started, stage_progress (bytes, total, shards) and stage_finished. `stop` (an
    event or a function) ends it between two chunks. A shard that is missing or short at its source, as a slow network
    file system may show it, is tried again for `missing_deadline_s`.

    UsageError: no data set, folder not writable, capacity below the data set. DamagedDataError: a shard is damaged at
    its source. InterruptedRunError: stopped, or no space left; nothing half-written stays, and the next call goes on.
    """
    return _Stager(Path(dataset), Path(cache), emit, stop, missing_deadline_s).run(capacity_bytes)


class _Stager:
    def __init__(
        self, dataset: Path, cache: Path, emit: Emit | None, stop: Stop | None, missing_deadline_s: float
    ) -> None:
        self.dataset = dataset
        self.manifest = load_manifest(dataset)
        self.home = cache / self.manifest.header.dataset_id
        self.ready, self.part, self.quarantine = (self.home / name for name in ("ready", "part", "quarantine"))
        self._emit = emit or (lambda kind, **fields: None)
        self._stop = stop
        self._missing_deadline_s = missing_deadline_s
        self._done = self._total = self._copied = 0
        self._last_progress = 0.0

    def run(self, capacity_bytes: int | None) -> StageReport:
        start = time.monotonic()
        with disk_full_means_interrupted(self.home):
            try:
                for folder in (self.ready, self.part, self.quarantine):
                    folder.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError):
                raise UsageError(f"{self.home}: part of this path is a file, expected a folder for the cache") from None
            except FileNotFoundError:  # as /proc answers
                raise UsageError(f"{self.home}: no folder for the cache can be made there; choose another") from None
            lock = FileLock(self.home / "stager.lock")
            while not lock.acquire():
                self._check_stop()
                time.sleep(0.05)
        try:
            self.manifest = load_manifest(self.dataset)  # it may have grown while this stager waited
            plan = self._prepare(capacity_bytes)
            self._total, self._done = self.manifest.nbytes, plan.bytes_reused
            self._emit("stage_started", shards=len(self.manifest.shards), bytes=self._done, total=self._total)
            for shard in plan.copy:
                self._copy(shard)
            self._progress(force=True)
        finally:
            lock.release()
        report = StageReport(
            shards=len(self.manifest.shards),
            bytes_copied=self._copied,
            bytes_reused=plan.bytes_reused,
            quarantined=len(plan.quarantine),
            seconds=time.monotonic() - start,
        )
        self._emit("stage_finished", **report.to_json())
        return report

    def _prepare(self, capacity_bytes: int | None) -> Any:
        for leftover in self.part.iterdir():  # the lock is ours: whoever wrote these is dead
            leftover.unlink()
        ready = {path.stem: path.stat().st_size for path in self.ready.glob("*.h5")}
        plan = plan_staging(self.manifest.shards, ready, capacity_bytes=capacity_bytes)
        for shard_id in plan.quarantine:
            (self.ready / f"{shard_id}.h5").rename(self.quarantine / f"{shard_id}.h5")
        for shard_id in plan.evict:
            (self.ready / f"{shard_id}.h5").unlink()
        return plan

    def _copy(self, shard: ShardRecord) -> None:
        """One shard from absent to ready; at most three tries at a wrong hash, then the source is looked at closely."""
        part = self.part / f"{shard.shard_id}.h5"
        deadline = time.monotonic() + self._missing_deadline_s
        before, pause, wrong = self._done, 0.05, 0
        while True:
            try:
                with disk_full_means_interrupted(part, shard.nbytes):
                    found = self._copy_once(shard, part)
            except _NotThereError as error:
                why, again = str(error), time.monotonic() < deadline
                if again:
                    self._check_stop()
                    time.sleep(pause)
                    pause = min(2 * pause, 1.0)
            else:
                if found == shard.xxh3_128:
                    break
                wrong += 1
                why, again = f"xxh3_128 {found}, expected {shard.xxh3_128}", wrong < _TRIES
            part.unlink(missing_ok=True)
            self._done = before
            if not again:
                raise self._source_damaged(shard, why)
        with disk_full_means_interrupted(part, shard.nbytes):
            part.rename(self.ready / part.name)
            fsync_dir(self.ready)
        self._copied += shard.nbytes
        self._progress()

    def _copy_once(self, shard: ShardRecord, part: Path) -> str:
        """Copies the shard's bytes to `part`, synced; returns the hash of what was read."""
        source_path = self.dataset / shard.path
        try:
            source = open_to_read(source_path)
        except OSError as error:
            raise _NotThereError(f"{source_path}: {error.strerror}") from None
        try:
            target = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                if shard.nbytes:
                    os.posix_fallocate(target, 0, shard.nbytes)  # reserve first: a full disk shows before the copy
                os.posix_fadvise(source, 0, 0, os.POSIX_FADV_SEQUENTIAL)
                digest = self._pour(source, target, shard, source_path)
                os.fsync(target)
            finally:
                os.close(target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        finally:
            os.close(source)
        return digest

    def _pour(self, source: int, target: int, shard: ShardRecord, source_path: Path) -> str:
        digest, offset = xxhash.xxh3_128(), 0
        buffer = memoryview(bytearray(min(_CHUNK, max(shard.nbytes, 1))))
        while offset < shard.nbytes:
            self._check_stop()
            try:
                count = os.preadv(source, [buffer[: shard.nbytes - offset]], offset)
            except OSError as error:
                raise _NotThereError(f"{source_path}: {error.strerror} at byte {offset}") from None
            if count == 0:
                raise _NotThereError(f"{source_path}: {offset} bytes, expected {shard.nbytes}")
            digest.update(buffer[:count])
            rest, at = buffer[:count], offset
            while rest:
                written = os.pwrite(target, rest, at)
                rest, at = rest[written:], at + written
            offset += count
            self._done += count
            self._progress()
        return digest.hexdigest()

    def _source_damaged(self, shard: ShardRecord, why: str) -> DamagedDataError:
        bad = check_shard(self.dataset, shard)
        samples = "; ".join(f"sample uid {b.uid:#018x}, {b.field}: {b.why}" for b in bad if b.uid is not None)
        record = {"shard": shard.shard_id, "why": why, "bad": [b.to_json() for b in bad]}
        write_atomic(self.quarantine / f"{shard.shard_id}.json", json.dumps(record, indent=1).encode())
        return DamagedDataError(
            f"shard {shard.shard_id} is damaged in the data set: {why}{'; ' + samples if samples else ''}. `exitwave "
            "verify` lists all damage; restore the file from a copy, or take the shard out and simulate it again."
        )

    def _progress(self, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._last_progress >= _PROGRESS_EVERY_S:
            self._last_progress = now
            self._emit("stage_progress", bytes=self._done, total=self._total)

    def _check_stop(self) -> None:
        stop = self._stop
        if stop is not None and (stop.is_set() if isinstance(stop, threading.Event) else stop()):
            raise InterruptedRunError(
                f"staging into {self.home} stopped at {self._done} of {self._total} bytes. Run it again to go on."
            )


class _NotThereError(Exception):
    """The source is missing or short: perhaps only not visible yet."""
