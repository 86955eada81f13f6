"""A process that ends with the one that started it: what was killed cannot stop its children any more."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["die_with_parent"]

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def die_with_parent(parent: int | None = None) -> None:
    """Ask Linux for SIGKILL when the parent process ends; end at once if it is not `parent` any more."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
