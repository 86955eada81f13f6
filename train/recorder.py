"""Events of a training, written and shown behind its back: a step does not wait for the disk.

Each line is synced as `EventLog` does it, in order, by one thread. `flush` waits until all are on the disk; a
checkpoint does so first, so that no step that a run will not take again is missing from the log.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from exitwave.ingest.events import EventLog

__all__ = ["Recorder"]


class Recorder:
    """`emit` returns at once; what writing failed with is raised by the next `emit` or `flush`."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._waiting: queue.Queue[tuple[str, dict[str, Any]] | None] = queue.Queue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="exitwave-events", daemon=True)
        self._thread.start()

    def listen(self, listener: Callable[[dict[str, Any]], None]) -> None:
        """`listener` is called with each event, in the thread that writes."""
        self._log.listeners.append(listener)

    def emit(self, kind: str, **fields: Any) -> None:
        self._raise()
        self._waiting.put((kind, fields))

    def flush(self) -> None:
        """Returns when everything emitted so far is written and shown."""
        self._waiting.join()
        self._raise()

    def close(self) -> None:
        """Writes what waits, as far as that is possible; raises nothing, so that it can stand in a `finally`."""
        self._waiting.put(None)
        self._thread.join(60)

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self) -> None:
        while True:
            item = self._waiting.get()
            try:
                if item is None:
                    return
                self._log.emit(item[0], **item[1])
            except Exception as error:
                self._error = error
            finally:
                self._waiting.task_done()
