"""The stored bytes of one sample, found by its extent: one `preadv`, no HDF5 library."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from exitwave.ingest.codecs import decompress
from exitwave.ingest.extents import Extent
from exitwave.ingest.files import crc32c

__all__ = ["SHORT", "read_extent", "read_sample"]

SHORT = "the file is short"

Array = np.ndarray[Any, Any]


def read_extent(fd: int, out: Array, offset: int) -> bool:
    """Fills `out` (bytes) from `offset`; whether the file had enough."""
    done = os.preadv(fd, [out.data], offset)
    while done < out.nbytes:
        count = os.preadv(fd, [out[done:].data], offset + done)
        if count == 0:
            return False
        done += count
    return True


def read_sample(fd: int, extent: Extent, row: int, out: Array) -> str:
    """Fills `out` with the stored bytes of sample `row`, decompressed; says what is wrong, "" where nothing is."""
    offset, length = extent.place(row)
    if not extent.compression:
        return "" if read_extent(fd, out, offset) else SHORT
    chunk = np.empty(length, np.uint8)
    if not read_extent(fd, chunk, offset):
        return SHORT
    if extent.chunk_sums and (found := crc32c(chunk)) != extent.chunk_sums[row]:
        return f"crc32c {found:08x} of the compressed bytes, expected {extent.chunk_sums[row]:08x}"
    try:
        decompress(extent.compression, chunk, out, extent.numpy_dtype.itemsize)
    except ValueError as error:
        return f"cannot be decompressed ({error})"
    return ""
