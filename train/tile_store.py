"""Tiles of the samples in memory, dealt out over ranks, and exchanged by mini-batch.

Reading every epoch from shared storage bounds the training of large samples (Oyama et al., arXiv:2007.12856, section
III-B: one global batch of 64 samples of 512³ is 64 GiB). So each tile is read once, kept by one rank, and handed over:

- Sample i is owned by data rank i mod D, for each spatial rank's tile of it. Whoever owns a tile reads it from the
  shard when it is first asked for, and what is left of its own when the first epoch ends: afterwards nothing is read.
- For each mini-batch the data ranks tell each other which samples they are about to train on. Each then sends, to each
  other rank, the tiles that it owns and that one needs, as one message.

Ownership depends on the sample's number alone, so a resumed run, also on another mesh, needs to know nothing.

A rank that cannot read tells the others in the same exchange, and all raise: none waits for tiles that never come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from exitwave.ingest.errors import ExitwaveError, UsageError

__all__ = ["Exchange", "Packing", "TileStore", "plan_exchange"]

Sample = dict[str, Any]
_ALIGN = 16  # bytes; arrays in a message begin at multiples of it


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What one data rank sends and receives for a mini-batch: peer -> sample numbers, in the order they travel."""

    sends: dict[int, tuple[int, ...]]
    receives: dict[int, tuple[int, ...]]


def plan_exchange(requests: Sequence[Sequence[int]], rank: int) -> Exchange:
    """Who sends what, given which samples each data rank asks for. Sample i is owned by rank i mod len(requests)."""
    size = len(requests)
    sends = {peer: tuple(i for i in wanted if i % size == rank) for peer, wanted in enumerate(requests) if peer != rank}
    receives = {owner: tuple(i for i in requests[rank] if i % size == owner) for owner in range(size) if owner != rank}
    return Exchange(
        sends={peer: some for peer, some in sends.items() if some},
        receives={peer: some for peer, some in receives.items() if some},
    )


class Packing:
    """The arrays of one sample as one run of bytes; all samples of a rank have the same arrays."""

    def __init__(self, sample: Sample) -> None:
        self._parts: list[tuple[str, np.dtype[Any], tuple[int, ...], int, int]] = []
        at = 0
        for name, value in sample.items():
            array = np.asarray(value)
            self._parts.append((name, array.dtype, array.shape, at, array.nbytes))
            at += -(-array.nbytes // _ALIGN) * _ALIGN
        self.nbytes = at

    def pack(self, sample: Sample) -> torch.Tensor:
        """(nbytes,) uint8."""
        out = np.zeros(self.nbytes, np.uint8)
        for name, dtype, shape, at, nbytes in self._parts:
            value = np.asarray(sample[name], dtype=dtype)
            if value.shape != shape:
                raise UsageError(f"tile store: expected {name} of shape {shape} in every sample, got {value.shape}")
            out[at : at + nbytes].view(dtype).reshape(shape)[...] = value
        return torch.from_numpy(out)

    def unpack(self, packed: torch.Tensor) -> Sample:
        """The sample; its arrays look into `packed`."""
        data = packed.numpy()
        return {
            # () takes a scalar, uid or params, out of its array
            name: data[at : at + nbytes].view(dtype).reshape(shape)[()]
            for name, dtype, shape, at, nbytes in self._parts
        }


class TileStore:
    """This rank's share of the tiles. `batch` is called by all data ranks of a column, once for each mini-batch.

    Args:
        read: number of a sample -> its arrays, this rank's tile of each; from shared storage.
        n_samples: how many samples there are, numbered from 0.
        rank, size: this rank's place along the mesh's data axis.
        group: the process group of those `size` ranks; None where it is one.
        peers: the global ranks of that group, in its order; None: 0, 1, …
        limit_bytes: refuse to hold more than this on one rank.
    """

    def __init__(
        self,
        read: Callable[[int], Sample],
        *,
        n_samples: int,
        rank: int = 0,
        size: int = 1,
        group: Any = None,
        peers: Sequence[int] | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        self._read = read
        self._n = n_samples
        self._rank, self._size, self._group = rank, size, group
        self._peers = list(peers) if peers is not None else list(range(size))
        self._limit = limit_bytes
        self._held: dict[int, torch.Tensor] = {}
        self._packing: Packing | None = None
        self._fill = False
        self.reads = 0  # samples read from shared storage
        self.moved_bytes = 0  # received from other ranks

    @property
    def held(self) -> tuple[int, ...]:
        """Numbers of the samples that are kept here."""
        return tuple(sorted(self._held))

    def first_epoch_ended(self) -> None:
        """From the next batch on nothing is read: what this rank owns and was not asked for is read before it."""
        self._fill = len(self._held) < len(range(self._rank, self._n, self._size))

    def batch(self, indices: Sequence[int]) -> list[Sample]:
        """This rank's tiles of the samples `indices`, in their order.

        Raises:
            UsageError, DamagedDataError, …: what reading failed with; on the other ranks an ExitwaveError naming it.
        """
        mine = [int(i) for i in indices]
        requests: list[Any] = [mine]
        if self._size > 1:
            requests = [None] * self._size
            dist.all_gather_object(requests, mine, group=self._group)
        error: Exception | None = None
        try:
            self._load({i for wanted in requests for i in wanted if i % self._size == self._rank})
        except Exception as caught:
            error = caught
        self._agree(error)
        received = self._exchange(plan_exchange(requests, self._rank)) if self._size > 1 else {}
        assert self._packing is not None
        return [self._packing.unpack(received[i] if i in received else self._held[i]) for i in mine]

    def _load(self, wanted: set[int]) -> None:
        """Reads what is wanted, owned, and not held; a first sample in any case, since it says how tiles are packed."""
        if self._fill:
            wanted |= set(range(self._rank, self._n, self._size))
            self._fill = False
        for index in sorted(wanted - self._held.keys()):
            sample = self._read(index)
            self.reads += 1
            if self._packing is None:
                self._set_packing(Packing(sample))
            assert self._packing is not None
            self._held[index] = self._packing.pack(sample)
        if self._packing is None:
            first = range(self._rank, self._n, self._size)
            sample = self._read(first[0] if first else 0)
            self._set_packing(Packing(sample))
            self.reads += 1
            if first:
                assert self._packing is not None
                self._held[first[0]] = self._packing.pack(sample)

    def _set_packing(self, packing: Packing) -> None:
        need = packing.nbytes * len(range(self._rank, self._n, self._size))
        if self._limit is not None and need > self._limit:
            raise UsageError(
                f"the tiles that this rank keeps in memory are {need / 2**30:.2f} GiB, more than the "
                f"{self._limit / 2**30:.2f} GiB there are; use more ranks, or set series.store: none to read them "
                "from the shards in every epoch"
            )
        self._packing = packing

    def _agree(self, error: Exception | None) -> None:
        if self._size == 1:
            if error is not None:
                raise error
            return
        failed = torch.tensor([float(error is not None)])
        dist.all_reduce(failed, group=self._group)
        if not failed.item():
            return
        said: list[Any] = [None] * self._size
        dist.all_gather_object(said, None if error is None else str(error), group=self._group)
        if error is not None:
            raise error
        who = next(k for k, text in enumerate(said) if text is not None)
        raise ExitwaveError(f"rank {self._peers[who]} could not read its tiles: {said[who]}")

    def _exchange(self, plan: Exchange) -> dict[int, torch.Tensor]:
        assert self._packing is not None
        nbytes = self._packing.nbytes
        buffers = {owner: torch.empty(len(some) * nbytes, dtype=torch.uint8) for owner, some in plan.receives.items()}
        works = [
            dist.irecv(buffers[owner], src=self._peers[owner], group=self._group) for owner in sorted(plan.receives)
        ]
        works += [
            dist.isend(torch.cat([self._held[i] for i in some]), dst=self._peers[peer], group=self._group)
            for peer, some in sorted(plan.sends.items())
        ]
        for work in works:
            if work is not None:
                work.wait()
        received: dict[int, torch.Tensor] = {}
        for owner, some in plan.receives.items():
            received.update(zip(some, buffers[owner].split(nbytes), strict=True))
            self.moved_bytes += buffers[owner].numel()
        return received
