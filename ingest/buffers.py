"""Memory for batches, used again once nobody holds the batch any more.

A fresh array of some megabytes costs a page fault for every 4 KiB, which takes longer than reading the bytes from the
page cache does; and copies from the kernel to an address that is not a multiple of a cache line run at half speed. So:
blocks are aligned to a page and kept. A block is free when the pool holds the only reference to it; every NumPy view
and every tensor made of it holds one, so that a batch somebody still looks at is never written to.
"""

from __future__ import annotations

import os
import sys
import threading
from math import prod
from typing import Any, NamedTuple

import numpy as np

__all__ = ["BufferPool", "page_aligned"]

_PAGE = 4096
_SMALL = 256 << 10  # bytes: below, the allocator's own memory is as good
_KEPT = 9  # blocks: of some fields, for the batch in use, the one that is ready and the one that is read now


Array = np.ndarray[Any, Any]


def page_aligned(nbytes: int) -> Array:
    """(nbytes,) uint8, uninitialised, whose first byte is a page's."""
    memory = np.empty(nbytes + _PAGE, np.uint8)
    return memory[-memory.ctypes.data % _PAGE :][:nbytes]


class _Block(NamedTuple):
    """`size` bytes from `start`, the first page in `memory`; `memory` is what every array in it refers to."""

    memory: Array
    start: int
    size: int


class BufferPool:
    """Arrays of any shape and dtype, uninitialised. Safe to use from several threads; empty again after a fork."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._blocks: list[_Block] = []

    def __reduce__(self) -> tuple[type[BufferPool], tuple[()]]:
        return BufferPool, ()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """As `np.empty`; large ones start at a page and lie in a block that may have been used before."""
        kind = np.dtype(dtype)
        nbytes = prod(shape) * kind.itemsize
        if nbytes < _SMALL:
            return np.empty(shape, kind)
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            memory, start, _ = self._take(nbytes)
            return memory[start : start + nbytes].view(kind).reshape(shape)

    def _take(self, nbytes: int) -> _Block:
        for i in reversed(range(len(self._blocks))):  # the one used last is the one most of the cache still holds
            # two references: the block's, and the one that the call itself holds
            if nbytes <= self._blocks[i].size <= 2 * nbytes and sys.getrefcount(self._blocks[i].memory) == 2:
                self._blocks.append(self._blocks.pop(i))
                return self._blocks[-1]
        memory = np.empty(nbytes + _PAGE, np.uint8)
        block = _Block(memory, -memory.ctypes.data % _PAGE, nbytes)
        self._blocks.append(block)
        if len(self._blocks) > _KEPT:  # the one unused for longest; whoever holds a batch in it keeps it alive
            del self._blocks[0]
        return block
