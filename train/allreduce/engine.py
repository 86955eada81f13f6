"""`GroupedAllreduce`: wraps a module as DistributedDataParallel does, and reduces its gradients in tensor groups.

From a gradient to the wire:

1.  A hook runs as soon as autograd has accumulated a parameter's gradient. The gradient moves to its place in the
    fusion buffer, scaled by this rank's share of the batch, and `.grad` becomes that place (`reducer`).
2.  When a tensor group is complete, the schedule (the protocol) says which groups may be reduced now. Their collectives
    start and run behind the backward pass.
3.  At the end of backward, parameters that had no gradient contribute zeros, the remaining groups go out, and the
    engine waits for all of them. `.grad` now holds the mean over ranks. A parameter that no rank used keeps None.

With grouping "optimal" the first plan is as "bytes" would make it, the next is made after a few measured reductions,
and others when measurements drift (`tuning`). A change happens between two reductions, at the same count on every rank.

The weights of the ranks add up to one: 1/world size each, or n_local/n_global after `set_local_batch`.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from exitwave.ingest.errors import UsageError
from exitwave.train.allreduce import groups
from exitwave.train.allreduce.agreement import broadcast_tensors, describe, verify_same
from exitwave.train.allreduce.backward_pass import BackwardPass
from exitwave.train.allreduce.groups import GroupPlan
from exitwave.train.allreduce.join import join, refuse_while_joining
from exitwave.train.allreduce.module_plan import plan_module, tensor_infos
from exitwave.train.allreduce.options import check_options, divisor_of, group_size, refuse_ranks_that_never_met
from exitwave.train.allreduce.reducer import Counters, Reducer
from exitwave.train.allreduce.ring import Ring
from exitwave.train.allreduce.sharded_optimizer import check_optimizer, describe_optimizer, mark_unscaled
from exitwave.train.allreduce.sparse import sparse_parameters
from exitwave.train.allreduce.stall import Watch
from exitwave.train.allreduce.step_mode import StepMode, open_step_ring, plan_for_steps
from exitwave.train.allreduce.timeline import Timeline, to_chrome
from exitwave.train.allreduce.tuning import Planning, Tuner, agree_on_link, measure_link
from exitwave.train.allreduce.unchanged import Unchanged, refuse_shared_memory
from exitwave.train.allreduce.wire import Nodes, check_node_size
from exitwave.train.transport import TorchTransport, Transport

__all__ = ["Counters", "GroupedAllreduce"]


class GroupedAllreduce(BackwardPass):
    """Data-parallel training of any module: after `loss.backward()` its gradients are the mean over ranks.

    Use it as DistributedDataParallel::

        engine = GroupedAllreduce(model)
        loss(engine(x), y).backward()
        optimizer.step()

    Parameters and buffers are made equal to rank 0's at construction, after all ranks compared names, shapes and
    dtypes; a mismatch raises `MismatchError` on every rank. An engine that wrapped the module before is closed.
    Gradients are views of the engine's buffers: keep a
    clone, not a reference, past the next backward.

    Args:
        module: its parameters that require gradients are reduced; frozen and shared ones are understood.
        protocol: "static" (reduce in the plan's order, no messages), "bitvector" (agree by bit vectors) or
            "coordinator" (rank 0 decides; for comparison).
        grouping: "optimal" (measure, then the plan that ends soonest), "optimal:MAX_MB", "bytes", "bytes:CAP_MB",
            "layer-blocks", "count:N", an object of `groups`, or a saved `GroupPlan`.
        overlap: "backward" (as DDP: communication hides behind backward) or "step" (it spans the whole step; needs
            `wrap(optimizer)`, leaves `.grad` undefined after backward: see `step_mode`).
        compression: "fp16" or "bf16": gradients travel in 16 bits, everything else stays as it is (`wire` has the bound
            on the error); None.
        process_group: the ranks to reduce over; None means all. Without torch.distributed, a world of one rank.
        average_over: how many of the ranks hold different samples (a number or a process group); None means all. When
            several ranks share a sample, their gradients are summed. Clear gradients between reductions then.
        timeout_s: a reduction that takes longer raises `StallError` on every rank, naming ranks and tensors.
        timeline: record what happens when, for `write_timeline`.
        node_size: reduce in two levels, ranks 0..node_size-1 being one node, the next as many another, … (see `wire`).
        transports: (data, control) to use instead of torch.distributed; two, since their orders are independent.

    Raises:
        UsageError: an option that does not exist, a parameter that cannot be reduced, ranks that do not match.
        StallError: from construction or backward, when a rank died, failed or never took part.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        protocol: str = "static",
        grouping: str | groups.Grouping | GroupPlan = "optimal",
        overlap: str = "backward",
        compression: str | None = None,
        process_group: Any = None,
        average_over: Any = None,
        timeout_s: float = 120.0,
        timeline: bool = False,
        node_size: int | None = None,
        transports: tuple[Transport, Transport] | None = None,
    ) -> None:
        super().__init__()
        check_options(protocol, overlap, compression, timeout_s, node_size)
        if any(isinstance(part, GroupedAllreduce) for part in module.modules()):
            raise UsageError("the module is, or holds, a GroupedAllreduce: wrap engine.module after engine.close()")
        self.module = module
        named = list(module.named_parameters())  # a shared parameter appears once, under its first name
        self._sparse = sparse_parameters(module)
        if self._sparse and overlap == "step":
            raise UsageError(f"overlap='step' does not serve sparse gradients: {', '.join(self._sparse)}")
        dense = [(n, p) for n, p in reversed(named) if p.requires_grad and n not in self._sparse]  # ≈ ready order
        self._parameters_by_name = dict(dense)
        self.plan = plan_module(module, self._parameters_by_name, grouping, sparse=bool(self._sparse))
        self.planning: Planning | None = None  # how the optimal plan came about, once it has
        self.counters = Counters()
        self._timeline = Timeline() if timeline else None
        self._tuner: Tuner | None = None
        self._compression = compression
        self._nodes: Nodes | None = None
        self.announce: Callable[[], float] | None = None  # within `join`: tells of a reduction, gives a weight's factor
        self._reducer: Reducer | StepMode | None = None
        self._ring: Ring | None = None  # of overlap "step"
        self._sync = True
        self._running = False  # between the first hook of a reduced backward pass and its end
        self._finite: bool | None = None
        self._closed = False
        self._forward_begun = self._backward_begun = self._ended = time.perf_counter()  # the last ones
        self._hooks: list[Any] = []
        self._unchanged: Unchanged | None = None
        self._data: Transport | None = None
        self._control: Transport | None = None
        if transports is None:
            refuse_ranks_that_never_met()
        if transports is None and dist.is_available() and dist.is_initialized() and group_size(process_group) > 1:
            if node_size is not None:  # before any connection: one closed early is a rank that crashed, to the others
                check_node_size(node_size, group_size(process_group))
            data = TorchTransport(process_group, timeout_s=timeout_s, label="data")
            transports = (
                data,
                TorchTransport(process_group, backend="gloo", timeout_s=timeout_s, label="control"),
            )
        self.world_size = transports[0].size if transports else 1
        self._divisor = divisor_of(average_over, self.world_size)
        self._weight = 1.0 / self._divisor
        if transports is None or self.world_size == 1:
            return  # one rank: gradients are what they should be
        self._data, self._control = transports
        self._protocol = protocol
        if node_size is not None:
            self._nodes = Nodes(process_group, node_size, timeout_s)
        if overlap == "step":
            self._ring = open_step_ring(process_group, self._data, timeout_s)
        else:
            self._use(self.plan)
        self._watch = Watch(
            self._control.board, rank=self._control.rank, size=self.world_size, timeout_s=timeout_s, snapshot=self._note
        )
        try:
            self._agree()
            self._tune(grouping)
        except BaseException:
            self._watch.close()
            raise
        trained = {**self._parameters_by_name, **self._sparse}
        _close_engines_of(trained.values())
        self._unchanged = Unchanged(module, trained)
        for i, parameter in enumerate(self._parameters_by_name.values()):
            self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, i)))
        for parameter in self._sparse.values():
            self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, None)))

    # ------------------------------------------------------------------------------------------ what users call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._check_open()
        if self._unchanged is not None and torch.is_grad_enabled():
            self._check_unchanged(self._unchanged)
        self._forward_begun = time.perf_counter()
        return self.module(*args, **kwargs)

    def set_local_batch(self, n_local: int, n_global: int) -> None:
        """From now on weight this rank's gradients (a mean over its samples) by n_local/n_global.

        Args:
            n_local: samples that this rank's loss averages; 0 makes it contribute zeros whatever its gradients hold.
            n_global: samples of all ranks together (each counted once where ranks share samples).

        Under `no_sync` the weight in force at the reducing backward pass applies to what was accumulated.
        """
        if not 0 <= n_local <= n_global or n_global < 1:
            raise UsageError(f"set_local_batch: need 0 <= n_local <= n_global, got {n_local} of {n_global}")
        if self.world_size == 1 and n_local != n_global:
            raise UsageError(f"set_local_batch: the only rank holds the whole batch, not {n_local} of {n_global}")
        self._weight = n_local / n_global

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate on this rank; the next one outside reduces the sum."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @contextlib.contextmanager
    def join(self, *, divide_by_initial_world_size: bool = True) -> Iterator[None]:
        """Within, ranks may have unequal numbers of batches; every rank enters it. See `join`, the module.

        Args:
            divide_by_initial_world_size: as in DDP: the mean stays one over all ranks; else over those still active.
        """
        if self._ring is not None:
            raise UsageError("join() serves overlap='backward' only")
        if self._data is None:
            yield
            return
        self._check_open()
        with join(self, over_all=divide_by_initial_world_size):
            yield

    def contribute_nothing(self, factor: float) -> None:
        """For a rank that has joined: zeros, with the weight (x `factor`) that makes the ranks' weights a whole."""
        for parameter in self.module.parameters():
            parameter.grad = None
        self._check_open()
        self._begin(factor)
        self._finish()

    def contribute_zeros(self) -> None:
        """Take part in a reduction without a backward pass: for a rank that has no samples this step."""
        self._check_open()
        if self._data is not None:
            self._begin()
            self._finish()

    def finite(self) -> bool:
        """Whether the reduced gradients are all finite. Every rank calls it and every rank gets the same answer.

        The answer is agreed by one control message of 8 bytes, once for each reduction.
        """
        refuse_while_joining("finite")
        if self._finite is None or self._data is None:
            self._finite = self._all_finite()
        return self._finite

    def wrap(self, optimizer: torch.optim.Optimizer, *, elementwise: bool = False) -> torch.optim.Optimizer:
        """The optimizer to use instead of `optimizer`; every rank calls it once, with the same one.

        With overlap "step": a `ShardedOptimizer`, which updates this rank's share of parameters and state and has the
        parameters gathered behind the next forward pass. What state `optimizer` holds (a checkpoint's) is taken over.
        Else `optimizer` itself.

        Args:
            optimizer: an element-wise one, over all parameters of the module that require gradients.
            elementwise: vouch for an optimizer that is not torch's own.

        Raises:
            UsageError: an optimizer that does not treat each element by itself, or that misses parameters.
            MismatchError: ranks that give different optimizers.
        """
        if self._ring is None:
            return optimizer
        self._check_open()
        assert self._control is not None
        if self._reducer is not None:
            raise UsageError("wrap was called before: one engine, one optimizer")
        assert self._unchanged is not None
        self._check_unchanged(self._unchanged)
        try:
            shared = refuse_shared_memory(self.module, self._parameters_by_name)
            if shared is not None:
                raise UsageError(shared)
            param_groups = check_optimizer(optimizer, self._parameters_by_name, elementwise=elementwise)
            verify_same(self._control, describe_optimizer(optimizer, param_groups), self.wait)
        except UsageError as error:
            self.fail(error)
        self._reducer = StepMode(
            self.plan,
            self.module,
            self._parameters_by_name,
            optimizer,
            param_groups,
            ring=self._ring,
            control=self._control,
            watch=self._watch,
            counters=self.counters,
            timeline=self._timeline,
        )
        self._unchanged = Unchanged(self.module, self._parameters_by_name, pinned=True)
        return self._reducer.optimizer

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the mean gradients to a norm of at most `max_norm`; returns the norm before, the same on all ranks.

        With overlap "step" this is a barrier: it waits for all reduce-scatters and sends one small message.
        """
        if isinstance(self._reducer, StepMode):
            self._check_open()
            norm = self._reducer.norm(norm_type)
            factor = float(max_norm) / (float(norm) + 1e-6)
            if factor < 1.0 or factor != factor:
                self._reducer.scale(factor)
            return norm
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)

    def unscale_(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """`scaler.unscale_(optimizer)` of a `torch.amp.GradScaler`, with the same verdict on every rank.

        Call it between backward and `scaler.step(optimizer)`; with overlap "step" it is needed, and a barrier as
        `clip_grad_norm_` is.
        """
        if isinstance(self._reducer, StepMode):
            self._check_open()
            found = torch.full((), 0.0 if self.finite() else 1.0)
            self._reducer.scale(1.0 / scaler.get_scale())
            mark_unscaled(scaler, optimizer, found)
        else:
            scaler.unscale_(optimizer)

    @contextlib.contextmanager
    def full_parameters(self) -> Iterator[None]:
        """Within, all parameters of the module are whole and may be read by any way, or changed alike on all ranks.

        Reading an attribute in a forward pass, `state_dict` and `load_state_dict` need no such care.
        """
        if isinstance(self._reducer, StepMode):
            self._check_open()
            self._reducer.wait_for_gathers()
        yield

    def broadcast_buffers(self) -> None:
        """Make the module's buffers (running statistics) equal to rank 0's; every rank calls it."""
        refuse_while_joining("broadcast_buffers")
        if self._data is not None:
            self._check_open()
            broadcast_tensors(self._data, list(self.module.buffers()), 0, self.wait)

    def write_timeline(self, path: Path) -> None:
        """Rank 0 writes what all ranks did so far in Chrome's trace format; every rank calls it."""
        refuse_while_joining("write_timeline")
        if self._timeline is None:
            raise UsageError("there is no timeline to write: construct the engine with timeline=True")
        rows = [self._timeline.to_json()]
        if self._control is not None:
            self._check_open()
            rows = self.wait(self._control.gather(rows[0]), "the timelines of all ranks")
        if self._control is None or self._control.rank == 0:
            path.write_text(json.dumps(to_chrome([Timeline.from_json(row) for row in rows])), encoding="utf-8")

    def close(self) -> None:
        """Remove the hooks and stop the heartbeat. Use `engine.module` from here on; the engine refuses."""
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if isinstance(self._reducer, StepMode):
            self._reducer.close()
        if self._nodes is not None:
            self._nodes.pump.close()
        if self._data is not None:
            self._watch.close()

    def _check_unchanged(self, unchanged: Unchanged) -> None:
        problem = unchanged.problem()
        if problem is not None:
            self.fail(UsageError(f"rank {self.control.rank}: {problem}"))

    # ---------------------------------------------------------------------------------------------- construction

    def _agree(self) -> None:
        assert self._data is not None and self._control is not None
        trainable = self._parameters_by_name
        options = {
            "option protocol": self._protocol,
            "option grouping": self.plan.grouping,
            "option average_over": str(self._divisor),
            "option overlap": "backward" if self._ring is None else "step",
            "option compression": str(self._compression),
            "option node_size": str(self._nodes.node_size if self._nodes is not None else None),
            "option tensor groups": " | ".join(",".join(group.names) for group in self.plan.groups),
        }
        tensors = {
            name: describe(p) + ("" if name in trainable else " frozen") for name, p in self.module.named_parameters()
        }
        held = {f"buffer {name}": describe(b) for name, b in self.module.named_buffers()}
        # Tensors first: they explain a difference better than the plan that follows from them.
        verify_same(self._control, {**tensors, **held, **options}, self.wait)
        everything = [*self.module.parameters(), *self.module.buffers()]
        broadcast_tensors(self._data, everything, 0, self.wait)

    def _tune(self, grouping: str | groups.Grouping | GroupPlan) -> None:
        """Prepare the second plan, where one is asked for."""
        assert self._data is not None
        chosen = groups.parse_grouping(grouping) if isinstance(grouping, str) else grouping
        if not isinstance(chosen, groups.Optimal) or not self._parameters_by_name:
            return
        device = next(iter(self._parameters_by_name.values())).device
        nbytes = sum(group.nbytes for group in self.plan.groups)
        link = measure_link(self._data, nbytes, device, self.wait)
        if self._ring is None:
            self._tuner = Tuner(chosen, tensor_infos(self.module, self._parameters_by_name), link)
        else:
            assert self._control is not None
            link = agree_on_link(link, self._control, self.wait)
            self.plan = plan_module(self.module, self._parameters_by_name, plan_for_steps(chosen, nbytes, link))


def _close_engines_of(parameters: Iterable[nn.Parameter]) -> None:
    """Two engines would both reduce: wrong by a factor, and nobody may hold the older one any more to close it."""
    for parameter in parameters:
        for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
            owner = getattr(getattr(hook, "func", None), "__self__", None)
            if isinstance(owner, GroupedAllreduce):
                owner.close()
