"""`exitwave train` from a terminal: starts the ranks by torchrun, follows them, and explains how they ended.

1. The configuration is read and checked here, before anything is started; a folder that belongs to another training is
   refused here, too. The resolved configuration goes to RUN/train.yaml, and that is what the ranks read.
2. One lock on RUN, so that two commands cannot train into one folder.
3. The ranks run in a session of their own under `guard`: a terminal's Ctrl-C reaches only us, and we pass SIGTERM on;
   if we are killed, they are.
4. Progress comes from RUN/events.jsonl, which rank 0 writes. Everything that ranks print goes to RUN/train.log.
5. Ranks that fail leave RUN/rank-errors/; the one that caused it is shown.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import DamagedDataError, ExitwaveError, InterruptedRunError, UsageError
from exitwave.ingest.events import EventTail
from exitwave.ingest.files import FileLock, LockHeldError, read_plain, read_plain_text, write_atomic
from exitwave.workflows.campaigns import default_workers
from exitwave.workflows.config import child_environment, rank_threads
from exitwave.workflows.datasets import completeness, find_dataset, require_split
from exitwave.workflows.following import follow
from exitwave.workflows.guard import guarded
from exitwave.workflows.progress import human_seconds
from exitwave.workflows.provenance import versions
from exitwave.workflows.rank import check_mesh, clear_rank_errors, read_rank_errors
from exitwave.workflows.resolved import dump_yaml, resolved_comment
from exitwave.workflows.session import Session

__all__ = [
    "evaluate_run",
    "locked",
    "make_folder",
    "prepare_run",
    "refuse_other",
    "start_ranks",
    "train_with_ranks",
    "training_document",
    "why_ranks_ended",
]

_NO_ROOM_BYTES = 64 << 10
_ERRORS: dict[int, type[ExitwaveError]] = {
    2: UsageError,
    3: DamagedDataError,
    75: InterruptedRunError,
}


def train_with_ranks(
    session: Session,
    config: Path,
    data: Path,
    out: Path,
    *,
    ranks: int | None,
    cache: Path | None,
    cache_capacity: int | None = None,
    mesh: str,
    fresh: bool,
    overrides: Sequence[str],
    replay: Path | None = None,
) -> dict[str, Any]:
    """Train with `ranks` processes on this machine; returns what came of it."""
    from exitwave.train.checkpoints import last_step
    from exitwave.workflows.train_config import read_training

    training = read_training(config, overrides)
    shape = check_mesh(mesh, ranks)
    n = ranks or (shape[0] * shape[1] if shape is not None else training.ranks or 1)
    data = find_dataset(data)
    with locked(out):
        before = last_step(out)
        with session.progress() as feed:
            start_ranks(
                session, training.spec, data, out,
                ranks=n, cache=cache, cache_capacity=cache_capacity, mesh=mesh, fresh=fresh, feed=feed,
                replay=replay,
            )  # fmt: skip
        document = training_document(out)
        if before and not fresh and document["steps"] == before:
            document["message"] = f"Nothing was left to train (--fresh begins again). {document['message']}"
        return document


def make_folder(out: Path) -> None:
    """The folder that `--out` names; UsageError when it cannot be made."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UsageError(f"{out}: this is a file; --out names a folder.") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UsageError(f"{out}: this folder cannot be made: {error.strerror}. Give another --out.") from None


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """RUN is ours alone; UsageError when another command works in it."""
    make_folder(out)
    lock = FileLock(out / ".lock")
    try:
        lock.__enter__()
    except LockHeldError:
        raise UsageError(
            f"{out}: another exitwave command is working in this folder ({lock.holder()}). Wait for it, stop "
            "it, or give "
            "another --out."
        ) from None
    try:
        yield
    finally:
        lock.release()


def start_ranks(
    session: Session,
    spec: Any,
    data: Path,
    out: Path,
    *,
    ranks: int,
    cache: Path | None,
    cache_capacity: int | None = None,
    mesh: str = "auto",
    fresh: bool,
    feed: Callable[[Mapping[str, Any]], None],
    online: Path | None = None,
    replay: Path | None = None,
) -> None:
    """Start the ranks, follow them to their end; raises what they failed with. `spec` is a TrainSpec.

    `online`: settings of a training while the data set grows; `replay`: the log of arrivals of one to do again.
    """
    resolved = prepare_run(session, spec, data, out, fresh=fresh, online=online, replay=replay)
    arguments = ["train", str(resolved), "--data", str(data), "--out", str(out), "--quiet"]
    if cache is not None:
        arguments += ["--cache", str(cache)]
    if cache_capacity is not None:
        arguments += ["--cache-capacity", str(cache_capacity)]
    if replay is not None:
        arguments += ["--replay", str(replay)]
    elif online is not None:
        arguments += ["--online", str(online)]
    if mesh != "auto":
        arguments += ["--mesh", mesh]
    if fresh:
        arguments += ["--fresh"]
    events = out / "events.jsonl"
    if fresh:
        events.unlink(missing_ok=True)
    tail = EventTail(events, from_end=not fresh)
    with session.finishing("this step and its checkpoint"):
        _run_ranks(session, out, _command(ranks, arguments), ranks=ranks, tail=tail, feed=feed)


def prepare_run(
    session: Session,
    spec: Any,
    data: Path,
    out: Path,
    *,
    fresh: bool,
    online: Path | None = None,
    replay: Path | None = None,
) -> Path:
    """RUN is made this training's, before any rank starts: the path of the configuration that the ranks read.

    Raises UsageError when it belongs to another training or the data set has no such split.
    """
    if online is None:  # else it comes
        require_split(data, spec.train_split)
        if (found := completeness(data)) is not None and found.sentence:
            session.note(f"{data}: {found.sentence} The training uses what is there.")
    if replay is not None:
        from exitwave.train.online import refuse_replay

        refuse_replay(spec, replay, out)
    refuse_other(out, spec, data, fresh=fresh, online=online, replay=replay)
    clear_rank_errors(out)
    resolved = out / "train.yaml"
    text = dump_yaml(spec.canonical(), comment=resolved_comment("A training", versions()))
    write_atomic(resolved, text.encode())
    return resolved


def _run_ranks(
    session: Session,
    out: Path,
    command: Sequence[str],
    *,
    ranks: int,
    tail: EventTail,
    feed: Callable[[Mapping[str, Any]], None],
) -> None:
    with (out / "train.log").open("ab") as log:
        since = log.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            # what cuBLAS needs to add in the same order each time; nothing to a processor
            env=child_environment(
                EXITWAVE_LAUNCHED="1",
                CUBLAS_WORKSPACE_CONFIG=":4096:8",
                **rank_threads(ranks, default_workers()),
                **({"RANK": "0", "WORLD_SIZE": "1"} if ranks == 1 else {}),
            ),
        )
    kill = _killer(process)
    session.interrupts.last_words.append(kill)
    try:
        follow(process, tail, feed, stopping=session.stop.is_set, tell=process.terminate)
    except BaseException:
        kill()
        raise
    finally:
        session.interrupts.last_words.remove(kill)
    if process.returncode != 0:
        raise why_ranks_ended(
            out, process.returncode, stopped=session.stop.is_set(), log=out / "train.log", since=since, ranks=ranks
        )


def _command(ranks: int, arguments: Sequence[str]) -> list[str]:
    if ranks == 1:
        return guarded("exitwave.workflows", *arguments)
    return guarded(
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
        f"--nproc-per-node={ranks}",
        "--module",
        "exitwave.workflows",
        *arguments,
    )


def refuse_other(
    out: Path, spec: Any, data: Path, *, fresh: bool, online: Path | None = None, replay: Path | None = None
) -> None:
    """Say at once, without starting anything, that the folder belongs to another training."""
    path = out / "train.json"
    if fresh or not path.exists():
        return
    from exitwave.ingest.manifest import load_manifest
    from exitwave.train.spec import spec_difference, with_defaults

    try:
        before = json.loads(read_plain_text(path))
    except ValueError:
        return  # the ranks will say what is wrong with it
    dataset_id = load_manifest(data).header.dataset_id
    difference = spec_difference(with_defaults(before.get("spec", {})), spec.canonical())
    if before.get("dataset_id") != dataset_id:
        difference.insert(0, f"data set: {before.get('dataset_id')} -> {dataset_id}")
    if online is not None or replay is not None or before.get("online") is not None:
        from exitwave.train.online import read_online

        arriving = read_online(online, replay)
        then, now = before.get("online"), None if arriving is None else arriving.identity()
        if (then is None) != (now is None):
            difference.append(f"--online: {'with' if then else 'without'} -> {'with' if now else 'without'}")
        else:
            difference += spec_difference(then or {}, now or {}, "online.")
    if difference:
        lines = "\n  ".join(difference)
        raise UsageError(
            f"{out}: belongs to another training (before -> now):\n  {lines}\nGive another --out, or --fresh to "
            "start again."
        )


def _killer(process: subprocess.Popen[bytes]) -> Callable[[], None]:
    def kill() -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    return kill


def why_ranks_ended(out: Path, code: int, *, stopped: bool, log: Path, since: int = 0, ranks: int = 1) -> ExitwaveError:
    """The one error that explains how the ranks ended. `since`: where in torchrun's `log` this attempt begins."""
    errors = read_rank_errors(out)
    who = "rank 0" if ranks == 1 else "torchrun, which runs the ranks,"
    killed = _killed(log, since) if code >= 0 else f"{who} was killed by {signal.Signals(-code).name}"
    if errors and not killed:
        first = errors[0]
        kind = _ERRORS.get(int(first["exit_code"]), ExitwaveError)
        message = str(first["message"])
        if not re.match(r"rank \d+", message) and kind is not InterruptedRunError:
            message = f"rank {first['rank']}: {message}"
        if kind is ExitwaveError:
            message += f"\nThe traceback is in {out / 'rank-errors'}; all that the ranks printed is in {log}."
        return kind(message)
    if stopped:
        return InterruptedRunError(f"{out}: the training was stopped before it could write another checkpoint.")
    if (
        not killed and out.exists() and shutil.disk_usage(out).free < _NO_ROOM_BYTES
    ):  # the ranks had no room to say so themselves
        return InterruptedRunError(
            f"{out}: the disk is full. Free some space, then give the same command again; it goes on from the last "
            "checkpoint."
        )
    what = f"{killed} (out of memory, or by somebody)" if killed else f"the ranks ended with exit code {code}"
    return ExitwaveError(
        f"training: {what}. All that the ranks printed is in {log}. The same command goes on from the last checkpoint."
    )


def _killed(log: Path, since: int) -> str:
    """`rank 1 was killed by SIGKILL`, if torchrun names that as the first failure of all."""
    try:
        text = read_plain(log)[since:].decode(errors="replace")
    except OSError:
        return ""
    first = text.rpartition("Root Cause")[2]
    found = re.search(r"rank\s*:\s*(\d+).*?exitcode\s*:\s*-(\d+)", first, flags=re.DOTALL)
    if found is None or "Root Cause" not in text or int(found[2]) == signal.SIGTERM:
        return ""
    return f"rank {found[1]} was killed by {signal.Signals(int(found[2])).name}"


def training_document(out: Path, result: Any = None) -> dict[str, Any]:
    """What a finished training says of itself."""
    from exitwave.ingest.events import read_events

    events = read_events(out / "events.jsonl")
    steps = [e for e in events if e["kind"] == "train_step"]
    last = steps[-1] if steps else {}
    document: dict[str, Any] = {
        "run": str(out),
        "model": str(out / "model.pt"),
        "steps": last.get("step"),
        "loss": last.get("loss"),
        "samples_per_s": last.get("samples_per_s"),
    }
    finished = [e for e in events if e["kind"] == "train_finished"]
    seconds = finished[-1].get("seconds") if finished else None
    took = f" in {human_seconds(float(seconds))}" if seconds is not None else ""
    loss = f", loss {float(last['loss']):.4g}" if last.get("loss") is not None else ""
    document["message"] = f"Trained {last.get('step', '?')} steps{took}{loss}: {out / 'model.pt'}"
    return document


def evaluate_run(
    session: Session,
    run: Path,
    data: Path,
    *,
    split: str,
    cache: Path | None,
    dense: Path | None = None,
    ptychography: Path | None = None,
) -> dict[str, Any]:
    """Metrics of a trained run on `split`, and a picture of some samples beside; the contract's `evaluate` document."""
    from exitwave.train.series_evaluate import evaluate_series, is_series_run

    if is_series_run(run):
        require_split(data, split)
        return evaluate_series(run, data, split=split, cache=cache)
    from exitwave.train.evaluate import evaluate
    from exitwave.train.run import saved_task
    from exitwave.workflows.comparison import write_comparison

    require_split(data, split)
    if saved_task(run) == "classify":
        from exitwave.train.evaluate_classes import evaluate_classes

        return evaluate_classes(run, data, split=split, cache=cache)
    document: dict[str, Any] = evaluate(run, data, split=split, cache=cache, dense=dense, ptychography=ptychography)
    document["picture"] = str(write_comparison(run / "evaluation.npz", run / f"evaluation-{split}.png"))
    return document
