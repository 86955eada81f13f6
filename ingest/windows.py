"""The order of an epoch's samples when not all of them fit into the cache: a shuffle through a moving window of shards.

The shards are permuted, and cut, in that order, into windows of at least ten shards and 64 structures (the rest of an
epoch joins the last one); within a window the samples are permuted. A batch is then as mixed as its window, while only
two windows need to be near at any time. With no window the samples of all shards are permuted at once.

Both are computed, not stored: what is kept is a few numbers for each shard, nothing for a sample. As in `order`, all is
a function of (seed, epoch, generation, position), and a change of it must raise ORDER_VERSION.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from exitwave.ingest.errors import UsageError
from exitwave.ingest.order import derived_seed, permute

__all__ = ["SampleOrder", "ShardLayout", "Window", "accesses"]

Array = np.ndarray[Any, Any]
_AT_ONCE = 4096
_SHARDS, _SAMPLES = 1, 2  # what a derived seed is for


@dataclass(frozen=True, kw_only=True)
class Window:
    """At least so many shards and so many different structures are mixed. UsageError for numbers below 1."""

    shards: int = 10
    structures: int = 64

    def __post_init__(self) -> None:
        if self.shards < 1 or self.structures < 1:
            raise UsageError(f"window of {self.shards} shards, {self.structures} structures: expected at least 1")


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """The shards of a data set in the order of its sample numbers: ids, samples in each, numbers of its structures."""

    ids: Sequence[str]
    counts: Array
    structures: Sequence[tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class _Epoch:
    """`shards` (S,) in the order of the epoch, `starts` (S + 1,) positions, `windows` (W + 1,) numbers of shards."""

    shards: Array
    starts: Array
    windows: Array


class SampleOrder:
    """Sample numbers by position, in any epoch. `window` None: the samples of all shards are shuffled at once.

    `layout` is needed for a window, and for `accesses`; `n_samples` is the sum of its counts.
    """

    def __init__(
        self,
        n_samples: int,
        *,
        seed: int,
        generation: int = 0,
        shuffle: bool = True,
        window: Window | None = None,
        layout: ShardLayout | None = None,
    ) -> None:
        if layout is None and window is not None:
            raise UsageError("a windowed order needs to know the shards: give the layout of the data set")
        self.n_samples = n_samples
        self.seed = seed
        self.generation = generation
        self.shuffle = shuffle
        self.window = window
        self.layout = layout
        counts = np.zeros(0, np.int64) if layout is None else np.asarray(layout.counts, dtype=np.int64)
        self._counts = counts
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        if layout is not None and int(self._starts[-1]) != n_samples:
            raise UsageError(f"{int(self._starts[-1])} samples in the shards, expected {n_samples}")
        self._epochs: dict[int, _Epoch] = {}

    def at(self, positions: Array, epoch: int) -> Array:
        """The sample numbers (int64, same shape) at `positions` of an epoch; ValueError outside 0..n_samples-1."""
        where = np.asarray(positions, dtype=np.int64)
        if not self.shuffle:
            return where
        if self.window is None:
            return permute(where, self.n_samples, seed=self.seed, epoch=epoch, generation=self.generation)
        if where.size and (where.min() < 0 or where.max() >= self.n_samples):
            raise ValueError(f"positions {where.min()}..{where.max()}, expected 0..{self.n_samples - 1}")
        plan = self._epoch(epoch)
        flat = where.reshape(-1)
        bounds = plan.starts[plan.windows]
        windows = np.searchsorted(bounds, flat, side="right") - 1
        seed = derived_seed(self.seed, epoch, self.generation, _SAMPLES)
        mixed = np.empty_like(flat)
        for w in np.unique(windows).tolist():
            here = windows == w
            low, high = int(bounds[w]), int(bounds[w + 1])
            mixed[here] = low + permute(flat[here] - low, high - low, seed=seed, epoch=w)
        places = np.searchsorted(plan.starts, mixed, side="right") - 1
        return (self._starts[plan.shards[places]] + mixed - plan.starts[places]).reshape(where.shape)

    def _epoch(self, epoch: int) -> _Epoch:
        known = self._epochs  # replaced as a whole, never changed: a sampler and a prefetcher ask at the same time
        plan = known.get(epoch)
        if plan is None:
            plan = self._plan(epoch)
            self._epochs = {
                **dict(list(known.items())[-1:]),
                epoch: plan,
            }  # this one and the next are asked for in turn
        return plan

    def _plan(self, epoch: int) -> _Epoch:
        n = len(self._counts)
        seed = derived_seed(self.seed, epoch, self.generation, _SHARDS)
        shards = permute(np.arange(n), n, seed=seed, epoch=0)
        starts = np.concatenate([[0], np.cumsum(self._counts[shards])])
        assert self.window is not None and self.layout is not None
        cuts, first = [0], 0
        seen: set[int] = set()
        for k, s in enumerate(shards.tolist(), start=1):
            seen.update(self.layout.structures[s])
            if k - first >= self.window.shards and len(seen) >= self.window.structures:
                cuts.append(k)
                first, seen = k, set()
        if cuts[-1] != n:
            cuts[-1 if len(cuts) > 1 else len(cuts) :] = [n]
        return _Epoch(shards=shards, starts=starts, windows=np.array(cuts))

    def shards_at(self, positions: Array, epoch: int) -> Array:
        """The number of the shard, in the layout, of each of the samples at `positions`."""
        return np.searchsorted(self._starts, self.at(positions, epoch), side="right") - 1


def accesses(order: SampleOrder, epoch: int, from_position: int, n: int) -> Iterator[str]:
    """The shards that `n` positions of an epoch from `from_position` on need, each once, in order of their first need.

    A pure function of its arguments: what a prefetcher reads ahead by. Positions behind the epoch's end are left out.
    """
    if order.layout is None:
        raise UsageError("the order does not know the shards: give it the layout of the data set")
    seen: set[int] = set()
    end = min(from_position + n, order.n_samples)
    for low in range(from_position, end, _AT_ONCE):
        shards = order.shards_at(np.arange(low, min(low + _AT_ONCE, end)), epoch)
        for s in shards.tolist():
            if s not in seen:
                seen.add(s)
                yield order.layout.ids[s]
