"""What the verbs have to do with Slurm besides `--cluster slurm`: the script that a plan shows, and one allocation."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from exitwave.simulate.cluster_spec import allocation_script, memory_bytes, worker_script
from exitwave.workflows.config import is_pipeline, load_document, slurm_run
from exitwave.workflows.pipeline_spec import ClusterSection, read_sections

__all__ = ["cluster_of_task", "slurm_script"]

ALLOCATION = "slurm-allocation"


def slurm_script(section: ClusterSection, *, name: str, out: Path, workers: int | None) -> str | None:
    """The job script of a campaign whose `cluster:` section says slurm or slurm-allocation, else None.

    With `slurm` it is the job of one set of workers, of which `exitwave simulate` submits as many as there need to be;
    the scheduler's address is known only then. With `slurm-allocation` it is the whole campaign, for `sbatch`.
    """
    if section.kind == ALLOCATION:
        return allocation_script(
            section.slurm,
            workers=workers or section.workers or section.slurm.workers_per_job,
            command=["exitwave", "simulate", "CAMPAIGN.yaml", "--out", str(out), "--cluster", ALLOCATION],
            name=f"exitwave-{_word(name)}",
        )
    if section.kind == "slurm":
        protocol = "tcp" if section.tls is False else "tls"
        return worker_script(
            section.slurm,
            scheduler=f"{protocol}://CONTROLLER:PORT",
            name="exitwave-PORT",
            log=f"{out}/.slurm/%j.out",
            python=sys.executable,
        )
    return None


def _word(name: str) -> str:
    """A campaign's name as part of a job's: Slurm's own commands separate by blanks and commas."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name)[:60]


@contextlib.contextmanager
def cluster_of_task(cluster: str | None, path: Path, overrides: Sequence[str], out: Path) -> Iterator[str | None]:
    """The cluster that this process is to use: `cluster`, or under `--cluster slurm-allocation` the address of the
    scheduler in the same allocation. For the tasks that are scheduler and workers this never returns."""
    document = load_document(path) if cluster in (None, ALLOCATION) else None
    piped = document is not None and is_pipeline(document)
    section = read_sections(document, overrides, "campaign").cluster if piped and document else ClusterSection()
    if (cluster or section.kind) != ALLOCATION:
        yield cluster
        return
    from exitwave.simulate.cluster_allocation import join_allocation

    with join_allocation(
        out / ".slurm",
        run=slurm_run(),
        memory_per_worker=memory_bytes(section.slurm.memory_per_worker),
        interface=section.slurm.interface,
        tls=section.tls is not False,
    ) as address:
        yield address
