"""One allocation of Slurm holds all: `srun -n 34 exitwave simulate … --cluster slurm-allocation`.

Every task of the step runs the same command line, and dask-jobqueue's SLURMRunner gives it its part: task 0 becomes the
scheduler, task 1 goes on as the controller, all others become workers. They meet by a file in the shared folder, whose
name says which run of the job this is: one that was killed before the job was queued again leaves a dead address.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path

from distributed import Client, Status

from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import read_plain_text
from exitwave.simulate.cluster_local import scheduler_habits, scratch_folder
from exitwave.simulate.cluster_tls import security

__all__ = ["join_allocation"]


@contextlib.contextmanager
def join_allocation(
    folder: Path, *, run: str, memory_per_worker: int, interface: str | None, tls: bool
) -> Iterator[str]:
    """The address of the scheduler, for the one task that is the controller; for all others this never returns.

    `run` names this run of the job: those of one srun agree on it, and no other has the same. At the end, also that by
    an error, the scheduler ends, and with it the workers. Raises UsageError outside an allocation or where
    dask-jobqueue is missing.
    """
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    try:
        from dask_jobqueue.slurm import SLURMRunner, WorldTooSmallException
    except ImportError:
        raise UsageError(
            "--cluster slurm-allocation needs dask-jobqueue, which is not installed: pip install 'exitwave[slurm]'"
        ) from None
    scheduler_habits()
    folder.mkdir(parents=True, exist_ok=True)
    where: dict[str, object] = {"interface": interface} if interface else {}
    where |= {"security": security(), "protocol": "tls"} if tls else {}
    workers = {"nthreads": 1, "memory_limit": memory_per_worker, "local_directory": scratch_folder(), **where}
    workers |= {"dashboard": False}
    # Slurm's warning goes to all tasks. Only the controller may follow it: it commits what the workers have in hand,
    # and ends them; and srun's exit code is then the controller's, by which the script knows that there is more to do.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        runner = SLURMRunner(
            scheduler_file=str(folder / f"scheduler-{{job_id}}-{run}.json"),
            scheduler_options={"dashboard_address": "127.0.0.1:0", **where},
            worker_class="distributed.Nanny",
            worker_options=workers,
        )
    except WorldTooSmallException as error:
        raise UsageError(f"--cluster slurm-allocation: {error} Give srun more tasks (-n)") from None
    except RuntimeError as error:
        raise UsageError(
            f"--cluster slurm-allocation: this is no task of Slurm ({error}); start it by srun, in a job of its own"
        ) from None
    finally:
        # The runner takes Ctrl-C for itself, by which its scheduler and workers end; the controller has its own way.
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])
    address = str(json.loads(read_plain_text(Path(runner.scheduler_file)))["address"])
    try:
        yield address
    finally:
        _end(address, where.get("security"))
        runner.status = Status.closed  # what it would do itself cannot be done under TLS


def _end(address: str, secured: object) -> None:
    """Tell the scheduler to end, and with it the workers; else they would fill the allocation until its walltime."""
    with contextlib.suppress(OSError, TimeoutError):
        Client(address, timeout=10, security=secured).shutdown()
