"""What the engine did when: spans of computation, collectives and exposed waiting, in Chrome's trace format.

Open the file in `chrome://tracing` or Perfetto: one process a rank, one row a kind of span. Format: "Trace Event
Format" of the Chromium project, complete events (`"ph": "X"`), times in microseconds. Rows are

- `computation`: from `forward` to the first gradient, and the backward pass on this rank;
- `collective`: from the start of a collective to the moment its end was noticed;
- `exposed`: the wait at the end of backward, which communication did not hide.

Collectives are in flight at the same time; those that overlap get rows of their own (`collective 2`, …).
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Span", "Timeline", "to_chrome"]

Kind = Literal["computation", "collective", "exposed"]
_ROWS: tuple[Kind, ...] = ("computation", "collective", "exposed")
_KEPT = 100_000  # spans; the oldest are forgotten first


@dataclass(frozen=True, kw_only=True)
class Span:
    """One bar of the timeline; times are seconds since the epoch, so that ranks of one host line up."""

    kind: Kind
    name: str
    begin_s: float
    end_s: float
    step: int
    nbytes: int = 0


class Timeline:
    """Collects the spans of one rank. Times are given by `time.perf_counter`."""

    def __init__(self) -> None:
        self.spans: deque[Span] = deque(maxlen=_KEPT)
        self.step = 0
        self._epoch_s = time.time() - time.perf_counter()

    def add(self, kind: Kind, name: str, begin: float, end: float, nbytes: int = 0) -> None:
        """One span, from `begin` to `end` of the performance counter."""
        offset = self._epoch_s
        self.spans.append(
            Span(kind=kind, name=name, begin_s=offset + begin, end_s=offset + end, step=self.step, nbytes=nbytes)
        )

    def to_json(self) -> bytes:
        """For other ranks."""
        return json.dumps([[s.kind, s.name, s.begin_s, s.end_s, s.step, s.nbytes] for s in list(self.spans)]).encode()

    @staticmethod
    def from_json(text: bytes) -> list[Span]:
        """What `to_json` wrote."""
        return [
            Span(kind=kind, name=name, begin_s=begin, end_s=end, step=step, nbytes=nbytes)
            for kind, name, begin, end, step, nbytes in json.loads(text)
        ]


def to_chrome(ranks: Sequence[Iterable[Span]]) -> dict[str, Any]:
    """The trace of all ranks (`ranks[r]`: spans of rank r) as one JSON document, starting at zero."""
    rows = [list(spans) for spans in ranks]
    start_s = min((span.begin_s for spans in rows for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(rows):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        for number, kind in enumerate(_ROWS):
            for lane, own in enumerate(_lanes([span for span in spans if span.kind == kind])):
                row = 100 * number + lane
                name = kind if not lane else f"{kind} {lane + 1}"
                events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}})
                events.append(
                    {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": row, "args": {"sort_index": row}}
                )
                events += [_complete(span, rank, row, start_s) for span in own]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans that overlap in different lanes (one at least): in a row of the format they must not."""
    lanes: list[list[Span]] = [[]]
    for span in sorted(spans, key=lambda span: span.begin_s):
        free = next((lane for lane in lanes if not lane or lane[-1].end_s <= span.begin_s), None)
        if free is None:
            lanes.append(free := [])
        free.append(span)
    return lanes


def _complete(span: Span, rank: int, row: int, start_s: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": rank,
        "tid": row,
        "ts": 1e6 * (span.begin_s - start_s),
        "dur": 1e6 * (span.end_s - span.begin_s),
        "args": {"step": span.step, "bytes": span.nbytes},
    }
