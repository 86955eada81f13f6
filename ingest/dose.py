"""Counted electrons from noise-free intensities, for views of samples outside the training.

The noise belongs to the sample: the key (seed, uid) alone gives the numbers, whatever else is exported beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from exitwave.ingest.errors import UsageError

__all__ = ["counted"]

Array = np.ndarray[Any, Any]
_MAX_DOSE = 1e15  # electrons: beyond it a Poisson number leaves int64's exact neighbourhood for no physical reason


def counted(intensity: Array, dose_e_per_pattern: float, *, uid: int, seed: int = 0) -> Array:
    """Poisson counts (same shape, uint16 or uint32) of `intensity` [fraction of the incident beam].

    `dose_e_per_pattern`: incident electrons per probe position. The pixel of largest expectation decides the dtype
    (ten standard deviations are kept free), so that it is a function of the sample as well.
    """
    if not 0 < dose_e_per_pattern <= _MAX_DOSE:
        raise UsageError(
            f"--dose: expected electrons per probe position, 0 to {_MAX_DOSE:g}, got {dose_e_per_pattern}."
        )
    expected = np.maximum(intensity, 0.0, dtype=np.float64) * dose_e_per_pattern
    # Philox is counter-based: two words of key, one stream for each (seed, uid)
    generator = np.random.Generator(np.random.Philox(key=np.array([uid, seed], dtype=np.uint64)))
    top = float(expected.max(initial=0.0))
    dtype = np.dtype("<u2") if top + 10 * top**0.5 + 20 < 2**16 else np.dtype("<u4")
    if top + 10 * top**0.5 >= 2**32:
        raise UsageError(
            f"--dose: {dose_e_per_pattern:g} electrons give {top:.3g} in one pixel, more than 2^32 counts."
        )
    return generator.poisson(expected).astype(dtype)
