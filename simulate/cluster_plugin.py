"""What every Dask worker does before its first task, also one that joins later: prepare itself, or leave.

1. It compares its versions with the controller's (`cluster_versions`). Where they differ it takes no task, says so in
   the scheduler's events under `exitwave-refused`, and leaves.
2. It limits itself to one thread and starts the guarded process in which its tasks will run (`worker_guard`).
3. It looks at itself twice a second and samples its own stacks every five, instead of fifty and a hundred times a
   second, as Dask does: that takes 2.4 % of a core from the simulation, whose stacks are in another process anyway.
4. Where the batch system will end its job at a known time (`exitwave.end-time` in Dask's configuration, seconds since
   1970), it takes no task that would probably not end by then, and leaves when the one in hand is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any

import dask.config
from distributed import Status, WorkerPlugin

from exitwave.simulate.cluster_versions import differences, own_versions
from exitwave.simulate.threads import limit_threads
from exitwave.simulate.worker import start_guard

__all__ = ["REFUSED_TOPIC", "PrepareWorker"]

REFUSED_TOPIC = "exitwave-refused"
_CALMER_MS = {"tick": 500.0, "profile": 5000.0}


class PrepareWorker(WorkerPlugin):
    """`versions`: those of the controller. `own_group`: leave the terminal's process group, whose Ctrl-C is not ours.

    `margin_s`: how long before its job's end a worker takes no more tasks.
    """

    def __init__(
        self, simulator: str, versions: Mapping[str, str], *, own_group: bool = False, margin_s: float = 0.0
    ) -> None:
        self.name = f"exitwave-{simulator}"
        self.simulator = simulator
        self.versions = dict(versions)
        self.own_group = own_group
        self.margin_s = margin_s
        self._before: dict[str, float] = {}

    def setup(self, worker: Any) -> None:
        if wrong := differences(self.versions, own_versions()):
            why = f"worker {worker.address} is of other versions than the controller (here): {'; '.join(wrong)}"
            worker.log_event(REFUSED_TOPIC, {"worker": worker.address, "why": why})
            worker.loop.add_callback(_leave, worker, why)
            worker.status = Status.paused
            return
        if self.own_group:
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
        self._slow_down(worker)
        limit_threads()
        start_guard(self.simulator, memory_bytes=worker.memory_manager.memory_limit or 0)
        end = dask.config.get("exitwave.end-time", None)
        if end is not None:
            worker.loop.call_later(max(0.0, float(end) - self.margin_s - time.time()), _leave, worker, "its job ends")

    def _slow_down(self, worker: Any) -> None:
        self._before = {}
        for name, interval_ms in _CALMER_MS.items():
            callback = worker.periodic_callbacks.get(name)
            if callback is not None:
                self._before[name] = callback.callback_time
                callback.callback_time = max(interval_ms, callback.callback_time)

    def teardown(self, worker: Any) -> None:
        """It serves others, too: as it was."""
        for name, before in self._before.items():
            worker.periodic_callbacks[name].callback_time = before


async def _leave(worker: Any, why: str) -> None:
    """Take no more tasks, end the one in hand, close with the nanny."""
    worker.status = Status.paused
    while worker.state.executing_count:
        await asyncio.sleep(0.2)
    await worker.close_gracefully(restart=False, reason=why)
