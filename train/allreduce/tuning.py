"""From measurements to the optimal plan, and to the next one when things drift: what grouping "optimal" does.

1.  At construction all ranks time a few allreduces of two sizes: alpha and beta of the link.
2.  The first pass warms up. In each of the next passes every rank notes when each gradient became ready. This is the
    order of the backward graph itself: a shared parameter is ready at its last use, a branch when it is done, and what
    got no gradient at the end.
3.  At the start of the pass after those (every rank has counted the same number of reductions) the ranks agree: for
    each tensor the median over the passes, of the slowest rank (a max over ranks), the same for alpha and beta.
4.  Rank 0 makes the plan and all ranks take it, whatever their own arithmetic would have said.
5.  After `Optimal.recheck` further reductions 2 to 4 are done again, with a short measurement of the link. Rank 0 gives
    out a new plan only if it is predicted to end sooner than the present one by more than `_WORTH` of it, else none:
    so ranks change their plan together or not at all.

Later reductions follow the new plan. Their sums are the same up to the order of addition, as between any two plans.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from exitwave.train.allreduce.cost import LinkCost, fit_link, predicted_end_s
from exitwave.train.allreduce.groups import GroupPlan, Optimal, TensorInfo
from exitwave.train.allreduce.optimal import plan_optimal
from exitwave.train.transport import Handle, Transport

__all__ = ["RECHECK_BYTES", "Planning", "Tuner", "agree_on_link", "measure_link"]

WARM_PASSES = 1
MEASURED_PASSES = 5
_SMALL_BYTES = 4 * 2**10
_LARGE_BYTES = (256 * 2**10, 8 * 2**20)  # bounds of the larger size, which is otherwise that of all gradients
_REPEATS = (17, 5)  # of either size; the first is not counted
RECHECK_BYTES = 2**20  # the larger size when the link is looked at again
_WORTH = 0.03

_log = logging.getLogger(__name__)
WaitFor = Callable[[Handle[Any], str], Any]


@dataclass(frozen=True, kw_only=True)
class Planning:
    """Why the plan is as it is: measurements that all ranks agreed on, and what they predict. Seconds within a pass."""

    after_steps: int
    link: LinkCost
    ready_s: Mapping[str, float]  # tensor -> when its gradient is ready on the slowest rank, after the first gradient
    before: GroupPlan
    plan: GroupPlan
    predicted_before_s: float  # end of the reduction by the plan before, and by the new one
    predicted_s: float
    exposed_before_s: float  # measured on the slowest rank: the wait at the end of backward, mean of the passes

    @property
    def backward_s(self) -> float:
        """When the last gradient is ready."""
        return max(self.ready_s.values())

    def __str__(self) -> str:
        gain = 1 - self.predicted_s / self.predicted_before_s if self.predicted_before_s > 0 else 0.0
        ms = [1e3 * s for s in (self.backward_s, self.predicted_before_s, self.predicted_s, self.exposed_before_s)]
        return (
            f"after {self.after_steps} steps: {len(self.plan)} tensor groups by {self.plan.grouping}, before: "
            f"{len(self.before)}; a collective costs {1e3 * self.link.alpha_s:.3f} ms + "
            f"{1e9 * self.link.beta_s_per_byte:.3f} ns/byte; gradients are ready after {ms[0]:.1f} ms; "
            f"predicted end {ms[1]:.1f} -> {ms[2]:.1f} ms ({gain:.1%} sooner), "
            f"exposed {ms[1] - ms[0]:.1f} -> {ms[2] - ms[0]:.1f} ms (measured before: {ms[3]:.1f} ms)"
        )

    def to_json(self) -> str:
        """Everything as one JSON document; `GroupPlan.from_json` reads its `plan` and `before`."""
        return json.dumps(asdict(self), sort_keys=True)


def measure_link(
    data: Transport, nbytes: int, device: torch.device, wait: WaitFor, *, most_bytes: int = _LARGE_BYTES[1]
) -> LinkCost:
    """Time allreduces of two sizes; `nbytes` are those of all gradients. Every rank calls it.

    Of each size the lower quartile counts: what else the machine does meanwhile only ever adds.
    """
    sizes = (_SMALL_BYTES, min(max(nbytes, _LARGE_BYTES[0]), most_bytes))
    typical = []
    for size, repeats in zip(sizes, _REPEATS, strict=True):
        tensor = torch.zeros(size // 4, dtype=torch.float32, device=device)
        seconds = []
        for _ in range(repeats):
            begun = time.perf_counter()
            wait(data.allreduce(tensor, "sum"), "the measurement of the link")
            seconds.append(time.perf_counter() - begun)
        typical.append(max(float(np.percentile(seconds[1:], 25)), 1e-9))
    return fit_link(sizes, typical)


def agree_on_link(own: LinkCost, control: Transport, wait: WaitFor) -> LinkCost:
    """The slowest rank's, on every rank."""
    measured = torch.tensor([own.alpha_s, own.beta_s_per_byte], dtype=torch.float64)
    alpha, beta = wait(control.allreduce(measured, "max"), "the agreement on the link").tolist()
    return LinkCost(alpha_s=alpha, beta_s_per_byte=beta)


class Tuner:
    """One rank's measurements; tensors go by their place in `infos`."""

    def __init__(self, grouping: Optimal, infos: Sequence[TensorInfo], link: LinkCost) -> None:
        self._grouping = grouping
        self._infos = list(infos)
        self._link: LinkCost | None = link
        self._begun = 0.0
        self._now: list[float] = []
        self._steps = 0
        self._skip = WARM_PASSES  # passes to let go by before the next measured one
        self._passes: list[list[float]] = []
        self._exposed_s: list[float] = []
        self.listens = False  # in this pass `ready` is to be called

    @property
    def due(self) -> bool:
        """All passes are measured: time to plan. The same on every rank, since all count the same reductions."""
        return len(self._passes) == MEASURED_PASSES

    def begin(self) -> None:
        """A pass starts, with its first gradient."""
        self.listens = self._skip == 0 and not self.due
        if self.listens:
            self._begun = time.perf_counter()
            self._now = [-1.0] * len(self._infos)

    def ready(self, i: int) -> None:
        """Tensor i has its gradient."""
        self._now[i] = time.perf_counter() - self._begun

    def end(self, backward_ended: float, exposed_s: float) -> None:
        """The pass is over; what got no gradient went out when backward had ended."""
        self._steps += 1
        if not self.listens:
            self._skip = max(self._skip - 1, 0)
            return
        self.listens = False
        last = backward_ended - self._begun
        self._passes.append([moment if moment >= 0 else last for moment in self._now])
        self._exposed_s.append(exposed_s)

    def plan(
        self, before: GroupPlan, control: Transport, wait: WaitFor, relink: Callable[[], LinkCost]
    ) -> Planning | None:
        """Steps 3 to 5 of the module's prose; every rank calls it at the same place. None: keep the plan.

        `relink` measures the link again, with all ranks.
        """
        first = self._link is not None
        link = self._link or relink()
        own = [
            *np.median(self._passes, axis=0).tolist(),
            link.alpha_s,
            link.beta_s_per_byte,
            float(np.mean(self._exposed_s)),
        ]
        self._link = None
        self._passes, self._exposed_s = [], []
        self._skip = self._grouping.recheck if self._grouping.recheck else 2**62
        measured = torch.tensor(own, dtype=torch.float64)
        *times, alpha, beta, exposed = wait(control.allreduce(measured, "max"), "the agreement on ready times").tolist()
        link = LinkCost(alpha_s=alpha, beta_s_per_byte=beta)
        ready_s = {info.name: moment for info, moment in zip(self._infos, times, strict=True)}
        text = b""
        if control.rank == 0:
            made = plan_optimal(self._infos, ready_s, link, self._grouping)
            gain = 1 - predicted_end_s(made, ready_s, link) / max(predicted_end_s(before, ready_s, link), 1e-12)
            if first or gain > _WORTH:
                text = made.to_json().encode()
        answer = wait(control.gather(text), "the plan of rank 0")[0].decode()
        if control.rank == 0 and not answer:
            _log.info("after %d steps: the plan is kept; exposed %.1f ms (measured)", self._steps, 1e3 * exposed)
        if not answer:
            return None
        plan = GroupPlan.from_json(answer)
        planning = Planning(
            after_steps=self._steps,
            link=link,
            ready_s=ready_s,
            before=before,
            plan=plan,
            predicted_before_s=predicted_end_s(before, ready_s, link),
            predicted_s=predicted_end_s(plan, ready_s, link),
            exposed_before_s=exposed,
        )
        if control.rank == 0:
            _log.info("%s", planning)
        return planning
