"""Which shards a node needs, and when: read off the seeded order of samples. Pure.

The order of an epoch is known from its first batch on, and so is that of the next one. Positions count samples over
all ranks, as committed by optimizer steps; a node sees the pieces of its own ranks of each global batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from exitwave.ingest.windows import SampleOrder

__all__ = ["AccessOrder"]

Array = np.ndarray[Any, Any]
_AT_ONCE = 4096


@dataclass(frozen=True, kw_only=True)
class AccessOrder:
    """The order of samples of a run, as `GlobalSampler` gives it, by shard.

    `ids` (S,) and `starts` (S + 1,): shard s holds the samples starts[s]..starts[s + 1] - 1. `ranks`: the ranks
    [first, last) of `world_size` that read on this node. `samples_per_epoch`: what an epoch commits. `order`: the
    sampler's own; by default one without a window.
    """

    ids: Sequence[str]
    starts: Array
    n_samples: int
    samples_per_epoch: int
    global_batch: int
    seed: int
    shuffle: bool = True
    generation: int = 0
    ranks: tuple[int, int] = (0, 1)
    world_size: int = 1
    order: SampleOrder | None = None

    @classmethod
    def of(cls, data: Any, sampler: Any, *, ranks: tuple[int, int] | None = None) -> AccessOrder:
        """That of a `Dataset` and the `GlobalSampler` over it; by default all ranks read on this node."""
        shards = [shard for shard in data.shards if shard.generation <= sampler.generation]
        return cls(
            ids=[shard.shard_id for shard in shards],
            starts=np.cumsum([0, *(shard.n for shard in shards)]),
            n_samples=sampler.n_samples,
            samples_per_epoch=sampler.samples_per_epoch,
            global_batch=sampler.global_batch,
            seed=sampler.seed,
            shuffle=sampler.shuffle,
            generation=sampler.generation,
            ranks=ranks or (0, sampler.world_size),
            world_size=sampler.world_size,
            order=sampler.order,
        )

    @property
    def _order(self) -> SampleOrder:
        if self.order is not None:
            return self.order
        return SampleOrder(self.n_samples, seed=self.seed, generation=self.generation)

    def samples(self, epoch: int, start: int) -> Iterator[Array]:
        """The sample numbers that this node reads in an epoch, from position `start` on, in pieces (k,)."""
        first, last = self.ranks
        for low in range(start, self.samples_per_epoch, _AT_ONCE):
            at = np.arange(low, min(low + _AT_ONCE, self.samples_per_epoch))
            begin = at // self.global_batch * self.global_batch
            size = np.minimum(self.global_batch, self.samples_per_epoch - begin)
            offset = at - begin
            mine = (offset >= first * size // self.world_size) & (offset < last * size // self.world_size)
            at = at[mine]
            if self.shuffle:
                at = self._order.at(at, epoch)
            yield at

    def accesses(self, epoch: int, start: int = 0) -> Iterator[str]:
        """The shards of those samples, one for each."""
        for samples in self.samples(epoch, start):
            for s in (np.searchsorted(self.starts, samples, side="right") - 1).tolist():
                yield self.ids[s]

    def upcoming(
        self, epoch: int, committed: int, *, sizes: Mapping[str, int] | None = None, at_most_bytes: int | None = None
    ) -> list[str]:
        """Distinct shards in order of need from a position on: those of this epoch, then those of the next.

        `at_most_bytes`: no further than to so many bytes of them, each of `sizes`: through a window, or without a
        shuffle, the last shard of an epoch is met only at its end, after all of its samples.
        """
        found: dict[int, None] = {}
        nbytes = 0
        for e, start in ((epoch, committed), (epoch + 1, 0)):
            for samples in self.samples(e, start):
                shards = np.searchsorted(self.starts, samples, side="right") - 1
                _, places = np.unique(shards, return_index=True)
                for s in shards[np.sort(places)].tolist():
                    if s not in found:
                        found[s] = None
                        nbytes += 0 if sizes is None else sizes.get(self.ids[s], 0)
                far = at_most_bytes is not None and nbytes > at_most_bytes
                if far or len(found) == len(self.ids):
                    return [self.ids[s] for s in found]
        return [self.ids[s] for s in found]
