"""The life of shards in a node's cache, decided without touching a file: what to copy, what to evict, and when.

    absent -> reserved -> copying -> verifying -> ready <-> pinned(n)
      ^          |           |           |          |  \\       |
      +----------+-----------+-----------+          |   quarantined
      +-------------------------------------- evicting <---'

Space counts from `reserved` on, so what is in flight can never overfill the cache. A quarantined copy counts until it
is removed, which is the first thing done when room is needed.

The future is known, since the order of samples is seeded, so the planner follows the four rules of Cao, Felten, Karlin
and Li, "A study of integrated prefetching and caching strategies" (SIGMETRICS 1995): copy what is needed next; evict
what is needed furthest in the future (Belady); never evict what is needed before the shard that it would make room
for; act at the first moment that these allow. What is pinned, or could not be got again, is never evicted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from exitwave.ingest.errors import UsageError

__all__ = ["CachePlanner", "Decision", "State", "StateError", "check_capacity", "window_bytes"]


class State(StrEnum):
    """Where a shard stands on this node."""

    ABSENT = "absent"
    RESERVED = "reserved"
    COPYING = "copying"
    VERIFYING = "verifying"
    READY = "ready"
    PINNED = "pinned"
    EVICTING = "evicting"
    QUARANTINED = "quarantined"


IN_FLIGHT = frozenset({State.RESERVED, State.COPYING, State.VERIFYING})

_MAY_FOLLOW: Mapping[State, frozenset[State]] = {
    State.ABSENT: frozenset({State.RESERVED}),
    State.RESERVED: frozenset({State.COPYING, State.ABSENT}),
    State.COPYING: frozenset({State.VERIFYING, State.ABSENT}),
    State.VERIFYING: frozenset({State.READY, State.ABSENT}),
    State.READY: frozenset({State.PINNED, State.EVICTING, State.QUARANTINED, State.ABSENT}),
    State.PINNED: frozenset({State.READY, State.QUARANTINED, State.ABSENT}),
    State.EVICTING: frozenset({State.ABSENT, State.READY}),
    State.QUARANTINED: frozenset({State.ABSENT}),
}


class StateError(AssertionError):
    """A shard was to go where its state does not allow: a fault in the caller."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do now: each shard of `start` is `reserved` already, each of `evict` is `evicting`.

    `blocked`: the first shard in need for which there is no room yet; None when nothing waits for room.
    """

    evict: tuple[str, ...] = ()
    start: tuple[str, ...] = ()
    blocked: str | None = None


@dataclass
class _Entry:
    nbytes: int
    state: State = State.ABSENT
    pins: int = 0


class CachePlanner:
    """The states of all shards, and the next decision. No files, clock or threads: its caller tells what happened.

    `sizes`: shard id -> bytes. `capacity_bytes`: None is without limit. At most `in_flight` copies at a time.
    `irreplaceable`: shards that could not be got again, never evicted.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        *,
        capacity_bytes: int | None = None,
        in_flight: int = 4,
        irreplaceable: Collection[str] = (),
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.in_flight = in_flight
        self.irreplaceable = set(irreplaceable)
        self._entries = {shard_id: _Entry(nbytes) for shard_id, nbytes in sizes.items()}
        self._need: dict[str, int] = {}
        self._used = 0
        self._flying = 0

    # --- what is asked ------------------------------------------------------------------------------------------

    def state(self, shard_id: str) -> State:
        entry = self._entries.get(shard_id)
        return State.ABSENT if entry is None else entry.state

    def pins(self, shard_id: str) -> int:
        return self._entries[shard_id].pins

    def ids(self, *states: State) -> list[str]:
        """The shards in any of these states, by name."""
        return sorted(i for i, entry in self._entries.items() if entry.state in states)

    @property
    def used_bytes(self) -> int:
        """Bytes of all that is reserved, copied or kept."""
        return self._used

    @property
    def copies_in_flight(self) -> int:
        return self._flying

    def next_use(self, shard_id: str) -> float:
        """The place of the shard in the order of need, infinity when it is not in it."""
        return self._need.get(shard_id, math.inf)

    def complete(self) -> bool:
        """Whether all that is needed is there."""
        return all(self.state(i) in (State.READY, State.PINNED) for i in self._need)

    # --- what happened ------------------------------------------------------------------------------------------

    def add(self, shard_id: str, nbytes: int) -> None:
        """A shard that a growing data set has gained; known ones stay as they are."""
        self._entries.setdefault(shard_id, _Entry(nbytes))

    def found(self, shard_id: str, nbytes: int) -> None:
        """A file that lies in the cache at the start, perhaps of a shard that is in no need."""
        entry = self._entries.setdefault(shard_id, _Entry(nbytes))
        if entry.state is not State.ABSENT:
            raise StateError(f"{shard_id} found, but it is {entry.state}")
        entry.nbytes = nbytes
        entry.state = State.READY
        self._used += nbytes

    def needs(self, order: Iterable[str]) -> None:
        """The shards in order of need from now on; of a shard named again only the first time counts."""
        self._need = {}
        for shard_id in order:
            self._need.setdefault(shard_id, len(self._need))

    def copying(self, shard_id: str) -> None:
        self._go(shard_id, State.COPYING)

    def verifying(self, shard_id: str) -> None:
        self._go(shard_id, State.VERIFYING)

    def ready(self, shard_id: str) -> None:
        self._go(shard_id, State.READY)

    def failed(self, shard_id: str) -> None:
        """A copy that came to nothing; its space is free again."""
        if self.state(shard_id) not in IN_FLIGHT:
            raise StateError(f"{shard_id} failed, but it is {self.state(shard_id)}")
        self._go(shard_id, State.ABSENT)

    def pin(self, shard_id: str) -> None:
        entry = self._entries[shard_id]
        if entry.state is not State.PINNED:
            self._go(shard_id, State.PINNED)
        entry.pins += 1

    def unpin(self, shard_id: str) -> None:
        entry = self._entries[shard_id]
        if entry.pins < 1:
            raise StateError(f"{shard_id} is not pinned")
        entry.pins -= 1
        if entry.pins == 0:
            self._go(shard_id, State.READY)

    def evicted(self, shard_id: str) -> None:
        self._go(shard_id, State.ABSENT)

    def not_evicted(self, shard_id: str) -> None:
        """A reader had it in hand after all: it is pinned until that reader lets go (see `unpin`)."""
        self._go(shard_id, State.READY)
        self.pin(shard_id)

    def quarantined(self, shard_id: str) -> None:
        """The copy turned out damaged and is set aside; once it is `gone` it may be copied again."""
        self._entries[shard_id].pins = 0
        self._go(shard_id, State.QUARANTINED)

    def gone(self, shard_id: str) -> None:
        """Someone else took the file away."""
        if self.state(shard_id) in IN_FLIGHT:
            raise StateError(f"{shard_id} is {self.state(shard_id)}, so it cannot be gone")
        if self.state(shard_id) is not State.ABSENT:
            self._entries[shard_id].pins = 0
            self._go(shard_id, State.ABSENT)

    def disk_is_full(self) -> None:
        """The disk holds no more than what is there now, whatever the capacity says."""
        self.capacity_bytes = min(self._used, self.capacity_bytes if self.capacity_bytes is not None else self._used)

    def _go(self, shard_id: str, state: State) -> None:
        entry = self._entries.get(shard_id)
        if entry is None or state not in _MAY_FOLLOW[entry.state]:
            raise StateError(f"{shard_id}: {None if entry is None else entry.state} -> {state} is no step of a shard")
        self._used += entry.nbytes * ((state is not State.ABSENT) - (entry.state is not State.ABSENT))
        self._flying += (state in IN_FLIGHT) - (entry.state in IN_FLIGHT)
        entry.state = state

    # --- what to do ---------------------------------------------------------------------------------------------

    def decide(self, *, hold: Collection[str] = ()) -> Decision:
        """The evictions and copies to begin now; shards in `hold` (waiting for another try) are not begun.

        Where room must be made first, the decision holds the evictions alone (those shards are `evicting` now); report
        them as `evicted` or `not_evicted` and ask again. A shard for which no room can be made ends the search: what
        is needed later must not take the room that it waits for.
        """
        limit = self._limit()
        if self._used > limit:  # it was larger once
            over = self._free(self._used - limit, needed_after=-1)
            if over:
                return Decision(evict=self._evicting(over), blocked=over[0])
        start: list[str] = []
        for shard_id, use in self._need.items():
            if self._flying >= self.in_flight:
                break
            entry = self._entries[shard_id]
            if shard_id in hold or entry.state is not State.ABSENT:
                continue
            lacking = self._used + entry.nbytes - limit
            if lacking > 0:
                evict = self._free(lacking, needed_after=use)
                enough = sum(self._entries[i].nbytes for i in evict) >= lacking
                return Decision(evict=self._evicting(evict) if enough else (), start=tuple(start), blocked=shard_id)
            self._go(shard_id, State.RESERVED)
            start.append(shard_id)
        return Decision(start=tuple(start))

    def _limit(self) -> float:
        """The capacity; a last copy that is in no need does not take the room of those that are."""
        if self.capacity_bytes is None:
            return math.inf
        kept = (i for i in self.irreplaceable if i not in self._need and self.state(i) in (State.READY, State.PINNED))
        return self.capacity_bytes + sum(self._entries[i].nbytes for i in kept)

    def _evicting(self, shards: list[str]) -> tuple[str, ...]:
        for shard_id in shards:
            self._go(shard_id, State.EVICTING)
        return tuple(shards)

    def _free(self, nbytes: float, *, needed_after: int) -> list[str]:
        """The first to go for `nbytes`, of those needed after that place only; perhaps not enough."""
        chosen: list[str] = []
        for victim in self._by_next_use():
            if nbytes <= 0 or self.next_use(victim) <= needed_after:
                break
            chosen.append(victim)
            nbytes -= self._entries[victim].nbytes
        return chosen

    def _by_next_use(self) -> list[str]:
        """What may be evicted: what is needed furthest in the future first, of those never needed the largest."""
        free = [i for i, entry in self._entries.items() if entry.state is State.READY and i not in self.irreplaceable]
        return sorted(free, key=lambda i: (-self.next_use(i), -self._entries[i].nbytes, i))


def window_bytes(order: Iterable[str], sizes: Mapping[str, int], window: int) -> int:
    """The most bytes of the distinct shards of any `window` accesses in a row: a cache must hold them at once."""
    recent: deque[str] = deque()
    counts: dict[str, int] = {}
    held = most = 0
    for shard_id in order:
        recent.append(shard_id)
        counts[shard_id] = counts.get(shard_id, 0) + 1
        if counts[shard_id] == 1:
            held += sizes[shard_id]
        if len(recent) > window:
            old = recent.popleft()
            counts[old] -= 1
            if counts[old] == 0:
                held -= sizes[old]
        most = max(most, held)
    return most


def check_capacity(capacity_bytes: int | None, needed: int, what: str, *, otherwise: str = "") -> None:
    """UsageError naming the minimum when the capacity is below `needed` bytes, which are those of `what`."""
    if capacity_bytes is not None and capacity_bytes < needed:
        raise UsageError(
            f"capacity of {capacity_bytes} bytes is too small: expected at least {needed} bytes for {what}. Give a "
            f"larger capacity, {otherwise}or train from the data set itself."
        )
