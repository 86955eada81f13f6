"""Worker processes on this machine, one thread each. They end when this process ends, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import dask.config
import distributed

from exitwave.ingest.errors import InterruptedRunError, UsageError
from exitwave.simulate.cluster_dask import DaskCluster
from exitwave.simulate.cluster_outcome import describe
from exitwave.simulate.cluster_tls import security

__all__ = ["LocalCluster", "scheduler_habits", "scratch_folder"]


def scratch_folder() -> str:
    """One folder for all of a user: Dask sweeps from it what killed processes left."""
    scratch = Path(tempfile.gettempdir()) / f"exitwave-dask-{os.getuid()}"
    scratch.mkdir(mode=0o700, exist_ok=True)
    return str(scratch)


def scheduler_habits() -> None:
    """Of a scheduler in this process. A task whose worker dies is reported at once: the campaign counts attempts and
    keeps them over a restart. No worker is given a second task while it has one in hand. And who waits looks at itself
    twice a second, not fifty times: scheduler and nannies share the cores with the simulations."""
    dask.config.set(
        {
            "distributed.scheduler.allowed-failures": 0,
            "distributed.scheduler.worker-saturation": 1.0,
            "distributed.scheduler.work-stealing": False,  # nobody has a task to spare
            "distributed.admin.tick.interval": "500ms",
            "distributed.worker.profile.interval": "5s",
        }
    )


_GUARD = 'what starts a campaign must stand below `if __name__ == "__main__":`, or each worker starts one'


def _script() -> str:
    """The user's own script, which each new process imports before anything else; "" for a command or a prompt."""
    main = sys.modules.get("__main__")
    plain = getattr(main, "__spec__", None) is None
    path = str(getattr(main, "__file__", "") or "")
    return path if plain and path.endswith(".py") else ""


class LocalCluster(DaskCluster):
    """The scheduler lives in this process; scheduler, workers and dashboard listen on 127.0.0.1 alone."""

    name = "local"
    own_group = True

    def __init__(self, workers: int, *, tls: bool = False) -> None:
        super().__init__()
        self._asked = workers
        self._tls = tls
        self._cluster: Any = None

    @property
    def n_workers(self) -> int:
        return self._asked

    def _launch(self) -> None:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise UsageError(f"--cluster local: this is a worker process, which imports {_script()}: {_GUARD}")
        scheduler_habits()
        try:
            self._cluster = distributed.LocalCluster(
                n_workers=self._asked,
                threads_per_worker=1,
                processes=True,
                host="127.0.0.1",
                dashboard_address="127.0.0.1:0",
                local_directory=scratch_folder(),
                silence_logs="CRITICAL",
                security=security() if self._tls else None,
                protocol="tls" if self._tls else "tcp",
            )
        except RuntimeError as error:  # a worker process that died before its first word
            if _script():
                raise UsageError(
                    f"--cluster local: no worker process could import {_script()} ({describe(error)}). If it has no "
                    f"guard, that is why: {_GUARD}. Else a process was killed, or memory is short"
                ) from None
            raise InterruptedRunError(
                f"--cluster local: {self._asked} worker(s) could not be started ({describe(error)}); a process was "
                "killed, or memory is short (fewer --workers need less)"
            ) from None

    def _connect(self, timeout_s: float) -> Any:
        return distributed.Client(self._cluster, timeout=timeout_s, set_as_default=False)

    def close(self, *, page: bool = False) -> None:
        if self._cluster is None:
            return
        # Closing talks to every worker, and one that hangs must not hang the end of a campaign.
        closing = threading.Thread(target=self._close_quietly, args=(page,), daemon=True)
        closing.start()
        closing.join(timeout=30)
        if not page:
            self._cluster = None

    def _close_quietly(self, page: bool) -> None:
        cluster = self._cluster
        with contextlib.suppress(Exception):
            super().close(page=page)
        with contextlib.suppress(Exception):
            if page:
                cluster.scale(0)
                cluster.sync(_without_workers, cluster)
            else:
                cluster.close(timeout=10)


async def _without_workers(cluster: Any) -> None:
    """Until the workers that `scale` ends are gone, as far as that takes no more than ten seconds."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(cluster, timeout=10)
