"""What changes, told to whoever watches: one reader for each run that is watched, however many watch it.

A watcher gets the run's facts at once and then whenever they differ. The reader looks once a second in a thread of its
own and ends with its last watcher, so that fifty browsers cost a campaign what one does. A watcher that does not take
what it is sent loses the older ones only: each message is the whole truth.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from exitwave.workflows.session import json_text

__all__ = ["Live", "TooManyError"]

_LOOK_S = 1.0
_ALIVE_S = 15.0
_MOST_WATCHERS = 256


class TooManyError(Exception):
    """No more watchers are taken."""


class Live:
    """Server-sent events of runs."""

    def __init__(self, read: Callable[[str], dict[str, Any]]) -> None:
        """`read(id)` gives a run's facts; it is called in threads. LookupError where the run has gone."""
        self._read = read
        self._watchers: dict[str, set[asyncio.Queue[str | None]]] = {}
        self._latest: dict[str, str] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def watchers(self) -> int:
        return sum(len(queues) for queues in self._watchers.values())

    async def watch(self, id: str) -> AsyncIterator[str]:
        """The text of a `text/event-stream`, until the client leaves or the run is deleted."""
        if self.watchers >= _MOST_WATCHERS:
            raise TooManyError
        queue: asyncio.Queue[str | None] = asyncio.Queue(maxsize=2)
        self._watchers.setdefault(id, set()).add(queue)
        if id in self._latest:
            queue.put_nowait(self._latest[id])
        if id not in self._tasks:
            self._tasks[id] = asyncio.create_task(self._look(id))
        try:
            while True:
                try:
                    data = await asyncio.wait_for(queue.get(), _ALIVE_S)
                except TimeoutError:
                    yield ": still here\n\n"
                    continue
                if data is None:
                    yield "event: gone\ndata: {}\n\n"
                    return
                yield f"event: run\ndata: {data}\n\n"
        finally:
            self._watchers[id].discard(queue)
            if not self._watchers[id]:
                del self._watchers[id]

    async def _look(self, id: str) -> None:
        try:
            while id in self._watchers:
                try:
                    facts = await asyncio.to_thread(self._read, id)
                except LookupError:
                    self._tell(id, None)
                    return
                data = json.dumps(json.loads(json_text(facts)), separators=(",", ":"))
                if data != self._latest.get(id):
                    self._latest[id] = data
                    self._tell(id, data)
                await asyncio.sleep(_LOOK_S)
        finally:
            self._tasks.pop(id, None)
            self._latest.pop(id, None)

    def _tell(self, id: str, data: str | None) -> None:
        for queue in self._watchers.get(id, ()):
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(data)
