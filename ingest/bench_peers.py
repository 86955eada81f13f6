"""The loaders that `exitwave bench ingest` compares: each an epoch of shuffled batches of tensors, in this process.

Every loader gives (uids, cbed): integers (n,), and a float32 tensor (n, …). Peers are used as their documentation has
it; one that is not installed, or whose package another version of ours cannot load, is left out and said so.
"""

from __future__ import annotations

import json
import subprocess
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from exitwave.ingest.batches import GlobalSampler, ShardDataset, collate
from exitwave.ingest.bench_data import SAMPLE_SHAPE, samples
from exitwave.ingest.errors import ExitwaveError
from exitwave.ingest.files import crc32c

__all__ = ["Mosaic", "litdata_epoch", "ours_epoch", "sums_of", "webdataset_epoch", "write_litdata"]

Batches = Iterator[tuple[Any, torch.Tensor]]


def ours_epoch(data: ShardDataset, *, epoch: int, batch: int, workers: int = 0) -> Batches:
    """An epoch of ours under PyTorch's own DataLoader."""
    sampler = GlobalSampler(data, rank=0, world_size=1, global_batch=batch, seed=0, tail="keep")
    sampler.load_state_dict({**sampler.state_dict(), "epoch": epoch})
    source: Any = data
    for got in DataLoader(source, batch_sampler=sampler, collate_fn=collate, num_workers=workers):
        yield got["uid"], got["cbed"]


def write_litdata(path: Path, n: int) -> Path:
    """By the writer that `litdata.optimize` uses, without its processes: tensors, its fastest kind, chunks of 64 MB."""
    from litdata.streaming.writer import BinaryWriter

    path.mkdir()
    writer = BinaryWriter(str(path), chunk_bytes="64MB")
    for i, (uid, values) in enumerate(samples(0, n, SAMPLE_SHAPE)):
        writer[i] = {"uid": uid, "cbed": torch.from_numpy(values)}
    writer.done()
    writer.merge(1)
    return path


def litdata_epoch(path: Path, *, batch: int) -> Callable[[int], Batches]:
    """litdata: StreamingDataset(shuffle=True) under its StreamingDataLoader; the loader is kept between epochs.

    Without decoding in advance, its default where it knows the option: with samples of this size that made it several
    times slower, and unsteady.
    """
    from litdata import StreamingDataLoader, StreamingDataset

    options: dict[str, Any] = (
        {"batch_decode": False} if "batch_decode" in signature(StreamingDataset).parameters else {}
    )
    data = StreamingDataset(str(path), shuffle=True, **options)
    loader = StreamingDataLoader(data, batch_size=batch, num_workers=0)

    def epoch(number: int) -> Batches:
        for got in loader:
            yield got["uid"], torch.as_tensor(got["cbed"])

    return epoch


def webdataset_epoch(path: Path, *, batch: int) -> Callable[[int], Batches]:
    """webdataset: shards shuffled, then samples through a shuffle buffer, its documented pipeline."""
    import webdataset

    urls = sorted(str(p) for p in path.glob("*.tar"))

    def epoch(number: int) -> Batches:
        data = (
            webdataset.WebDataset(urls, shardshuffle=len(urls), seed=number, empty_check=False)
            .shuffle(256)
            .decode()
            .to_tuple("__key__", "cbed.npy")
            .batched(batch)
        )
        for keys, values in webdataset.WebLoader(data, batch_size=None, num_workers=0):
            yield [int(key, 16) for key in keys], torch.as_tensor(values)

    return epoch


def sums_of(batches: Batches) -> Counter[tuple[int, int]]:
    """The multiset of (uid, crc32c of the values) of an epoch."""
    sums: Counter[tuple[int, int]] = Counter()
    for uids, values in batches:
        for uid, value in zip(uids, values, strict=True):
            sums[(int(uid), crc32c(np.ascontiguousarray(value.numpy()).reshape(-1).view(np.uint8)))] += 1
    return sums


class Mosaic:
    """mosaicml-streaming in an environment of its own (it needs an older NumPy): a process that answers by lines."""

    def __init__(self, python: Path, plain: Path, work: Path, *, batch: int) -> None:
        script = Path(__file__).with_name("bench_mosaic.py")
        self._process = subprocess.Popen(
            [str(python), str(script), str(plain), str(work), str(batch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.version = self._answer()["version"]

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise ExitwaveError(f"the process of mosaicml-streaming ended with code {self._process.wait()}")

    def _ask(self, what: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return self._answer()

    def epoch_s(self) -> float:
        """Seconds of one epoch."""
        return float(self._ask("epoch")["seconds"])

    def is_whole(self, plain: Path) -> bool:
        """Whether an epoch of it holds every sample of `plain` once, byte by byte (by zlib's CRC-32 there and here)."""
        got = Counter((int(u), int(c)) for u, c in self._ask("check")["sums"])
        uids = np.fromfile(plain / "uids.u8", "<u8").tolist()
        data = np.memmap(plain / "samples.f4", np.uint8, mode="r").reshape(len(uids), -1)
        return got == Counter((uid, zlib.crc32(row.data)) for uid, row in zip(uids, data, strict=True))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
