"""Whether a trainer that works on the data set meanwhile holds the campaign back, and telling so.

The trainer says so in a file of the data set (`ingest.growing`), because all that it has room for has yet to be seen. A
campaign that is held back hands out no new task; what runs goes on, and its samples are committed. A trainer that died
holds nobody: its word is good for a minute.
"""

from __future__ import annotations

import time
from pathlib import Path

from exitwave.ingest.events import EventLog
from exitwave.ingest.growing import held_back

__all__ = ["Hold"]

_LOOK_EVERY_S = 0.1


class Hold:
    """Asked before tasks are handed out; emits `campaign_held` (why) and `campaign_released` (seconds)."""

    def __init__(self, dataset: Path, log: EventLog) -> None:
        self._dataset, self._log = dataset, log
        self._looked = self._since = 0.0
        self.why: str | None = None

    def asks(self) -> bool:
        """Whether to hand out nothing now."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_EVERY_S:
            self._looked = now
            why = held_back(self._dataset)
            if why is not None and self.why is None:
                self._since = now
                self._log.emit("campaign_held", why=why)
            elif why is None and self.why is not None:
                self._log.emit("campaign_released", seconds=round(now - self._since, 3))
            self.why = why
        return self.why is not None
