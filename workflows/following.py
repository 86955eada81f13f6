"""Processes that train are followed to their end: their events are passed on, and they are told to stop once."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any

from exitwave.ingest.events import EventTail

__all__ = ["follow"]

_POLL_S = 0.2


def follow(
    process: subprocess.Popen[bytes],
    tail: EventTail,
    feed: Callable[[Mapping[str, Any]], None],
    *,
    stopping: Callable[[], bool],
    tell: Callable[[], None],
    gives_up: Callable[[], bool] = lambda: False,
) -> bool:
    """Whether the process has ended; False where `gives_up` said so first. All its events are fed before.

    tell: tells the process to stop, called once when `stopping` says so for the first time.
    """
    told = False
    while True:
        ended = process.poll() is not None
        for event in tail.read():
            feed(event)
        if ended:
            return True
        if stopping() and not told:
            told = True
            tell()
        if gives_up():
            return False
        time.sleep(_POLL_S)
