"""`GroupedAllreduce`: wraps a module as DistributedDataParallel does, and reduces its gradients in tensor groups.

From a gradient to the wire:

1.  A hook runs as soon as autograd has accumulated a parameter's gradient. It moves the gradient to its place in the
    fusion buffer, scaled by this rank's share of the batch in the same pass, and lets `.grad` be that place.
2.  When a tensor group is complete, the schedule (the protocol) says which groups may be reduced now. Their collectives
    start and run behind the backward pass.
3.  At the end of backward, parameters that had no gradient contribute zeros, the remaining groups go out, and the
    engine waits for all of them. `.grad` now holds the mean over ranks. A parameter that no rank used keeps None.

The weights of the ranks add up to one: 1/world size each, or n_local/n_global after `set_local_batch`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from exitwave.ingest.errors import ExitwaveError, UsageError
from exitwave.train.allreduce import groups
from exitwave.train.allreduce.agreement import broadcast_tensors, describe, verify_same
from exitwave.train.allreduce.fusion import FusionBuffers
from exitwave.train.allreduce.groups import GroupPlan
from exitwave.train.allreduce.module_plan import plan_module
from exitwave.train.allreduce.schedules import BitvectorSchedule, Schedule, StaticSchedule, plan_requests
from exitwave.train.allreduce.stall import Progress, Watch
from exitwave.train.transport import Handle, TorchTransport, Transport

__all__ = ["Counters", "GroupedAllreduce"]

_PROTOCOLS = ("static", "bitvector")


@dataclass(kw_only=True)
class Counters:
    """What the engine did since it was made (on this rank)."""

    steps: int = 0  # backward passes that were reduced
    groups: int = 0  # tensor groups reduced
    collectives: int = 0  # data collectives; fewer than groups where neighbours were fused
    bytes: int = 0  # bytes of the tensors given to data collectives
    cycles: int = 0  # negotiation messages
    exposed_s: float = 0.0  # seconds waited after the local backward pass had ended


class GroupedAllreduce(nn.Module):
    """Data-parallel training of any module: after `loss.backward()` its gradients are the mean over ranks.

    Use it as DistributedDataParallel::

        engine = GroupedAllreduce(model)
        loss(engine(x), y).backward()
        optimizer.step()

    Parameters and buffers are made equal to rank 0's at construction, after all ranks compared names, shapes and
    dtypes; a mismatch raises `MismatchError` on every rank. Gradients are views of the engine's buffers: keep a
    clone, not a reference, past the next backward.

    Args:
        module: its parameters that require gradients are reduced; frozen and shared ones are understood.
        protocol: "static" (reduce in the plan's order, no messages) or "bitvector" (agree by bit vectors).
        grouping: "bytes", "bytes:CAP_MB", "layer-blocks", "count:N", an object of `groups`, or a saved `GroupPlan`.
        overlap: "backward".
        compression: None.
        process_group: the ranks to reduce over; None means all. Without torch.distributed, a world of one rank.
        average_over: how many of the ranks hold different samples (a number or a process group); None means all. When
            several ranks share a sample, their gradients are summed. Clear gradients between reductions then.
        timeout_s: a reduction that takes longer raises `StallError` on every rank, naming ranks and tensors.
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
        grouping: str | groups.Grouping | GroupPlan = "bytes",
        overlap: str = "backward",
        compression: str | None = None,
        process_group: Any = None,
        average_over: Any = None,
        timeout_s: float = 120.0,
        transports: tuple[Transport, Transport] | None = None,
    ) -> None:
        super().__init__()
        _check_options(protocol, overlap, compression, timeout_s)
        self.module = module
        named = list(module.named_parameters())  # a shared parameter appears once, under its first name
        self._parameters_by_name = {n: p for n, p in reversed(named) if p.requires_grad}  # ≈ ready order
        self.plan = plan_module(module, self._parameters_by_name, grouping)
        self.counters = Counters()
        self._sync = True
        self._running = False  # between the first hook of a reduced backward pass and its end
        self._finite: bool | None = None
        self._closed = False
        self._ended = time.perf_counter()  # of the last reduction
        self._hooks: list[Any] = []
        self._data: Transport | None = None
        self._control: Transport | None = None
        if transports is None and dist.is_available() and dist.is_initialized() and _size(process_group) > 1:
            data = TorchTransport(process_group, timeout_s=timeout_s, label="data")
            transports = (
                data,
                TorchTransport(process_group, backend="gloo", timeout_s=timeout_s, label="control"),
            )
        self.world_size = transports[0].size if transports else 1
        self._divisor = _divisor(average_over, self.world_size)
        self._weight = 1.0 / self._divisor
        if transports is None or self.world_size == 1:
            return  # one rank: gradients are what they should be
        self._data, self._control = transports
        self._fusion = FusionBuffers(self.plan, self._parameters_by_name)
        self._members = [[(n, self._parameters_by_name[n]) for n in group.names] for group in self.plan.groups]
        self._remaining: list[set[str]] = [set(group.names) for group in self.plan.groups]
        self._flying: list[tuple[tuple[int, ...], Handle[torch.Tensor]]] = []
        self._watch = Watch(
            self._control.board, rank=self._control.rank, size=self.world_size, timeout_s=timeout_s, snapshot=self._note
        )
        try:
            self._agree(protocol)
        except BaseException:
            self._watch.close()
            raise
        self._schedule = self._make_schedule(protocol)
        for group in self.plan.groups:
            for name in group.names:
                hook = partial(self._on_gradient, name, group.index)
                self._hooks.append(self._parameters_by_name[name].register_post_accumulate_grad_hook(hook))

    # ------------------------------------------------------------------------------------------ what users call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._check_open()
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
        if self._finite is None or self._data is None:
            self._finite = self._all_finite()
        return self._finite

    def broadcast_buffers(self) -> None:
        """Make the module's buffers (running statistics) equal to rank 0's; every rank calls it."""
        if self._data is not None:
            self._check_open()
            broadcast_tensors(self._data, list(self.module.buffers()), 0, self._wait)

    def close(self) -> None:
        """Remove the hooks and stop the heartbeat. Use `engine.module` from here on; the engine refuses."""
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._data is not None:
            self._watch.close()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's own, without a prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Into the wrapped module; on every rank the same. `assign` would swap the parameters that are hooked."""
        if assign:
            raise UsageError("load_state_dict(assign=True) replaces parameters: load before wrapping the module")
        return self.module.load_state_dict(state_dict, strict=strict)

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        """The wrapped module's, under their real names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        """The wrapped module's, under their real names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    # ---------------------------------------------------------------------------------------------- construction

    def _agree(self, protocol: str) -> None:
        assert self._data is not None and self._control is not None
        trainable = self._parameters_by_name
        options = {
            "option protocol": protocol,
            "option grouping": self.plan.grouping,
            "option average_over": str(self._divisor),
            "option tensor groups": " | ".join(",".join(group.names) for group in self.plan.groups),
        }
        tensors = {
            name: describe(p) + ("" if name in trainable else " frozen") for name, p in self.module.named_parameters()
        }
        held = {f"buffer {name}": describe(b) for name, b in self.module.named_buffers()}
        # Tensors first: they explain a difference better than the plan that follows from them.
        verify_same(self._control, {**tensors, **held, **options}, self._wait)
        everything = [*self.module.parameters(), *self.module.buffers()]
        broadcast_tensors(self._data, everything, 0, self._wait)

    def _make_schedule(self, protocol: str) -> Schedule:
        assert self._control is not None
        if protocol == "static":
            return StaticSchedule(len(self.plan))
        signatures = {name: describe(p) for name, p in self._parameters_by_name.items()}
        arenas = [self._fusion.arena_of(g) for g in range(len(self.plan))]
        return BitvectorSchedule(self._control, plan_requests(self.plan, signatures), arenas)

    # -------------------------------------------------------------------------------------------- a backward pass

    def _on_gradient(self, name: str, group: int, parameter: torch.Tensor) -> None:
        """Step 1 and 2 of the module's prose."""
        if not self._sync:
            return
        if not self._running:
            self._begin()
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if name not in self._remaining[group]:
            self._fail(
                UsageError(f"the gradient of {name} became ready twice in one backward pass (reentrant checkpoint?)")
            )
        self._place(name, parameter)
        self._remaining[group].discard(name)
        if not self._remaining[group]:
            self._start(self._schedule.complete(group))
        else:
            self._start(self._schedule.poll())

    def _begin(self) -> None:
        self._check_open()
        self._running = True
        self._finite = None

    def _place(self, name: str, parameter: torch.Tensor) -> None:
        """Bring a gradient, scaled, to its view; zeros when there is none."""
        view = self._fusion.views[name]
        gradient = parameter.grad
        if gradient is None or self._weight == 0.0:
            view.zero_()  # not 0·x: a rank without samples may hold NaN
        elif gradient is view or gradient.data_ptr() == view.data_ptr():
            view.mul_(self._weight)
        else:
            if gradient.is_sparse or gradient.dtype != view.dtype or gradient.shape != view.shape:
                kind = "sparse" if gradient.is_sparse else describe(gradient)
                self._fail(UsageError(f"the gradient of {name} is {kind}, expected dense {describe(view)}"))
            torch.mul(gradient.detach(), self._weight, out=view)
        if gradient is not None:
            parameter.grad = view

    def _start(self, runs: list[tuple[int, ...]]) -> None:
        """Start the collectives of `runs`, in order."""
        assert self._data is not None
        for run in runs:
            for group in run:
                used = [p.grad is not None for _, p in self._members[group]]
                self._fusion.write_tail(group, self._weight, used)
            payload = self._fusion.payload(run)
            self.counters.collectives += 1
            self.counters.bytes += payload.numel() * payload.element_size()
            self._flying.append((run, self._data.allreduce(payload, "sum")))

    @torch.no_grad()
    def _finish(self) -> None:
        """Step 3 of the module's prose; autograd calls it at the end of backward."""
        begun = time.perf_counter()
        for group, members in enumerate(self._members):
            if self._remaining[group]:
                for name, parameter in members:
                    if name in self._remaining[group]:
                        self._place(name, parameter)
                self._remaining[group].clear()
                self._start(self._schedule.complete(group))
        for run in self._schedule.finish(lambda handle, what: self._watch.wait(handle, what)):
            self._start([run])
        for run, handle in self._flying:
            self._watch.wait(handle, partial(self._describe_run, run))
        self._flying.clear()
        if time.perf_counter() - self._ended > self._watch.timeout_s / 2:
            self._watch.check(reread=True)  # this rank was away for long: the others may have given it up meanwhile
        for group, members in enumerate(self._members):
            self._attach(group, members)
            self._remaining[group] = {name for name, _ in members}
        self._running = False
        self.counters.steps += 1
        self.counters.groups += len(self.plan)
        self.counters.cycles = self._schedule.cycles
        self._ended = time.perf_counter()
        self.counters.exposed_s += self._ended - begun

    def _attach(self, group: int, members: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Let `.grad` be the reduced view wherever some rank had a gradient."""
        weight, used = self._fusion.read_tail(group)
        whole = self.world_size / self._divisor
        if not abs(weight - whole) < 0.05 * whole:  # loose: a float16 tail sums many small weights
            self._fail(
                UsageError(
                    f"the ranks' weights add up to {weight:.4g}, expected {whole:.4g}: the n_local given to "
                    "set_local_batch do not add up to n_global over the ranks"
                )
            )
        for (name, parameter), by_some_rank in zip(members, used, strict=True):
            if by_some_rank:
                parameter.grad = self._fusion.views[name]

    def _all_finite(self) -> bool:
        if self._data is None or self._control is None:
            gradients = [p.grad for p in self._parameters_by_name.values() if p.grad is not None]
            return all(bool(torch.isfinite(g).all()) for g in gradients)
        self._check_open()
        # min and max carry NaN and infinities; one pass, no temporary.
        ends = [torch.stack(torch.aminmax(arena)) for arena in self._fusion.arenas]
        own = all(bool(torch.isfinite(end).all()) for end in ends)
        flag = torch.tensor([int(own)], dtype=torch.int64)
        return bool(self._wait(self._control.allreduce(flag, "and"), "the finite flag").item())

    # ---------------------------------------------------------------------------------------------------- failing

    def _wait(self, handle: Handle[Any], what: str) -> Any:
        return self._watch.wait(handle, lambda: what)

    def _fail(self, error: ExitwaveError) -> None:
        self._closed = True
        self._watch.fail(error)

    def _check_open(self) -> None:
        if self._data is None:
            return
        self._watch.check()
        if self._closed:
            raise UsageError("the engine was closed: wrap the module again")
        if self._running and torch._C._current_graph_task_id() == -1:  # -1: not within a backward pass
            self._fail(UsageError("the previous backward pass did not reach its end: its gradients are half reduced"))

    def _describe_run(self, run: tuple[int, ...]) -> str:
        names = [name for group in run for name in self.plan.groups[group].names]
        shown = ", ".join(names[:4]) + (f", … ({len(names)} tensors)" if len(names) > 4 else "")
        return f"tensor group {', '.join(map(str, run))} of {len(self.plan)} ({shown})"

    def _note(self) -> Progress:
        """For the heartbeat thread: reads only, tolerates any moment."""
        missing = [name for left in list(self._remaining) for name in list(left)]
        phase = "backward" if self._running else "idle"
        return Progress(step=self.counters.steps, phase=phase, missing=tuple(missing))


def _check_options(protocol: str, overlap: str, compression: str | None, timeout_s: float) -> None:
    if protocol not in _PROTOCOLS:
        raise UsageError(f"protocol {protocol!r} does not exist (yet): choose {' or '.join(_PROTOCOLS)}")
    if overlap != "backward":
        raise UsageError(f"overlap {overlap!r} does not exist (yet): choose backward")
    if compression is not None:
        raise UsageError(f"compression {compression!r} does not exist (yet): leave it out")
    if not timeout_s > 0:
        raise UsageError(f"timeout_s must be positive, got {timeout_s}")


def _size(process_group: Any) -> int:
    return dist.get_world_size(process_group if process_group is not None else dist.group.WORLD)


def _divisor(average_over: Any, world_size: int) -> int:
    if average_over is None:
        return world_size
    divisor = average_over if isinstance(average_over, int) else _size(average_over)
    if not 1 <= divisor <= world_size or world_size % divisor:
        raise UsageError(f"average_over={divisor}: expected a divisor of the world size {world_size}")
    return divisor
