"""Answers that many ask for at once: made by one of them, given to all, remembered for a moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Shared"]

T = TypeVar("T")


class Shared(Generic[T]):
    """`make(key)` at most once in `for_s` seconds for each key, by one thread at a time; the others wait for it."""

    def __init__(self, make: Callable[[str], T], *, for_s: float = 0.5) -> None:
        self._make, self._for_s = make, for_s
        self._kept: dict[str, tuple[float, T]] = {}
        self._making = threading.Lock()

    def fresh(self, key: str) -> T | None:
        """What is remembered of it, None where that is too old. Never waits."""
        kept = self._kept.get(key)
        return kept[1] if kept is not None and time.monotonic() - kept[0] < self._for_s else None

    def get(self, key: str) -> T:
        """Remembered or made; what `make` raises is raised here too, and remembered by nobody."""
        with self._making:
            found = self.fresh(key)
            if found is None:
                self._kept.pop(key, None)
                found = self._make(key)
                self._kept[key] = (time.monotonic(), found)
            return found

    def forget(self, key: str) -> None:
        """Something was changed: the next one makes it anew, also where somebody is making it just now."""
        with self._making:
            self._kept.pop(key, None)
