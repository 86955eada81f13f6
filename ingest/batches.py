"""Samples for PyTorch: a map-style data set with batched reads, its collate function, and the global sampler.

loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate, num_workers=2)
for batch in loader:
    …                                     # batch["cbed"]: tensor (n_local, Ry, Rx, Qy, Qx)
    sampler.commit(sampler.global_batch)  # after the optimizer step
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, overload

import numpy as np

from exitwave.ingest.ahead import Batch, ReadAhead
from exitwave.ingest.dataset import Dataset, open_dataset
from exitwave.ingest.sampler import GlobalSampler
from exitwave.ingest.windows import ShardLayout, Window

__all__ = ["GlobalSampler", "SampleList", "ShardDataset", "Window", "collate"]

Array = np.ndarray[Any, Any]
_WORTH_A_THREAD = 1 << 20  # bytes of a batch


class SampleList(Sequence[dict[str, Any]]):
    """A batch as a sequence of samples, each a view into `stacked` (field -> (n, …)): collating copies nothing."""

    def __init__(self, stacked: dict[str, Array]) -> None:
        self.stacked = stacked

    def __len__(self) -> int:
        return len(self.stacked["uid"])

    @overload
    def __getitem__(self, k: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, k: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, k: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(k, slice):
            return [self[i] for i in range(len(self))[k]]
        return {name: array[k] for name, array in self.stacked.items()}


class ShardDataset:
    """A map-style data set of samples: `[i]` gives a dict of the asked `fields`, `uid` and `params`, as arrays.

    `split`: only that split. `cache`: a folder that `stage` filled. `verify`: check every sample's checksum. `threads`:
    how many read a large batch (default: up to four, as there are processors). `read_ahead`: without workers, read the
    sampler's next batch while this one is in use; it takes the memory of one batch more, and pays where a training
    step leaves a processor idle. It may be pickled and forked, so that a
    DataLoader takes any number of workers and any start method. Memory does not grow with the number of samples read;
    that of a batch is used again once nothing refers to its tensors.
    """

    def __init__(
        self,
        path: str | Path,
        fields: Sequence[str] = ("cbed", "potential"),
        split: str | None = None,
        cache: str | Path | None = None,
        verify: bool = True,
        threads: int | None = None,
        read_ahead: bool = False,
    ) -> None:
        data = open_dataset(path, cache=cache, verify=verify, threads=threads)
        self.data: Dataset = data if split is None else data.split(split)
        self.fields = tuple(fields)
        self.data.read([], self.fields)  # a field that is not there shows now, not in a worker
        self.read_ahead = read_ahead
        specs = [spec for spec in self.data.fields if spec.name in self.fields]
        self._sample_nbytes = sum(prod(spec.shape) * spec.stored_dtype.itemsize for spec in specs)
        self._ahead = ReadAhead(self._read)

    @property
    def dataset_id(self) -> str:
        return self.data.dataset_id

    @property
    def generation(self) -> int:
        return self.data.generation

    @property
    def split_name(self) -> str | None:
        return self.data.split_name

    def n_samples_until(self, generation: int) -> int:
        return self.data.n_samples_until(generation)

    def digest_until(self, generation: int) -> str:
        return self.data.digest_until(generation)

    def layout_until(self, generation: int) -> ShardLayout:
        return self.data.layout_until(generation)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.__getitems__([i])[0]

    def __getitems__(self, indices: Sequence[int]) -> SampleList:
        """Several samples in one go; a DataLoader calls this with a batch of the sampler."""
        samples = self._ahead.get(indices)
        ahead = indices.ahead if self.read_ahead and isinstance(indices, Batch) else None
        if ahead and len(ahead) * self._sample_nbytes >= _WORTH_A_THREAD:
            self._ahead.begin(ahead)
        return samples

    def _read(self, indices: Sequence[int]) -> SampleList:
        return SampleList(self.data.read(indices, self.fields))

    def read_tile(self, index: int, field: str, slices: Sequence[slice]) -> Array:
        """A part of one field of one sample, reading only its bytes: see `Dataset.read_tile`."""
        return self.data.read_tile(index, field, slices)


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A batch: each field a tensor (n, …); `uid` an int64 tensor (n,) of the same 64 bits; `params` stays NumPy.

    `batch["uid"].numpy().view("uint64")` gives the uids back. Without a copy where the samples lie in one array.
    """
    import torch  # here only: a simulation worker never pays for it

    if isinstance(samples, SampleList):
        stacked = samples.stacked
    else:
        stacked = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
    batch: dict[str, Any] = {}
    for name, array in stacked.items():
        if name == "params":
            batch[name] = array
        else:
            batch[name] = torch.from_numpy(array.view(np.int64) if array.dtype == np.uint64 else array)
    return batch
