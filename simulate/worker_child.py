"""The process in which a worker's tasks run, one after the other: `python -m exitwave.simulate.worker_child FD PARENT`.

It reads (function, arguments) from the pipe and answers with the result or with a report of the failure.
See `worker_guard`.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1  # prctl(2)


def main() -> None:
    pipe, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    _die_with(parent)
    _stand_back()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        simulator, path = pipe.recv()
        sys.path[:] = [*path, *(p for p in sys.path if p not in path)]
        _prepare(simulator)
        pipe.send_bytes(b"ready")
        while True:
            message = pipe.recv_bytes()
            pipe.send_bytes(_answer(message))
    except (EOFError, ConnectionError):
        os._exit(0)  # the worker is gone


def _die_with(parent: int) -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _stand_back() -> None:
    """A niceness shall count among all processes. By autogroups (sched(7)) Linux shares cores evenly between sessions
    and weighs nice values inside each alone; so this session of one process is made as nice as the process is."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    if niceness > 0:
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(niceness))


def _prepare(simulator: str) -> None:
    from exitwave.simulate.worker import prepare_worker

    with suppress(Exception):  # the first task fails for the same reason and says so
        prepare_worker(simulator)


def _answer(message: bytes) -> bytes:
    from exitwave.simulate.cluster_outcome import classify, describe
    from exitwave.simulate.worker_guard import failure_report

    began = time.monotonic()
    try:
        function, args = pickle.loads(message)
        reply: Any = function(*args)
        return pickle.dumps(reply)
    except BaseException as error:
        return pickle.dumps(failure_report(classify(error), describe(error), time.monotonic() - began))


if __name__ == "__main__":
    main()
