"""`python -m exitwave.workflows.guard PARENT MODULE ARGS…`: run a module that dies when process PARENT dies.

A launcher that is killed cannot stop its children. So the child asks the kernel for SIGKILL when its parent is gone
(prctl(2), PR_SET_PDEATHSIG), checks that the parent is not gone already, and becomes the module. What it was writing
is safe: files get their final names only when whole.
"""

from __future__ import annotations

import os
import runpy
import sys

from exitwave.ingest.processes import die_with_parent

__all__ = ["guarded"]


def guarded(module: str, *arguments: str) -> list[str]:
    """The command that runs `module` under this process's guard."""
    return [sys.executable, "-m", "exitwave.workflows.guard", str(os.getpid()), module, *arguments]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    name = sys.argv[2]
    sys.argv = sys.argv[2:]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
