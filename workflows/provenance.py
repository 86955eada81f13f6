"""What made a result: versions, host, commit."""

from __future__ import annotations

import getpass
import platform
import socket
import subprocess
from importlib import metadata
from pathlib import Path

__all__ = ["exitwave_version", "git_commit", "host_facts", "versions"]

_PACKAGES = ("exitwave", "abtem", "ase", "numpy", "torch", "dask", "distributed", "h5py")


def exitwave_version() -> str:
    """The installed version."""
    return metadata.version("exitwave")


def versions(names: tuple[str, ...] = _PACKAGES) -> dict[str, str]:
    """Versions of Python and of the packages that results depend on, without importing them."""
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def git_commit(folder: Path | None = None) -> str | None:
    """The commit of the source tree that exitwave runs from, with `+changes` if it was changed; None outside git."""
    folder = folder or Path(__file__).resolve().parent
    try:
        head = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=5
        )
        if head.returncode != 0:
            return None
        dirty = subprocess.run(
            ["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True, text=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")


def host_facts() -> dict[str, str]:
    """Host, system, cores and user."""
    import os

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} ({platform.machine()})",
        "cores": str(cores),
        "user": getpass.getuser(),
    }
