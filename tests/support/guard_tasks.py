"""What a guarded process is asked to do in the tests of the guard: well-behaved and otherwise."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any


def double(value: int) -> dict[str, Any]:
    return {"value": 2 * value, "pid": os.getpid()}


def fail(what: str) -> None:
    if what == "memory":
        raise MemoryError("no room for 3 GB")
    if what == "disk":
        raise OSError(errno.ENOSPC, "No space left on device")
    raise ValueError(f"cannot: {what}")


def die(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)


def leave(code: int) -> None:
    os._exit(code)


def hang(marker: str) -> None:
    """It sleeps, deaf to SIGTERM, with a child of its own."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "1000"])
    with Path(marker).open("w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    time.sleep(1000)


def swallow(megabytes: int) -> None:
    """Takes memory 20 MB at a time, and touches it."""
    held = []
    for _ in range(megabytes // 20):
        held.append(b"x" * 20_000_000)
        time.sleep(0.02)
    time.sleep(60)


def unpicklable() -> Any:
    return lambda: 0
