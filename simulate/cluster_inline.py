"""Tasks run in this process, one after the other, and travel as on a wire: what works here works on a cluster."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

from exitwave.simulate.cluster_outcome import Outcome, attempt, outcome_of
from exitwave.simulate.worker import prepare_worker

__all__ = ["InlineCluster"]


class InlineCluster:
    """Tasks run here, when `wait` is called. Task and result are pickled."""

    name = "inline"
    n_workers = 1
    queued = False
    dashboard_link: str | None = None

    def __init__(self) -> None:
        self._queue: deque[tuple[str, bytes]] = deque()

    @property
    def running(self) -> Mapping[str, float]:
        return {}

    def start(self, simulator: str) -> None:
        prepare_worker(simulator)

    def submit(self, key: str, function: Callable[..., Any], *args: Any) -> None:
        self._queue.append((key, pickle.dumps((function, args))))

    def wait(self, timeout_s: float) -> list[Outcome]:
        if not self._queue:
            return []
        key, message = self._queue.popleft()
        function, args = pickle.loads(message)
        return [outcome_of(key, pickle.loads(pickle.dumps(attempt(function, *args))))]

    def cancel(self, keys: Collection[str] | None = None, *, begun: bool = False) -> list[str]:
        gone = [key for key, _ in self._queue if keys is None or key in keys]
        self._queue = deque((key, message) for key, message in self._queue if key not in gone)
        return gone

    def publish(self, snapshot: Mapping[str, Any]) -> None:
        """Nobody to show it to."""

    def close(self, *, page: bool = False) -> None:
        self._queue.clear()
