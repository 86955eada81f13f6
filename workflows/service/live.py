"""What changes, told to whoever watches: one reader for each run that is watched, however many watch it.

A watcher gets the run's facts at once and then whenever they differ. The reader looks once a second in a thread of its
own and ends with its last watcher, so that fifty browsers cost a campaign what one does. A watcher that does not take
what it is sent loses the older ones only: each message is the whole truth.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

__all__ = ["Live", "TooManyError"]

_LOOK_S = 1.0
_ALIVE_S = 15.0
_MOST_WATCHERS = 256


class TooManyError(Exception):
    """No more watchers are taken."""


class Live:
    """Server-sent events of runs."""

    def __init__(self, read: Callable[[str], str]) -> None:
        """`read(id)` gives a run's facts as JSON on one line, or raises LookupError; it is called in threads."""
        self._read = read
        self._watchers: dict[str, set[asyncio.Queue[bytes | None]]] = {}
        self._latest: dict[str, bytes] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def watchers(self) -> int:
        return sum(len(queues) for queues in self._watchers.values())

    async def watch(self, id: str) -> AsyncIterator[bytes]:
        """The text of a `text/event-stream`, until the client leaves or the run is deleted."""
        if self.watchers >= _MOST_WATCHERS:
            raise TooManyError
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=2)
        self._watchers.setdefault(id, set()).add(queue)
        if id in self._latest:
            queue.put_nowait(self._latest[id])
        if id not in self._tasks:
            self._tasks[id] = asyncio.create_task(self._look(id))
        try:
            while True:
                try:
                    async with asyncio.timeout(_ALIVE_S):
                        event = await queue.get()
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                if event is None:
                    yield b"event: gone\ndata: {}\n\n"
                    return
                yield event
        finally:
            self._watchers[id].discard(queue)
            if not self._watchers[id]:
                del self._watchers[id]

    async def _look(self, id: str) -> None:
        try:
            while id in self._watchers:
                try:
                    event = f"event: run\ndata: {await asyncio.to_thread(self._read, id)}\n\n".encode()
                except LookupError:
                    self._tell(id, None)
                    return
                except Exception:  # a disk that hangs up, say: the next look may do better
                    logging.getLogger("exitwave.service").exception("looking at %s failed; it is tried again", id)
                else:
                    if event != self._latest.get(id):
                        self._latest[id] = event
                        self._tell(id, event)
                await asyncio.sleep(_LOOK_S)
        finally:
            self._tasks.pop(id, None)
            self._latest.pop(id, None)

    def _tell(self, id: str, event: bytes | None) -> None:
        for queue in self._watchers.get(id, ()):
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(event)
