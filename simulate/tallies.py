"""Small bounded tallies that `counters` is made of: each call is cheap, none grows beyond its limit."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

__all__ = ["Curve", "Reasons", "Recent", "Slowest"]


@dataclass
class Recent:
    """A rate over the near past: the last `window_s` seconds, or the last `least` additions where these took longer.

    Additions within a 64th of the window are one point.
    """

    window_s: float = 60.0
    least: int = 9
    points: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=160))
    total: float = 0.0

    def start(self, now: float) -> None:
        """Forget everything; the rate is counted from `now`."""
        self.points.clear()
        self.total = 0.0
        self.points.append((now, 0.0))

    def add(self, amount: float, now: float) -> None:
        self.total += amount
        # The first point stands for the start, and is not moved.
        if len(self.points) > 2 and now - self.points[-2][0] < self.window_s / 64:
            self.points[-1] = (now, self.total)
        else:
            self.points.append((now, self.total))
        while len(self.points) > self.least and self.points[1][0] < now - self.window_s:
            self.points.popleft()

    def per_second(self, now: float) -> float:
        """Units a second; with time that passes and nothing added, it falls."""
        if not self.points or self.total <= 0:
            return 0.0
        (first, before), (last, total) = self.points[0], self.points[-1]
        # Between two additions nothing is amiss; when the next is late by a third of the window, it is.
        until = max(last, now - self.window_s / 3)
        return (total - before) / (until - first) if until > first else 0.0


@dataclass
class Curve:
    """A curve of any length in at most `limit` points: when it is full, every second point goes."""

    limit: int = 120
    points: list[tuple[float, float]] = field(default_factory=list)
    stride: int = 1
    _seen: int = 0

    def add(self, x: float, y: float) -> None:
        keep = self._seen % self.stride == 0
        self._seen += 1
        if not keep:
            return
        if len(self.points) >= self.limit:
            self.points = self.points[::2]
            self.stride *= 2
        self.points.append((x, y))


@dataclass
class Slowest:
    """The `limit` greatest values, one for each name."""

    limit: int = 10
    _heap: list[tuple[float, str]] = field(default_factory=list)
    _values: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        known = self._values.get(name)
        if known is not None:
            if value > known:
                self._values[name] = value
                self._heap = sorted((v, n) for n, v in self._values.items())
            return
        if len(self._heap) < self.limit:
            heapq.heappush(self._heap, (value, name))
        elif value > self._heap[0][0]:
            del self._values[heapq.heapreplace(self._heap, (value, name))[1]]
        else:
            return
        self._values[name] = value

    def rows(self) -> list[tuple[str, float]]:
        """Name and value, the greatest first."""
        return sorted(self._values.items(), key=lambda row: (-row[1], row[0]))


@dataclass
class Reasons:
    """How often each of at most `limit` reasons was given; those that come later are counted together."""

    limit: int = 64
    counts: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, state: str, why: str) -> None:
        key = (state, why[:200])
        if key not in self.counts and len(self.counts) >= self.limit:
            key = ("", "other reasons")
        self.counts[key] = self.counts.get(key, 0) + 1

    def rows(self, most: int) -> list[tuple[str, str, int]]:
        """State, reason and count, the most frequent first."""
        ordered = sorted(self.counts.items(), key=lambda row: (-row[1], row[0]))
        return [(state, why, count) for (state, why), count in ordered[:most]]
