"""`exitwave train --nodes N` outside a job: check, write the script, submit it by sbatch, and follow the job.

1. All that can be refused is refused here, before anything waits in a queue.
2. RUN/.slurm/job.sh is the script and RUN/.slurm/job.json the job's number. The same command finds a job of RUN that is
   still queued or running and follows it instead of submitting another: by its name, which says which folder is RUN, so
   that also one is found whose number nobody lived to write down. One command at a time looks and submits. Where squeue
   does not answer, none is submitted. A job at another training than the one that is asked for is not followed.
3. How far the training is comes from RUN/events.jsonl, and whether the job is still there from `squeue`; a requeued
   job is followed on. Where squeue does not answer, the job counts as being there.
4. At the end the exit code is the one that the script left, with the message of the node that knew it first.
5. Ctrl-C or SIGTERM cancels the job. If this command is killed, the job goes on, and the same command finds it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import ExitwaveError, InterruptedRunError, UsageError
from exitwave.ingest.events import EventTail
from exitwave.ingest.files import FileLock, read_plain_text, write_atomic
from exitwave.workflows.datasets import find_dataset, require_split
from exitwave.workflows.launch import make_folder, refuse_other, training_document
from exitwave.workflows.nodes_meeting import error_of, read_verdict
from exitwave.workflows.nodes_spec import STATE, LaunchSection, ranks_a_node, training_script
from exitwave.workflows.provenance import versions
from exitwave.workflows.resolved import dump_yaml, resolved_comment
from exitwave.workflows.session import Session

__all__ = [
    "NodeJob",
    "follow_job",
    "job_name",
    "job_of",
    "node_job",
    "refuse_while_job",
    "require_job",
    "run_job",
    "submit_job",
    "train_on_nodes",
]

_POLL_S = 0.5
_ASK_S = 3.0
_GRACE_S = 10.0  # squeue may not know a job yet that sbatch has just accepted


@dataclass(frozen=True, kw_only=True)
class NodeJob:
    """A training to be done by a job. `spec` is a TrainSpec."""

    spec: Any
    data: Path
    out: Path
    launch: LaunchSection
    nodes: int
    ranks: int
    name: str
    cache: str | None
    cache_capacity: int | None = None
    mesh: str = "auto"
    fresh: bool = False

    @property
    def state(self) -> Path:
        return self.out / STATE


def job_of(job: NodeJob) -> str:
    """The job's script. Raises UsageError for what cannot be a job."""
    command = [
        job.launch.slurm.python or sys.executable,
        "-m",
        "exitwave.workflows",
        "train",
        str(job.state / "train.yaml"),
    ]
    command += ["--data", str(job.data), "--out", str(job.out), "--nodes", str(job.nodes), "--ranks", str(job.ranks)]
    command += ["--cache", job.cache] if job.cache else []
    command += ["--cache-capacity", str(job.cache_capacity)] if job.cache_capacity is not None else []
    command += ["--mesh", job.mesh] if job.mesh != "auto" else []
    command += ["--fresh"] if job.fresh else []
    try:
        return training_script(
            job.launch, nodes=job.nodes, ranks=job.ranks, name=job.name, out=job.out, command=command
        )
    except ValueError as error:
        raise UsageError(f"launch: {error}.") from None


def train_on_nodes(session: Session, job: NodeJob, *, script_only: bool, detach: bool) -> dict[str, Any]:
    """The whole of it; returns what came of the training, or the script, or the job's number."""
    script = job_of(job)
    if script_only:
        _write(job, script)
        return {"script": script, "message": script.rstrip("\n")}
    job_id = submit_job(session, job, script)
    if detach:
        told = f"Job {job_id}. The same command without --detach follows it; `exitwave report {job.out}` shows it."
        return {"run": str(job.out), "job": job_id, "script": str(job.state / "job.sh"), "message": told}
    with session.progress() as feed:
        follow_job(session, job, job_id, feed)
    return training_document(job.out)


def run_job(session: Session, job: NodeJob, feed: Callable[[Mapping[str, Any]], None]) -> None:
    """Submit it, or find it under way, and follow it to its end; raises what it ended with."""
    follow_job(session, job, submit_job(session, job, job_of(job)), feed)


def submit_job(session: Session, job: NodeJob, script: str) -> str:
    """The number of RUN's job: one that is under way already, or a new one."""
    _require_tools(job.nodes)
    make_folder(job.state)
    with FileLock(job.state / "submit.lock", blocking=True):
        if (found := _under_way(job)) is not None:
            _refuse_changed(job, found)
            session.note(f"{job.out}: job {found} is at it already; following it.")
            return found
        _write(job, script)
        done = _run("sbatch", "--parsable", str(job.state / "job.sh"))
        if done.returncode != 0:
            told = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            raise UsageError(f"sbatch refuses the job ({job.state / 'job.sh'}): {told}")
        job_id = done.stdout.strip().split(";")[0]
        write_atomic(_record(job), json.dumps({"job": job_id, "name": job.name}).encode())
    session.note(f"{job.out}: job {job_id}, {job.nodes} nodes with {ranks_a_node(job.ranks, job.nodes)} ranks each")
    return job_id


def _require_tools(nodes: int) -> None:
    missing = [tool for tool in ("sbatch", "squeue", "scancel") if shutil.which(tool) is None]
    if missing:
        raise UsageError(
            f"--nodes {nodes}: {', '.join(missing)} not found on PATH. Run it on a node of the cluster; "
            "`exitwave train --script` prints the job's script anywhere."
        )


def require_job(launch: LaunchSection, *, nodes: int, ranks: int) -> None:
    """Say before a campaign of hours that its training could not be submitted. Raises UsageError."""
    try:
        training_script(_filled(launch), nodes=nodes, ranks=ranks, name="job", out=Path("/run"), command=[])
    except ValueError as error:
        raise UsageError(f"launch: {error}.") from None
    _require_tools(nodes)


def refuse_while_job(out: Path) -> None:
    """What is below `out` shall be deleted: UsageError where a job still trains there."""
    records = [path for depth in range(4) for path in out.glob("*/" * depth + f"{STATE}/job.json")]
    for record in records:
        number, name = _read_record(record)
        rows = _asked(name) if number and shutil.which("squeue") is not None else {}
        if rows is None or number in rows:
            what = (
                "may still be at it: squeue does not answer" if rows is None else f"is at it: `scancel {number}` first"
            )
            raise UsageError(f"{record.parent.parent}: job {number} {what}. Nothing was deleted.")


def _record(job: NodeJob) -> Path:
    return job.state / "job.json"


def _recorded(job: NodeJob) -> tuple[str, str]:
    """Number and name of the job that was submitted last; empty where none was."""
    return _read_record(_record(job))


def _read_record(path: Path) -> tuple[str, str]:
    try:
        before = json.loads(read_plain_text(path))
        return str(before["job"]), str(before["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return "", ""


def _under_way(job: NodeJob) -> str | None:
    """The number of RUN's job that is queued or running. Raises InterruptedRunError where squeue does not answer."""
    rows = _rows(job)
    if rows is None:
        raise InterruptedRunError(
            f"{job.out}: squeue does not answer, so whether a job of this folder is under way cannot be told; nothing "
            "was submitted."
        )
    last = _recorded(job)[0]
    return last if last in rows else max(rows, key=lambda number: (len(number), number), default=None)


def _refuse_changed(job: NodeJob, job_id: str) -> None:
    """What a job trains is what it was submitted with, whatever the file says by now."""
    same = False
    with suppress(OSError):
        script, before = read_plain_text(job.state / "job.sh"), read_plain_text(job.state / "train.yaml")
        same = _content(before) == _content(dump_yaml(job.spec.canonical()))
        same = same and shlex.join(["--data", str(job.data)]) in script and (not job.fresh or " --fresh " in script)
    if not same:
        raise UsageError(
            f"{job.out}: job {job_id} is at another training there: its configuration ({job.state / 'train.yaml'}), "
            f"its data set or --fresh ({job.state / 'job.sh'}) is not what is given now. Give those again to follow "
            f"it, `scancel {job_id}` to end it, or another --out."
        )


def _content(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("#")]


def _write(job: NodeJob, script: str) -> None:
    """The script, and the resolved configuration that it names; refuses what would be refused in the job."""
    require_split(job.data, job.spec.train_split)
    refuse_other(job.out, job.spec, job.data, fresh=job.fresh)
    make_folder(job.state)
    text = dump_yaml(job.spec.canonical(), comment=resolved_comment("A training", versions()))
    write_atomic(job.state / "train.yaml", text.encode())
    write_atomic(job.state / "job.sh", script.encode())


def follow_job(session: Session, job: NodeJob, job_id: str, feed: Callable[[Mapping[str, Any]], None]) -> None:
    """Until the job is over; raises what it ended with."""
    tail = EventTail(job.out / "events.jsonl", from_end=True)
    began, asked, state, cancelled, scancel = time.monotonic(), float("-inf"), "", False, ""
    with session.finishing("this step and its checkpoint, by cancelling the job"):
        while True:
            now = time.monotonic()
            for event in tail.read():
                feed(event)
            if session.stop.is_set() and not cancelled and (not scancel or now - asked >= _ASK_S):
                done = _run("scancel", job_id)
                cancelled = done.returncode == 0
                if not cancelled and not scancel:
                    scancel = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
                    session.note(f"scancel {job_id}: {scancel}; it is tried again")
            if now - asked >= _ASK_S:
                asked = now
                before, state = state, _state(job, job_id)
                if state not in ("", "?", before):
                    session.note(f"job {job_id}: {state.lower()}")
                if not state and now - began > _GRACE_S:
                    break
                if not state and _ended(job.state, job_id) is not None:
                    break
            time.sleep(_POLL_S)
    for event in tail.read():
        feed(event)
    if (error := _outcome(job, job_id, cancelled=cancelled)) is not None:
        raise error


def _outcome(job: NodeJob, job_id: str, *, cancelled: bool) -> ExitwaveError | None:
    """How the last attempt of the job ended; None: well."""
    ended = _ended(job.state, job_id)
    verdict = read_verdict(_last_attempt(job.state, job_id))
    log = job.state / f"{job_id}.out"
    if ended == 0:
        return None  # also where it was over before scancel came
    if cancelled:
        where = str(verdict) if isinstance(verdict, InterruptedRunError) else f"{job.out}: job {job_id} was cancelled."
        return InterruptedRunError(where)
    if verdict is not None:
        return verdict
    last = ""
    with suppress(OSError):
        last = " ".join(read_plain_text(log, errors="replace").split())[-300:]
    if ended is None:  # the shell was killed: the walltime, an administrator, a node
        return InterruptedRunError(f"{job.out}: Slurm ended job {job_id}. {log}: {last or 'it is empty or missing'}")
    return error_of(1, f"job {job_id} ended with exit code {ended}. {log}: {last or 'it is empty or missing'}")


def _last_attempt(state: Path, job_id: str) -> Path:
    attempts = [p for p in state.glob(f"{job_id}-*") if p.is_dir() and p.name.rpartition("-")[2].isdigit()]
    return max(attempts, key=lambda p: int(p.name.rpartition("-")[2]), default=state / f"{job_id}-0")


def _ended(state: Path, job_id: str) -> int | None:
    try:
        return int(read_plain_text(_last_attempt(state, job_id) / "ended"))
    except (OSError, ValueError):
        return None


def _state(job: NodeJob, job_id: str) -> str:
    """Slurm's word for the state of a job that is queued or running; empty: neither; "?": squeue does not answer."""
    rows = _rows(job)
    return "?" if rows is None else rows.get(job_id, "")


def _rows(job: NodeJob) -> dict[str, str] | None:
    """Number and state of RUN's jobs that are queued or running; None: squeue does not answer."""
    last, name = _recorded(job)
    rows = _asked(job.name)
    if rows is None or name in ("", job.name):
        return rows
    earlier = _asked(name)  # submitted under another name, which may be that of other folders' jobs too
    return None if earlier is None else rows | {number: earlier[number] for number in (last,) if number in earlier}


def _asked(name: str) -> dict[str, str] | None:
    """Number and state of the jobs of that name."""
    done = _run("squeue", "--noheader", f"--name={name}", "--format=%i %T")
    if done.returncode != 0:
        return None
    return dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if len(line.split()) == 2)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def job_name(word: str, out: Path) -> str:
    """A name that no job for another folder has: Slurm finds jobs by it."""
    folder = hashlib.sha256(os.path.realpath(out).encode(errors="surrogateescape")).hexdigest()[:10]
    return f"exitwave-{''.join(c if c.isalnum() or c in '-_.' else '-' for c in word)[:40]}-{folder}"


def _filled(launch: LaunchSection) -> LaunchSection:
    from exitwave.simulate.cluster_slurm import site_defaults

    return launch.model_copy(update={"slurm": launch.slurm.filled(site_defaults())})


def node_job(
    config_name: str, launch: LaunchSection, *, spec: Any, data: Path, out: Path, nodes: int, ranks: int,
    cache: str | None, cache_capacity: int | None = None, mesh: str = "auto", fresh: bool = False,
) -> NodeJob:  # fmt: skip
    """A job with what the site's Dask configuration says where `launch.slurm` says nothing, and whole paths."""
    if cache is not None and not cache.startswith("$"):
        cache = str(Path(cache).absolute())
    return NodeJob(
        spec=spec, data=find_dataset(data).absolute(), out=out.absolute(), launch=_filled(launch), nodes=nodes,
        ranks=ranks, name=job_name(config_name, out), cache=cache,
        cache_capacity=cache_capacity, mesh=mesh, fresh=fresh,
    )  # fmt: skip
