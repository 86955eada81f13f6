"""sbatch, squeue, scancel, scontrol and srun for one machine: a stand-in with walltimes and preemptions.

`SlurmStandIn(folder)` writes the commands to `folder/bin`, to be put on PATH; `folder/jobs` holds one file of JSON for
each job. A job is a runner process (`python slurm_stand_in.py _run FOLDER ID`) that waits for a free slot, starts the
script with bash in a session of its own, sends SIGTERM and, two seconds later, SIGKILL at the walltime, at a `scancel`
or at a preemption, and queues a preempted job again where it was submitted with --requeue.
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
    """For tests. `slots`: how many jobs can run at once."""

    def __init__(self, folder: Path, *, slots: int = 8) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        for path in (self.bin, folder / "jobs"):
            path.mkdir(parents=True)
        (folder / "slots").write_text(str(slots))
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

    def preempt(self, job: str) -> None:
        with locked(self.folder):
            change(self.folder, job, order="preempt")

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
            cwd=str(Path.cwd()),
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
    """All tasks of the job's step on this machine; the exit code is the largest of theirs."""
    command = list(itertools.dropwhile(lambda a: a.startswith("-"), arguments))
    tasks = int(os.environ["SLURM_NTASKS"])
    started = []
    for rank in range(tasks):
        place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_ID": "0", "SLURM_NODEID": "0"}
        started.append(subprocess.Popen(command, env={**os.environ, **place}))
    signal.signal(signal.SIGTERM, lambda *_: None)  # every task gets it too, and ends as it likes
    return max(abs(process.wait()) for process in started)


# --- the runner of one job


def run(folder: Path, job: str) -> int:
    while _wait_for_slot(folder, job):
        end = _run_once(folder, job)
        with locked(folder):
            row = change(folder, job, order="")
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
            if sum(r["state"] == "RUNNING" for r in rows.values()) < int((folder / "slots").read_text()):
                change(folder, job, state="RUNNING", runs=rows[job]["runs"] + 1)
                return True
        time.sleep(0.1)
    return False


def _run_once(folder: Path, job: str) -> str:
    with locked(folder):
        row = read(folder)[job]
    script = folder / "jobs" / f"{job}.sh"
    environment = {**os.environ, "SLURM_JOB_ID": job, "SLURM_NTASKS": str(row["tasks"]), "SLURM_JOB_NAME": row["name"]}
    if row["runs"] > 1:
        environment["SLURM_RESTART_COUNT"] = str(row["runs"] - 1)
    with (Path(row["cwd"]) / row["output"]).open("ab") as log:
        process = subprocess.Popen(
            ["bash", str(script)], start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env=environment, cwd=row["cwd"],
        )  # fmt: skip
    end = time.monotonic() + row["seconds"]
    state = "COMPLETED"
    while process.poll() is None:
        order = read(folder)[job]["order"] if (folder / "jobs").exists() else "cancel"
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
