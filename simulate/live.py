"""The live picture of a campaign: events are folded as they happen, and about once a second everybody is shown.

    events -> Counters -> one snapshot -> DATASET/status.json        (`exitwave status`, the service)
                                       -> the scheduler's page       (with pictures of the newest sample)

A thread of its own does it, so that neither a slow disk nor a scheduler that hangs holds up the campaign. It is a
picture and no more: whatever goes wrong here is left out, and the campaign goes on. The truth is in the manifest.

A snapshot carries the epoch of its controller's lease. A controller that slept while another took over shows nothing
more; what it had been about to write when it fell asleep, no reader believes.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from exitwave.ingest.errors import UsageError
from exitwave.ingest.events import read_events, read_events_from
from exitwave.ingest.files import part_path, read_plain_text
from exitwave.ingest.manifest import MANIFEST_NAME, read_records_from
from exitwave.ingest.records import ShardRecord, Tombstone
from exitwave.simulate.counters import SNAPSHOT_VERSION, Counters, fold, recalled
from exitwave.simulate.lease import told_epoch

if TYPE_CHECKING:
    from exitwave.simulate.pictures import Picture

__all__ = ["STATUS_NAME", "LiveStatus", "read_live", "read_on"]

STATUS_NAME = "status.json"
_EVENTS_NAME = "events.jsonl"
_EVERY_S = 1.0
_PICTURES_EVERY_S = 5.0
_STALE_S = 15.0
_MUCH_BYTES = 32 << 20  # since the last snapshot: then everything is read
_PATIENCE_S = 2.0

Publish = Callable[[Mapping[str, Any]], None]


class LiveStatus:
    """A context manager. Give `feed` every event; inside, snapshots are written and published.

    `epoch` is that of the controller's lease: a reader tells by it whether the file is this controller's. That of a
    pipeline outlives its campaign, which is attached to it, and shows staging and training, too.
    """

    def __init__(
        self, dataset: Path, *, epoch: int = 0, publish: Publish | None = None, every_s: float = _EVERY_S
    ) -> None:
        self._dataset, self._epoch, self._publish, self._every_s = dataset, epoch, publish, every_s
        self._counters = Counters()
        self._upto: Mapping[str, int] | None = None  # bytes of log and manifest that the counters know
        self._lock = threading.Lock()
        self._wake, self._shown, self._ended = threading.Event(), threading.Event(), False
        self._thread = threading.Thread(target=self._work, name="exitwave-status", daemon=True)
        self._close: Callable[[], None] | None = None
        self._pictures: list[Picture] = []
        self._pictured: tuple[float, str] = (0.0, "")

    def attach(self, *, epoch: int, publish: Publish | None, close: Callable[[], None] | None = None) -> None:
        """From now on it shows the campaign of the controller with this `epoch`, also by `publish`, until `close`,
        which is called at the end or when the next campaign is attached."""
        self._close_page()
        with self._lock:
            self._epoch, self._publish, self._close, self._upto = epoch, publish, close, None
        self._take_over()

    def remember(self) -> None:
        """Show the campaign that the data set's events tell of, where it is over and none was attached."""
        with self._lock:
            if self._epoch == 0:
                self._counters = fold(read_events(self._dataset / _EVENTS_NAME))
                self._epoch = told_epoch(self._dataset)

    def _close_page(self) -> None:
        close, self._close, self._publish = self._close, None, None
        if close is not None:
            close()

    def feed(self, event: Mapping[str, Any]) -> None:
        """Take in one event. The end of a run is shown before this returns, or two seconds were not enough for it."""
        self._feed([event], None)

    def follow(self, events: Sequence[Mapping[str, Any]], size: int) -> None:
        """As `feed`, what the campaign's log took at once. `size`: of the log, with it. The manifest holds nothing at
        this moment that the log does not tell of, so that whoever reads the snapshot can go on from these two places.
        """
        self._feed(events, {"events": size, "manifest": _size(self._dataset / MANIFEST_NAME)})

    def _feed(self, events: Sequence[Mapping[str, Any]], upto: Mapping[str, int] | None) -> None:
        with self._lock:
            for event in events:
                self._counters.feed(event)
            self._upto = upto or self._upto
        ended = any(event.get("kind") in ("campaign_finished", "campaign_interrupted") for event in events)
        if ended and self._thread.is_alive():
            self._shown.clear()
            self._wake.set()
            self._shown.wait(_PATIENCE_S)

    def snapshot(self) -> dict[str, Any]:
        """What is shown now: that of `Counters`, with the data set, the epoch and the size of the manifest."""
        with self._lock:
            shown = self._counters.snapshot(time.time())
            shown["upto"] = self._upto
        return {
            **shown,
            "dataset": str(self._dataset.absolute()),
            "epoch": self._epoch,
            "manifest_bytes": _size(self._dataset / MANIFEST_NAME),
        }

    def show(self) -> None:
        """Write and publish the present snapshot; nothing before a campaign began, or after another took over."""
        shown = self.snapshot()
        if shown["activity"] == "not started" or told_epoch(self._dataset) > self._epoch:
            return
        with contextlib.suppress(OSError):
            _replace(self._dataset / STATUS_NAME, _text(shown))
        if self._publish is not None:
            self._look_at_newest(shown["newest"])
            with contextlib.suppress(Exception):  # a cluster that is gone shows nothing
                self._publish({**shown, "pictures": [picture.to_json() for picture in self._pictures]})

    def _look_at_newest(self, newest: Mapping[str, Any] | None) -> None:
        """New pictures, seldom: reading them takes time that others need."""
        if newest is None or not newest["shard_id"]:
            return
        since, shard_id = self._pictured
        if newest["shard_id"] == shard_id or time.monotonic() - since < _PICTURES_EVERY_S:
            return
        self._pictured = (time.monotonic(), newest["shard_id"])
        with contextlib.suppress(Exception):  # the shard may be gone, or its fields no pictures
            from exitwave.simulate.pictures import newest_pictures  # with HDF5, which readers of the status do not need

            self._pictures = newest_pictures(self._dataset, newest["shard_id"])

    def _work(self) -> None:
        while not self._ended:
            woken = self._wake.wait(self._every_s)
            self._wake.clear()
            self.show()
            if woken:
                self._shown.set()

    def _take_over(self) -> None:
        """What the controller before this one showed at its end stays true until this one has something to show."""
        shown = _ended_snapshot(self._dataset, self._epoch - 1)
        if shown is not None:
            with contextlib.suppress(OSError):
                _replace(self._dataset / STATUS_NAME, _text({**shown, "epoch": self._epoch}))

    def __enter__(self) -> LiveStatus:
        if self._epoch:
            self._take_over()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._close is None:
            self._publish = None  # the cluster is closed by now
        self._ended = True
        self._wake.set()
        self._thread.join(timeout=_PATIENCE_S)
        self._close_page()


def read_live(dataset: Path, holder: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The last snapshot of a data set, where it still is what reading everything would give; else None.

    `holder`: who has the lease now. While a controller is at work its snapshot counts as long as it comes; afterwards
    that of the last one counts, where its run ended in order and the manifest has not changed since.
    """
    if holder is None:
        return _ended_snapshot(dataset, told_epoch(dataset))
    shown = _read(dataset)
    try:
        if shown is None or shown["epoch"] != holder.get("epoch") or shown["activity"] != "running":
            return None
        return shown if time.time() - shown["updated"] < _STALE_S else None
    except (KeyError, TypeError):
        return None


def read_on(dataset: Path) -> Counters | None:
    """What the last snapshot of a data set showed, and on from it by what log and manifest tell since; None where that
    need not be what reading everything would give. So it costs little to ask for a campaign that was killed.
    """
    shown = _read(dataset)
    try:
        if shown is None or shown["activity"] != "running" or shown["upto"] is None:
            return None
        events, manifest = int(shown["upto"]["events"]), int(shown["upto"]["manifest"])
        more = _size(dataset / _EVENTS_NAME) - events, _size(dataset / MANIFEST_NAME) - manifest
        if min(more) < 0 or max(more) > _MUCH_BYTES:
            return None
        later = read_events_from(dataset / _EVENTS_NAME, events)
        records = read_records_from(dataset, manifest)
        counters = recalled(shown)
    except (KeyError, TypeError, ValueError, OSError, UsageError):
        return None
    if any(event["kind"] in ("campaign_started", "campaign_extended") for event in later):
        return None
    epochs = [int(shown["epoch"]), *(record.epoch for record in records)]
    if epochs != sorted(epochs) or any(isinstance(record, Tombstone) for record in records):
        return None
    told = [str(event.get("shard_id")) for event in later if event["kind"] == "shard_committed"]
    made = {record.shard_id: record for record in records if isinstance(record, ShardRecord)}
    if len(set(told)) < len(told) or not made.keys() >= set(told) or len(made) < len(records):
        return None
    for event in later:
        counters.feed(event)
    for shard_id in made.keys() - set(told):  # killed before it could say so
        shard = made[shard_id]
        committed = {"task": f"task-{shard.task:06d}", "shard_id": shard_id, "n": shard.n, "nbytes": shard.nbytes}
        counters.feed({"kind": "shard_committed", "t": counters.last, "adopted": True, **committed})
    return counters


def _ended_snapshot(dataset: Path, epoch: int) -> dict[str, Any] | None:
    """The snapshot with which a controller ended in order, where no later one than `epoch` had the lease."""
    shown = _read(dataset)
    try:
        if shown is None or shown["epoch"] < epoch or shown["activity"] not in ("finished", "interrupted"):
            return None
        return shown if shown["manifest_bytes"] == _size(dataset / MANIFEST_NAME) else None
    except (KeyError, TypeError):
        return None


def _read(dataset: Path) -> dict[str, Any] | None:
    try:
        shown = json.loads(read_plain_text(dataset / STATUS_NAME))
    except (OSError, ValueError, RecursionError):
        return None
    return shown if isinstance(shown, dict) and shown.get("version") == SNAPSHOT_VERSION else None


def _text(shown: Mapping[str, Any]) -> str:
    return json.dumps(shown, ensure_ascii=False, separators=(",", ":"))


def _replace(path: Path, text: str) -> None:
    """As `write_atomic`, but that a power cut may take it: the next one comes in a second."""
    part = part_path(path.parent, path.name)
    try:
        part.write_text(text)
        part.rename(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
