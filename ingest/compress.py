"""Compressed shards: one chunk of a field is one sample, through a filter that any HDF5 reader with hdf5plugin knows.

Writing: each sample is compressed in memory as it comes and kept beside the shard to be; at the end, when all sizes are
known, the file is laid out in the order of the rows, so that the order of writing changes no byte, and a full disk
never meets HDF5 half-way. Reading: the manifest says where a chunk lies; its bytes go through the same filter in an
HDF5 file in memory, one for each thread and kind of chunk, which is filled anew each time (50 µs for 32 KiB).

Counts of electrons compress well (15 to 26 times at 1e5 electrons in uint16), noise-free float32 hardly at all: this is
an option, off by default.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import disk_full_means_interrupted, part_path
from exitwave.ingest.schema import FieldSpec
from exitwave.ingest.shard import ALIGNMENT, LIBVER, ShardWriter

__all__ = ["COMPRESSIONS", "CompressedShardWriter", "decompress_chunk", "shard_writer"]

Array = np.ndarray[Any, Any]
COMPRESSIONS = ("bitshuffle-lz4", "blosc2-zstd")
_LEVEL = 5
_MAX_OPEN = 32
_A_CHUNK = 8192  # bytes that HDF5 may take for a chunk beyond its own: alignment, and its place in the index
_METADATA = 1 << 17


def _filter(compression: str) -> Any:
    """The filter as h5py takes it. UsageError where the compression is unknown or hdf5plugin is not installed."""
    if compression not in COMPRESSIONS:
        raise UsageError(f"compression {compression!r}: expected one of {', '.join(COMPRESSIONS)}.")
    try:
        import hdf5plugin
    except ImportError as error:
        raise UsageError("compressed shards need hdf5plugin: pip install 'exitwave[formats]'") from error
    if compression == "bitshuffle-lz4":
        return hdf5plugin.Bitshuffle(cname="lz4")
    return hdf5plugin.Blosc2(cname="zstd", clevel=_LEVEL, filters=hdf5plugin.Blosc2.BITSHUFFLE)


class _Memory(threading.local):
    """HDF5 files in memory, each with a dataset of one chunk, for this thread of this process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.open: OrderedDict[Any, Any] = OrderedDict()

    def chunk(self, compression: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        if self.pid != os.getpid():  # nothing of HDF5 crosses a fork
            self.__init__()  # type: ignore[misc]
        key = (compression, shape, dtype.str)
        if key in self.open:
            self.open.move_to_end(key)
        else:
            name = f"exitwave-{os.getpid()}-{threading.get_ident()}-{next(_NUMBERS)}"
            file = h5py.File(name, "w", driver="core", backing_store=False, rdcc_nbytes=0, libver=LIBVER)
            self.open[key] = file.create_dataset("d", shape=shape, dtype=dtype, chunks=shape, **_filter(compression))
            if len(self.open) > _MAX_OPEN:
                self.open.popitem(last=False)[1].file.close()
        return self.open[key]


_NUMBERS = itertools.count()
_memory = _Memory()


def compress_chunk(compression: str, array: Array) -> bytes:
    """The chunk of one sample (…), stored as (1, …)."""
    dataset = _memory.chunk(compression, (1, *array.shape), array.dtype)
    dataset[0] = array
    mask, data = dataset.id.read_direct_chunk((0,) * dataset.ndim)
    if mask:
        raise RuntimeError(f"{compression} refused a sample of {array.dtype} {array.shape}")
    return bytes(data)


def decompress_chunk(compression: str, data: Array, out: Array, itemsize: int) -> None:
    """Fills `out` (bytes) from the chunk `data` (bytes) of numbers of `itemsize` bytes.

    ValueError where it does not give exactly these bytes, UsageError where hdf5plugin is missing.
    """
    count = out.size // itemsize
    if data.size == 0:
        raise ValueError("an empty chunk")
    try:
        dataset = _memory.chunk(compression, (count,), np.dtype(f"V{itemsize}" if itemsize > 8 else f"u{itemsize}"))
        dataset.id.write_direct_chunk((0,), data.tobytes())
        dataset.read_direct(out.view(dataset.dtype))
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{compression}: {error}") from error


class CompressedShardWriter(ShardWriter):
    """As ShardWriter, with the fields compressed."""

    def __init__(self, dataset: Path, *, compression: str, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.compression = compression
        self._filter = _filter(compression)
        self._spool: int | None = None
        self._spool_path: Path | None = None
        self._end = 0
        self._places: dict[tuple[str, int], tuple[int, int]] = {}

    def _begin(self, folder: Path) -> None:
        self._spool_path = part_path(folder, f"{self.shard_id}.chunks")
        self._spool = os.open(self._spool_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def _put_sample(self, field: FieldSpec, row: int, data: Array) -> None:
        if self._spool is None:
            raise RuntimeError("the shard is not open: use the writer as a context manager, and publish once")
        chunk = compress_chunk(self.compression, data.view(field.stored_dtype).reshape(field.shape))
        view, offset = memoryview(chunk), self._end
        with disk_full_means_interrupted(self.dataset, len(chunk)):
            while view:
                count = os.pwrite(self._spool, view, offset)
                view, offset = view[count:], offset + count
        self._places[field.name, row] = (self._end, len(chunk))
        self._end = offset

    def _finish_samples(self) -> None:
        """Lays the file out and puts the chunks in it, row by row."""
        if self._spool is None or self._part is None:
            raise RuntimeError("the shard is not open")
        with disk_full_means_interrupted(self.dataset, self._end):
            self._lay_out(self._part)
            fd = os.open(self._part, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.posix_fallocate(fd, 0, os.fstat(fd).st_size + self._end + _METADATA + _A_CHUNK * len(self._places))
            finally:
                os.close(fd)
            with h5py.File(self._part, "r+", libver=LIBVER, **ALIGNMENT) as file:
                for row in range(self.n):
                    for field in self.fields:
                        offset, length = self._places[field.name, row]
                        chunk = os.pread(self._spool, length, offset)
                        place = (row,) + (0,) * len(field.shape)
                        file[field.name].id.write_direct_chunk(place, chunk)
            self._open_laid_out(self._part)

    def _create_field(self, file: Any, field: FieldSpec) -> None:
        file.create_dataset(
            field.name,
            shape=(self.n, *field.shape),
            dtype=field.stored_dtype,
            chunks=(1, *field.shape),
            track_times=False,
            fill_time="never",
            **self._filter,
        )

    def _discard(self) -> None:
        super()._discard()
        if self._spool is not None:
            os.close(self._spool)
            self._spool = None
        if self._spool_path is not None:
            self._spool_path.unlink(missing_ok=True)
            self._spool_path = None


def shard_writer(dataset: Path, *, compression: str = "", **options: Any) -> ShardWriter:
    """The writer of a shard, compressed or (by default) not."""
    if not compression:
        return ShardWriter(dataset, **options)
    return CompressedShardWriter(dataset, compression=compression, **options)
