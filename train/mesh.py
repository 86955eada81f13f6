"""Who the ranks are and how they agree.

A training runs as one process per rank. Gradients travel through the allreduce engine; everything that the ranks must
decide together (stop now? did a rank fail? what is the global loss?) travels here, over a process group of its own so
that it can never be matched with a gradient.

The rule for failures: a rank that meets an error does not just leave, it tells the others at the next point of
agreement, and all of them raise the same error with the rank's number in it. A rank that is killed cannot tell; then
the others' next collective fails, and says that contact was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from exitwave.ingest.errors import DamagedDataError, ExitwaveError, InterruptedRunError, UsageError

__all__ = ["Agreement", "RankInfo", "Ranks", "open_ranks"]

T = TypeVar("T")
_CLASSES: dict[str, type[ExitwaveError]] = {
    cls.__name__: cls for cls in (ExitwaveError, UsageError, DamagedDataError, InterruptedRunError)
}


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """This process's place, as the launcher gave it. `init_method` says where the ranks meet (torch.distributed).

    `attempt`: how often the launcher has started the ranks again.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    init_method: str = "env://"
    attempt: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank: expected 0 <= rank < {self.world_size} (the world size), got {self.rank}")


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What all ranks know after `Ranks.agree`."""

    stop: bool
    clock_s: float


class Ranks:
    """Collectives of the control group; each must be called by every rank, in the same order."""

    def __init__(self, info: RankInfo, group: dist.ProcessGroup) -> None:
        self.info = info
        self.process_group = group

    @property
    def is_first(self) -> bool:
        return self.info.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Each value summed over the ranks, in float64."""
        return self.start_sum(*values)()

    def start_sum(self, *values: float) -> Callable[[], list[float]]:
        """As `sum`, behind the caller's back: what is returned waits for the sums. Call it before the next collective.

        A rank that starts it early has nothing to wait for by the time all the others have started it too.
        """
        vector = torch.tensor(values, dtype=torch.float64)
        with self.contact():
            work = dist.all_reduce(vector, group=self.process_group, async_op=True)

        def collect() -> list[float]:
            with self.contact():
                work.wait()
            sums: list[float] = vector.tolist()
            return sums

        return collect

    def gather(self, value: T) -> list[T]:
        """Everybody's value, in the order of ranks. The value is pickled."""
        out: list[Any] = [None] * self.info.world_size
        with self.contact():
            dist.all_gather_object(out, value, group=self.process_group)
        return out

    def from_first(self, work: Callable[[], T]) -> T:
        """Does `work` on rank 0 only and gives its result to all; an error there is raised by all."""
        outcome: list[Any] = [None, None]
        if self.is_first:
            try:
                outcome = ["ok", work()]
            except Exception as error:
                outcome = ["error", _packed(error)]
                self._share(outcome)
                raise
        self._share(outcome)
        if outcome[0] == "error":
            raise _unpacked(0, outcome[1])
        result: T = outcome[1]
        return result

    def agree(self, *, error: Exception | None = None, stop: bool = False, clock_s: float = 0.0) -> Agreement:
        """Whether any rank wants to stop, and rank 0's clock. All raise the error of any rank, naming it."""
        return self.start_agree(error=error, stop=stop, clock_s=clock_s)()

    def start_agree(
        self, *, error: Exception | None = None, stop: bool = False, clock_s: float = 0.0
    ) -> Callable[[], Agreement]:
        """As `agree`, behind the caller's back: what is returned waits for it, and raises what it would raise."""
        sums = self.start_sum(float(error is not None), float(stop), clock_s if self.is_first else 0.0)

        def collect() -> Agreement:
            failed, stopping, clock = sums()
            if failed:
                packed = self.gather(_packed(error) if error is not None else None)
                if error is not None:
                    raise error
                rank = next(i for i, entry in enumerate(packed) if entry is not None)
                raise _unpacked(rank, packed[rank])
            return Agreement(stop=stopping > 0, clock_s=clock)

        return collect

    def barrier(self) -> None:
        self.sum(0.0)

    def _share(self, outcome: list[Any]) -> None:
        with self.contact():
            dist.broadcast_object_list(outcome, src=0, group=self.process_group)

    @contextmanager
    def contact(self) -> Iterator[None]:
        """Within, a collective that fails says that a rank is gone."""
        try:
            yield
        except RuntimeError as error:
            raise ExitwaveError(
                f"rank {self.info.rank} of {self.info.world_size}: lost contact with another rank, which failed or was "
                f"killed (its own message says why); the run resumes from its last checkpoint. [{error}]"
            ) from error


@contextmanager
def open_ranks(info: RankInfo, *, timeout_s: float) -> Iterator[Ranks]:
    """Joins the ranks into a process group (gloo) and leaves it at the end; an existing default group is used as it is.

    A single rank gets a group too: there is one path through the trainer.
    """
    timeout = timedelta(seconds=timeout_s)
    ours = not dist.is_initialized()
    if ours and info.world_size == 1:
        dist.init_process_group(
            "gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    elif ours:
        store, _, _ = next(rendezvous(info.init_method, info.rank, info.world_size, timeout=timeout))
        # torchrun keeps one store over its restarts, and gloo would connect to the addresses of ranks that are gone
        dist.init_process_group(
            "gloo",
            store=c10d.PrefixStore(f"attempt/{info.attempt}", store),
            rank=info.rank,
            world_size=info.world_size,
            timeout=timeout,
        )
    try:
        if dist.get_world_size() != info.world_size or dist.get_rank() != info.rank:
            raise UsageError(
                f"process group: expected rank {info.rank} of {info.world_size}, it is rank {dist.get_rank()} of "
                f"{dist.get_world_size()}"
            )
        group = dist.new_group(backend="gloo", timeout=timeout)
        yield Ranks(info, group)
    finally:
        if ours:
            dist.destroy_process_group()


def _packed(error: Exception) -> tuple[str, str]:
    return type(error).__name__, str(error)


def _unpacked(rank: int, packed: Any) -> ExitwaveError:
    name, message = packed
    if name in _CLASSES:
        return _CLASSES[name](f"rank {rank}: {message}")
    return ExitwaveError(f"rank {rank} failed: {name}: {message}")
