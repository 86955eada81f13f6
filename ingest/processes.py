"""What a process asks of its system: to end with the one that started it, and to keep memory that it will use again."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["die_with_parent", "keep_freed_memory"]

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_MMAP_LARGEST = 32 << 20  # bytes; glibc takes no more
_KEPT = 256 << 20


def die_with_parent(parent: int | None = None) -> None:
    """Ask Linux for SIGKILL when the parent process ends; end at once if it is not `parent` any more."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def keep_freed_memory() -> None:
    """Ask glibc to keep up to 256 MiB that are freed, instead of giving them back and faulting them in again.

    A training step and a multislice pass free and allocate the same large arrays over and over; each page that comes
    back from the kernel is cleared anew. Dask starts its workers with MALLOC_TRIM_THRESHOLD_=65536, which gives back
    at every turn. Arrays of 32 MiB and more are still mapped one by one (mallopt(3)). Nothing happens with another
    allocator.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_LARGEST)
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
