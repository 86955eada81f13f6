"""sbatch, squeue, scancel, scontrol and srun for one machine: a stand-in with walltimes and preemptions.

`SlurmStandIn(folder)` writes the commands to `folder/bin`, to be put on PATH; `folder/jobs` holds one file of JSON for
each job. A job is a runner process (`python slurm_stand_in.py _run FOLDER ID`) that waits for a free slot, starts the
script with bash in a session of its own, sends SIGTERM and, two seconds later, SIGKILL at the walltime, at a `scancel`
or at a preemption, and queues a preempted job again where it was submitted with --requeue.

With `nodes`, a job takes as many of them as it asks for by --nodes: its script runs on the first, and srun starts one
task on each. A node is a prefix of commands (`ip netns exec …`), and a folder that is TMPDIR there. As Slurm's own,
this srun passes signals on to its tasks but answers SIGTERM by killing them, and `--signal=B:USR1@S` goes to the
script's shell alone, before the walltime or at a preemption that warns (`preempt(job, warning_s=…)`); without `B:` it
goes to all processes that srun started.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

KILL_AFTER_S = 2.0
COMMANDS = ("sbatch", "squeue", "scancel", "scontrol", "srun")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in (folder / "jobs").glob("*.json")}


def change(folder: Path, job: str, **values: Any) -> dict[str, Any]:
    path = folder / "jobs" / f"{job}.json"
    content: dict[str, Any] = {**(json.loads(path.read_text()) if path.exists() else {}), **values}
    path.with_suffix(".part").write_text(json.dumps(content))
    path.with_suffix(".part").rename(path)
    return content


class SlurmStandIn:
    """For tests. `slots`: how many jobs can run at once. `nodes`: name -> prefix of the commands that run there."""

    def __init__(self, folder: Path, *, slots: int = 8, nodes: dict[str, list[str]] | None = None) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        for path in (self.bin, folder / "jobs"):
            path.mkdir(parents=True)
        (folder / "slots").write_text(str(slots))
        (folder / "nodes.json").write_text(json.dumps(nodes or {}))
        for name in nodes or {}:
            (folder / "tmp" / name).mkdir(parents=True)
        for name in COMMANDS:
            file = self.bin / name
            words = [sys.executable, str(Path(__file__).resolve()), name, str(folder)]
            file.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            file.chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}

    def jobs(self, *states: str) -> dict[str, dict[str, Any]]:
        with locked(self.folder):
            found = read(self.folder)
        return {k: v for k, v in found.items() if not states or v["state"] in states}

    def preempt(self, job: str, *, warning_s: float = 0.0) -> None:
        """Take the job's nodes away; with a warning, its own signal comes first."""
        with locked(self.folder):
            change(self.folder, job, order="preempt", warning_s=warning_s)

    def shorten(self, job: str, seconds: float) -> None:
        """The walltime of this run of the job ends in so many seconds."""
        with locked(self.folder):
            change(self.folder, job, until=time.monotonic() + seconds)

    def end_node(self, name: str) -> None:
        """Kill all that runs on a node that is a network namespace."""
        self.signal_node(name, signal.SIGKILL)

    def signal_node(self, name: str, number: signal.Signals) -> None:
        """To all that runs on a node that is a network namespace."""
        space = json.loads((self.folder / "nodes.json").read_text())[name][-1]
        done = subprocess.run(["ip", "netns", "pids", space], check=True, capture_output=True, text=True)
        for pid in map(int, done.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        """Cancel everything and wait for it."""
        subprocess.run([self.bin / "scancel", *self.jobs()], check=True)
        until = time.monotonic() + 20
        while self.jobs("PENDING", "RUNNING", "COMPLETING") and time.monotonic() < until:
            time.sleep(0.1)


# --- the commands


def sbatch(folder: Path, arguments: list[str]) -> int:
    files = [a for a in arguments if not a.startswith("-")]
    script = Path(files[0]).read_text() if files else sys.stdin.read()
    if (refusal := folder / "refuse").exists():
        print(f"sbatch: error: {refusal.read_text()}", file=sys.stderr)
        return 1
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", script, flags=re.MULTILINE))
    with locked(folder):
        job = str(1 + max(map(int, read(folder)), default=100))
        (folder / "jobs" / f"{job}.sh").write_text(script)
        change(
            folder, job, state="PENDING", name=options.get("job-name", "sbatch"), runs=0, order="",
            seconds=_seconds(options.get("time", "01:00:00")), tasks=int(options.get("ntasks", "1")),
            requeue="requeue" in options, output=shlex.split(options["output"])[0].replace("%j", job),
            cwd=str(Path.cwd()), nodes=int(options.get("nodes", "1")), signal=options.get("signal", ""), allotted=[],
        )  # fmt: skip
    subprocess.Popen(
        [sys.executable, __file__, "_run", str(folder), job],
        start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    print(job if "--parsable" in arguments else f"Submitted batch job {job}")
    return 0


def _seconds(text: str) -> int:
    hours, minutes, seconds = map(int, text.split(":"))
    return 3600 * hours + 60 * minutes + seconds


def squeue(folder: Path, arguments: list[str]) -> int:
    if (folder / "silent").exists():
        print("slurm_load_jobs error: Unable to contact slurm controller", file=sys.stderr)
        return 1
    names = [a.partition("=")[2] for a in arguments if a.startswith("--name=")]
    with locked(folder):
        for job, row in sorted(read(folder).items()):
            if row["state"] in ("PENDING", "RUNNING", "COMPLETING") and (not names or row["name"] in names):
                print(job, row["state"])
    return 0


def scancel(folder: Path, arguments: list[str]) -> int:
    with locked(folder):
        for job in arguments:
            if (folder / "jobs" / f"{job}.json").exists():
                change(folder, job, order="cancel")
    return 0


def scontrol(folder: Path, arguments: list[str]) -> int:
    if arguments[:1] == ["requeue"]:
        with locked(folder):
            change(folder, arguments[1], order="requeue")
    return 0


def srun(folder: Path, arguments: list[str]) -> int:
    """All tasks of the job's step; the exit code is the largest of theirs. On nodes, one task each."""
    command = list(itertools.dropwhile(lambda a: a.startswith("-"), arguments))
    options = dict(a[2:].partition("=")[::2] for a in arguments[: len(arguments) - len(command)])
    nodes = json.loads((folder / "nodes.json").read_text())
    hosts = [h for h in os.environ.get("SLURM_JOB_NODELIST", "").split(",") if h]
    per_node = int(options.get("ntasks-per-node", "1"))
    tasks = len(hosts) * per_node if hosts else int(options.get("ntasks", os.environ["SLURM_NTASKS"]))
    started: list[subprocess.Popen[bytes]] = []
    for rank in range(tasks):
        node = rank // per_node if hosts else 0
        place = {
            "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % per_node if hosts else rank), "SLURM_STEP_ID": "0",
            "SLURM_NODEID": str(node), "SLURM_NTASKS": str(tasks), "SLURM_STEP_NUM_TASKS": str(tasks),
        }  # fmt: skip
        prefix: list[str] = []
        if hosts:
            prefix = nodes[hosts[node]]
            place |= {"SLURMD_NODENAME": hosts[node], "TMPDIR": str(folder / "tmp" / hosts[node])}
        name = options.get("output", "/dev/stdout")
        with Path(name.replace("%j", os.environ["SLURM_JOB_ID"]).replace("%n", str(node))).open("ab") as log:
            started.append(subprocess.Popen([*prefix, *command], env={**os.environ, **place}, stdout=log, stderr=log))

    def kill(*_: object) -> None:
        print("srun: forcing job termination", file=sys.stderr, flush=True)
        for process in started:
            process.kill()

    signal.signal(signal.SIGTERM, kill)
    signal.signal(signal.SIGUSR1, lambda *_: [p.send_signal(signal.SIGUSR1) for p in started])
    codes = [process.wait() for process in started]
    return max(128 - code if code < 0 else code for code in codes)


# --- the runner of one job


def run(folder: Path, job: str) -> int:
    while _wait_for_slot(folder, job):
        end = _run_once(folder, job)
        with locked(folder):
            row = change(folder, job, order="", until=0.0)
            if end not in ("PREEMPTED", "REQUEUED") or not row["requeue"]:
                change(folder, job, state=end)
                return 0
            change(folder, job, state="PENDING")
        time.sleep(0.5)
    return 0


def _wait_for_slot(folder: Path, job: str) -> bool:
    while (folder / "jobs").exists():
        with locked(folder):
            rows = read(folder)
            if rows[job]["order"] == "cancel":
                change(folder, job, state="CANCELLED")
                return False
            busy = {
                h
                for k, r in rows.items()
                if k != job and r["state"] in ("RUNNING", "COMPLETING")
                for h in r["allotted"]
            }
            nodes = json.loads((folder / "nodes.json").read_text())
            free = [name for name in nodes if name not in busy]
            slots = int((folder / "slots").read_text())
            if sum(r["state"] == "RUNNING" for r in rows.values()) < slots and (
                not nodes or len(free) >= rows[job]["nodes"]
            ):
                change(
                    folder, job, state="RUNNING", runs=rows[job]["runs"] + 1, allotted=free[: rows[job]["nodes"]]
                )  # fmt: skip
                return True
        time.sleep(0.1)
    return False


def _run_once(folder: Path, job: str) -> str:
    with locked(folder):
        row = read(folder)[job]
    script = folder / "jobs" / f"{job}.sh"
    environment = {**os.environ, "SLURM_JOB_ID": job, "SLURM_NTASKS": str(row["tasks"]), "SLURM_JOB_NAME": row["name"]}
    prefix: list[str] = []
    if row["allotted"]:
        prefix = json.loads((folder / "nodes.json").read_text())[row["allotted"][0]]
        environment |= {"SLURM_JOB_NODELIST": ",".join(row["allotted"]), "SLURM_NNODES": str(row["nodes"])}
    if row["runs"] > 1:
        environment["SLURM_RESTART_COUNT"] = str(row["runs"] - 1)
    with (Path(row["cwd"]) / row["output"]).open("ab") as log:
        process = subprocess.Popen(
            [*prefix, "bash", str(script)], start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env=environment, cwd=row["cwd"],
        )  # fmt: skip
    end = time.monotonic() + row["seconds"]
    warning = re.fullmatch(r"(B:)?(\w+)@(\d+)", row["signal"])
    warn_at = end - int(warning[3]) if warning else float("inf")
    state, preempted_at = "COMPLETED", 0.0
    while process.poll() is None:
        now = read(folder)[job] if (folder / "jobs").exists() else {"order": "cancel"}
        order = now["order"]
        if now.get("until") and warning and end != now["until"]:
            end = now["until"]
            warn_at = end - int(warning[3])
        if order == "preempt" and not preempted_at:
            preempted_at = time.monotonic() + now.get("warning_s", 0.0)
            warn_at = 0.0 if warning and now.get("warning_s") else float("inf")
        if time.monotonic() > warn_at:
            warn_at = float("inf")
            _warn(process.pid, warning)
        if order == "preempt" and time.monotonic() < preempted_at:
            time.sleep(0.05)
            continue
        if order == "requeue" and process.poll() is None and "scontrol requeue" in script.read_text():
            time.sleep(0.05)  # the script asked for it, and is about to end
            continue
        if order in ("cancel", "preempt", "requeue") or time.monotonic() > end:
            state = {"cancel": "CANCELLED", "preempt": "PREEMPTED", "requeue": "REQUEUED"}.get(order, "TIMEOUT")
            with locked(folder):
                change(folder, job, state="COMPLETING")
            _end(process)
            return state
        time.sleep(0.05)
    _sweep(process.pid)
    if state == "COMPLETED" and read(folder)[job]["order"] == "requeue":
        return "REQUEUED"
    return state if process.returncode == 0 else "FAILED"


def _warn(shell: int, warning: re.Match[str] | None) -> None:
    """The signal that the job asked for: to its shell (B:), else to all processes of its steps, not to srun."""
    assert warning is not None
    number = signal.Signals[f"SIG{warning[2]}"]
    if warning[1]:
        os.kill(shell, number)
        return
    for srun in psutil.Process(shell).children():
        for member in srun.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.send_signal(number)


def _end(process: subprocess.Popen[bytes]) -> None:
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for how in (signal.SIGTERM, signal.SIGKILL):
        for member in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.send_signal(how)
        _, tree = psutil.wait_procs(tree, timeout=KILL_AFTER_S)
    process.wait()
    _sweep(process.pid)


def _sweep(session: int) -> None:
    """What a job leaves behind is ended with it, as cgroups do."""
    for member in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(member.pid) == session:
                member.kill()


if __name__ == "__main__":
    if sys.argv[1] == "_run":
        sys.exit(run(Path(sys.argv[2]), sys.argv[3]))
    sys.exit(globals()[sys.argv[1]](Path(sys.argv[2]), sys.argv[3:]))
