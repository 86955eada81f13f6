"""Staging with peers: where each shard is read from, and when a node may leave.

(1) Every node asks the highest node in the shard's ranking (`placement`) that it believes to be up; the highest of all
    is the owner. A node that is that one itself reads from shared storage. Since a node always believes itself up, it
    only ever waits for nodes above it in the ranking: no two wait for each other.
(2) A peer that refuses connections while nodes may still be starting (`join_s`) is asked again. After that, or when it
    breaks off, stalls, or sends wrong bytes, it counts as down for `down_s`, and the next in the ranking takes its
    place, in the end this node itself: shared storage is the last resort, and always there.
(3) A node that has all it needs tells each other node so, and stays to serve until all have told it the same, or are
    gone, or nobody has asked for anything for `linger_s`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from exitwave.ingest.errors import UsageError
from exitwave.ingest.peers import PeerServer, Status, ask_peer, parse_address, tell_done
from exitwave.ingest.placement import owner, ranking
from exitwave.ingest.records import ShardRecord
from exitwave.ingest.staging_home import CacheHome
from exitwave.ingest.staging_sources import Source, StorageSource
from exitwave.ingest.storage import Reader

__all__ = ["PeerOptions", "PeerSources"]

MIN_SECRET = 16


@dataclass(frozen=True, kw_only=True)
class PeerOptions:
    """The cluster as one node sees it. `nodes`: HOST:PORT of every node, this one's `me` among them, alike everywhere.

    UsageError: `me` is not among them, an address is no address or means all addresses, a secret is too short.
    """

    me: str
    nodes: tuple[str, ...]
    secret: bytes
    join_s: float = 30.0
    linger_s: float = 120.0
    down_s: float = 30.0
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        for node in self.nodes:
            parse_address(node)
        if self.me not in self.nodes or len(set(self.nodes)) != len(self.nodes):
            raise UsageError(f"peers {', '.join(self.nodes)}: expected each node once, this one ({self.me}) among them")
        if len(self.secret) < MIN_SECRET:
            raise UsageError(f"the secret of the peers has {len(self.secret)} bytes, expected at least {MIN_SECRET}")

    def order(self, shards: Sequence[ShardRecord]) -> list[ShardRecord]:
        """The shards that this node owns first, since others wait for them."""
        return sorted(shards, key=lambda s: owner(s.shard_id, self.nodes) != self.me)

    @property
    def others(self) -> tuple[str, ...]:
        return tuple(node for node in self.nodes if node != self.me)


@dataclass(frozen=True)
class _PeerSource:
    name: str
    options: PeerOptions
    dataset_id: str
    met: Callable[[str], None]
    chosen_at: float
    shared: bool = False

    def open(self, shard: ShardRecord) -> Reader:
        return ask_peer(
            self.name,
            self.options.me,
            secret=self.options.secret,
            dataset_id=self.dataset_id,
            shard_id=shard.shard_id,
            nbytes=shard.nbytes,
            timeout_s=self.options.timeout_s,
            met=self.met,
        )


class PeerSources:
    """Chooses between peers and shared storage, and serves this node's shards. Close it at the end.

    `holders(shard_id)`: the nodes to ask, in that order, up to this one; by default the shard's ranking.
    """

    def __init__(
        self, options: PeerOptions, home: CacheHome, storage: StorageSource, *, dataset_id: str,
        status: Callable[[str], Status], holders: Callable[[str], Sequence[str]] | None = None,
    ) -> None:  # fmt: skip
        self.options = options
        self._storage = storage
        self._dataset_id = dataset_id
        self._started = time.monotonic()
        self._down_until: dict[str, float] = {}
        self._seen: dict[str, float] = {}  # since when
        self._lacking: set[tuple[str, str]] = set()
        self._holders = holders or (lambda shard_id: ranking(shard_id, options.nodes))
        self.server = PeerServer(
            options.me,
            secret=options.secret,
            dataset_id=dataset_id,
            ready=home.ready,
            status=status,
            allowed={parse_address(node)[0] for node in options.nodes},
            met=self._meet,
        )

    def choose(self, shard: ShardRecord) -> Source:
        now = time.monotonic()
        for node in self._holders(shard.shard_id):
            if node == self.options.me:
                break
            if (node, shard.shard_id) not in self._lacking and self._down_until.get(node, 0.0) <= now:
                return _PeerSource(node, self.options, self._dataset_id, self._meet, now)
        return self._storage

    def failed(self, source: Source) -> None:
        """A peer broke off, stalled, lied or cannot be reached."""
        if not isinstance(source, _PeerSource):
            return
        now = time.monotonic()
        # One that was asked before it was first met had perhaps not started then: that says nothing against it.
        was_up = self._seen.get(source.name, float("inf")) < source.chosen_at
        if was_up or now - self._started > self.options.join_s:
            self._down_until[source.name] = now + self.options.down_s

    def _meet(self, node: str) -> None:
        self._seen.setdefault(node, time.monotonic())

    def lacks(self, source: Source, shard: ShardRecord) -> None:
        """A peer is well, but does not have that shard: it is not asked for it again."""
        self._lacking.add((source.name, shard.shard_id))

    def worked(self, source: Source) -> None:
        if not source.shared:
            self._meet(source.name)

    def linger(self, stop: Callable[[], bool]) -> None:
        """Serves until no other node needs this one."""
        told: set[str] = set()
        gone: set[str] = set()
        finished = time.monotonic()
        while not stop():
            for node in self.options.others:
                if node in gone or (node in told and node in self.server.done):
                    continue
                try:
                    tell_done(node, self.options.me, secret=self.options.secret, dataset_id=self._dataset_id)
                    told.add(node)
                    self._meet(node)
                except OSError as error:
                    met = node in self._seen or node in self.server.done or self._joined()
                    silent_s = time.monotonic() - self.server.last_asked
                    # Nobody listens there any more; one that is only slow to answer is not gone.
                    if met and (isinstance(error, ConnectionRefusedError) or silent_s > self.options.down_s):
                        gone.add(node)
            quiet_s = time.monotonic() - max(self.server.last_asked, finished)
            if gone | (told & self.server.done) >= set(self.options.others) or quiet_s > self.options.linger_s:
                return
            time.sleep(0.1)

    def _joined(self) -> bool:
        return time.monotonic() - self._started > self.options.join_s

    def close(self) -> None:
        self.server.close()
