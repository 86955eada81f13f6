"""Where the bytes of a field lie in a shard, and dtypes as JSON: with them no reader of samples needs HDF5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from exitwave.ingest.codecs import check_codec
from exitwave.ingest.errors import UsageError

__all__ = ["Extent", "dtype_from_json", "dtype_to_json"]


def dtype_to_json(dtype: np.dtype[Any]) -> Any:
    """A dtype as JSON: a string such as "<f4", or for a compound a list of [name, dtype] or [name, dtype, shape]."""
    if dtype.names is None:
        return dtype.str
    columns: list[list[Any]] = []
    for name in dtype.names:
        part = dtype[name]
        columns.append([name, part.base.str, *([list(part.shape)] if part.shape else [])])
    return columns


def dtype_from_json(data: Any) -> np.dtype[Any]:
    """The inverse of `dtype_to_json`; lists or tuples."""
    if isinstance(data, str):
        return np.dtype(data)
    return np.dtype([(str(c[0]), str(c[1]), tuple(c[2])) if len(c) > 2 else (str(c[0]), str(c[1])) for c in data])


@lru_cache(maxsize=256)
def _cached_dtype(data: Any) -> np.dtype[Any]:
    return dtype_from_json(data)


def _tuples(data: Any) -> Any:
    return tuple(_tuples(item) for item in data) if isinstance(data, list | tuple) else data


def _lists(data: Any) -> Any:
    return [_lists(item) for item in data] if isinstance(data, list | tuple) else data


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Where the bytes of one field lie in a shard: sample `i` starts at `offset + i·stride`, both in bytes.

    `shape` includes the leading axis of n samples, `stride` is the bytes of one sample. `dtype` is a NumPy dtype
    string, or for the compound `/params` nested tuples as in `dtype_to_json`. `encoding` and `scale` are those of the
    field. With `compression`, the bytes of sample `i` are what the chunk at `chunks[i]` = (offset, length) gives; the
    `offset` of the extent is 0 then. `chunk_sums`: the CRC-32C of each chunk as it lies in the file, to be looked at
    before it is decompressed (a damaged one can crash or hang a decompressor); none in manifests of before.
    """

    field: str
    dtype: Any
    shape: tuple[int, ...]
    offset: int
    stride: int
    encoding: str = ""
    scale: float = 1.0
    compression: str = ""
    chunks: tuple[tuple[int, int], ...] = ()
    chunk_sums: tuple[int, ...] = ()

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return _cached_dtype(self.dtype)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return self.shape[1:]

    @property
    def nbytes(self) -> int:
        """Bytes of all samples, decompressed."""
        return self.shape[0] * self.stride

    @property
    def end(self) -> int:
        """The byte behind the last one in the file."""
        if self.compression:
            return max((offset + length for offset, length in self.chunks), default=0)
        return self.offset + self.nbytes

    def place(self, row: int) -> tuple[int, int]:
        """Where the bytes of sample `row` lie in the file: offset and length, compressed where they are."""
        return self.chunks[row] if self.compression else (self.offset + row * self.stride, self.stride)

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "field": self.field,
            "dtype": _lists(self.dtype),
            "shape": list(self.shape),
            "offset": self.offset,
            "stride": self.stride,
        }
        if self.encoding:
            data |= {"encoding": self.encoding, "scale": self.scale}
        if self.compression:
            data |= {"compression": self.compression, "chunks": _lists(self.chunks)}
        if self.chunk_sums:
            data["chunk_crc32c"] = list(self.chunk_sums)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Extent:
        extent = cls(
            field=str(data["field"]),
            dtype=_tuples(data["dtype"]),
            shape=tuple(int(s) for s in data["shape"]),
            offset=int(data["offset"]),
            stride=int(data["stride"]),
            encoding=str(data.get("encoding", "")),
            scale=float(data.get("scale", 1.0)),
            compression=str(data.get("compression", "")),
            chunks=tuple((int(offset), int(length)) for offset, length in data.get("chunks", ())),
            chunk_sums=tuple(int(found) for found in data.get("chunk_crc32c", ())),
        )
        expected = extent.numpy_dtype.itemsize * prod(extent.sample_shape)
        if extent.stride != expected or extent.offset < 0 or not extent.shape or min(extent.shape) < 0:
            raise UsageError(
                f"extent of {extent.field!r}: offset {extent.offset}, stride {extent.stride}; "
                f"expected offset >= 0 and stride {expected} for {extent.dtype} {extent.sample_shape}"
            )
        check_codec(extent.field, extent.numpy_dtype, extent.encoding, extent.compression)
        if len(extent.chunks) != (extent.shape[0] if extent.compression else 0) or any(
            offset < 0 or length < 0 for offset, length in extent.chunks
        ):
            raise UsageError(f"extent of {extent.field!r}: {len(extent.chunks)} chunks, expected one a sample")
        if extent.chunk_sums and len(extent.chunk_sums) != len(extent.chunks):
            raise UsageError(
                f"extent of {extent.field!r}: {len(extent.chunk_sums)} sums of {len(extent.chunks)} chunks"
            )
        return extent
