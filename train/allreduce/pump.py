"""A thread that carries out transfers one after the other, in the order in which they were submitted.

The order is the same on every rank because every rank submits the same list. At most two transfers are under way at a
time: the second keeps the link busy while the first ends and its sum is taken; more would compete, and what is needed
first would come last.

A job is prepared by the thread just before its transfer (for a gather: the optimizer's update of this rank's share),
so arithmetic that belongs to the transfer runs behind the forward pass as the transfer does.

Other threads wait for a `Job` as for any `Handle`: the engine's watch can do it, warn and name ranks.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch

from exitwave.train.allreduce.ring import Exchange
from exitwave.train.transport import TransportError

__all__ = ["Job", "Pump"]

_UNDER_WAY = 2


class Job:
    """One transfer. `prepare` runs first, after all jobs of `after` are over, then `start`; `done` tells of the end."""

    def __init__(
        self,
        start: Callable[[], Exchange],
        *,
        prepare: Callable[[], None] | None = None,
        after: Sequence[Job] = (),
        label: str = "",
        nbytes: int = 0,
    ) -> None:
        self.label, self.nbytes = label, nbytes  # for the timeline
        self.begun = 0.0  # of the performance counter, when the transfer started
        self.start = start
        self.prepare = prepare
        self.after = after
        self.error: BaseException | None = None
        self._over = threading.Event()

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._over.is_set()

    def wait(self, timeout_s: float) -> None:
        """See `Handle`: raises `TimeoutError`, or what went wrong in the thread."""
        if not self._over.wait(timeout_s):
            raise TimeoutError(f"still in flight after {timeout_s:.3g} s")
        if self.error is not None:
            raise self.error

    def finish(self, error: BaseException | None = None) -> None:
        """The thread says that it is over."""
        self.error = error
        self._over.set()


class Pump:
    """The thread and its queue."""

    def __init__(
        self,
        name: str,
        *,
        sever: Callable[[], None],
        note: Callable[[Job], None] | None = None,
        under_way: int = _UNDER_WAY,
    ) -> None:
        """`note` is called in the thread with each job whose transfer has ended well.

        `sever` ends transfers that will never come by themselves (`Ring.sever`), when the pump is closed.
        """
        self.note = note
        self._sever = sever
        self.under_way = under_way
        self._queue: deque[Job] = deque()
        self._news = threading.Condition()
        self._closed = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=_run, args=(self,), name=name, daemon=True)
        self._thread.start()
        _OPEN.add(self)

    def submit(self, *jobs: Job) -> None:
        """Append to the list; returns at once."""
        with self._news:
            if self._closed:
                for job in jobs:
                    job.finish(TransportError("the engine was closed"))
                return
            self._queue.extend(jobs)
            self._news.notify()

    def close(self) -> None:
        """Refuse further jobs and let the thread end; what is still under way a second later is given up."""
        _OPEN.discard(self)
        if os.getpid() != self._process:  # a forked child has no thread, and perhaps a lock that nobody releases
            return
        with self._news:
            self._closed = True
            while self._queue:
                self._queue.popleft().finish(TransportError("the engine was closed"))
            self._news.notify()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=1)
            if self._thread.is_alive():
                self._sever()
                self._thread.join(timeout=5)

    # -- the thread's side

    def take(self, *, wait: bool) -> Job | None:
        """The next job; None when there is none (or, where `wait`, when the pump was closed)."""
        with self._news:
            while wait and not self._queue and not self._closed:
                self._news.wait()
            return self._queue.popleft() if self._queue else None


def _run(pump: Pump) -> None:
    flying: deque[tuple[Job, Exchange]] = deque()
    broken: BaseException | None = None
    with torch.no_grad():
        while True:
            job = pump.take(wait=not flying) if len(flying) < pump.under_way else None
            if job is None and not flying:
                return
            try:
                if broken is not None:
                    raise broken
                if job is not None:
                    while not all(before.done() for before in job.after):
                        _advance(flying, pump.note)
                    for before in job.after:
                        before.wait(0)
                    if job.prepare is not None:
                        job.prepare()
                    job.begun = time.perf_counter()
                    flying.append((job, job.start()))
                else:
                    _advance(flying, pump.note)
            except BaseException as error:
                broken = error  # transfers are matched by order: after one is lost none can be trusted
                for lost in [job, *(waiting for waiting, _ in flying)]:
                    if lost is not None:
                        lost.finish(error)
                flying.clear()


def _advance(flying: deque[tuple[Job, Exchange]], note: Callable[[Job], None] | None) -> None:
    """Wait for the transfer that was started first, and go on with it."""
    job, exchange = flying[0]
    over = exchange.advance()
    flying.popleft()
    if over:
        if note is not None:
            note(job)
        job.finish()
    else:
        flying.append((job, exchange))


_OPEN: weakref.WeakSet[Pump] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that is inside torch when the interpreter goes away would abort the process."""
    for pump in list(_OPEN):
        pump.close()
