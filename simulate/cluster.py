"""Where tasks run: the seam between a campaign and Dask.

A cluster takes a key, a function and its arguments, and later gives an `Outcome` for that key, exactly one. An outcome
says of which kind it is (`cluster_outcome`), because a raised error, a killed worker and a lack of memory call for
different answers. Dask is imported by the files `cluster_*.py` alone, and only by those that are asked for:

- `inline`: this process, one task after the other (`cluster_inline`);
- `local`: single-threaded worker processes on this machine (`cluster_local`);
- `cuda`: one worker process for each GPU of this machine (`cluster_cuda`);
- `slurm`: workers in jobs of a batch system, asked for again as they end (`cluster_slurm`);
- `slurm-allocation`: the tasks of one srun (`cluster_allocation`; the command line takes it apart first);
- `tcp://HOST:PORT`, `tls://HOST:PORT`: a scheduler that runs already (`cluster_address`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from exitwave.ingest.errors import UsageError
from exitwave.simulate.cluster_outcome import Outcome
from exitwave.simulate.cluster_spec import SlurmSpec

__all__ = ["EXPECTED", "Cluster", "Outcome", "is_cluster_name", "make_cluster"]


class Cluster(Protocol):
    """Six methods. Between `start` and `close` none of them raises for what a task or a worker does.

    `start` raises UsageError where there is nothing to run on, or workers have other versions than this process.
    `submit` never blocks, also while the scheduler is away. `wait` gives what has ended, at least one outcome unless
    `timeout_s` passes first; it raises InterruptedRunError once the scheduler has been away for too long.
    `cancel` forgets tasks, all or those of `keys`, that no worker has begun; with `begun` also those that run, whose
    worker processes it ends. It returns the keys that it forgot, of which no outcome will come.
    `publish` shows a snapshot (JSON types, under 64 kB) to the page on the scheduler's dashboard. `close` ends what
    was started; with `page` all but the scheduler and its page, which live, and are published to, until `close` is
    called again without: the training that follows a campaign is shown there.

    `n_workers` are the tasks that can run at once, now or as soon as those who were asked for have come. `running`
    gives for each task that a worker holds how many seconds ago it was first seen there; it is a second old at most.
    `queued`: all workers wait in a batch system's queue, which may take days and is nobody's fault.
    """

    name: str
    dashboard_link: str | None

    @property
    def n_workers(self) -> int: ...

    @property
    def running(self) -> Mapping[str, float]: ...

    @property
    def queued(self) -> bool: ...

    def start(self, simulator: str) -> None: ...

    def submit(self, key: str, function: Callable[..., Any], *args: Any) -> None: ...

    def wait(self, timeout_s: float) -> list[Outcome]: ...

    def cancel(self, keys: Collection[str] | None = None, *, begun: bool = False) -> list[str]: ...

    def publish(self, snapshot: Mapping[str, Any]) -> None: ...

    def close(self, *, page: bool = False) -> None: ...


_ADDRESS = re.compile(r"(tcp|tls)://[^\s/]+:[0-9]{1,5}")
_NAMES = ("inline", "local", "slurm", "slurm-allocation", "cuda")
EXPECTED = "inline, local, slurm, cuda, or the address of a scheduler (tcp://HOST:PORT, tls://HOST:PORT)"


def is_cluster_name(name: str) -> bool:
    """Whether `make_cluster` knows the name; whether anybody answers at an address is not asked."""
    return name in _NAMES or _ADDRESS.fullmatch(name) is not None


def make_cluster(
    name: str,
    *,
    workers: int | None = None,
    slurm: SlurmSpec | None = None,
    tls: bool | None = None,
    log_folder: Path | None = None,
) -> Cluster:
    """A cluster by the name given on the command line; not yet started.

    `workers` defaults to one a core (local), one job's (slurm), one a GPU (cuda). `tls` encrypts what goes between
    processes, and lets in nobody without this user's certificate: on for slurm and tls:// addresses, where traffic
    leaves the machine, off for local unless asked for. `log_folder` takes the output of jobs.
    """
    if workers is not None and workers < 1:
        raise UsageError(f"--workers {workers}: at least 1 expected")
    if name == "inline":
        if workers not in (None, 1):
            raise UsageError(f"--cluster inline has one worker, this process; came --workers {workers}")
        from exitwave.simulate.cluster_inline import InlineCluster

        return InlineCluster()
    if name == "local":
        from exitwave.simulate.cluster_local import LocalCluster

        return LocalCluster(workers or len(os.sched_getaffinity(0)), tls=bool(tls))
    if name == "cuda":
        from exitwave.simulate.cluster_cuda import CudaCluster

        return CudaCluster(workers)
    if name == "slurm":
        from exitwave.simulate.cluster_slurm import SlurmCluster

        spec = slurm or SlurmSpec()
        return SlurmCluster(workers or spec.workers_per_job, spec, tls=tls is not False, log_folder=log_folder)
    if _ADDRESS.fullmatch(name):
        from exitwave.simulate.cluster_address import ExistingCluster

        return ExistingCluster(name)
    if name == "slurm-allocation":
        raise UsageError("--cluster slurm-allocation: started by srun alone, one task for each part")
    raise UsageError(f"--cluster {name}: {EXPECTED} expected")
