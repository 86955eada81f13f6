"""What staging is going to do, decided before a byte moves: which shards to copy, keep, set aside or evict. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exitwave.ingest.errors import UsageError
from exitwave.ingest.records import ShardRecord

__all__ = ["StagingPlan", "plan_staging"]


@dataclass(frozen=True, kw_only=True)
class StagingPlan:
    """Shards to copy, in the manifest's order; shards that are ready; ids to set aside and to evict, before copying."""

    copy: tuple[ShardRecord, ...]
    reuse: tuple[ShardRecord, ...]
    quarantine: tuple[str, ...]
    evict: tuple[str, ...]

    @property
    def bytes_to_copy(self) -> int:
        return sum(shard.nbytes for shard in self.copy)

    @property
    def bytes_reused(self) -> int:
        return sum(shard.nbytes for shard in self.reuse)


def plan_staging(
    shards: Sequence[ShardRecord], ready: Mapping[str, int], *, capacity_bytes: int | None = None
) -> StagingPlan:
    """Plans a cache that holds every live shard.

    `ready`: shard id -> size in bytes of the files under `ready/`. A ready file is verified by being there, so only a
    wrong size sets it aside. What the manifest no longer lists is evicted when the capacity asks for it, largest first.
    UsageError naming the minimum when `capacity_bytes` is smaller than the data set.
    """
    needed = sum(shard.nbytes for shard in shards)
    if capacity_bytes is not None and capacity_bytes < needed:
        raise UsageError(
            f"capacity of {capacity_bytes} bytes is too small: expected at least {needed} bytes for the "
            f"{len(shards)} shards of this data set. Give a larger capacity, or train from the data set itself."
        )
    wanted = {shard.shard_id: shard for shard in shards}
    quarantine = tuple(i for i in sorted(ready) if i in wanted and ready[i] != wanted[i].nbytes)
    reuse = tuple(s for s in shards if ready.get(s.shard_id) == s.nbytes)
    evict: list[str] = []
    unlisted = sorted((i for i in ready if i not in wanted), key=lambda i: (-ready[i], i))
    over = 0 if capacity_bytes is None else needed + sum(ready[i] for i in unlisted) - capacity_bytes
    for shard_id in unlisted:
        if over <= 0:
            break
        evict.append(shard_id)
        over -= ready[shard_id]
    return StagingPlan(
        copy=tuple(s for s in shards if ready.get(s.shard_id) != s.nbytes),
        reuse=reuse,
        quarantine=quarantine,
        evict=tuple(evict),
    )
