"""Tasks of a real campaign, some of which misbehave: for tests in which everything is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from exitwave.simulate.plan import Plan
from exitwave.simulate.tasks import TaskSpec

# structure index -> what all of its tasks do
Deeds = Mapping[int, str]


@dataclass(frozen=True, kw_only=True)
class ChaosTask:
    """A task that takes `pause_s` longer than it should, and then does its deed."""

    inner: TaskSpec
    pause_s: float
    deed: str = ""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":  # as unpickling asks
            raise AttributeError(name)
        return getattr(self.inner, name)

    def simulate(self) -> Iterator[Any]:
        time.sleep(self.pause_s)
        if self.deed == "raise":
            raise ValueError("it always does")
        if self.deed == "crash":
            if self.inner.index % 2:
                os.kill(os.getppid(), signal.SIGKILL)  # the worker itself, and this process with it
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.deed == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.deed == "swallow":
            held = []
            for _ in range(200):
                held.append(b"x" * 20_000_000)
                time.sleep(0.01)
        if self.deed:
            time.sleep(1000)
        return self.inner.simulate()


def with_deeds(plan: Plan, deeds: Deeds, pause_s: float) -> Plan:
    """The plan with tasks that misbehave where their structure is one of `deeds`."""
    tasks: Any = tuple(
        ChaosTask(inner=task, pause_s=pause_s, deed=deeds.get(task.structure.index, "")) for task in plan.tasks
    )
    return replace(plan, tasks=tasks)
