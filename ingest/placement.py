"""Which node of a cluster keeps and fetches which shard. Pure: every node finds the same answer from the same names.

The owner of a shard is the node of highest weight for it (rendezvous hashing; Thaler and Ravishankar, "Using
name-based mappings to increase hit rates", IEEE/ACM Trans. Networking 6, 1998): when a node is lost, only its shards
change hands, and each goes to the next in its own ranking.

`shares` is for caches that hold a share of the data set each: epoch by epoch a fraction of every share is dealt out
anew, as in Nguyen et al., "Why globally re-shuffle? Revisiting data shuffling in large scale deep learning" (IPDPS
2022): with a fraction of 0 the nodes see the same shards for ever, with 1 the shuffle is global.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from exitwave.ingest.errors import UsageError

__all__ = ["owner", "ranking", "shares"]


def _weight(*what: object) -> int:
    return xxhash.xxh3_64_intdigest("\0".join(map(str, what)).encode())


def ranking(shard_id: str, nodes: Sequence[str]) -> list[str]:
    """The nodes in the order in which they may own the shard; the first one does."""
    return sorted(nodes, key=lambda node: (-_weight("owner", shard_id, node), node))


def owner(shard_id: str, nodes: Sequence[str]) -> str:
    """The node that reads the shard from shared storage; the others get it from there."""
    return max(nodes, key=lambda node: (_weight("owner", shard_id, node), node))


def shares(shards: Sequence[str], nodes: int, *, epoch: int, exchange: float, seed: int = 0) -> list[list[str]]:
    """The share of each node in an epoch: a partition of `shards`, of sizes that differ by one at most.

    Epoch 0 deals the shuffled shards out; between two epochs every node gives round(exchange · share) of its shards
    away, and the same number comes back to it from what all have given. UsageError: exchange outside 0..1.
    """
    if nodes < 1 or not 0 <= exchange <= 1:
        raise UsageError(f"{nodes} nodes, exchange {exchange}: expected at least one node, and a fraction from 0 to 1")
    dealt = sorted(shards, key=lambda i: (_weight("deal", seed, i), i))
    now = [dealt[node::nodes] for node in range(nodes)]
    for e in range(1, epoch + 1):
        # A node's own shards by a weight of this epoch: those in front stay, those behind go into the pool.
        kept, pool, counts = [], [], []
        for share in now:
            mixed = sorted(share, key=lambda i: (_weight("exchange", seed, e, i), i))
            stay = len(mixed) - round(exchange * len(mixed))
            kept.append(mixed[:stay])
            pool += mixed[stay:]
            counts.append(len(mixed) - stay)
        pool.sort(key=lambda i: (_weight("pool", seed, e, i), i))
        start = 0
        for node, count in enumerate(counts):
            kept[node] += pool[start : start + count]
            start += count
        now = kept
    return now
