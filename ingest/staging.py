"""Copies a data set's shards to a node-local folder, so that training reads local disk.

`staging_plan` decides, `staging_run` carries out, `staging_home` knows the folders; here they come together for a
cache that is filled and then left alone. (`prefetch` is the other way: a cache smaller than the data set, which moves
along with the training.) A second stager of a node waits for the first one's lock and then finds everything ready.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import xxhash

from exitwave.ingest.errors import InterruptedRunError, UsageError
from exitwave.ingest.files import FileLock, disk_full_means_interrupted, read_plain, write_atomic
from exitwave.ingest.manifest import MANIFEST_NAME, load_manifest
from exitwave.ingest.peers import Status
from exitwave.ingest.peers_staging import PeerOptions, PeerSources
from exitwave.ingest.placement import shares
from exitwave.ingest.records import Manifest, ShardRecord
from exitwave.ingest.staging_home import CacheHome, make_folder
from exitwave.ingest.staging_plan import CachePlanner, State, check_capacity
from exitwave.ingest.staging_run import PROGRESS_EVERY_S, Limits, StagingRun
from exitwave.ingest.staging_sources import StorageSource
from exitwave.ingest.storage import holds, is_url, open_storage
from exitwave.ingest.verify import Bad, check_shard

__all__ = ["Share", "StageReport", "fill_planner", "stage"]

Emit = Callable[..., Any]
Stop = threading.Event | Callable[[], bool]

_DESCRIBING = (MANIFEST_NAME, "campaign.yaml")  # what a URL is asked for beside shards


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """What staging did. `shards` are ready now; `quarantined` local copies were set aside and copied again.

    `bytes_from_source` were read from the data set's storage, `bytes_from_peers` from other nodes; tries that came to
    nothing count there. `home`: the folder of this cache; of a URL, it can be opened as the data set.
    """

    shards: int
    bytes_copied: int
    bytes_reused: int
    quarantined: int
    seconds: float
    bytes_from_source: int = 0
    bytes_from_peers: int = 0
    evicted: int = 0
    retries: int = 0
    home: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Share:
    """The share of node 0 <= `node` < `nodes`; between epochs a fraction `exchange` is new (`placement.shares`)."""

    node: int
    nodes: int
    epoch: int = 0
    exchange: float = 0.0


def stage(
    dataset: str | Path,
    cache: str | Path,
    *,
    capacity_bytes: int | None = None,
    emit: Emit | None = None,
    stop: Stop | None = None,
    share: Share | None = None,
    partial: bool = False,
    limits: Limits | None = None,
    peers: PeerOptions | None = None,
) -> StageReport:
    """Makes every shard of `dataset` ready in `cache`; called again, it copies only what is not.

    `dataset` is a folder, or a URL that fsspec opens.
    `emit(kind, **fields)` is told stage_waiting (another process stages), stage_started, stage_progress (bytes, total),
    stage_finished, and of single shards cache_ready, cache_evicted, cache_retry, cache_quarantined, cache_disk_full,
    cache_source_damaged, cache_last_copy. `stop` (an event or a function) ends it between two chunks. `share`: only
    this node's share of the shards. `partial`: as many as the capacity holds, in the order of the manifest, rather than
    all. `limits`: see `Limits`.
    `peers`: the other nodes; each shard is then read from the data set by one of them (see `peers_staging`), and this
    call returns when no node needs this one any more.

    UsageError: no data set, folder not writable, another user's or another data set's, capacity below the data set.
    DamagedDataError: a shard is damaged at its source. InterruptedRunError: stopped, or no space left; nothing
    half-written stays, and the next call goes on.
    """
    told = emit or (lambda kind, **fields: None)
    stager = _Stager(
        str(dataset) if is_url(dataset) else Path(dataset), Path(cache), told, _asked(stop), limits or Limits(), peers
    )
    return stager.run(capacity_bytes, share, partial)


def _asked(stop: Stop | None) -> Callable[[], bool]:
    if stop is None:
        return lambda: False
    return stop.is_set if isinstance(stop, threading.Event) else stop


def _holders_before(share: Share, peers: PeerOptions, shard_ids: Sequence[str]) -> Callable[[str], Sequence[str]]:
    """Whom to ask for a shard of a share: the node that had it in the epoch before."""
    if len(peers.nodes) != share.nodes or peers.nodes[share.node] != peers.me:
        raise UsageError(
            f"share {share.node + 1} of {share.nodes} with {len(peers.nodes)} peers: expected as many peers as shares, "
            f"and {peers.me} as number {share.node + 1} of them"
        )
    if share.epoch == 0:
        return lambda shard_id: ()
    dealt = shares(shard_ids, share.nodes, epoch=share.epoch - 1, exchange=share.exchange)
    held = {shard_id: peers.nodes[node] for node, share_ in enumerate(dealt) for shard_id in share_}
    return lambda shard_id: [held[shard_id]] if shard_id in held else []


class _Stager:
    def __init__(
        self,
        dataset: Path | str,
        cache: Path,
        emit: Emit,
        stop: Callable[[], bool],
        limits: Limits,
        peers: PeerOptions | None,
    ) -> None:
        self.dataset = dataset
        self._cache = cache
        self._storage = open_storage(dataset)
        self.manifest = self._load()
        self.home = CacheHome(cache, self.manifest.header)
        self._emit = emit
        self._stop = stop
        self._limits = limits
        self._peers = peers
        self._last_progress = 0.0

    def run(self, capacity_bytes: int | None, share: Share | None, partial: bool) -> StageReport:
        start, told = time.monotonic(), False
        self.home.make()
        with disk_full_means_interrupted(self.home.path):
            lock = FileLock(self.home.lock_path)
            while not lock.acquire():
                if not told and time.monotonic() - start > 1.0:
                    told = True
                    self._emit("stage_waiting", holder=lock.holder())
                if self._stop():
                    raise InterruptedRunError(f"staging into {self.home.path} stopped while another process stages.")
                time.sleep(0.05)
        try:
            self.manifest = self._load()  # it may have grown while this stager waited
            return self._fill(capacity_bytes, share, partial, start)
        finally:
            lock.release()

    def _fill(self, capacity_bytes: int | None, share: Share | None, partial: bool, start: float) -> StageReport:
        wanted = self._wanted(capacity_bytes, share, partial)
        total = sum(shard.nbytes for shard in wanted)
        otherwise = "stream through a cache that is smaller than the data set (mode stream), "
        check_capacity(capacity_bytes, total, f"the {len(wanted)} shards of this data set", otherwise=otherwise)
        self._open_as_data_set()
        planner = CachePlanner({}, capacity_bytes=capacity_bytes, in_flight=self._limits.in_flight)
        quarantined = fill_planner(planner, self.home, self.manifest, emit=self._emit)
        reused = sum(s.nbytes for s in wanted if planner.state(s.shard_id) is State.READY)
        storage = StorageSource(self._storage)
        planner.needs(s.shard_id for s in (wanted if self._peers is None else self._peers.order(wanted)))
        peers = self._join(planner, storage, share)
        run = StagingRun(
            self.home,
            self.manifest.shards,
            planner,
            peers or storage,
            limits=self._limits,
            emit=self._emit,
            stop=self._stop,
            diagnose=self._diagnose,
            obtainable=lambda shard: holds(self._storage, shard.path, shard.nbytes),
        )
        self._emit("stage_started", shards=len(wanted), bytes=reused, total=total)
        try:
            run.turn(0.0)
            while not planner.complete():
                run.turn(PROGRESS_EVERY_S)
                self._progress(reused + run.counts.copied + run.bytes_in_flight(), total)
                self._check(run, reused, total)
            self._progress(total, total, force=True)
            if peers is not None:
                peers.linger(self._stop)
        finally:
            run.close()
            if peers is not None:
                peers.close()
        report = StageReport(
            shards=len(wanted),
            bytes_copied=run.counts.copied,
            bytes_reused=reused,
            quarantined=quarantined,
            seconds=time.monotonic() - start,
            bytes_from_source=run.counts.from_source,
            bytes_from_peers=run.counts.from_peers,
            evicted=run.counts.evicted,
            retries=run.counts.retries,
            home=str(self.home.path),
        )
        self._emit("stage_finished", **report.to_json())
        return report

    def _load(self) -> Manifest:
        """The manifest; that of a URL is copied below the cache first, and lies in its home at the end."""
        if isinstance(self.dataset, Path):
            return load_manifest(self.dataset)
        copied = self._cache / ".sources" / xxhash.xxh3_64_hexdigest(self.dataset.encode())
        make_folder(copied)
        for name in _DESCRIBING:
            try:
                write_atomic(copied / name, self._storage.read(name))
            except OSError as error:
                if name == MANIFEST_NAME:
                    raise UsageError(
                        f"{self.dataset}: there is no {MANIFEST_NAME} to be read there ({error.strerror or error})."
                    ) from None
        return load_manifest(copied)

    def _open_as_data_set(self) -> None:
        copied = self._cache / ".sources" / xxhash.xxh3_64_hexdigest(str(self.dataset).encode())
        for name in _DESCRIBING if not isinstance(self.dataset, Path) else ():
            if (copied / name).exists():
                write_atomic(self.home.path / name, read_plain(copied / name))

    def _diagnose(self, shard: ShardRecord) -> list[Bad]:
        return check_shard(self.dataset, shard) if isinstance(self.dataset, Path) else []

    def _wanted(self, capacity_bytes: int | None, share: Share | None, partial: bool) -> list[ShardRecord]:
        wanted = list(self.manifest.shards)
        if share is not None:
            dealt = shares([s.shard_id for s in wanted], share.nodes, epoch=share.epoch, exchange=share.exchange)
            mine = set(dealt[share.node])
            wanted = [s for s in wanted if s.shard_id in mine]
        if partial and capacity_bytes is not None:
            smallest = min((s.nbytes for s in wanted), default=0)
            check_capacity(capacity_bytes, smallest, "a single shard of this data set")
            ends = accumulate(s.nbytes for s in wanted)
            wanted = [s for s, end in zip(wanted, ends, strict=True) if end <= capacity_bytes]
        return wanted

    def _join(self, planner: CachePlanner, storage: StorageSource, share: Share | None) -> PeerSources | None:
        if self._peers is None:
            return None
        holders: Callable[[str], Sequence[str]] | None = None
        if share is not None:
            holders = _holders_before(share, self._peers, [s.shard_id for s in self.manifest.shards])

        def status(shard_id: str) -> Status:
            needed = planner.next_use(shard_id) != float("inf")
            return "coming" if needed and planner.state(shard_id) not in (State.READY, State.PINNED) else "no"

        return PeerSources(
            self._peers, self.home, storage, dataset_id=self.manifest.header.dataset_id, status=status, holders=holders
        )

    def _check(self, run: StagingRun, reused: int, total: int) -> None:
        done = reused + run.counts.copied
        if self._stop():
            raise InterruptedRunError(
                f"staging into {self.home.path} stopped at {done} of {total} bytes. Run it again to go on."
            )
        if run.blocked is not None and run.idle():
            if run.disk_full:
                raise InterruptedRunError(
                    f"{self.home.path}: no space left on the device. {total - done} bytes were needed. Free some "
                    "space, then run the same command again: it continues where it stopped."
                )
            run.recheck_pins()
            time.sleep(0.05)

    def _progress(self, done: int, total: int, *, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._last_progress >= PROGRESS_EVERY_S:
            self._last_progress = now
            self._emit("stage_progress", bytes=done, total=total)


def fill_planner(planner: CachePlanner, home: CacheHome, manifest: Manifest, *, emit: Emit) -> int:
    """Tells the planner of all shards and of what lies in the cache; returns how many copies had to be set aside.

    Called under the stager's lock. What a killed stager left is swept. A ready file is verified by being there, so only
    a wrong size sets it aside; what the manifest does not list stays until its room is needed.
    """
    with disk_full_means_interrupted(home.path):
        home.claim()
        home.sweep()
    known: dict[str, ShardRecord] = {shard.shard_id: shard for shard in manifest.shards}
    for shard in manifest.shards:
        planner.add(shard.shard_id, shard.nbytes)
    quarantined = 0
    for shard_id, nbytes in home.scan().items():
        if shard_id in known and known[shard_id].nbytes != nbytes:
            home.set_aside(shard_id)
            quarantined += 1
            emit("cache_quarantined", shard=shard_id, why=f"{nbytes} bytes, expected {known[shard_id].nbytes}")
        else:
            planner.found(shard_id, nbytes)
    return quarantined
