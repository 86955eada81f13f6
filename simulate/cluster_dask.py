"""What every cluster with a Dask scheduler has in common: a client, the tasks it waits for, and coming back.

1. A task stays in `_work` until its outcome was given. It is with the scheduler when it also has a future.
2. The scheduler is lost when the client's connection broke, or when a scheduler of another id answers. Then all tasks
   that were with it end as `lost`, the client is thrown away, and a new one is tried about once a second; what is
   submitted meanwhile waits in `_work`. After `patience_s` the campaign is interrupted, to be resumed; likewise when
   the scheduler was lost `losses_in_a_row` times without one task ending in between.
3. A killed worker is told from one that its nanny ended for its memory by the nanny's event at the scheduler, and from
   one that left (`lost_worker`) by who it was.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import dask
import distributed

from exitwave.ingest.errors import InterruptedRunError, UsageError
from exitwave.simulate.cluster_outcome import Outcome, attempt, classify, describe, outcome_of
from exitwave.simulate.cluster_plugin import REFUSED_TOPIC, PrepareWorker
from exitwave.simulate.cluster_versions import GATED_PACKAGES, differences, own_versions, short_python
from exitwave.simulate.dashboard import add_page, publish

__all__ = ["DaskCluster"]

_MEMORY_TOPIC = "worker-restart-memory"  # distributed's nannies write there before they end a worker
_TRY_S = 2.0  # one attempt to connect again
_LOOK_S = 1.0  # how often the scheduler is asked who is there and what runs
_RESTART_S = 20.0
# Each connection keeps its last messages for developers, tasks and all: by default 1,000 of them.
_FEW_LOGS = {"distributed.admin.low-level-log-length": 32}


class DaskCluster:
    """Subclasses say how to launch (`_launch`), to connect (`_connect`), and who has left (`lost_worker`)."""

    name = ""
    dashboard_link: str | None = None
    own_group = False
    patience_s = 600.0
    losses_in_a_row = 12
    margin_s = 60.0

    def __init__(self) -> None:
        self._client: Any = None
        self._plugin: Any = None
        self._scheduler_id = ""
        self._work: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
        self._futures: dict[str, Any] = {}
        self._released: list[Any] = []
        self._ended: list[Outcome] = []
        self._seen: dict[str, float] = {}
        self._workers = 0
        self._looked = 0.0
        self._lost_since: float | None = None
        self._losses_so_far = 0
        self._tried = 0.0

    # --- what a kind of cluster says of itself

    def _launch(self) -> None:
        """Start the scheduler and workers, where they are ours."""

    def _connect(self, timeout_s: float) -> Any:
        raise NotImplementedError

    def _connect_first(self) -> Any:
        return self._connect(30.0)

    def lost_worker(self, name: str) -> bool:
        """Whether a worker that died did so because its job had ended, not because of its task."""
        return False

    # --- the protocol

    @property
    def n_workers(self) -> int:
        return max(1, self._workers)

    @property
    def running(self) -> Mapping[str, float]:
        now = time.monotonic()
        return {key: now - since for key, since in self._seen.items()}

    @property
    def queued(self) -> bool:
        return False

    def start(self, simulator: str) -> None:
        with dask.config.set(_FEW_LOGS):
            self._launch()
            client = self._connect_first()
        try:
            self._refuse_other_versions(client)
            self._plugin = PrepareWorker(simulator, own_versions(), own_group=self.own_group, margin_s=self.margin_s)
            self._use(client)
        except BaseException:
            client.close(timeout=5)
            raise

    def submit(self, key: str, function: Callable[..., Any], *args: Any) -> None:
        self._work[key] = (function, args)  # handed over by the next `wait`, all that came until then at once

    def wait(self, timeout_s: float) -> list[Outcome]:
        if self._client is None:
            self._come_back(timeout_s)
        else:
            self._hand_over()
        if self._client is not None and self._futures and not self._ended:
            lost = (distributed.TimeoutError, TimeoutError, distributed.CancelledError)
            with self._client.as_current(), contextlib.suppress(*lost):
                distributed.wait(list(self._futures.values()), timeout=timeout_s, return_when="FIRST_COMPLETED")
        self._look()
        if self._client is not None:
            done = [key for key, future in self._futures.items() if future.done()]
            self._gather([key for key in done if self._futures[key].status == "finished"])
            for key in done:
                self._take(key)
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, keys: Collection[str] | None = None, *, begun: bool = False) -> list[str]:
        asked = [key for key in self._work if keys is None or key in keys]
        if self._client is None:
            return self._forget(asked)
        try:
            return self._cancel(asked, begun)
        except Exception as error:
            if not self._gone(error):
                raise
            return self._forget(asked)

    def publish(self, snapshot: Mapping[str, Any]) -> None:
        """To the page on the scheduler's dashboard; from any thread. A scheduler that is lost raises something."""
        if self._client is not None:
            publish(self._client, snapshot)

    def close(self, *, page: bool = False) -> None:
        self._forget(list(self._work))
        self._release()
        plugin, self._plugin = self._plugin, None
        if self._client is not None and plugin is not None:
            with contextlib.suppress(Exception):
                self._client.unregister_worker_plugin(plugin.name)
        if page:
            return
        client, self._client = self._client, None
        if client is not None:
            client.close(timeout=5)

    # --- the connection

    def _refuse_other_versions(self, client: Any) -> None:
        """UsageError naming both sides where a worker or the scheduler is of another make."""
        here = own_versions()
        told = client.get_versions(packages=list(GATED_PACKAGES))
        rows = {f"worker {address}": row for address, row in told["workers"].items()}
        for who, row in rows.items():
            there = {name: str(v or "none") for name, v in row["packages"].items()}
            there["python"] = short_python(there.get("python", "none"))
            if wrong := differences(here, there):
                raise UsageError(
                    f"--cluster {self.name}: {who} is of other versions than this process: {'; '.join(wrong)}. "
                    "Start its workers from the environment that this command runs in"
                )
        scheduler = str(told["scheduler"]["packages"].get("distributed"))
        if scheduler != here["distributed"]:
            raise UsageError(
                f"--cluster {self.name}: the scheduler is of another version than this process: distributed "
                f"{here['distributed']} here, {scheduler} there. Start it from the environment of this command"
            )

    def _use(self, client: Any) -> None:
        """From now on this client: whatever waits is handed over to it."""
        client.register_plugin(self._plugin)
        with contextlib.suppress(Exception):  # a scheduler that cannot have the page does its work all the same
            add_page(client)
        self._scheduler_id = client.scheduler_info(n_workers=0)["id"]
        self._client, self._lost_since, self._looked = client, None, 0.0
        self.dashboard_link = client.dashboard_link
        self._look()
        self._hand_over()

    def _gone(self, error: BaseException | None = None) -> bool:
        """Whether the scheduler is lost; then everything that was with it has ended."""
        client = self._client
        if client is None:
            return True
        if client.status == "running" and classify(error or Exception()) != "lost" and not isinstance(error, OSError):
            return False
        self._lose(
            f"the connection to the scheduler was lost ({describe(error)})" if error else "the scheduler is gone"
        )
        return True

    def _lose(self, why: str) -> None:
        client, self._client = self._client, None
        self._lost_since = now = time.monotonic()
        self._losses_so_far += 1
        for key in list(self._futures):
            self._end(Outcome(key=key, kind="lost", error=why, seconds=now - self._seen.get(key, now)))
        self._released.clear()
        # A client without a scheduler may take its time to close.
        threading.Thread(target=_close_quietly, args=(client,), daemon=True).start()

    def _come_back(self, timeout_s: float) -> None:
        assert self._lost_since is not None
        now = time.monotonic()
        if now - self._lost_since > self.patience_s:
            raise InterruptedRunError(
                f"--cluster {self.name}: the scheduler has not answered for {self.patience_s:.0f} s. Start it again, "
                "then give the same command again; it resumes"
            )
        if self._losses_so_far >= self.losses_in_a_row:
            raise InterruptedRunError(
                f"--cluster {self.name}: the scheduler was lost {self._losses_so_far} times in a row, and no task "
                "ended in between. See its log for why it dies, then give the same command again; it resumes"
            )
        if now - self._tried < _LOOK_S:
            time.sleep(min(timeout_s, _LOOK_S))
            return
        self._tried = now
        try:
            with dask.config.set(_FEW_LOGS):
                client = self._connect(_TRY_S)
        except (OSError, TimeoutError, ValueError):
            return
        try:
            self._use(client)
        except UsageError:
            raise
        except Exception as error:
            if not self._gone(error):
                self._client = None
                _close_quietly(client)

    def _look(self) -> None:
        """About once a second: is it the same scheduler, who is there, what runs?"""
        if self._client is None or (self._client.status == "running" and time.monotonic() - self._looked < _LOOK_S):
            return
        try:
            if self._gone():
                return
            self._looked = time.monotonic()
            info = self._client.scheduler_info(n_workers=0)
            if info["id"] != self._scheduler_id:
                self._lose("the scheduler was started anew")
                return
            self._workers = int(info["total_threads"])
            begun = self._begun()
        except Exception as error:
            if not self._gone(error):
                raise
            return
        now = time.monotonic()
        self._seen = {key: self._seen.get(key, now) for key, future in self._futures.items() if future.key in begun}

    # --- tasks

    def _hand_over(self) -> None:
        """Whatever waits goes to the scheduler in one message: one for each task costs both sides far more."""
        if len(self._work) == len(self._futures):
            self._release()
            return
        calls: dict[str, bytes] = {}
        for key in [key for key in self._work if key not in self._futures]:
            try:
                # Packed here: to the scheduler it is mere bytes, and one that cannot be unpacked harms no other.
                calls[key] = distributed.protocol.pickle.dumps(self._work[key])
            except Exception as error:
                told = f"the task cannot travel to a worker: {describe(error.__cause__ or error)}"
                self._end(Outcome(key=key, kind="error", error=told))
        # A key that was used before would give the earlier result: each submission has its own. All share one prefix,
        # by which the scheduler sees that they are of one kind and keeps them queued instead of handing them all out
        # at once: a dying worker then takes few of them along.
        now = time.time_ns()
        keys = [("exitwave-task", f"{key}-{now}") for key in calls]
        try:
            futures = self._client.map(_attempt, list(calls.values()), key=keys, pure=False, retries=0)
        except Exception as error:
            if not self._gone(error):
                raise
            return
        self._futures.update(zip(calls, futures, strict=True))
        self._release()

    def _end(self, outcome: Outcome) -> None:
        self._forget([outcome.key])
        self._ended.append(outcome)

    def _forget(self, keys: list[str]) -> list[str]:
        for key in keys:
            self._work.pop(key, None)
            self._seen.pop(key, None)
            future = self._futures.pop(key, None)
            if future is not None:
                self._released.append(future)
        return keys

    def _release(self) -> None:
        """After others were handed over: of a kind of task that it has none of any more, the scheduler begins a new
        record when the next comes, and keeps the old."""
        for future in self._released:
            with contextlib.suppress(Exception):
                future.release()
        self._released.clear()

    def _gather(self, keys: list[str]) -> None:
        """The outcomes of tasks that are done, by one question for all; where it fails, `_take` asks for each."""
        if not keys:
            return
        with contextlib.suppress(Exception):
            results = self._client.gather([self._futures[key] for key in keys])
            self._losses_so_far = 0
            for key, result in zip(keys, results, strict=True):
                self._end(outcome_of(key, result))

    def _take(self, key: str) -> None:
        if key not in self._futures:
            return
        future = self._futures[key]
        try:
            if future.cancelled():
                if not self._gone():
                    self._lose("the scheduler has lost the tasks")
                return
            error = future.exception()
            outcome = outcome_of(key, future.result()) if error is None else self._failure(key, error)
            self._losses_so_far = 0
        except Exception as lost:  # the connection to the scheduler broke between the calls
            if self._gone(lost):
                return
            outcome = Outcome(key=key, kind="error", error=describe(lost))
        self._end(outcome)

    def _failure(self, key: str, error: BaseException) -> Outcome:
        """Of a task that could not report for itself."""
        if type(error).__name__ != "KilledWorker":
            return Outcome(key=key, kind=classify(error), error=describe(error))
        last: Any = getattr(error, "last_worker", None)
        address, name = getattr(last, "address", ""), str(getattr(last, "name", ""))
        host, seconds = getattr(last, "host", ""), time.monotonic() - self._seen.get(key, time.monotonic())
        if (rss := self._memory_of(address)) is not None:
            told = f"its worker was ended for using {rss / 1e9:.3g} GB of {_limit(last)}"
            return Outcome(key=key, kind="memory", error=told, host=host, seconds=seconds)
        if self._refused(address):
            return Outcome(key=key, kind="lost", error="its worker was of another version and left", host=host)
        if self.lost_worker(name):
            return Outcome(key=key, kind="lost", error="the job of its worker has ended", host=host, seconds=seconds)
        told = f"its worker {address} died while it ran"
        return Outcome(key=key, kind="killed", error=told, host=host, seconds=seconds)

    def _memory_of(self, address: str) -> float | None:
        """The bytes in use for which the nanny ended this worker. Its event may come a moment after the death."""
        for attempt_ in range(3):
            for _, event in reversed(self._client.get_events(_MEMORY_TOPIC)):
                if event.get("worker") == address:
                    return float(event["rss"])
            if attempt_ < 2:
                time.sleep(0.1)
        return None

    def _refused(self, address: str) -> bool:
        return any(event.get("worker") == address for _, event in self._client.get_events(REFUSED_TOPIC))

    def _begun(self) -> set[Any]:
        return {key for keys in self._client.processing().values() for key in keys}

    def _cancel(self, asked: list[str], begun: bool) -> list[str]:
        holders = self._client.processing()
        held = {key for keys in holders.values() for key in keys}
        chosen = []
        for key in asked:
            future = self._futures.get(key)
            if future is None or (not future.done() and (begun or future.key not in held)):
                chosen.append(key)
        futures = [self._futures[key] for key in chosen if key in self._futures]
        keys = {future.key for future in futures}
        if futures:
            self._client.cancel(futures, force=True)
        self._forget(chosen)
        busy = [worker for worker, held_keys in holders.items() if keys & set(held_keys)]
        if begun and busy:
            self._end_processes(busy)
        return chosen

    def _end_processes(self, workers: list[str]) -> None:
        """Nannies start a new process in the place of each; a worker without a nanny goes on with what it does."""
        with contextlib.suppress(ValueError):  # no nanny
            self._client.restart_workers(workers, timeout=_RESTART_S, raise_for_error=False)


def _attempt(call: bytes) -> dict[str, Any]:
    """In the worker: unpack a call, and report how it ended."""
    return attempt(_called, call)


def _called(call: bytes) -> Any:
    function, args = distributed.protocol.pickle.loads(call)
    return function(*args)


def _limit(worker: Any) -> str:
    limit = getattr(worker, "memory_limit", 0)
    return f"{limit / 1e9:.3g} GB" if limit else "what it may"


def _close_quietly(client: Any) -> None:
    with contextlib.suppress(Exception):
        client.close(timeout=2)
