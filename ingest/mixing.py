"""The mixing of numbers that everything keyed is made of: SplitMix64's finaliser, on one number.

Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014: a bijection of 64 bits with full
avalanche. Our own, since NumPy's generators may change between versions. `order` has the same on arrays.
"""

from __future__ import annotations

__all__ = ["GOLDEN", "MASK64", "mix64"]

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # the odd number nearest to 2**64 over the golden ratio: SplitMix64's step


def mix64(x: int) -> int:
    """The low 64 bits of `x`, mixed."""
    x &= MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)
