"""The `launch:` section and the job script of a training on several nodes that follows from it: pure functions.

    launch:
      nodes: 4
      cpus_per_rank: 8
      slurm: { partition: gpu, account: phys, walltime: "12:00:00", memory_per_worker: 32GB }

A worker is a rank here. The job starts one task a node (`nodes_agent`), and that one the ranks of its node.

Two minutes before the walltime Slurm sends USR1 to the script's shell, and so it does at a preemption where the site
has `PreemptParameters=send_user_signal`. The shell hands it on to the nodes, which write a checkpoint and leave with
75, and then asks for the job to be queued again. The shell must not hand on a TERM: srun answers a TERM of its own by
killing the tasks. A TERM says that the job is being taken away (scancel, or a preemption without a warning): then
nothing is asked for, since Slurm itself queues what it preempted again, and what somebody cancelled stays cancelled.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from exitwave.ingest.strict_model import StrictModel
from exitwave.simulate.cluster_spec import SlurmSpec, memory_bytes, walltime_seconds

__all__ = ["STATE", "LaunchSection", "ranks_a_node", "training_script"]

STATE = ".slurm"  # of RUN: scripts, logs, and what the nodes of one attempt tell each other


class LaunchSection(StrictModel):
    """Where a training runs. `nodes`: so many nodes of Slurm; without it, this machine alone.

    `cache`: the folder on each node's own disk that shards are staged into; $TMPDIR and $USER are the node's. None:
    ranks read the data set itself. `warning_s`: how long before the walltime the training is told.
    """

    nodes: int | None = Field(default=None, ge=1, le=100_000)
    cpus_per_rank: int = Field(default=1, ge=1, le=1024)
    gpus_per_node: int = Field(default=0, ge=0, le=1024)
    cache: str | None = "$TMPDIR/exitwave-$USER"
    warning_s: int = Field(default=120, ge=1, le=86_400)
    slurm: SlurmSpec = SlurmSpec()

    @field_validator("slurm")
    @classmethod
    def _of_a_training(cls, value: SlurmSpec) -> SlurmSpec:
        if value.workers_per_job != SlurmSpec.model_fields["workers_per_job"].default:  # as a resolved file says it
            raise ValueError("workers_per_job is for campaigns; here `ranks` and `nodes` say how many share a node")
        return value

    @field_validator("cache")
    @classmethod
    def _one_line(cls, value: Any) -> Any:
        if value is not None and (not value.strip() or "\n" in value):
            raise ValueError(f"expected a folder, or null for none, got {value!r}")
        return value


def ranks_a_node(ranks: int, nodes: int) -> int:
    """How many of the ranks each node holds; ValueError where they cannot be shared out evenly."""
    if ranks < nodes or ranks % nodes:
        raise ValueError(f"{ranks} ranks on {nodes} nodes: expected the same number of ranks, one at least, on each")
    return ranks // nodes


def training_script(
    launch: LaunchSection, *, nodes: int, ranks: int, name: str, out: Path, command: Sequence[str]
) -> str:
    """The job: `command` once on each of `nodes`, on behalf of `ranks` ranks in all. `out` is RUN, an absolute path.

    Raises ValueError where the walltime leaves no room for the warning.
    """
    spec, here = launch.slurm, ranks_a_node(ranks, nodes)
    if walltime_seconds(spec.walltime) <= launch.warning_s:
        raise ValueError(f"walltime {spec.walltime}: expected more than the {launch.warning_s} s of launch.warning_s")
    state = out / STATE
    cpus = here * launch.cpus_per_rank
    options = [f"--job-name={name}", f"--output={shlex.quote(f'{_literal(state)}/%j.out')}", "--open-mode=append"]
    options += [f"--partition={spec.partition}"] if spec.partition else []
    options += [f"--account={spec.account}"] if spec.account else []
    options += [f"--nodes={nodes}", "--ntasks-per-node=1", f"--cpus-per-task={cpus}"]
    options += [f"--mem={math.ceil(memory_bytes(spec.memory_per_worker) * here / 2**20)}M"]
    options += [f"--gpus-per-node={launch.gpus_per_node}"] if launch.gpus_per_node else []
    options += [f"--time={spec.walltime}", f"--signal=B:USR1@{launch.warning_s}"]
    options += ["--requeue" if spec.requeue else "--no-requeue", *spec.directives]
    step = ["srun", f"--ntasks={nodes}", "--ntasks-per-node=1", f"--cpus-per-task={cpus}", "--cpu-bind=none"]
    step += ["--kill-on-bad-exit=0", "--wait=0", f"--output={_literal(state)}/%j-node-%n.out", "--open-mode=append"]
    again = '[ "$code" -eq 75 ] && [ -z "$taken" ] && scontrol requeue "$SLURM_JOB_ID"'
    lines = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH {option}" for option in options),
        *spec.prologue,
        f"export OMP_NUM_THREADS={launch.cpus_per_rank}",
        *([f"export EXITWAVE_INTERFACE={shlex.quote(spec.interface)}"] if spec.interface else []),
        'export EXITWAVE_ATTEMPT="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',
        f'state={shlex.quote(str(state))}/"$EXITWAVE_ATTEMPT"; rm -rf "$state"; mkdir -p "$state"; taken=',
        "trap 'kill -USR1 \"$step\"' USR1  # the walltime is near: srun passes it on to the nodes",
        "trap 'taken=1' TERM  # the nodes have it too; handed on to srun it would kill them",
        f"{shlex.join([*step, *command])} &",
        'step=$!; while kill -0 "$step" 2>/dev/null; do wait "$step"; done; wait "$step"; code=$?',
        '[ -s "$state/verdict" ] && read -r code < "$state/verdict"',
        'echo "$code" > "$state/ended"',
        *([again] if spec.requeue else []),
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _literal(path: Path) -> str:
    """A path within a file name pattern of Slurm's."""
    return str(path).replace("%", "%%")
