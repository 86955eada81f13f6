"""One trial, in a worker: a training in a folder of its own, which goes on where an earlier attempt left it.

    STUDY/trials/<n>/         a RUN as `exitwave train` makes it
        stop                  written by the controller: why the trial is to stop at its next step
        .lock                 held while a worker trains here

1. The folder is locked. Where another worker still holds it (its controller was killed, it was not), this one waits.
2. The training runs in the worker's guarded process (`simulate.worker_guard`), on one thread: its memory is watched,
   and its death is a report. Where it has several ranks, they are started as `exitwave train --ranks` starts them.
3. Before each step it looks whether a file `stop` is there; then it writes a checkpoint and ends as `stopped`.
4. A trained model is judged: the validation loss of its last step, or what `exitwave evaluate` says on the validation
   split. What comes back is a handful of figures; everything else is in the folder.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import DamagedDataError, ExitwaveError, InterruptedRunError, UsageError
from exitwave.ingest.events import read_events
from exitwave.ingest.files import FileLock, write_atomic
from exitwave.ingest.processes import keep_freed_memory
from exitwave.train.checkpoints import last_step
from exitwave.workflows.provenance import versions
from exitwave.workflows.resolved import dump_yaml, resolved_comment

__all__ = ["SIMULATOR", "STOP_NAME", "TrialTask", "failure_state", "run_trial"]

STOP_NAME = "stop"
SIMULATOR = "exitwave.workflows.tune_trial:run_trial"  # prepares a worker for one thread, and imports no simulator
_LOOK_EVERY_S = 0.2
_DIVERGED = re.compile(
    r"(rank \d+: )?step \d+: .*(finite|overflow)"
)  # of a step; data may hold NaN, and folders any name


@dataclass(frozen=True, kw_only=True)
class TrialTask:
    """What a worker needs to know. `spec`: a TrainSpec in canonical form; `metric`: see `ObjectiveSpec`."""

    number: int
    folder: str
    spec: Mapping[str, Any]
    ranks: int
    metric: str
    simulator: str = SIMULATOR


def run_trial(task: TrialTask, dataset: str) -> dict[str, Any]:
    """Train and judge: {"ended": finished, value, step} or {"ended": stopped, step} or {"ended": failed, state, why},
    each with seconds and host. Raises InterruptedRunError where the disk is full.
    """
    out, began = Path(task.folder), time.monotonic()
    told: dict[str, Any] = {"n": task.number, "host": socket.gethostname()}
    try:
        with _held(out):
            value = _train_and_judge(task, Path(dataset), out)
        told |= {"ended": "finished", "value": value, "step": last_step(out)}
        if value != value or value in (float("inf"), float("-inf")):
            told |= {"ended": "failed", "state": "diverged", "why": f"its {task.metric} is not a finite number"}
    except InterruptedRunError:
        if not (out / STOP_NAME).exists():
            raise
        told |= {"ended": "stopped", "step": last_step(out)}
    except Exception as error:
        told |= {"ended": "failed", "state": failure_state(error), "why": _words(error)}
    return {**told, "seconds": round(time.monotonic() - began, 3)}


def failure_state(error: BaseException) -> str:
    """Of which kind a failure is: diverged, configuration, memory or error."""
    text = str(error)
    if isinstance(error, ExitwaveError) and _DIVERGED.match(text):
        return "diverged"
    if isinstance(error, UsageError):
        return "configuration"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "allocate memory" in text:
        return "memory"
    return "damaged data" if isinstance(error, DamagedDataError) else "error"


def _words(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no message"
    return text[:1000] if isinstance(error, ExitwaveError) else f"{type(error).__name__}: {text[:1000]}"


@contextmanager
def _held(out: Path) -> Iterator[None]:
    """The folder is ours; InterruptedRunError when it is to stop before that."""
    out.mkdir(parents=True, exist_ok=True)
    lock = FileLock(out / ".lock")
    while not lock.acquire():
        if (out / STOP_NAME).exists():
            raise InterruptedRunError(f"{out}: stopped before another worker had left it")
        time.sleep(_LOOK_EVERY_S)
    try:
        yield
    finally:
        lock.release()


def _train_and_judge(task: TrialTask, dataset: Path, out: Path) -> float:
    from exitwave.train.spec import TrainSpec

    spec = TrainSpec.model_validate(dict(task.spec))
    text = dump_yaml(spec.canonical(), comment=resolved_comment("A trial's training", versions()))
    write_atomic(out / "train.yaml", text.encode())
    if task.ranks == 1:
        from exitwave.train.trainer import train

        keep_freed_memory()
        train(spec, data=dataset, out=out, stop=_stop(out), threads=1)
    else:
        _train_with_ranks(spec, dataset, out, task.ranks)
    return _judge(spec, dataset, out, task.metric)


def _stop(out: Path) -> Callable[[], bool]:
    """Whether the controller wants the trial to stop; the disk is asked five times a second at most."""
    path, asked = out / STOP_NAME, 0.0

    def stop() -> bool:
        nonlocal asked
        now = time.monotonic()
        if now - asked < _LOOK_EVERY_S:
            return False
        asked = now
        return path.exists()

    return stop


def _train_with_ranks(spec: Any, dataset: Path, out: Path, ranks: int) -> None:
    """As `exitwave train --ranks` does, below this process; a file `stop` is its Ctrl-C."""
    from exitwave.workflows.interrupts import Interrupts
    from exitwave.workflows.launch import start_ranks
    from exitwave.workflows.session import Session

    session = Session(json=False, quiet=True, interrupts=Interrupts(quiet=True), stdout=2)
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_LOOK_EVERY_S):
            if (out / STOP_NAME).exists():
                session.stop.set()

    watching = threading.Thread(target=watch, name="exitwave-trial-stop", daemon=True)
    watching.start()
    try:
        start_ranks(session, spec, dataset, out, ranks=ranks, cache=None, fresh=False, feed=lambda event: None)
    finally:
        done.set()
        watching.join()


def _judge(spec: Any, dataset: Path, out: Path, metric: str) -> float:
    if metric == "loss":
        losses = [e for e in read_events(out / "events.jsonl") if e["kind"] == "train_eval"]
        if not losses:
            raise UsageError("it ended without a validation: train.eval_every_steps is more than its steps")
        return float(losses[-1]["loss"])
    if spec.task == "classify":
        from exitwave.train.evaluate_classes import evaluate_classes

        document = evaluate_classes(out, dataset, split=spec.val_split)
    else:
        from exitwave.train.evaluate import evaluate

        document = evaluate(out, dataset, split=spec.val_split, threads=1)
    return float(document["metrics"]["model"][metric])
