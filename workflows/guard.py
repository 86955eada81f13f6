"""`python -m exitwave.workflows.guard PARENT MODULE ARGS…`: run a module that dies when process PARENT dies.

A launcher that is killed cannot stop its children. So the child asks the kernel for SIGKILL when its parent is gone
(prctl(2), PR_SET_PDEATHSIG), checks that the parent is not gone already, and becomes the module. What it was writing
is safe: files get their final names only when whole.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

__all__ = ["die_with_parent", "guarded"]

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Ask for SIGKILL when the parent process ends; end at once if it is not `parent` any more."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def guarded(module: str, *arguments: str) -> list[str]:
    """The command that runs `module` under this process's guard."""
    return [sys.executable, "-m", "exitwave.workflows.guard", str(os.getpid()), module, *arguments]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    name = sys.argv[2]
    sys.argv = sys.argv[2:]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
