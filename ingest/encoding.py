"""From values to what a shard stores: the other direction of `codecs.decode`, and how far the two lie apart.

`sqrt-f2` stores an intensity as the square root over a scale, in half precision: value = (stored·scale)². The scale is
a power of two, so that multiplying by it rounds nothing, and depends on the field alone, never on the data: it is the
smallest that holds the largest value which the field can take. A half has 11 bits, so the root is off by at most one
part in 2^11 and the value by one in 2^10 (`SQRT_F2_RELATIVE_ERROR`), as long as the root over the scale is at least
2^-14: for fractions of a beam, from 3.5e-18 on. Below that, the error is less than 1e-20. Poisson noise of a pixel
reaches that relative error only beyond a million counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from exitwave.ingest.codecs import ENCODINGS
from exitwave.ingest.errors import UsageError
from exitwave.ingest.schema import FieldSpec

__all__ = ["LARGEST_VALUE", "SQRT_F2_RELATIVE_ERROR", "encode", "encode_sample", "sqrt_scale"]

Array = np.ndarray[Any, Any]

_LARGEST_HALF = 65504.0
SQRT_F2_RELATIVE_ERROR = 2.0**-10 * (1 + 2.0**-10)

# The largest value that a field of intensities is given room for. A pattern is a fraction of the beam; an image of an
# exit wave has mean 1, and columns of heavy atoms focus the wave to some tens of it.
LARGEST_VALUE = {"cbed": 1.0, "images": 1000.0}


def sqrt_scale(largest: float) -> float:
    """The scale of `sqrt-f2` that holds values up to `largest`: a power of two."""
    if not (math.isfinite(largest) and largest > 0):
        raise UsageError(f"largest value {largest}: a positive number expected")
    return 2.0 ** math.ceil(math.log2(math.sqrt(largest) / _LARGEST_HALF))


def encode(field: FieldSpec, values: Array) -> Array:
    """What the shard stores for `values` (…): of the field's stored dtype; `values` itself without an encoding.

    UsageError where a value is negative, or larger than the field's scale has room for.
    """
    if not field.encoding:
        return values
    assert field.encoding == "sqrt-f2" and field.encoding in ENCODINGS
    room = (_LARGEST_HALF * field.scale) ** 2
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    if not (low >= 0.0 and high <= room):
        raise UsageError(
            f"field {field.name}: values from {low:g} to {high:g}; its encoding {field.encoding} has room for 0 to "
            f"{room:g}. Store this field without `encoding`."
        )
    return (np.sqrt(values.astype(np.float32)) / np.float32(field.scale)).astype(field.stored_dtype)


def encode_sample(fields: Sequence[FieldSpec], arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays of a sample as its shard stores them; fields that are not asked for stay as they are."""
    encoded = {field.name: encode(field, arrays[field.name]) for field in fields if field.name in arrays}
    return {**arrays, **encoded}
