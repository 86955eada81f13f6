"""What `exitwave train --nodes N` does as the task of one node, under srun.

1. Node 0 claims RUN, as the launcher on a single machine does. All nodes meet (`nodes_meeting`).
2. Each node stages the data set to its own disk; shards that another node has come from that node, so that shared
   storage is read once.
3. Each node starts its ranks by torchrun. They meet at a port that node 0 picked, by addresses and not by names.
4. Told to stop (TERM, USR1), a node tells its ranks, and all ranks agree to write a checkpoint and leave: exit 75.
5. A node that is gone ends the training on all others, soon, with a message that names it: exit 75, for the checkpoint
   stands. A job that was started three times without getting any further than before is not started again: exit 1.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from exitwave.ingest.errors import ExitwaveError, InterruptedRunError
from exitwave.ingest.events import EventLog, EventTail
from exitwave.ingest.files import read_plain_text, write_atomic
from exitwave.train.checkpoints import last_step
from exitwave.workflows.config import child_environment, expanded_folder
from exitwave.workflows.datasets import find_dataset, require_split
from exitwave.workflows.following import follow
from exitwave.workflows.guard import guarded
from exitwave.workflows.launch import locked, prepare_run, training_document, why_ranks_ended
from exitwave.workflows.nodes_meeting import Meeting, Member
from exitwave.workflows.nodes_place import NETWORK_VARIABLES, NodePlace, interface_of
from exitwave.workflows.nodes_spec import STATE, ranks_a_node
from exitwave.workflows.rank import read_rank_errors
from exitwave.workflows.session import Session
from exitwave.workflows.staging import StageChoices, stage_dataset

__all__ = ["NodeTraining", "run_node"]

_LEAVE_S = 20.0  # for ranks whose training has ended elsewhere
_SAY_S = 10.0  # for the node with the cause to say it
_JOIN_S = 600
_STARTS = 3


@dataclass(frozen=True, kw_only=True)
class NodeTraining:
    """What all nodes are told. `spec` is a TrainSpec; `ranks` are those of all nodes; `cache` may hold $TMPDIR."""

    spec: Any
    data: Path
    out: Path
    ranks: int
    cache: str | None
    cache_capacity: int | None
    mesh: str
    fresh: bool


def run_node(session: Session, place: NodePlace, training: NodeTraining) -> dict[str, Any] | None:
    """This node's part; on node 0 it returns what came of the training. Raises what ended it, alike on all nodes."""
    out = training.out
    signal.signal(signal.SIGUSR1, lambda number, frame: session.stop.set())
    with Meeting(place, out / STATE / place.attempt) as meeting:
        try:
            with locked(out) if place.node == 0 else nullcontext():
                _take_part(session, place, training, meeting)
        except ExitwaveError as error:
            meeting.conclude(error)
            raise
        except KeyboardInterrupt:
            meeting.conclude(InterruptedRunError(f"{out}: stopped before the training began."))
            raise
        except Exception as error:  # the others would wait minutes for this node
            meeting.conclude(_told(place, error))
            raise
    return training_document(out) if place.node == 0 else None


def _told(place: NodePlace, error: Exception) -> ExitwaveError:
    """What the other nodes are told of an error that is not one of ours: a full disk passes, others do not."""
    kind = InterruptedRunError if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) else ExitwaveError
    return kind(f"{place.host}: {type(error).__name__}: {error}")


def _take_part(session: Session, place: NodePlace, training: NodeTraining, meeting: Meeting) -> None:
    out = training.out
    training = replace(training, data=find_dataset(training.data))
    require_split(training.data, training.spec.train_split)
    if place.node == 0:
        _refuse_a_loop(out, place)
        training = replace(training, fresh=training.fresh and _is_to_be_forgotten(out, place))
        prepare_run(session, training.spec, training.data, out, fresh=training.fresh)
    members = meeting.meet(session.stop.is_set)
    me = members[place.node]
    session.note(f"{place.host}: node {place.node + 1} of {place.nodes}, at {me.address}; attempt {place.attempt}")
    if place.node == 0:
        hosts = [member.host for member in members]
        EventLog(out / "events.jsonl").emit("nodes_started", hosts=hosts, attempt=place.attempt, ranks=training.ranks)
    cache = None if training.cache is None else expanded_folder(training.cache, "launch.cache")
    if cache is not None and training.cache_capacity is None:
        _stage(session, training.data, cache, members, me, meeting)
    _train(session, place, training, cache, members, meeting)


def _stage(session: Session, data: Path, cache: Path, members: Sequence[Member], me: Member, meeting: Meeting) -> None:
    peers = tuple(f"{m.address}:{m.cache_port}" for m in members) if len(members) > 1 else ()
    choices = StageChoices(
        peers=peers, me=peers[me.node] if peers else None, secret_file=meeting.secret_file if peers else None
    )

    def feed(event: Mapping[str, Any]) -> None:
        if meeting.lost():  # its peers do without it; the ranks cannot
            session.stop.set()

    try:
        report = stage_dataset(session, data, cache, choices, feed=feed)
    except InterruptedRunError:
        if lost := meeting.look():
            raise _lost_node(lost, "while the data set was staged") from None
        raise
    names = ("bytes_copied", "bytes_from_source", "bytes_from_peers", "bytes_reused", "seconds")
    staged = {"host": me.host, **{name: report[name] for name in names}}
    write_atomic(meeting.folder / f"node-{me.node}.staged", json.dumps(staged).encode())
    session.note(f"{me.host}: {report['message']}")


def _train(
    session: Session,
    place: NodePlace,
    training: NodeTraining,
    cache: Path | None,
    members: Sequence[Member],
    meeting: Meeting,
) -> None:
    logs = training.out / "logs" / place.attempt
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"node-{place.node}.log"
    tail = EventTail(training.out / "events.jsonl", from_end=True)
    shown = session.progress() if place.node == 0 else nullcontext(_ignore)
    with shown as feed, session.finishing("this step and its checkpoint"), log.open("ab") as file:
        since = file.tell()
        with _ranks(_command(place, training, cache, members, logs), file, members[place.node]) as process:
            follow(
                process, tail, feed,
                stopping=session.stop.is_set, tell=lambda: _tell(process), gives_up=_patience(meeting),
            )  # fmt: skip
        if process.returncode != 0:
            raise _why(session, place, training, meeting, log, since, process.returncode)


def _ignore(event: Mapping[str, Any]) -> None:
    """Only node 0 shows how far the training is."""


def _command(
    place: NodePlace, training: NodeTraining, cache: Path | None, members: Sequence[Member], logs: Path
) -> list[str]:
    """torchrun with this node's ranks. Nothing in it depends on what a host calls itself."""
    arguments = ["train", str(training.out / "train.yaml"), "--data", str(training.data), "--out", str(training.out)]
    arguments += ["--quiet", *(["--cache", str(cache)] if cache is not None else [])]
    if cache is not None and training.cache_capacity is not None:
        arguments += ["--cache-capacity", str(training.cache_capacity)]
    arguments += ["--mesh", training.mesh] if training.mesh != "auto" else []
    arguments += ["--fresh"] if training.fresh and place.node == 0 else []  # rank 0 does it
    first, me = members[0], members[place.node]
    return guarded(
        "torch.distributed.run",
        f"--nnodes={place.nodes}",
        f"--nproc-per-node={ranks_a_node(training.ranks, place.nodes)}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={first.address}:{first.meeting_port}",
        f"--rdzv-id={place.attempt}",
        f"--rdzv-conf=is_host={int(place.node == 0)},join_timeout={_JOIN_S}",
        f"--local-addr={me.address}",
        "--max-restarts=0",
        f"--log-dir={logs / f'node-{place.node}'}",
        "--redirects=3",
        "--module",
        "exitwave.workflows",
        *arguments,
    )


@contextmanager
def _ranks(command: Sequence[str], log: Any, me: Member) -> Iterator[subprocess.Popen[bytes]]:
    """torchrun and its ranks, in a session of their own; gone at the end, whatever comes."""
    more = {"EXITWAVE_LAUNCHED": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if (interface := interface_of(me.address)) is not None:
        more |= dict.fromkeys(NETWORK_VARIABLES, interface)
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        env=child_environment(**more),
    )  # fmt: skip
    try:
        yield process
    finally:
        _kill(process)


def _patience(meeting: Meeting) -> Callable[[], bool]:
    """Whether torchrun must end now: a node is gone, or the training ended elsewhere a while ago."""
    until = float("inf")

    def is_over() -> bool:
        nonlocal until
        if until == float("inf") and (meeting.lost() or meeting.verdict() is not None):
            until = time.monotonic() + (0.0 if meeting.lost() else _LEAVE_S)
        return time.monotonic() >= until

    return is_over


def _tell(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM for the ranks themselves: torchrun would give them half a minute only. For torchrun while it has none."""
    try:
        torchrun = psutil.Process(process.pid)
        ranks = torchrun.children()
    except psutil.NoSuchProcess:
        return
    for rank in ranks or [torchrun]:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            rank.send_signal(signal.SIGTERM)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    members = [p for p in psutil.process_iter() if _session_of(p.pid) == process.pid]
    for member in members:  # torchrun gives each rank a group of its own
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _why(
    session: Session, place: NodePlace, training: NodeTraining, meeting: Meeting, log: Path, since: int, code: int
) -> ExitwaveError:
    """The one error that explains how this node's ranks ended: the cause, wherever it was."""
    if lost := meeting.look():
        return _lost_node(lost, f"after step {last_step(training.out)}")
    if (told := meeting.verdict()) is not None:
        return told
    errors = read_rank_errors(training.out)
    if session.stop.is_set() and not errors:
        return InterruptedRunError(
            f"{training.out}: the training was stopped before it could write another checkpoint."
        )
    found = why_ranks_ended(
        training.out, code, stopped=session.stop.is_set(), log=log, since=since, ranks=training.ranks
    )
    only_lost = not errors or "lost contact" in str(found)
    if only_lost and "was killed" not in str(found):
        if (told := meeting.verdict(_SAY_S)) is not None:
            return told
        if lost := meeting.look():
            return _lost_node(lost, f"after step {last_step(training.out)}")
    return type(found)(f"{place.host}: {found}") if type(found) is ExitwaveError else found


def _lost_node(names: str, when: str) -> InterruptedRunError:
    return InterruptedRunError(
        f"node {names} is gone: it was ended, or cannot be reached any more, {when}. The training goes on from its "
        "last checkpoint when the job runs again."
    )


def _refuse_a_loop(out: Path, place: NodePlace) -> None:
    """A job that is queued again and again and gets nowhere would do so until somebody looks."""
    path = out / STATE / f"{place.job}.starts"
    starts: list[int] = []
    with suppress(OSError, ValueError):
        starts = list(json.loads(read_plain_text(path))) if place.restarts else []
    here = last_step(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([*starts, here]))
    if len(starts) >= _STARTS and set(starts[-_STARTS:]) == {here}:
        raise ExitwaveError(
            f"{out}: job {place.job} was started {_STARTS} times at step {here} and never came to another checkpoint, "
            f"so it is not started again. Why they ended is in {out / STATE} (verdict of each attempt) and "
            f"{out / 'logs'}. A longer walltime, or a smaller checkpoint.every_steps, may be all that it needs."
        )


def _is_to_be_forgotten(out: Path, place: NodePlace) -> bool:
    """Whether --fresh is still to be done: an earlier run of this job may have ended before its ranks began."""
    mark = out / STATE / f"{place.job}.fresh"
    try:
        info = (out / "train.json").stat()
        now = f"{info.st_ino} {info.st_mtime_ns}"
    except OSError:
        now = ""
    if place.restarts == 0:
        mark.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(mark, now.encode())
        return True
    try:
        return read_plain_text(mark) == now
    except OSError:
        return False


def task_of_node(command: Sequence[str], nodes: int) -> None:
    """Inside an allocation, but not in a step of it: the same command again, as one task a node. Never returns."""
    os.execvp("srun", ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpu-bind=none",
                       "--kill-on-bad-exit=0", sys.executable, "-m", "exitwave.workflows", *command])  # fmt: skip
