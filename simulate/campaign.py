"""Runs a plan on a cluster until the manifest holds all of it, through failures, interruptions and restarts.

1. This process takes the data set's lease; nobody else commits while it lives (`lease`).
2. The manifest is the queue: what it lacks of the plan is to be done. What an earlier controller left half-written is
   swept; what it left published but uncommitted is adopted by the worker that meets it.
3. What counts against each task is replayed from the events (`attempts`): failures outlive the controller.
4. The loop (`campaign_loop`) hands a bounded window of tasks to the cluster and commits what comes back.
5. What happens is told as events, and shown as it happens (`live`).
6. A trainer that works on the data set meanwhile may hold the campaign back (`campaign_hold`).
7. A request to stop ends the refilling; what runs is awaited for a bounded time and committed. A full disk stops too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import UsageError
from exitwave.ingest.events import EventLog
from exitwave.ingest.files import sweep_parts
from exitwave.ingest.manifest import MANIFEST_NAME, ManifestWriter
from exitwave.simulate.attempts import Patience
from exitwave.simulate.campaign_files import (
    EVENTS_NAME,
    disk_shortage,
    fit_to,
    lay_out,
    make_folder,
    take_back,
)
from exitwave.simulate.campaign_loop import CampaignLoop, CampaignResult, Listener
from exitwave.simulate.cluster import Cluster
from exitwave.simulate.lease import Lease
from exitwave.simulate.live import LiveStatus
from exitwave.simulate.work import CampaignPlan, CampaignTask

__all__ = ["CampaignResult", "Patience", "disk_shortage", "run_campaign"]


def run_campaign(
    plan: CampaignPlan,
    dataset: Path,
    cluster: Cluster,
    *,
    listeners: Sequence[Listener] = (),
    stop: threading.Event | None = None,
    patience: Patience | None = None,
    live: LiveStatus | None = None,
    order: Callable[[CampaignTask], Any] | None = None,
) -> CampaignResult:
    """Simulate what `dataset` lacks of `plan`. `cluster` is started and closed here; where the caller's `live` shows
    more than the campaign, the scheduler with its page remains until `live` ends. `order`: what tasks are sorted by
    before they are handed out; by default they come as planned.

    Raises UsageError (another campaign's data set, another controller at work, a file in the way), InterruptedRunError
    (`stop` was set, or the disk is full; the same call resumes). Failed tasks do not raise: see the result.
    """
    make_folder(dataset)
    plan = fit_to(plan, dataset)
    with Lease(dataset) as lease:
        fresh = not (dataset / MANIFEST_NAME).exists()
        lay_out(plan, dataset)
        log = EventLog(dataset / EVENTS_NAME)
        kept = live is not None
        shown = live or LiveStatus(dataset)
        shown.attach(epoch=lease.epoch, publish=cluster.publish, close=cluster.close if kept else None)
        log.listeners.extend(listeners)
        log.followers.append(shown.follow)
        with ManifestWriter(dataset, epoch=lease.epoch) as manifest, contextlib.nullcontext() if kept else shown:
            loop = CampaignLoop(
                plan, dataset, cluster, log, manifest, stop or threading.Event(), patience or Patience(), lease,
                keep_page=kept, order=order,
            )  # fmt: skip
            try:
                return loop.execute()
            except UsageError:  # no cluster there: nothing began
                if fresh and not loop.done:
                    take_back(dataset)
                raise
            finally:
                sweep_parts(dataset)
                with contextlib.suppress(OSError):  # not empty: a writer on another host may live
                    (dataset / "shards" / ".part").rmdir()
