"""Which samples this rank reads, in which order, and from where to go on after a stop.

The position of a run is the number of samples *committed* by optimizer steps in this epoch, over all ranks; what a
DataLoader has fetched ahead does not count. A resumed run, also on another number of ranks, continues the very same
global sequence: no sample twice, none lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

import numpy as np

from exitwave.ingest.ahead import Batch, with_ahead
from exitwave.ingest.errors import UsageError
from exitwave.ingest.order import ORDER_VERSION, batch_bounds, partition
from exitwave.ingest.windows import SampleOrder, ShardLayout, Window

__all__ = ["BatchIterator", "GlobalSampler", "Ordered"]

_POSITIONS_AT_ONCE = 4096  # computing the order of many costs little more than of one


class Ordered(Protocol):
    """What the sampler asks of a data set: `Dataset` and `ShardDataset` both answer."""

    @property
    def dataset_id(self) -> str: ...
    @property
    def generation(self) -> int: ...
    @property
    def split_name(self) -> str | None: ...
    def n_samples_until(self, generation: int) -> int: ...
    def digest_until(self, generation: int) -> str: ...
    def layout_until(self, generation: int) -> ShardLayout: ...


class GlobalSampler:
    """This rank's batches of sample numbers, for a DataLoader's `batch_sampler` with `collate_fn=collate`.

    Iterating yields batches from the committed position to the end of the epoch; iterate again for the next epoch once
    all of this one is committed. `global_batch` is the number of samples of one optimizer step over all ranks;
    ranks get pieces whose sizes differ by one at most. `tail="drop"` leaves out what does not fill a global batch at an
    epoch's end (other samples each epoch, when shuffled). `tail="keep"`, for evaluation, gives each sample exactly once
    over all ranks: the last batches are smaller, and may be empty on some ranks, but every rank has as many of them.
    `generation`: use samples up to this one only (default: the newest now). `window`: shuffle through a moving window
    of shards (see `windows`), for a cache that does not hold the data set; by default all samples at once.
    """

    def __init__(
        self,
        dataset: Ordered,
        *,
        rank: int,
        world_size: int,
        global_batch: int,
        seed: int,
        shuffle: bool = True,
        generation: int | None = None,
        tail: Literal["drop", "keep"] = "drop",
        window: Window | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise UsageError(f"rank {rank}: expected 0..{world_size - 1}")
        if tail not in ("drop", "keep"):
            raise UsageError(f"tail {tail!r}: expected 'drop' or 'keep'")
        if global_batch < (world_size if tail == "drop" else 1):
            raise UsageError(
                f"global batch of {global_batch} samples for {world_size} ranks: expected at least one sample per rank"
            )
        self.rank = rank
        self.world_size = world_size
        self.global_batch = global_batch
        self.seed = seed
        self.shuffle = shuffle
        self.tail = tail
        self.generation = dataset.generation if generation is None else generation
        self.epoch = 0
        self.committed = 0
        self._dataset_id = dataset.dataset_id
        self._split = dataset.split_name
        self._digest = dataset.digest_until(self.generation)
        self.n_samples = dataset.n_samples_until(self.generation)
        self.window = window
        self.order = SampleOrder(
            self.n_samples,
            seed=seed,
            generation=self.generation,
            shuffle=shuffle,
            window=window,
            layout=None if window is None else dataset.layout_until(self.generation),
        )
        if self.samples_per_epoch == 0:
            split = "" if self._split is None else f" of split {self._split!r}"
            raise UsageError(
                f"data set {self._dataset_id}: {self.n_samples} samples{split} do not fill one global batch of "
                f"{global_batch}. Use a smaller batch, or simulate more samples."
            )

    @property
    def samples_per_epoch(self) -> int:
        """Samples that an epoch commits, over all ranks: without the tail if that is dropped."""
        return self.n_samples if self.tail == "keep" else self.n_samples // self.global_batch * self.global_batch

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples_per_epoch // self.global_batch)

    def _bounds(self) -> list[tuple[int, int]]:
        return batch_bounds(self.committed, self.global_batch, self.samples_per_epoch, keep_tail=True)

    def __len__(self) -> int:
        """Batches from the committed position to the end of the epoch; the same on every rank."""
        return len(self._bounds())

    def __iter__(self) -> BatchIterator:
        return BatchIterator(self)

    def batches(self) -> Iterator[Batch]:
        """From the position as it is now: commits that come while they are taken do not move the start."""
        return with_ahead(self._batches(self._bounds(), self.epoch))

    def _batches(self, bounds: list[tuple[int, int]], epoch: int) -> Iterator[list[int]]:
        at_once = max(1, _POSITIONS_AT_ONCE * self.world_size // self.global_batch)
        for first in range(0, len(bounds), at_once):
            pieces = [partition(np.arange(*b), self.rank, self.world_size) for b in bounds[first : first + at_once]]
            mine = self.order.at(np.concatenate(pieces), epoch)
            for piece in np.split(mine, np.cumsum([len(piece) for piece in pieces])[:-1]):
                yield piece.tolist()

    def commit(self, n: int) -> None:
        """Records that `n` samples, counted over all ranks, went into the model: call it after each optimizer step.

        At the end of the epoch the next one begins. UsageError beyond it.
        """
        left = self.samples_per_epoch - self.committed
        if not 0 <= n <= left:
            raise UsageError(f"commit of {n} samples: epoch {self.epoch} has {left} left (of {self.samples_per_epoch})")
        self.committed += n
        if self.committed == self.samples_per_epoch:
            self.epoch, self.committed = self.epoch + 1, 0

    def _identity(self) -> dict[str, Any]:
        return {
            "dataset_id": self._dataset_id,
            "split": self._split,
            "generation": self.generation,
            "n_samples": self.n_samples,
            "shards_digest": self._digest,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "tail": self.tail,
            "global_batch": self.global_batch,
            "order_version": ORDER_VERSION,
            "window": None if self.window is None else [self.window.shards, self.window.structures],
        }

    def state_dict(self) -> dict[str, Any]:
        """The position and all that the order depends on; plain values. The world size is not among them."""
        return {**self._identity(), "epoch": self.epoch, "committed": self.committed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where `state` stopped. UsageError naming each value that would make another order."""
        differences = [
            f"{key} {state.get(key)!r} then, {value!r} now"
            for key, value in self._identity().items()
            if state.get(key) != value
        ]
        if differences:
            raise UsageError(
                "the run cannot continue in the same order of samples: " + "; ".join(differences) + ". Use the data "
                "set and settings of the run, or start a new one."
            )
        epoch, committed = int(state["epoch"]), int(state["committed"])
        if epoch < 0 or not 0 <= committed < self.samples_per_epoch:
            raise UsageError(f"position: epoch {epoch}, {committed} samples; expected 0..{self.samples_per_epoch - 1}")
        self.epoch, self.committed = epoch, committed


class BatchIterator(Iterator[Batch]):
    """The batches of an epoch, from the sampler's position on; with a state of its own.

    torchdata's StatefulDataLoader asks the iterator where it is, and means what the loader has given, not what was
    committed. Loading such a state takes the sampler there, too.
    """

    def __init__(self, sampler: GlobalSampler) -> None:
        self._sampler = sampler
        self._begin()

    def _begin(self) -> None:
        self._epoch, self._given = self._sampler.epoch, self._sampler.committed
        self._batches = self._sampler.batches()

    def __next__(self) -> Batch:
        batch = next(self._batches)
        self._given = min(self._given + self._sampler.global_batch, self._sampler.samples_per_epoch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """As the sampler's, at what this iterator has given."""
        whole = self._given == self._sampler.samples_per_epoch
        place = (self._epoch + 1, 0) if whole else (self._epoch, self._given)
        return {**self._sampler.state_dict(), "epoch": place[0], "committed": place[1]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken. UsageError as from the sampler's."""
        self._sampler.load_state_dict(state)
        self._begin()
