"""From the bytes of a shard to values: first decompress, then decode.

Two things may stand between a file and the numbers of a sample. *Compression* is of the bytes: one compressed chunk per
sample and field, wherever the extent says it lies, and what comes out are the stored bytes that the sample's checksum
covers. *Encoding* is of the numbers: the stored array, of the field's `dtype`, stands for values of its `value_dtype`.
A new kind of either is one entry in a table here; readers know no names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from exitwave.ingest.errors import UsageError

if TYPE_CHECKING:
    from exitwave.ingest.schema import FieldSpec

__all__ = ["DECOMPRESSORS", "ENCODINGS", "Decompressor", "Encoding", "check_codec", "decode", "decompress"]

Array = np.ndarray[Any, Any]
# Compressed bytes (uint8, one axis), the stored bytes to fill (uint8, one axis), and the size in bytes of one number,
# which shuffling filters go by. Raises ValueError when the chunk does not give exactly these bytes.
Decompressor = Callable[[Array, Array, int], None]


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """Stored numbers of `stored_dtype` stand for values of `value_dtype`; `decode(stored, scale, out)` fills `out`."""

    stored_dtype: str
    value_dtype: str
    decode: Callable[[Array, float, Array], None]


def _square(stored: Array, scale: float, out: Array) -> None:
    """value = (stored·scale)²: half precision keeps its 11 bits for intensities over 24 decades that way."""
    np.multiply(stored, np.float32(scale), out=out, dtype=np.float32)
    np.square(out, out=out)


ENCODINGS: dict[str, Encoding] = {
    "sqrt-f2": Encoding(stored_dtype="<f2", value_dtype="<f4", decode=_square),
}


def _by_filter(compression: str) -> Decompressor:
    """A compression that goes through a filter of HDF5; the library is loaded by the first chunk."""

    def decompress_it(data: Array, out: Array, itemsize: int) -> None:
        from exitwave.ingest.compress import decompress_chunk

        decompress_chunk(compression, data, out, itemsize)

    return decompress_it


DECOMPRESSORS: dict[str, Decompressor] = {name: _by_filter(name) for name in ("bitshuffle-lz4", "blosc2-zstd")}


def check_codec(field: str, dtype: Any, encoding: str, compression: str = "") -> None:
    """UsageError unless this version knows how to read such a field."""
    if encoding:
        known = ENCODINGS.get(encoding)
        if known is None:
            raise UsageError(
                f"field {field!r}: encoding {encoding!r} is not known; there are {', '.join(ENCODINGS)}. Read it with "
                "the exitwave that wrote it."
            )
        if np.dtype(dtype).newbyteorder("<") != np.dtype(known.stored_dtype):
            raise UsageError(f"field {field!r}: {dtype} stored as {encoding}, expected {known.stored_dtype}")
    if compression and compression not in DECOMPRESSORS:
        raise UsageError(
            f"field {field!r}: compression {compression!r} is not known; there are "
            f"{', '.join(DECOMPRESSORS) or 'none'}. Read it with the exitwave that wrote it."
        )


def decompress(compression: str, data: Array, out: Array, itemsize: int) -> None:
    """Fills `out` (stored bytes) from a compressed chunk. ValueError where it does not give exactly these bytes."""
    DECOMPRESSORS[compression](data, out, itemsize)


def decode(spec: FieldSpec, stored: Array, out: Array | None = None) -> Array:
    """The values (…) of `stored` (…), of `spec.value_dtype`; `stored` itself where the field has no encoding.

    `out`, of the same shape and `spec.value_dtype`, is filled and returned where it is given.
    """
    if not spec.encoding:
        if out is None:
            return stored
        out[...] = stored
        return out
    if out is None:
        out = np.empty(stored.shape, spec.value_dtype)
    ENCODINGS[spec.encoding].decode(stored, spec.scale, out)
    return out
