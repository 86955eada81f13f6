"""Readiness as bits: what each rank has ready, packed into the few words that one cycle exchanges. Pure.

A message is a run of int64 words. Its first `STATUS_BITS` bits are status bits, the others one bit for each entry of
the cache (1 = ready here). Messages are combined over the ranks by bitwise AND. The status bits are inverted, 0 means
yes, so that AND acts as OR on them: the combined bit is 0 as soon as one rank said yes. 72 tensors need 16 bytes, 1,024
need 136.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["STATUS_BITS", "Agreed", "bits_of", "n_words", "pack", "pack_bits", "unpack"]

STATUS_BITS = 3  # shutdown, uncached, invalid
WORD_BITS = 64


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What all ranks know after a cycle's AND."""

    ready: frozenset[int]  # bits that are set on every rank
    shutdown: bool  # some rank wants to stop
    uncached: bool  # some rank met a name that has no bit yet
    invalid: bool  # some rank met a cached name with another signature


def n_words(n_entries: int) -> int:
    """The int64 words of one message.

    >>> [8 * n_words(n) for n in (72, 1024)]
    [16, 136]
    """
    return -(-(STATUS_BITS + n_entries) // WORD_BITS)


def pack(ready: Iterable[int], n_entries: int, *, shutdown: bool, uncached: bool, invalid: bool) -> tuple[int, ...]:
    """This rank's message, as signed words."""
    bits = (not shutdown) | (not uncached) << 1 | (not invalid) << 2
    for bit in ready:
        if not 0 <= bit < n_entries:
            raise ValueError(f"bit {bit} outside the cache of {n_entries} entries")
        bits |= 1 << (STATUS_BITS + bit)
    return _to_words(bits, n_words(n_entries))


def unpack(words: Sequence[int], n_entries: int) -> Agreed:
    """Read a combined message."""
    if len(words) != n_words(n_entries):
        raise ValueError(f"expected {n_words(n_entries)} words for {n_entries} entries, got {len(words)}")
    bits = _from_words(words)
    return Agreed(
        ready=_set_bits(bits >> STATUS_BITS, n_entries),
        shutdown=not bits & 1,
        uncached=not bits & 2,
        invalid=not bits & 4,
    )


def pack_bits(marked: Iterable[int], n_entries: int) -> tuple[int, ...]:
    """Plain bits without status, of the same length as a message, to be combined by OR."""
    bits = 0
    for bit in marked:
        bits |= 1 << bit
    return _to_words(bits, n_words(n_entries))


def bits_of(words: Sequence[int], n_entries: int) -> frozenset[int]:
    """The bits that `pack_bits` marked."""
    return _set_bits(_from_words(words), n_entries)


def _to_words(bits: int, count: int) -> tuple[int, ...]:
    return struct.unpack(f"<{count}q", bits.to_bytes(8 * count, "little"))


def _from_words(words: Sequence[int]) -> int:
    return int.from_bytes(struct.pack(f"<{len(words)}q", *words), "little")


def _set_bits(bits: int, n_entries: int) -> frozenset[int]:
    return frozenset(bit for bit in range(n_entries) if bits >> bit & 1)
