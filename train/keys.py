"""Random numbers that belong to a thing, not to a process.

Training on one rank and on three must see the same noise, the same augmentation and the same dropout. So no random
draw here depends on a global generator, on a rank or on the order of samples: each has a key made of what it is for
("dose", the seed, the epoch, the sample's uid), and the key alone gives the numbers.
"""

from __future__ import annotations

import hashlib

import numpy as np

__all__ = ["generator", "key_of"]


def key_of(*parts: int | str) -> int:
    """A 128-bit key of the parts in their order; integers may be any size that fits 64 bits, signed or not.

    BLAKE2b over a text form without ambiguity: the same number on every machine and in every version of Python.
    """
    text = "\x1f".join(f"s{part}" if isinstance(part, str) else f"i{int(part)}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def generator(*parts: int | str) -> np.random.Generator:
    """NumPy's counter-based Philox generator under the key of `parts`."""
    return np.random.Generator(np.random.Philox(key=key_of(*parts)))
