"""How a task ended, and of which class its failure is: each class calls for another answer of the campaign.

| kind | what happened | whose fault |
| --- | --- | --- |
| ok | there is a result | |
| error | the task raised an exception | the task's; nearly always the same the next time |
| memory | it found no memory, or its worker was ended for using too much | the task's, or of too many workers |
| timeout | the campaign gave up waiting for it | the task's |
| killed | its worker died while it ran | anybody's; nearly always an accident |
| disk-full | there was no room for its shard | the disk's: the campaign stops |
| lost | the scheduler went away, or the batch system ended the worker's job | not the task's |
"""

from __future__ import annotations

import errno
import pickle
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from exitwave.ingest.errors import InterruptedRunError

__all__ = ["Kind", "Outcome", "attempt", "classify", "describe", "outcome_of"]

Kind = Literal["ok", "error", "memory", "timeout", "killed", "disk-full", "lost"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a task ended. `result` where it is ok; otherwise `error`, one line for people.

    `host` is where it ran and `seconds` how long, as far as anybody knows: "" and 0 where its worker died unseen.
    """

    key: str
    kind: Kind
    result: Any = None
    error: str = ""
    host: str = ""
    seconds: float = 0.0


def classify(error: BaseException) -> Kind:
    """What kind of failure an exception is, by its type and those that it was raised from."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, MemoryError):
            return "memory"
        if isinstance(chain, InterruptedRunError):
            return "disk-full"
        if isinstance(chain, OSError) and chain.errno in (errno.ENOSPC, errno.EDQUOT):
            return "disk-full"
        name = type(chain).__name__
        if name == "KilledWorker":
            return "killed"
        if name in ("CancelledError", "FutureCancelledError", "FuturesCancelledError", "CommClosedError"):
            return "lost"
        chain = chain.__cause__ or chain.__context__
    return "error"


def describe(error: BaseException) -> str:
    """One line: the type's name, unless the message stands for itself, and the message."""
    text = " ".join(str(error).split()) or "no message"
    return text if hasattr(error, "exit_code") else f"{type(error).__name__}: {text}"


def attempt(function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """In the worker: call it, and report how that ended in plain types, since not every exception travels.

    What is no Exception (KeyboardInterrupt, SystemExit) goes on its way.
    """
    began = time.perf_counter()
    report: dict[str, Any] = {"kind": "ok", "result": None, "error": "", "host": socket.gethostname()}
    try:
        report["result"] = function(*args)
        pickle.dumps(report["result"])
    except Exception as error:
        report |= {"kind": classify(error), "error": describe(error), "result": None}
        if report["kind"] == "lost":  # a connection that the task itself had made
            report["kind"] = "error"
    report["seconds"] = time.perf_counter() - began
    return report


def outcome_of(key: str, report: dict[str, Any]) -> Outcome:
    """What `attempt` reported, under the key that it was submitted by."""
    return Outcome(key=key, **report)
