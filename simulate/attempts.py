"""The life of a task, as pure functions: what counts against it, when it is tried again, when it has failed.

    pending -> running -> committed
                       -> pending again, as long as its failures are within what their class allows
                       -> failed (error, memory, timeout or killed)
    rejected: never to run; the plan says why

Failures are counted by class, because each calls for another answer: an exception is nearly always the same the next
time, a crash is sometimes not, and a worker that vanished (`certain` is false: nobody saw the task's own process fail)
is nearly always an accident of the machine. So is a process that was ended by a signal that somebody sends (`is_own`):
a program that crashes dies of others. Such accidents are counted apart, and six of them end a task too, since some
tasks do bring their workers down. What a lost scheduler or a stopped controller cost is counted as an attempt, not as a
failure. But a task that was lost again and again, with its scheduler or its worker's job, may be why they go: that
ends, too (`ALLOWED_LOSSES`).

A *round* begins with a campaign's first start and ends when nothing is left to do. Counts and failed tasks persist
through every interruption within a round, also through the death of the controller: they are replayed from the events.
The next start after a round's end, and `exitwave retry` at any time, give failed tasks a new chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

__all__ = [
    "CLASSES",
    "Failure",
    "FailureClass",
    "History",
    "fold",
    "is_final",
    "is_own",
    "overdue_s",
    "replay_histories",
    "starved_s",
]

FailureClass = Literal["error", "memory", "timeout", "killed"]
CLASSES: tuple[FailureClass, ...] = get_args(FailureClass)

# The failure of this number is the last.
ALLOWED: Mapping[FailureClass, int] = {"error": 2, "memory": 2, "timeout": 2, "killed": 3}
ALLOWED_ACCIDENTS = 6
# Of an operator, a batch system, the end of the worker, the kernel: no program dies of them by its own mistake.
SENT = frozenset({"SIGHUP", "SIGINT", "SIGKILL", "SIGTERM"})
ALLOWED_IN_ALL = 8
# Times that a task was lost: one that ran then is far more likely the reason than one that waited.
ALLOWED_LOSSES = 24
_LOSS_RUNNING, _LOSS_WAITING = 4, 1


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One failed attempt. `certain`: the task's own process was seen to fail by itself; else it was ended from outside,
    or its worker was lost with it."""

    state: FailureClass
    why: str
    host: str = ""
    seconds: float = 0.0
    certain: bool = True


@dataclass(frozen=True, kw_only=True)
class History:
    """What is known of one task. `attempts` are those of all rounds, `counts` the failures of this round, by class
    (`accident` for those that are not certain); `losses` what it was lost for, in points, in this round; `failed` is
    the failure after which it was given up."""

    attempts: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    losses: int = 0
    failed: Failure | None = None

    def begun(self) -> History:
        return replace(self, attempts=self.attempts + 1, failed=None)

    def after(self, failure: Failure) -> History:
        """With one more failure; given up where that was the last one allowed."""
        key = failure.state if failure.certain else "accident"
        counts = {**self.counts, key: self.counts.get(key, 0) + 1}
        final = is_final(counts) or self.lost_too_often
        return replace(self, counts=counts, failed=failure if final else None)

    def lost(self, *, ran: bool) -> History:
        """Lost once more; `ran`: a worker had it then. Whether that was too often is `lost_too_often`."""
        return replace(self, losses=self.losses + (_LOSS_RUNNING if ran else _LOSS_WAITING))

    @property
    def lost_too_often(self) -> bool:
        return self.losses >= ALLOWED_LOSSES

    def forgiven(self) -> History:
        return History(attempts=self.attempts)


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a campaign waits for what. Seconds, and bytes of memory.

    `task_s`: one task; by default 30 times what the longest should need, at least ten minutes. `task_memory_bytes`: one
    task; 0 for what its worker may use. `drain_s`: for what runs after a request to stop. `silence_s`: without a word
    from a cluster on which nothing runs; then the tasks are handed out anew.
    """

    task_s: float | None = None
    task_memory_bytes: int = 0
    drain_s: float = 30.0
    silence_s: float = 600.0


def is_final(counts: Mapping[str, int]) -> bool:
    """Whether so many failures, by class, are the end of a task."""
    return (
        any(counts.get(name, 0) >= most for name, most in ALLOWED.items())
        or counts.get("accident", 0) >= ALLOWED_ACCIDENTS
        or sum(counts.values()) >= ALLOWED_IN_ALL
    )


def is_own(state: str, signal: str = "") -> bool:
    """Whether a failure of a task's process is the task's. `signal`: the name of that of which the process died, if it
    did; not where its worker ended it for a limit, which is the task's own failure."""
    return state != "killed" or signal not in SENT


def starved_s(limit_s: float) -> float:
    """For how many seconds, at most, a task may wait for a processor without their counting against its limit."""
    return max(45.0, 0.4 * limit_s)


def overdue_s(limit_s: float) -> float:
    """After how many seconds on a worker a task counts as stalled: its limit, which the worker itself should have kept,
    and time for the worker to start its process and to say so."""
    return limit_s + starved_s(limit_s) + 30.0


def replay_histories(events: Iterable[Mapping[str, Any]]) -> dict[str, History]:
    """The histories of all tasks of which the events tell, as of their end."""
    histories: dict[str, History] = {}
    for event in events:
        for task, history in fold(histories, event):
            histories[task] = history
    return histories


def fold(histories: Mapping[str, History], event: Mapping[str, Any]) -> Iterator[tuple[str, History]]:
    """What one event changes."""
    kind = event.get("kind")
    if kind == "campaign_finished":
        for task, history in list(histories.items()):
            if history.counts or history.losses or history.failed:
                yield task, history.forgiven()
        return
    if kind == "campaign_extended":  # numbers of tasks may mean others from now on
        yield from [(task, History()) for task in histories]
        return
    task = str(event.get("task", ""))
    if not task:
        return
    history = histories.get(task, History())
    if kind == "task_submitted":
        yield task, history.begun()
    elif kind == "task_retried":
        yield task, history.forgiven()
    elif kind == "task_dropped" and "ran" in event:
        yield task, history.lost(ran=bool(event["ran"]))
    elif kind == "task_failed":
        failure = failure_of(event)
        # The log says what was decided, also where an older version decided otherwise.
        yield task, replace(history.after(failure), failed=failure if event.get("final", True) else None)


def failure_of(event: Mapping[str, Any]) -> Failure:
    """The failure that a `task_failed` event tells of."""
    state = str(event.get("state", "error"))
    return Failure(
        state=state if state in CLASSES else "error",
        why=str(event.get("why", "")),
        host=str(event.get("host", "")),
        seconds=float(event.get("seconds", 0.0)),
        certain=bool(event.get("certain", True)),
    )
