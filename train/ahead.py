"""Batches made ready by a thread while a step runs, so that the step does not wait for them.

Order and content are those of the source. An error in a batch is raised when that batch is asked for.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["Ahead"]

T = TypeVar("T")


class Ahead(Iterator[T], Generic[T]):
    """Iterates `source`, at most `depth` items before they are asked for. `close` ends the thread."""

    def __init__(self, source: Iterator[T], depth: int) -> None:
        self._source = source
        self._ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
        self._closing = threading.Event()
        self._ended: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="exitwave-batches", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                item: tuple[T | None, BaseException | None] = next(self._source), None
            except BaseException as error:
                item = None, error
            while not self._closing.is_set():
                try:
                    self._ready.put(item, timeout=0.2)
                    break
                except queue.Full:
                    continue
            if item[1] is not None:
                return

    def __next__(self) -> T:
        if self._ended is not None:
            raise StopIteration
        value, error = self._ready.get()
        if error is not None:
            self._ended = error
            raise error
        assert value is not None
        return value

    def close(self) -> None:
        """What is ready and was not asked for is dropped."""
        self._closing.set()
        self._thread.join(20)
