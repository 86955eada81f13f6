"""What a `cluster:` section says of a batch system, and the job scripts that follow from it: pure functions of text.

    cluster:
      kind: slurm
      workers: 64
      slurm: { partition: cpu, account: phys, walltime: "04:00:00", workers_per_job: 16, memory_per_worker: 3GB }

One job is one set of single-threaded workers. What the section leaves open is taken from `jobqueue.slurm` in the user's
own Dask configuration (~/.config/dask/jobqueue.yaml), where sites and users of dask-jobqueue have it already.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, field_validator

from exitwave.ingest.strict_model import StrictModel

__all__ = ["SlurmSpec", "allocation_script", "jobs_for", "memory_bytes", "walltime_seconds", "worker_script"]

_WALLTIME = re.compile(r"(?:(\d+)-)?(\d{1,3}):(\d{2}):(\d{2})")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)B?", re.IGNORECASE)
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}


class SlurmSpec(StrictModel):
    """How jobs are asked for. `directives` are further options of sbatch, `prologue` lines before the workers start.

    `interface` is the network interface (`ib0`) by which workers reach the scheduler; without it, the address that the
    host's own name has.
    """

    partition: str | None = None
    account: str | None = None
    walltime: str = "01:00:00"
    workers_per_job: int = Field(default=1, ge=1, le=1024)
    memory_per_worker: str = "4GB"
    directives: tuple[str, ...] = ()
    prologue: tuple[str, ...] = ()
    interface: str | None = None
    requeue: bool = True
    python: str | None = None

    @field_validator("walltime")
    @classmethod
    def _time(cls, value: str) -> str:
        if walltime_seconds(value) < 1:
            raise ValueError("a walltime is longer than nothing")
        return value

    @field_validator("memory_per_worker")
    @classmethod
    def _memory(cls, value: str) -> str:
        memory_bytes(value)
        return value

    @field_validator("partition", "account", "interface", "python", "directives", "prologue")
    @classmethod
    def _one_line(cls, value: Any) -> Any:
        for text in (value,) if isinstance(value, str) else value or ():
            if "\n" in text or "\r" in text or not text.strip():
                raise ValueError(f"expected one line of text, got {text!r}")
        return value

    def filled(self, site: Mapping[str, Any]) -> SlurmSpec:
        """With what `site`, the section `jobqueue.slurm` of Dask's configuration, says where this one says nothing."""
        found: dict[str, Any] = {
            "partition": site.get("queue"),
            "account": site.get("account") or site.get("project"),
            "walltime": site.get("walltime"),
            "interface": site.get("interface"),
            "python": site.get("python"),
            "directives": tuple(site.get("job-extra-directives") or ()),
            "prologue": tuple(site.get("job-script-prologue") or ()),
        }
        said = {k for k in self.model_fields_set if getattr(self, k) not in (None, ())}  # a resolved file says null
        new = {k: v for k, v in found.items() if v and k not in said}
        return SlurmSpec.model_validate({**self.model_dump(exclude_unset=True), **new})


def walltime_seconds(text: str) -> int:
    """Seconds of Slurm's `[days-]hours:minutes:seconds`; ValueError for anything else."""
    found = _WALLTIME.fullmatch(text)
    if found is None or int(found[3]) > 59 or int(found[4]) > 59:
        raise ValueError(f'expected [DAYS-]HH:MM:SS in quotes, such as "04:00:00", got {text!r}')
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((24 * days + hours) * 60 + minutes) * 60 + seconds


def memory_bytes(text: str) -> int:
    """`4GB`, `3500MiB` in bytes. Slurm's units are binary, and so these are; ValueError for anything else."""
    found = _MEMORY.fullmatch(text.strip())
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"expected a size such as 4GB, got {text!r}")
    return int(float(found[1]) * 1024 ** _POWERS[found[2][0].upper()])


def jobs_for(workers: int, spec: SlurmSpec) -> int:
    """How many jobs hold that many workers."""
    return math.ceil(workers / spec.workers_per_job)


def _header(spec: SlurmSpec, *, name: str, log: str, cpus: int, tasks: int = 1) -> list[str]:
    """The lines of `#SBATCH`. A log is named by job id, so that a job that ran twice appends."""
    mebibytes = math.ceil(memory_bytes(spec.memory_per_worker) * (cpus if tasks == 1 else 1) / 2**20)
    memory = f"--mem={mebibytes}M" if tasks == 1 else f"--mem-per-cpu={mebibytes}M"
    options = [f"--job-name={name}", f"--output={shlex.quote(log)}", "--open-mode=append"]
    options += [f"--partition={spec.partition}"] if spec.partition else []
    options += [f"--account={spec.account}"] if spec.account else []
    options += [f"--ntasks={tasks}", f"--cpus-per-task={cpus if tasks == 1 else 1}", memory, f"--time={spec.walltime}"]
    options += ["--requeue" if spec.requeue else "--no-requeue", *spec.directives]
    return ["#!/usr/bin/env bash", *(f"#SBATCH {option}" for option in options)]


def _environment(spec: SlurmSpec) -> list[str]:
    end = f"export DASK_EXITWAVE__END_TIME=$(($(date +%s) + {walltime_seconds(spec.walltime)}))"
    return [end, "export OMP_NUM_THREADS=1"]


def worker_script(spec: SlurmSpec, *, scheduler: str, name: str, log: str, python: str, tls: Sequence[str] = ()) -> str:
    """The job of one set of workers, which join the scheduler at that address. `tls`: options of `dask worker`.

    Workers are told when their job will end, and take no task that could not end before. They end by themselves a
    minute after their scheduler is gone.
    """
    command = [
        spec.python or python, "-m", "distributed.cli.dask_worker", scheduler,
        "--nthreads", "1", "--nworkers", str(spec.workers_per_job),
        "--memory-limit", str(memory_bytes(spec.memory_per_worker)),
        "--death-timeout", "60", "--no-dashboard",
    ]  # fmt: skip
    command += ["--interface", spec.interface] if spec.interface else []
    quoted = f'{shlex.join(command)} --name "exitwave-$SLURM_JOB_ID"'
    lines = [
        *_header(spec, name=name, log=log, cpus=spec.workers_per_job),
        *spec.prologue,
        *_environment(spec),
        f'exec {quoted} --local-directory "${{TMPDIR:-/tmp}}" {shlex.join(tls)}'.rstrip(),
    ]
    return "\n".join(lines) + "\n"


def allocation_script(spec: SlurmSpec, *, workers: int, command: Sequence[str], name: str) -> str:
    """The whole campaign as one job: srun starts the scheduler, the controller, and the workers.

    `command` is `exitwave simulate … --cluster slurm-allocation`. Two tasks more than workers are asked for. Two
    minutes before its walltime it is told, commits what it has, and asks to be queued again, until all is done.
    """
    spec = spec.model_copy(update={"directives": (*spec.directives, "--signal=TERM@120")})
    lines = [
        *_header(spec, name=name, log=f"{name}-%j.out", cpus=1, tasks=workers + 2),
        *spec.prologue,
        *_environment(spec),
        f"srun --kill-on-bad-exit=0 {shlex.join(command)}",
        'code=$?; [ "$code" -eq 75 ] && scontrol requeue "$SLURM_JOB_ID"; exit "$code"',
    ]
    return "\n".join(lines) + "\n"
