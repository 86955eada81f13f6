"""One rank's reduced backward passes: from a parameter's first gradient to means on all ranks, and how that fails.

Steps 1 to 3 of `engine`'s prose. What the engine was made of (plan, connections, options) is given; which plan it
follows may change between two passes.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from exitwave.ingest.errors import ExitwaveError, UsageError
from exitwave.train.allreduce.agreement import describe
from exitwave.train.allreduce.coordinator import CoordinatorSchedule
from exitwave.train.allreduce.cost import LinkCost
from exitwave.train.allreduce.facade import ModuleFacade
from exitwave.train.allreduce.fusion import FusionBuffers
from exitwave.train.allreduce.groups import GroupPlan
from exitwave.train.allreduce.reducer import Counters, Reducer
from exitwave.train.allreduce.schedules import BitvectorSchedule, Schedule, StaticSchedule, plan_requests
from exitwave.train.allreduce.sparse import reduce_sparse
from exitwave.train.allreduce.stall import Progress, Watch
from exitwave.train.allreduce.step_mode import StepMode
from exitwave.train.allreduce.timeline import Timeline
from exitwave.train.allreduce.tuning import RECHECK_BYTES, Planning, Tuner, measure_link
from exitwave.train.allreduce.wire import CompressedWire, HierarchicalWire, Nodes, PlainWire, Wire
from exitwave.train.transport import Handle, Transport

__all__ = ["BackwardPass"]


class _End:
    """What autograd calls at the end of a pass, and lets go of when an exception breaks the pass off."""

    def __init__(self, engine: BackwardPass) -> None:
        self._engine = engine

    def __call__(self) -> None:
        self._engine._finish()


class BackwardPass(ModuleFacade):
    """The engine's part that autograd calls."""

    plan: GroupPlan
    planning: Planning | None  # how the optimal plan came about, once it has
    counters: Counters
    world_size: int
    announce: Callable[[], float] | None  # within `join`: tells of a reduction, gives a weight's factor
    _parameters_by_name: dict[str, nn.Parameter]
    _sparse: dict[str, nn.Parameter]
    _protocol: str
    _compression: str | None
    _nodes: Nodes | None
    _reducer: Reducer | StepMode | None
    _tuner: Tuner | None
    _timeline: Timeline | None
    _data: Transport | None
    _control: Transport | None
    _watch: Watch
    _divisor: int
    _weight: float
    _sync: bool
    _running: bool  # between the first hook of a reduced backward pass and its end
    _end: weakref.ref[_End]  # of the pass that runs
    _finite: bool | None
    _closed: bool
    _forward_begun: float  # the last one, as the two below
    _backward_begun: float
    _ended: float

    def _on_gradient(self, i: int | None, parameter: torch.Tensor) -> None:
        """Step 1 and 2 of the module's prose, for parameter i (None: a sparse one, which waits for the end)."""
        if not self._sync:
            return
        if not self._running:
            self._begin()
            end = _End(self)
            self._end = weakref.ref(end)
            torch.autograd.Variable._execution_engine.queue_callback(end)
        elif self._end() is None:  # the pass that began this reduction was broken off by an exception
            self._refuse_after_a_broken_pass()
        if i is None:
            return
        if self._tuner is not None and self._tuner.listens:
            self._tuner.ready(i)
        try:
            assert self._reducer is not None
            self._reducer.ready(i)
        except UsageError as error:
            self.fail(error)

    def _begin(self, factor: float = 1.0) -> None:
        self._check_open()
        if self.announce is not None:
            factor = self.announce()
        if self._reducer is None:
            self.fail(UsageError("overlap='step': call optimizer = engine.wrap(optimizer) before the first backward"))
        if self._tuner is not None and self._tuner.due:
            assert self._control is not None
            planning = self._tuner.plan(self.plan, self._control, self.wait, self._measure_again)
            if planning is not None:
                self.planning = planning
                self.counters.plans += 1
                self._use(planning.plan)
        self._running = True
        self._finite = None
        assert self._reducer is not None
        try:
            self._reducer.begin(self._weight * factor)
        except UsageError as error:
            self.fail(error)
        self._backward_begun = time.perf_counter()
        if self._tuner is not None:
            self._tuner.begin()

    @torch.no_grad()
    def _finish(self) -> None:
        """Step 3 of the module's prose; autograd calls it at the end of backward."""
        begun = time.perf_counter()
        try:
            assert self._reducer is not None
            self._reducer.finish(self._watch.wait)
            if self._sparse:
                assert self._data is not None
                reduce_sparse(self._sparse, self._reducer.weight, self._data, self.wait)
            if time.perf_counter() - self._ended > self._watch.timeout_s / 2:
                self._watch.check(reread=True)  # away for long: the others may have given this rank up meanwhile
            self._reducer.attach(self.world_size / self._divisor)
        except UsageError as error:
            self.fail(error)
        self._running = False
        self.counters.steps += 1
        before, self._ended = self._ended, time.perf_counter()
        self.counters.exposed_s += self._ended - begun
        self.counters.reduction_s += self._ended - self._backward_begun
        if self._tuner is not None:
            self._tuner.end(begun, self._ended - begun)
        if self._timeline is not None:
            if self._forward_begun > before:
                self._timeline.add("computation", "forward", self._forward_begun, self._backward_begun)
            self._timeline.add("computation", "backward", self._backward_begun, begun)
            self._timeline.add("exposed", "wait for collectives", begun, self._ended)
            self._timeline.step += 1

    def _all_finite(self) -> bool:
        if self._data is None or self._control is None:
            trained = [*self._parameters_by_name.values(), *self._sparse.values()]
            return all(bool(torch.isfinite(_values(p.grad)).all()) for p in trained if p.grad is not None)
        self._check_open()
        # min and max carry NaN and infinities; one pass, no temporary.
        assert self._reducer is not None
        rows = [*self._reducer.reduced(), *(_values(p.grad) for p in self._sparse.values() if p.grad is not None)]
        ends = [torch.stack(torch.aminmax(row)) for row in rows if row.numel()]
        own = all(bool(torch.isfinite(end).all()) for end in ends)
        flag = torch.tensor([int(own)], dtype=torch.int64)
        return bool(self.wait(self._control.allreduce(flag, "and"), "the finite flag").item())

    # ---------------------------------------------------------------------------------------- following a plan

    def _use(self, plan: GroupPlan) -> None:
        """Reduce by `plan` from here on; not within a reduction."""
        assert self._data is not None
        self.plan = plan
        self._reducer = Reducer(
            plan,
            self._parameters_by_name,
            wire=self._make_wire,
            schedule=self._make_schedule,
            counters=self.counters,
            timeline=self._timeline,
            ranks=self.world_size,
        )

    def _make_wire(self, buffers: FusionBuffers) -> Wire:
        assert self._data is not None
        if self._nodes is not None:
            return HierarchicalWire(buffers, self._nodes)
        return (
            CompressedWire(buffers, self._data, self._compression)
            if self._compression
            else PlainWire(buffers, self._data)
        )

    def _make_schedule(self, buffers: FusionBuffers) -> Schedule:
        assert self._control is not None
        if self._protocol == "static":
            return StaticSchedule(len(self.plan))
        arenas = [buffers.arena_of(g) for g in range(len(self.plan))]
        if self._protocol == "coordinator":
            return CoordinatorSchedule(self._control, [len(group.names) for group in self.plan.groups], arenas)
        signatures = {name: describe(p) for name, p in self._parameters_by_name.items()}
        return BitvectorSchedule(self._control, plan_requests(self.plan, signatures), arenas)

    def _measure_again(self) -> LinkCost:
        assert self._data is not None
        device = next(iter(self._parameters_by_name.values())).device
        nbytes = sum(group.nbytes for group in self.plan.groups)
        return measure_link(self._data, nbytes, device, self.wait, most_bytes=RECHECK_BYTES)

    # ------------------------------------------------------------------------------------------------- failing

    @property
    def control(self) -> Transport:
        """The transport of small messages."""
        assert self._control is not None
        return self._control

    @property
    def data(self) -> Transport:
        """The transport of gradients."""
        assert self._data is not None
        return self._data

    def wait(self, handle: Handle[Any], what: str) -> Any:
        """Wait for a collective; warn, then raise `StallError`, when it takes long."""
        return self._watch.wait(handle, lambda: what)

    def fail(self, error: ExitwaveError) -> NoReturn:
        """Tell all ranks of an error, then raise it; the engine is of no use from here on."""
        self._closed = True
        self._watch.fail(error)
        raise error

    def _check_open(self) -> None:
        if self._data is None:
            return
        self._watch.check()
        if self._closed:
            raise UsageError("the engine was closed: wrap the module again")
        if self._running and torch._C._current_graph_task_id() == -1:  # -1: not within a backward pass
            self._refuse_after_a_broken_pass()

    def _refuse_after_a_broken_pass(self) -> NoReturn:
        self.fail(UsageError("the previous backward pass did not reach its end: its gradients are half reduced"))

    def _note(self) -> Progress:
        """For the heartbeat thread: reads only, tolerates any moment."""
        phase = "backward" if self._running else "idle"
        missing = self._reducer.missing() if self._reducer is not None else ()
        if not self._running:
            missing = (*missing, *self._sparse)
        return Progress(step=self.counters.steps, phase=phase, missing=missing)


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient
