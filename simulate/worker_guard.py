"""Every task runs in a process of its own beside its worker, watched: the worker outlives whatever the task does.

1. The worker starts a child (`worker_child`) before its first task and keeps it: what is imported stays imported.
2. A task goes to the child through a pipe, its receipt comes back; meanwhile the worker looks ten times a second at the
   clock and at the memory of the child and of all that the child started.
3. A child that takes too long or too much is killed with all its processes, and so is known which of the two it was; a
   child that dies by itself has crashed. Either way the worker says what happened, where, and after how many seconds,
   and the next task gets a new child. A failure is a report, not an exception: nothing of it depends on Dask.
4. The kernel kills the child when its worker dies, so that no task goes on whose outcome nobody awaits.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from exitwave.simulate.attempts import starved_s

__all__ = ["Guard", "Limits", "failure_report", "memory_of_machine"]

_LOOK_EVERY_S = 0.1
_START_WITHIN_S = 300.0  # importing what simulates, from a slow network file system, by many workers at once


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one task may take. `memory_bytes` 0: what its worker may take, or nearly all of the machine's memory."""

    seconds: float = math.inf
    memory_bytes: int = 0


def memory_of_machine() -> int:
    """Bytes that this process may use: the machine's memory, or less where a control group (version 2) says so."""
    total = int(psutil.virtual_memory().total)
    with suppress(OSError, ValueError):
        group = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].strip().lstrip("/")
        for folder in (Path("/sys/fs/cgroup") / group, *(Path("/sys/fs/cgroup") / group).parents):
            limit = folder / "memory.max"
            if limit.exists() and (text := limit.read_text().strip()) != "max":
                total = min(total, int(text))
    return total


def failure_report(state: str, why: str, seconds: float, *, pid: int | None = None, signal: str = "") -> dict[str, Any]:
    """What a worker sends in place of a receipt. `state`: error, memory, timeout, killed or disk-full; `signal`: the
    name of that of which the process died by itself or through others, "" where there was none."""
    return {
        "failed": {
            "state": state,
            "why": why,
            "host": socket.gethostname(),
            "pid": os.getpid() if pid is None else pid,
            "seconds": round(seconds, 3),
            "signal": signal,
        }
    }


@dataclass
class Guard:
    """The child of one worker process. `call` runs one function at a time in it."""

    simulator: str
    memory_bytes: int = 0  # of the worker; 0: that of the machine
    _child: subprocess.Popen[bytes] | None = None
    _pipe: Connection | None = None
    _ready: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Begin to import, in the child; returns at once."""
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "exitwave.simulate.worker_child", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # its processes can be killed as one; a terminal's Ctrl-C does not reach it
            )
        self._pipe = ours
        self._ready = False
        ours.send((self.simulator, [p for p in sys.path if p]))

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], limits: Limits) -> Any:
        """`function(*args)` in the child: its result, or a `failure_report`."""
        with self._lock:
            message = pickle.dumps((function, args))
            killed_before = _kernel_kills()
            if self._child is None or self._child.poll() is not None:
                self._forget()
                self.start()
            assert self._pipe is not None and self._child is not None
            pipe, child = self._pipe, self._child  # `close` may take them away meanwhile
            began = time.monotonic()
            limit = limits.memory_bytes or int(0.95 * (self.memory_bytes or memory_of_machine()))
            try:
                if not self._ready:
                    failed = self._await(pipe, child.pid, began, _START_WITHIN_S, limit, "its process was to start")
                    if failed is not None:
                        return failed
                    pipe.recv_bytes()
                    self._ready = True
                began = time.monotonic()
                pipe.send_bytes(message)
                failed = self._await(pipe, child.pid, began, limits.seconds, limit, "it ran")
                if failed is not None:
                    return failed
                reply = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                return self._died(child, time.monotonic() - began, limit, killed_before)
            if isinstance(reply, dict) and reply.get("failed", {}).get("state") == "memory":
                self._kill()  # what it still holds goes with it
            return reply

    def close(self) -> None:
        self._kill()

    def _await(
        self, pipe: Connection, pid: int, began: float, seconds: float, limit: int, what: str
    ) -> dict[str, Any] | None:
        """Until the child says something or dies (None), or has to be killed (the report)."""
        self._peak = 0
        waited = _waited_s(pid)
        while not pipe.poll(_LOOK_EVERY_S):
            # On a machine with too much to do, waiting for a processor is not the task's fault, for a while.
            took, used = time.monotonic() - began, _memory_of(pid)
            fair = took - min(_waited_s(pid) - waited, starved_s(seconds))
            self._peak = max(self._peak, used)
            if used > limit:
                self._kill()
                why = f"it used {used / 1e6:.0f} MB of memory, its limit is {limit / 1e6:.0f} MB"
                return failure_report("memory", why, took, pid=pid)
            if fair > seconds:
                self._kill()
                return failure_report("timeout", f"{what} for {took:.1f} s, its limit is {seconds:g} s", took, pid=pid)
        return None

    def _died(self, child: subprocess.Popen[bytes], took: float, limit: int, killed_before: int) -> dict[str, Any]:
        try:
            code = child.wait(timeout=5)
        except subprocess.TimeoutExpired:  # it closed its pipe and lives
            code = 0
        self._kill()
        if code == -signal.SIGKILL and (self._peak > 0.9 * limit or _kernel_kills() > killed_before):
            why = f"the kernel killed its process, which used {self._peak / 1e6:.0f} MB: memory was short"
            return failure_report("memory", why, took, pid=child.pid)
        name = _signal_name(-code) if code < 0 else ""
        how = f"died of {name}" if name else f"ended with exit code {code}"
        return failure_report("killed", f"its process {how}", took, pid=child.pid, signal=name)

    def _kill(self) -> None:
        if self._child is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # waiting for a device that does not answer: left to the kernel
                self._child.wait(timeout=10)
        self._forget()

    def _forget(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        self._child = self._pipe = None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _waited_s(pid: int) -> float:
    """How long a process was ready to run and did not, in seconds: the second number of proc(5)'s schedstat."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _memory_of(pid: int) -> int:
    """Resident bytes of a process and its descendants; 0 where it is gone."""
    total, left = 0, [pid]
    while left:
        each = left.pop()
        try:
            total += int(Path(f"/proc/{each}/statm").read_text().split()[1]) * _PAGE
            for thread in Path(f"/proc/{each}/task").iterdir():
                left += [int(child) for child in (thread / "children").read_text().split()]
        except (OSError, ValueError, IndexError):
            continue
    return total


_PAGE = os.sysconf("SC_PAGE_SIZE")


def _kernel_kills() -> int:
    """How often this kernel has killed a process for want of memory, proc(5)."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/vmstat").read_text().split("oom_kill ")[1].split("\n")[0])
    return 0
