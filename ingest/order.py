"""The order of samples: a pure function of (seed, epoch, generation, position), in memory that does not grow with n.

An epoch's order is a keyed permutation of 0..n-1. Up to 2048 samples, each index gets a 64-bit key and the keys are
sorted. Above, a balanced Feistel network permutes the smallest domain 2^(2h) >= n, and an image outside 0..n-1 is
permuted again until it falls inside (cycle walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
CT-RSA 2002): still a bijection, and every position is found on its own. The mixing is our own, NumPy's generators may
change between versions. Whatever would change an order must raise ORDER_VERSION.

A global batch is a run of positions; `partition` cuts it into the ranks' pieces. Ranks joined in order give the global
batch again, so the sequence of an epoch does not depend on the number of ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from exitwave.ingest.mixing import GOLDEN, mix64

__all__ = ["ORDER_VERSION", "batch_bounds", "derived_seed", "partition", "permute"]

ORDER_VERSION = 1

_SORTED_UP_TO = 2048
_ROUNDS = 6

Array = np.ndarray[Any, Any]


def _mix(x: Array) -> Array:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection of uint64 with full avalanche."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _key(seed: int, epoch: int, generation: int) -> int:
    """One 64-bit key of the three numbers; each enters through a mixing: (1, 0) is not like (0, 1)."""
    key = 0
    for number in (seed, epoch, generation):
        key = mix64(key + GOLDEN + mix64(number + GOLDEN))
    return key


def derived_seed(seed: int, epoch: int, generation: int, purpose: int) -> int:
    """A seed for another permutation of the same epoch, not like that of the samples nor of another purpose."""
    return mix64(_key(seed, epoch, generation) + GOLDEN * purpose)


def permute(positions: Array, n: int, *, seed: int, epoch: int, generation: int = 0) -> Array:
    """The sample indices (int64, same shape) at `positions` of an epoch's order over 0..n-1. ValueError outside it."""
    at = np.asarray(positions, dtype=np.int64)
    if at.size and (at.min() < 0 or at.max() >= n):
        raise ValueError(f"positions {at.min()}..{at.max()}, expected 0..{n - 1}")
    key = _key(seed, epoch, generation)
    if n <= _SORTED_UP_TO:
        keys = _mix(np.arange(n, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(key))
        return np.argsort(keys, kind="stable")[at]
    half = -(-(n - 1).bit_length() // 2)  # the domain 2^(2·half) holds fewer than 4n: 4 walks at most on average
    flat = at.reshape(-1).astype(np.uint64)
    out = _feistel(flat, half, key)
    while (outside := np.flatnonzero(out >= np.uint64(n))).size:
        out[outside] = _feistel(out[outside], half, key)
    return out.astype(np.int64).reshape(at.shape)


def _feistel(x: Array, half: int, key: int) -> Array:
    """A bijection of the numbers of 2·half bits: (left, right) -> (right, left xor F_i(right)), six rounds."""
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    left, right = x >> shift, x & mask
    for i in range(_ROUNDS):
        round_key = np.uint64(mix64(key + (i + 1) * GOLDEN))
        left, right = right, left ^ (_mix(right + round_key) & mask)
    return (left << shift) | right


def batch_bounds(start: int, global_batch: int, end: int, *, keep_tail: bool) -> list[tuple[int, int]]:
    """The global batches [low, high) of positions from `start` to `end`; a last smaller one only if `keep_tail`."""
    lows = range(start, end, global_batch)
    return [(low, min(low + global_batch, end)) for low in lows if keep_tail or low + global_batch <= end]


def partition(batch: Array, rank: int, world_size: int) -> Array:
    """This rank's piece of a global batch (n,): contiguous, sizes over ranks differ by one at most, empty if n < ranks.

    The pieces of ranks 0..world_size-1 joined in that order are the global batch.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank}, expected 0..{world_size - 1}")
    n = len(batch)
    return batch[rank * n // world_size : (rank + 1) * n // world_size]
