"""`overlap="step"`: communication spans the whole step, half of it behind backward, half behind the next forward.

1.  Backward. When a tensor group's gradients are complete on this rank, its reduce-scatter is handed to the pump, in
    the plan's order. `.grad` is let go: after backward it is undefined, and this rank holds the mean of its share only.
2.  `optimizer.step()`. For each group, in the order in which the forward pass needs them: update this rank's share,
    then gather the parameters. All of that is handed to the pump; the call returns at once.
3.  The next forward pass. Whatever reads a parameter first waits for its group: hooks before each module that owns
    parameters, and the attribute access itself (`linear.weight`, also by another module) for all others.
4.  The next backward pass begins when all gathers have ended.

So at each moment parameters are either whole or waited for, and are the same to the bit on every rank. The limit of a
step is max(compute, communication), where `overlap="backward"` has forward + max(backward, communication).

A norm over all gradients (`clip_grad_norm_`) and unscaling (`unscale_`) need every reduce-scatter to have ended and a
sum over ranks before the first update: a barrier between 1 and 2. It costs what of the reduce-scatters backward did
not hide, plus one small message.

The order of need is what rank 0's first forward pass did; the others take it over before the first gather.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import nn

from exitwave.ingest.errors import ExitwaveError, UsageError
from exitwave.train.allreduce.access import watch_access
from exitwave.train.allreduce.agreement import SameSettings
from exitwave.train.allreduce.cost import LinkCost
from exitwave.train.allreduce.fusion import weights_do_not_add_up
from exitwave.train.allreduce.groups import ByBytes, GroupPlan, Optimal
from exitwave.train.allreduce.pump import Job, Pump
from exitwave.train.allreduce.reducer import Counters
from exitwave.train.allreduce.ring import Ring, open_ring
from exitwave.train.allreduce.sharded_optimizer import (
    ShardedOptimizer,
    ShareStates,
    cut_states,
    describe_optimizer,
    pack_states,
    whole_states,
)
from exitwave.train.allreduce.shards import GroupShards
from exitwave.train.allreduce.stall import Watch
from exitwave.train.allreduce.timeline import Timeline
from exitwave.train.transport import TorchTransport, Transport

__all__ = ["StepMode", "open_step_ring", "plan_for_steps"]

_JOB_S = 1.2e-3  # what a reduce-scatter and a gather cost beside their bytes, where ranks = cores
_MOST_GROUPS = 32


def plan_for_steps(chosen: Optimal, nbytes: int, link: LinkCost) -> ByBytes:
    """What grouping "optimal" means with overlap "step": a cap on the bytes of a group, from the measured link.

    With n groups min(1, 2/n) of the communication C is exposed, at the end of backward and the beginning of forward,
    and each group costs `_JOB_S`; so either n = sqrt(2 C / job), or, where the link is so fast that this gains less
    than its jobs cost, one group.
    """
    communication_s = link.alpha_s + link.beta_s_per_byte * nbytes
    n = min(math.sqrt(2 * communication_s / _JOB_S), _MOST_GROUPS)
    if n <= 2 or 2 * communication_s / n + n * _JOB_S >= communication_s + _JOB_S:
        n = 1.0
    cap_mb = math.ceil(nbytes / n / 2**20 * 1e3) / 1e3  # rounded up: one group must hold all
    return ByBytes(min(max(cap_mb, 1e-3), chosen.max_mb))


def open_step_ring(process_group: Any, data: Transport, timeout_s: float) -> Ring:
    """A ring on connections of its own; collective as `TorchTransport` is."""
    if not isinstance(data, TorchTransport):
        raise UsageError("overlap='step' needs torch.distributed; transports of one's own serve overlap='backward'")
    return open_ring(TorchTransport(process_group, timeout_s=timeout_s, label="step"))


class StepMode:
    """One rank's end. Stands where a `Reducer` does: `begin`, `ready`, `finish`, `attach`, `missing`."""

    def __init__(
        self,
        plan: GroupPlan,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        plain: torch.optim.Optimizer,
        param_groups: Sequence[int],
        *,
        ring: Ring,
        control: Transport,
        watch: Watch,
        counters: Counters,
        timeline: Timeline | None = None,
    ) -> None:
        self.plan = plan
        self._timeline = timeline
        self._names = list(parameters)
        self._ring, self._control, self._watch, self._counters = ring, control, watch, counters
        number = {name: i for i, name in enumerate(self._names)}
        of_param = dict(zip(self._names, param_groups, strict=True))
        # within a group the order is free: tensors with the same settings side by side make few, long shares
        self._members = [sorted((number[n] for n in g.names), key=lambda i: param_groups[i]) for g in plan.groups]
        self._place = {i: (g, m) for g, members in enumerate(self._members) for m, i in enumerate(members)}
        listed = list(parameters.values())
        self.shards = [
            GroupShards(
                [listed[i] for i in members],
                [of_param[self._names[i]] for i in members],
                rank=control.rank,
                size=control.size,
            )
            for members in self._members
        ]
        self._parameters = listed
        self._states = ShareStates(plain)
        self._deal_out(plain.state)
        plain.state.clear()
        self.optimizer = ShardedOptimizer(
            plain, step=self._step, discard=self._discard, collect=self._collect, deal_out=self._deal_out
        )
        self._pump = Pump("exitwave-step", sever=ring.sever, note=self._note if timeline is not None else None)
        self.weight = self._whole = 1.0
        self._settings = SameSettings(control)
        self._scale: float | None = None  # gradients are multiplied by it before the update
        self._ready = bytearray(len(listed))
        self._left = [len(members) for members in self._members]
        self._lacking: list[set[int]] = [set() for _ in self._members]  # members without a gradient on this rank
        self._next = 0  # group whose reduce-scatter is to start next
        self._reducing: list[Job] = []  # of the last backward pass, until `step` takes them
        self._gathering: dict[int, Job] = {}  # group -> the gather that nobody waited for yet
        self._unwaited: frozenset[int] = frozenset()
        self._order: list[int] | None = None  # of need, agreed
        self._needed: dict[int, None] = {}  # groups in the order in which the forward pass first asked
        self._undo = watch_access(module, {id(p): self._place[i][0] for i, p in enumerate(listed)}, self.need)

    # ------------------------------------------------------------------------------------------ a backward pass

    def begin(self, weight: float) -> None:
        """Step 4 of the module's text."""
        if self._reducing:
            raise UsageError(
                "overlap='step': a second reduced backward pass without optimizer.step() or optimizer.zero_grad() in "
                "between; accumulate under no_sync()"
            )
        self._unwaited = frozenset(self._gathering)
        self.wait_for_gathers()
        self._settings.verify(self._wait)
        self.weight = weight

    def ready(self, i: int) -> None:
        """Parameter i has its gradient."""
        group, member = self._place[i]
        if self._ready[i]:
            raise UsageError(f"the gradient of {self._names[i]} became ready twice in one backward pass")
        if group in self._unwaited:
            raise UsageError(
                f"overlap='step': {self._names[i]} was used before its new value was asked for; read it as an "
                "attribute of its module in each forward pass"
            )
        self._ready[i] = 1
        if member in self.shards[group].single and not self.shards[group].place(member, self.weight):
            self._lacking[group].add(member)
        self._left[group] -= 1
        if not self._left[group]:
            self._start_complete()

    def finish(self, wait: Any = None) -> None:
        """The local backward pass is over: zeros for what got no gradient, and the remaining groups out."""
        for group, left in enumerate(self._left):
            if left:
                for member, i in enumerate(self._members[group]):
                    alone = not self._ready[i] and member in self.shards[group].single
                    if alone and not self.shards[group].place(member, self.weight):
                        self._lacking[group].add(member)
                self._left[group] = 0
        self._start_complete()

    def attach(self, whole: float) -> None:
        """Ready for the next pass."""
        self._whole = whole
        self._left = [len(members) for members in self._members]
        self._ready = bytearray(len(self._ready))
        self._next = 0
        self._counters.groups += len(self.plan)

    def missing(self) -> tuple[str, ...]:
        """Names of tensors that this rank has not ready."""
        return tuple(name for name, ready in zip(self._names, self._ready, strict=True) if not ready)

    def _start_complete(self) -> None:
        while self._next < len(self._left) and not self._left[self._next]:
            group = self._next
            self._next += 1
            shards = self.shards[group]
            lacking = self._lacking[group]
            for batch, (members, _) in enumerate(shards.batches):
                if not shards.place_batch(batch, self.weight):
                    lacking.update(member for member in members if not shards.place(member, self.weight))
            used = [member not in lacking for member in range(len(shards.members))] if lacking else None
            shards.write_tails(self.weight, used)
            lacking.clear()
            job = Job(
                partial(self._ring.reduce_scatter, shards.gradients),
                label=f"reduce-scatter of tensor group {group}",
                nbytes=_nbytes(shards.gradients),
            )
            self._count(shards.gradients)
            self._reducing.append(job)
            self._pump.submit(job)

    def _count(self, rows: torch.Tensor) -> None:
        self._counters.collectives += 1
        self._counters.bytes += _nbytes(rows)

    # ---------------------------------------------------------------------------------------- after a backward pass

    def _step(self) -> None:
        """Step 2 of the module's text."""
        if not self._reducing:
            raise UsageError("overlap='step': optimizer.step() without a reduced backward pass before it")
        if self._order is None:
            self._agree_on_order()
        assert self._order is not None
        jobs = self._reducing
        self._reducing = []
        scale, self._scale = self._scale, None
        self._settings.verify(self._wait)
        self._settings.compare(describe_optimizer(self.optimizer, ()))
        hyper = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        torch.autograd.graph.increment_version(self._parameters)  # a graph of before must not go backward any more
        for group in self._order:
            job = Job(
                partial(self._ring.all_gather, self.shards[group].parameters),
                prepare=partial(self._update, group, hyper, scale),
                after=(jobs[group],),
                label=f"gather of tensor group {group}",
                nbytes=_nbytes(self.shards[group].parameters),
            )
            self._count(self.shards[group].parameters)
            self._gathering[group] = job
        self._pump.submit(*self._gathering.values())

    def _update(self, group: int, hyper: Sequence[Mapping[str, Any]], scale: float | None) -> None:
        """In the pump's thread: this rank's shares of one group."""
        shards = self.shards[group]
        weight, used = shards.read_tail()
        problem = weights_do_not_add_up(weight, self._whole, self._control.size, shards.gradients.dtype)
        if shards.shares and problem is not None:
            raise UsageError(problem)
        if not all(used):
            self._split_unused(shards, used)
        first = 0
        shares = []
        for share in shards.shares:
            if all(used[first : first + len(share.pieces)]):
                shares.append(share)
            first += len(share.pieces)
        if scale is not None and scale != 1.0:
            shards.own_gradients().mul_(scale)
        self._states.update(shards, shares, hyper)

    def _split_unused(self, shards: GroupShards, used: Sequence[bool]) -> None:
        first = 0
        for share in list(shards.shares):
            here = used[first : first + len(share.pieces)]
            first += len(share.pieces)
            if any(here) and not all(here):
                self._states.split(shards, share)

    def _discard(self) -> None:
        """Gradients are forgotten; their reductions, which other ranks take part in, still end."""
        for job in self._reducing:
            self._wait(job, "reduce-scatters whose result is dropped")
        self._reducing = []
        self._scale = None

    def _agree_on_order(self) -> None:
        seen = list(self._needed)
        seen += [group for group in reversed(range(len(self.plan))) if group not in self._needed]
        rows = self._wait(self._control.gather(json.dumps(seen).encode()), "the order of the first forward pass")
        self._order = [int(group) for group in json.loads(rows[0])]

    # ------------------------------------------------------------------------------------------ parameters are needed

    def need(self, group: int) -> None:
        """Return when the parameters of `group` are whole."""
        if self._order is None:
            self._needed[group] = None
        job = self._gathering.get(group)
        if job is not None:
            begun = perf_counter()
            self._wait(job, f"the parameters of {self.plan.groups[group]}")
            self._counters.exposed_s += perf_counter() - begun
            if self._timeline is not None:
                self._timeline.add("exposed", "wait for parameters", begun, perf_counter())
            self._gathering.pop(group, None)

    def _note(self, job: Job) -> None:
        """In the pump's thread: a transfer has ended."""
        assert self._timeline is not None
        self._timeline.add("collective", job.label, job.begun, perf_counter(), job.nbytes)

    def wait_for_gathers(self) -> None:
        """Return when all parameters are whole."""
        for group in list(self._gathering):
            self.need(group)

    def _wait_for_reductions(self) -> None:
        begun = perf_counter()
        for group, job in enumerate(self._reducing):
            self._wait(job, f"the reduce-scatter of {self.plan.groups[group]}")
        self._counters.exposed_s += perf_counter() - begun

    def _wait(self, handle: Any, what: str) -> Any:
        try:
            return self._watch.wait(handle, lambda: what)
        except UsageError as error:  # met by this rank's pump: tell the others
            self._watch.fail(error)

    # ------------------------------------------------------------------------------------ over all gradients: a barrier

    def reduced(self) -> list[torch.Tensor]:
        """This rank's rows of the mean gradients, after all reduce-scatters. A scale that is pending is applied."""
        self._wait_for_reductions()
        rows = [shards.own_gradients() for shards in self.shards]
        if self._scale is not None and self._scale != 1.0:
            torch._foreach_mul_(rows, self._scale)
        self._scale = None
        return rows

    def norm(self, norm_type: float) -> torch.Tensor:
        """The norm of the mean gradient over all parameters, the same on every rank."""
        rows = [row for row in self.reduced() if row.numel()]
        infinite = norm_type == float("inf")
        norms = [torch.linalg.vector_norm(row.double(), norm_type).cpu() for row in rows]
        each = torch.stack([torch.zeros((), dtype=torch.float64), *norms])  # zero: there may be empty tensors only
        own = each.max() if infinite else each.pow(norm_type).sum()
        whole = self._wait(self._control.allreduce(own.reshape(1), "max" if infinite else "sum"), "the gradient's norm")
        return (whole[0] if infinite else whole[0].pow(1.0 / norm_type)).to(self._parameters[0].dtype)

    def scale(self, factor: float) -> None:
        """Multiply the mean gradients before the update."""
        self._scale = factor if self._scale is None else self._scale * factor

    # ------------------------------------------------------------------------------------------------- whole states

    def _collect(self) -> dict[nn.Parameter, dict[str, Any]]:
        self.wait_for_gathers()
        self._settings.verify(self._wait)
        found: dict[nn.Parameter, dict[str, Any]] = {}
        for shards in self.shards:
            packed = self._wait(self._control.gather(pack_states(shards, self._states)), "the optimizer's whole state")
            for member, state in whole_states(shards, packed).items():
                if state:
                    found[shards.members[member]] = state
        return {p: found[p] for p in self._parameters if p in found}

    def _deal_out(self, plain: Mapping[Any, dict[str, Any]]) -> None:
        self._states.clear()
        for shards in self.shards:
            cut_states(shards, self._states, plain)

    def close(self) -> None:
        """Parameters stay as they are, whole where nothing has failed."""
        try:
            self.wait_for_gathers()
        except ExitwaveError:
            self._gathering.clear()
        self._undo()
        self._pump.close()


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
