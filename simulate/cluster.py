"""Where tasks run: the seam between a campaign and Dask, and the only place that imports Dask.

A cluster takes a key, a function and its arguments, and later gives an `Outcome` for that key. Every outcome says of
which kind it is, because a raised error, a killed worker, a time-out and a lack of memory call for different answers.

`inline` runs tasks in this process, one after the other, and pickles every task and result on the way: what works there
will travel. `local` starts single-threaded worker processes on this machine. An address (`tcp://…`, `tls://…`) joins
a scheduler that runs already.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import re
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from exitwave.ingest.errors import InterruptedRunError, UsageError
from exitwave.simulate.worker import prepare_worker

__all__ = ["Cluster", "Outcome", "make_cluster"]

Kind = Literal["ok", "error", "memory", "timeout", "killed", "lost", "disk-full"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a task ended. `result` where it is ok; otherwise `error`, one line for people, and `host` where known.

    `killed`: the worker that ran it is gone, perhaps through the task's own fault. `lost`: the scheduler or the
    connection to it is gone, and the task is not to blame.
    """

    key: str
    kind: Kind
    result: Any = None
    error: str = ""
    host: str = ""


class Cluster(Protocol):
    """`submit` never blocks; `wait` gives what has ended, at least one outcome unless `timeout_s` passes first.

    `drop_waiting` forgets the tasks that no worker has begun and returns their keys; `restart` forgets all of them and
    starts the workers anew. Where a scheduler is lost, `wait` gives every task back as `lost`; the cluster then finds
    the scheduler again within `wait` or `submit` (and prepares its workers anew), or raises InterruptedRunError.
    """

    name: str
    n_workers: int
    dashboard_link: str | None

    def start(self, simulator: str) -> None: ...

    def submit(self, key: str, function: Callable[..., Any], *args: Any) -> None: ...

    def wait(self, timeout_s: float) -> list[Outcome]: ...

    def drop_waiting(self) -> list[str]: ...

    def restart(self) -> None: ...

    def close(self) -> None: ...


_ADDRESS = re.compile(r"(tcp|tls)://[^\s/]+:[0-9]{1,5}")


def is_cluster_name(name: str) -> bool:
    """Whether `make_cluster` knows the name; whether anybody answers at an address is not asked."""
    return name in ("inline", "local") or _ADDRESS.fullmatch(name) is not None


def make_cluster(name: str, *, workers: int | None = None) -> Cluster:
    """A cluster by the name given on the command line; not yet started. `workers` defaults to one a core."""
    if workers is not None and workers < 1:
        raise UsageError(f"--workers {workers}: at least 1 expected")
    if name == "inline":
        if workers not in (None, 1):
            raise UsageError(f"--cluster inline has one worker, this process; came --workers {workers}")
        return InlineCluster()
    if name == "local":
        return LocalCluster(workers or _usable_cores())
    if _ADDRESS.fullmatch(name):
        return ExistingCluster(name)
    raise UsageError(f"--cluster {name}: inline, local, or the address of a scheduler (tcp://HOST:PORT) expected")


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def classify(error: BaseException) -> Kind:
    """What kind of failure an exception is."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, MemoryError):
            return "memory"
        if isinstance(chain, InterruptedRunError):
            return "disk-full"
        if isinstance(chain, OSError) and chain.errno in (errno.ENOSPC, errno.EDQUOT):
            return "disk-full"
        if type(chain).__name__ == "KilledWorker":
            return "killed"
        if type(chain).__name__ in ("CancelledError", "FutureCancelledError", "CommClosedError"):
            return "lost"
        chain = chain.__cause__ or chain.__context__
    return "error"


def describe(error: BaseException) -> str:
    """One line: the type's name, unless the message stands for itself, and the message."""
    text = " ".join(str(error).split()) or "no message"
    return text if hasattr(error, "exit_code") else f"{type(error).__name__}: {text}"


class InlineCluster:
    """Tasks run here, when `wait` is called. Task, result and error are pickled as a wire would."""

    name = "inline"
    n_workers = 1
    dashboard_link: str | None = None

    def __init__(self) -> None:
        self._queue: deque[tuple[str, bytes]] = deque()

    def start(self, simulator: str) -> None:
        prepare_worker(simulator)

    def submit(self, key: str, function: Callable[..., Any], *args: Any) -> None:
        self._queue.append((key, pickle.dumps((function, args))))

    def wait(self, timeout_s: float) -> list[Outcome]:
        if not self._queue:
            return []
        key, message = self._queue.popleft()
        function, args = pickle.loads(message)
        try:
            result = pickle.loads(pickle.dumps(function(*args)))
        except Exception as error:
            return [Outcome(key=key, kind=classify(error), error=describe(error))]
        return [Outcome(key=key, kind="ok", result=result)]

    def drop_waiting(self) -> list[str]:
        keys = [key for key, _ in self._queue]
        self._queue.clear()
        return keys

    def restart(self) -> None:
        self._queue.clear()

    def close(self) -> None:
        self._queue.clear()


class _DaskCluster:
    """What every cluster with a Dask scheduler has in common: a client and the futures that it waits for."""

    name = ""
    n_workers = 0
    dashboard_link: str | None = None

    def __init__(self) -> None:
        self._client: Any = None
        self._futures: dict[str, Any] = {}

    def _register(self, simulator: str, *, own_group: bool = False) -> None:
        """Each worker, also one started later in the place of a dead one, prepares itself before its first task."""
        from distributed import WorkerPlugin

        class PrepareWorker(WorkerPlugin):
            name = "exitwave-prepare"

            def setup(self, worker: Any) -> None:
                if own_group:  # Ctrl-C in a terminal goes to a whole process group; a worker is to finish its task
                    with contextlib.suppress(OSError):
                        os.setpgid(0, 0)
                prepare_worker(simulator)

        self._client.register_plugin(PrepareWorker())

    def submit(self, key: str, function: Callable[..., Any], *args: Any) -> None:
        # A key that was used before would give the earlier result: each submission has its own. All share one prefix,
        # by which the scheduler sees that they are of one kind and keeps them queued instead of handing them all out
        # at once: a dying worker then takes few of them along.
        dask_key = ("exitwave-task", f"{key}-{time.time_ns()}")
        self._futures[key] = self._client.submit(function, *args, key=dask_key, pure=False, retries=0)

    def wait(self, timeout_s: float) -> list[Outcome]:
        from distributed import TimeoutError as DaskTimeoutError
        from distributed import wait

        if not self._futures:
            return []
        with contextlib.suppress(DaskTimeoutError, TimeoutError):
            wait(list(self._futures.values()), timeout=timeout_s, return_when="FIRST_COMPLETED")
        ended = [key for key, future in self._futures.items() if future.done()]
        return [self._outcome(key) for key in ended]

    def _outcome(self, key: str) -> Outcome:
        future = self._futures.pop(key)
        try:
            if future.cancelled():
                return Outcome(key=key, kind="lost", error="the scheduler lost the task")
            error = future.exception()
            if error is None:
                return Outcome(key=key, kind="ok", result=future.result())
            return Outcome(key=key, kind=classify(error), error=describe(error))
        except Exception as lost:  # the connection to the scheduler broke between the two calls
            return Outcome(key=key, kind=classify(lost), error=describe(lost))
        finally:
            future.release()

    def drop_waiting(self) -> list[str]:
        begun = {key for keys in self._client.processing().values() for key in keys}
        waiting = [key for key, future in self._futures.items() if future.key not in begun and not future.done()]
        futures = [self._futures.pop(key) for key in waiting]
        if futures:
            self._client.cancel(futures, force=True)
        return waiting

    def restart(self) -> None:
        self._futures.clear()
        self._client.restart(timeout=60)

    def close(self) -> None:
        self._futures.clear()
        if self._client is not None:
            self._client.close(timeout=5)
            self._client = None


class LocalCluster(_DaskCluster):
    """Worker processes on this machine, one thread each. They end when this process ends, however it ends."""

    name = "local"

    def __init__(self, workers: int) -> None:
        super().__init__()
        self.n_workers = workers
        self._cluster: Any = None

    def start(self, simulator: str) -> None:
        import dask
        import distributed

        # A task whose worker dies is reported at once: the campaign counts attempts and keeps them over a restart.
        dask.config.set({"distributed.scheduler.allowed-failures": 0, "distributed.scheduler.worker-saturation": 1.0})
        # One folder for all: Dask sweeps from it what killed processes left.
        scratch = Path(tempfile.gettempdir()) / f"exitwave-dask-{os.getuid()}"
        scratch.mkdir(mode=0o700, exist_ok=True)
        try:
            self._cluster = distributed.LocalCluster(
                n_workers=self.n_workers,
                threads_per_worker=1,
                processes=True,
                host="127.0.0.1",
                dashboard_address="127.0.0.1:0",
                local_directory=str(scratch),
                silence_logs="CRITICAL",
            )
        except RuntimeError as error:  # a worker process that died before its first word
            raise InterruptedRunError(
                f"--cluster local: {self.n_workers} worker(s) could not be started ({describe(error)}); a process was "
                "killed, or memory is short (fewer --workers need less)"
            ) from None
        self._client = distributed.Client(self._cluster)
        self.dashboard_link = self._cluster.dashboard_link
        self._register(simulator, own_group=True)

    def close(self) -> None:
        if self._cluster is None:
            return
        # Closing talks to every worker, and one that hangs must not hang the end of a campaign.
        closing = threading.Thread(target=self._close_quietly, daemon=True)
        closing.start()
        closing.join(timeout=30)
        self._cluster = None

    def _close_quietly(self) -> None:
        with contextlib.suppress(Exception):
            super().close()
        with contextlib.suppress(Exception):
            self._cluster.close(timeout=10)


class ExistingCluster(_DaskCluster):
    """A scheduler that others started. Its workers must have exitwave installed and see the data set's folder."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.name = address

    def start(self, simulator: str) -> None:
        import distributed

        try:
            self._client = distributed.Client(self.name, timeout=5)
        except (OSError, TimeoutError) as error:
            raise UsageError(f"--cluster {self.name}: no scheduler answers there ({describe(error)})") from None
        workers = self._client.scheduler_info(n_workers=-1)["workers"]
        if not workers:
            raise UsageError(f"--cluster {self.name}: the scheduler has no workers; start some with `dask worker`")
        self.n_workers = sum(worker["nthreads"] for worker in workers.values())
        self.dashboard_link = self._client.dashboard_link
        self._register(simulator)
