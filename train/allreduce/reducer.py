"""A plan at work on one rank: gradients into the fusion buffers, complete groups onto the wire, means back.

A gradient is brought to its place in the fusion buffer, scaled by this rank's share of the batch, in one of two ways:

- a large one at once, while it is in the processor's cache, by one multiplication that writes to its place;
- small neighbours together, when their tensor group is complete: flattened by one call and scaled by another. A call
  from Python costs more than the bytes of a small tensor do, and a network may have a thousand of them.

Both compute gradient x weight once, so the result is the same to the bit. From then on `.grad` is the place itself.

Per gradient only counters change; everything that can be known before is computed when the plan is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch._utils import _flatten_dense_tensors

from exitwave.ingest.errors import UsageError
from exitwave.train.allreduce.agreement import describe
from exitwave.train.allreduce.fusion import FusionBuffers, weights_do_not_add_up
from exitwave.train.allreduce.groups import GroupPlan
from exitwave.train.allreduce.schedules import Schedule, Wait
from exitwave.train.allreduce.timeline import Timeline
from exitwave.train.allreduce.wire import Wire
from exitwave.train.transport import Handle

__all__ = ["Counters", "Moments", "Reducer"]

_LARGE_BYTES = 32 * 2**10  # from here on the memory, not the call, is what a gradient costs


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Of one reduction on this rank, by the performance counter: its first gradient, its collectives, its end."""

    begun: float
    started: tuple[tuple[float, int], ...]  # when each collective was started, and its bytes
    ended: float


@dataclass(kw_only=True)
class Counters:
    """What the engine did since it was made (on this rank)."""

    steps: int = 0  # backward passes that were reduced
    groups: int = 0  # tensor groups reduced
    collectives: int = 0  # data collectives; fewer than groups where neighbours were fused
    bytes: int = 0  # bytes of the tensors given to data collectives
    cycles: int = 0  # negotiations
    plans: int = 0  # plans made from measurements, the first included
    exposed_s: float = 0.0  # seconds waited after the local backward pass had ended
    reduction_s: float = 0.0  # seconds from a pass's first gradient to the end of its reduction
    last: Moments | None = None  # the last reduction, with overlap "backward"


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """Small neighbours of one tensor group: their numbers, and the slice in which they lie one after the other."""

    members: tuple[int, ...]
    flat: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class _Flight:
    run: tuple[int, ...]
    handle: Handle[torch.Tensor]
    begun: float
    nbytes: int


class Reducer:
    """Tensors go by their number, their place in `parameters`, whatever the plan.

    `ready` and `finish` raise `UsageError` for what this rank alone may have met: whoever calls tells the others.
    """

    def __init__(
        self,
        plan: GroupPlan,
        parameters: Mapping[str, torch.Tensor],
        *,
        wire: Callable[[FusionBuffers], Wire],
        schedule: Callable[[FusionBuffers], Schedule],
        counters: Counters,
        timeline: Timeline | None,
        ranks: int,
    ) -> None:
        self.plan = plan
        self._ranks = ranks
        self.buffers = FusionBuffers(plan, parameters)
        self._wire = wire(self.buffers)
        self._schedule = schedule(self.buffers)
        self._counters = counters
        self._timeline = timeline
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._views = [self.buffers.views[name] for name in self._names]
        number = {name: i for i, name in enumerate(self._names)}
        self._members = [[number[name] for name in group.names] for group in plan.groups]
        self._group_of = [0] * len(number)
        self._at_once = bytearray(len(number))
        for g, members in enumerate(self._members):
            for i in members:
                self._group_of[i] = g
                self._at_once[i] = not _is_small(self._views[i])
        self._batches = [self._cut_batches(g) for g in range(len(plan))]
        self._ready = bytearray(len(number))
        self._left = [len(members) for members in self._members]
        self._lacking: list[list[int]] = [[] for _ in plan.groups]  # members that have no gradient on this rank
        self._flights: list[_Flight] = []
        self._noticed = 0  # of them, by the timeline
        self._cycles = 0  # of the schedule, as far as they are counted
        self.weight = 1.0
        self._begun = 0.0

    def _cut_batches(self, group: int) -> list[_Batch]:
        """Runs of small neighbours within a group."""
        flat = self.buffers.gradients_of(group)
        batches: list[_Batch] = []
        run: list[int] = []
        start = end = 0
        for i in [*self._members[group], -1]:
            if i >= 0 and not self._at_once[i]:
                run.append(i)
                end += self._views[i].numel()
                continue
            if run:
                batches.append(_Batch(members=tuple(run), flat=flat[start:end]))
            run = []
            start = end = end + (self._views[i].numel() if i >= 0 else 0)
        return batches

    # ------------------------------------------------------------------------------------------ a backward pass

    def begin(self, weight: float) -> None:
        """A reduction starts; this rank's gradients count `weight`."""
        self.weight = weight
        self._begun = time.perf_counter()

    def ready(self, i: int) -> None:
        """Tensor i has its gradient."""
        if self._ready[i]:
            name = self._names[i]
            raise UsageError(f"the gradient of {name} became ready twice in one backward pass (reentrant checkpoint?)")
        self._ready[i] = 1
        if self._at_once[i]:
            self._place(i)
        group = self._group_of[i]
        self._left[group] -= 1
        if not self._left[group]:
            self._complete(group)
        elif self._schedule.polls:
            self._start(self._schedule.poll())
        if self._timeline is not None:
            self._notice()

    def finish(self, wait: Wait) -> None:
        """Zeros for what got no gradient, the remaining groups out, then wait for all."""
        for group, left in enumerate(self._left):
            if left:
                for i in self._members[group]:
                    if self._at_once[i] and not self._ready[i]:
                        self._place(i)
                    self._ready[i] = 1
                self._complete(group)
        for run in self._schedule.finish(wait):
            self._start([run])
        for flight in self._flights:
            wait(flight.handle, lambda run=flight.run: self._describe(run))  # type: ignore[misc]
            if self._timeline is not None:
                self._notice()
        started = tuple((flight.begun, flight.nbytes) for flight in self._flights)
        self._counters.last = Moments(begun=self._begun, started=started, ended=time.perf_counter())
        self._counters.cycles += self._schedule.cycles - self._cycles
        self._cycles = self._schedule.cycles

    def attach(self, whole: float) -> None:
        """After `finish`: let `.grad` be the mean where any rank had a gradient. The weights must add up to `whole`."""
        for group, members in enumerate(self._members):
            weight, used = self.buffers.read_tail(group)
            problem = weights_do_not_add_up(weight, whole, self._ranks, self._wire.dtype_of(group))
            if problem is not None:
                raise UsageError(problem)
            if self._lacking[group]:
                some_rank_used = dict(zip(members, used, strict=True))
                for i in self._lacking[group]:
                    if some_rank_used[i]:
                        self._parameters[i].grad = self._views[i]
                self._lacking[group] = []
            self._left[group] = len(members)
        self._ready = bytearray(len(self._ready))
        self._flights.clear()
        self._noticed = 0
        self._counters.groups += len(self.plan)

    def reduced(self) -> list[torch.Tensor]:
        """After `finish`: all mean gradients, as flat tensors (with their control tails)."""
        return self.buffers.arenas

    def missing(self) -> tuple[str, ...]:
        """Names of tensors that this rank has not ready; for another thread, at any moment."""
        return tuple(name for name, ready in zip(self._names, self._ready, strict=True) if not ready)

    # --------------------------------------------------------------------------------------------------- inside

    def _complete(self, group: int) -> None:
        for batch in self._batches[group]:
            if not self._place_together(batch):
                for i in batch.members:
                    self._place(i)
        self._start(self._schedule.complete(group))

    def _place_together(self, batch: _Batch) -> bool:
        """Bring gradients that are as they should be to their places; False, nothing done, if one is not."""
        if self.weight == 0.0:
            return False
        parameters, views = self._parameters, self._views
        gradients: list[torch.Tensor] = []
        in_place = 0
        for i in batch.members:
            gradient = parameters[i].grad
            if gradient is None or gradient.is_sparse:
                return False
            in_place += gradient is views[i]
            gradients.append(gradient)
        if in_place == len(gradients):  # cleared with set_to_none=False, or accumulated
            batch.flat.mul_(self.weight)
            return True
        flat = _flatten_dense_tensors(gradients).detach()
        if flat.dtype != batch.flat.dtype or flat.shape != batch.flat.shape:
            return False
        torch.mul(flat, self.weight, out=batch.flat)
        for i in batch.members:
            parameters[i].grad = views[i]
        return True

    def _place(self, i: int) -> None:
        """Bring one gradient, scaled, to its view; zeros when there is none."""
        parameter, view = self._parameters[i], self._views[i]
        gradient = parameter.grad
        if gradient is None:
            self._lacking[self._group_of[i]].append(i)
            view.zero_()
            return
        if self.weight == 0.0:
            view.zero_()  # not 0·x: a rank without samples may hold NaN
        elif gradient is view or (not gradient.is_sparse and gradient.data_ptr() == view.data_ptr()):
            view.mul_(self.weight)
        else:
            if gradient.is_sparse or gradient.dtype != view.dtype or gradient.shape != view.shape:
                kind = "sparse" if gradient.is_sparse else describe(gradient)
                raise UsageError(f"the gradient of {self._names[i]} is {kind}, expected dense {describe(view)}")
            torch.mul(gradient.detach(), self.weight, out=view)
        parameter.grad = view

    def _start(self, runs: Sequence[tuple[int, ...]]) -> None:
        """Start the collectives of `runs`, in order."""
        for run in runs:
            for group in run:
                lacking = frozenset(self._lacking[group])
                used = [i not in lacking for i in self._members[group]] if lacking else None
                self.buffers.write_tail(group, self.weight, used)
            begun = time.perf_counter()
            handle, nbytes = self._wire.start(run)
            self._counters.collectives += 1
            self._counters.bytes += nbytes
            self._flights.append(_Flight(run=run, handle=handle, begun=begun, nbytes=nbytes))

    def _notice(self) -> None:
        """For the timeline: collectives that have ended meanwhile."""
        assert self._timeline is not None
        while self._noticed < len(self._flights) and self._flights[self._noticed].handle.done():
            flight = self._flights[self._noticed]
            name = f"tensor group {', '.join(map(str, flight.run))}"
            self._timeline.add("collective", name, flight.begun, time.perf_counter(), flight.nbytes)
            self._noticed += 1

    def _describe(self, run: tuple[int, ...]) -> str:
        names = [name for group in run for name in self.plan.groups[group].names]
        shown = ", ".join(names[:4]) + (f", … ({len(names)} tensors)" if len(names) > 4 else "")
        return f"tensor group {', '.join(map(str, run))} of {len(self.plan)} ({shown})"


def _is_small(view: torch.Tensor) -> bool:
    """Small, and laid out so that flattening a gradient and flattening the view give the same order."""
    return view.is_contiguous() and view.numel() * view.element_size() < _LARGE_BYTES
