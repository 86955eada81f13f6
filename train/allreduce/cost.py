"""What a plan costs: the model of one backward pass whose tensor groups are reduced as they become ready. Pure.

A collective of n bytes takes alpha + beta·n seconds (Hockney's model) and the link carries one at a time, so a chain of
groups ends at F(k) = max(F(k-1), t_k) + alpha + beta·n_k, where t_k is when the last gradient of group k is ready.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from exitwave.train.allreduce.groups import GroupPlan

__all__ = ["LinkCost", "exposed_s", "finish_times_s", "fit_link", "predicted_end_s"]


@dataclass(frozen=True, kw_only=True)
class LinkCost:
    """The cost of one collective: `alpha_s` to start it, `beta_s_per_byte` for each byte of the tensor."""

    alpha_s: float
    beta_s_per_byte: float

    def time_s(self, nbytes: float) -> float:
        """Seconds that one collective of `nbytes` takes on a free link."""
        return self.alpha_s + self.beta_s_per_byte * nbytes


def finish_times_s(ready_s: Sequence[float], nbytes: Sequence[int], link: LinkCost) -> list[float]:
    """When each group's reduction ends; `ready_s[k]`, `nbytes[k]` of group k in order of reduction."""
    ends: list[float] = []
    end = 0.0
    for ready, size in zip(ready_s, nbytes, strict=True):
        end = max(end, ready) + link.time_s(size)
        ends.append(end)
    return ends


def exposed_s(ready_s: Sequence[float], nbytes: Sequence[int], link: LinkCost) -> float:
    """Seconds of communication left over after the last gradient is ready (0 for no groups)."""
    if not ready_s:
        return 0.0
    return finish_times_s(ready_s, nbytes, link)[-1] - max(ready_s)


def predicted_end_s(plan: GroupPlan, ready_s: Mapping[str, float], link: LinkCost) -> float:
    """When the reduction of a whole plan ends, group after group in its order; `ready_s`: tensor name -> seconds."""
    ready = [max(ready_s[name] for name in group.names) for group in plan.groups]
    return finish_times_s(ready, [group.nbytes for group in plan.groups], link)[-1]


def fit_link(nbytes: Sequence[int], seconds: Sequence[float]) -> LinkCost:
    """Least squares of measured collectives, relative to each measurement, with both terms kept non-negative."""
    if len(nbytes) != len(seconds) or len(set(nbytes)) < 2:
        raise ValueError("a fit of alpha and beta needs measurements at two sizes or more")
    sizes = np.asarray(nbytes, dtype=np.float64)
    times = np.asarray(seconds, dtype=np.float64)
    # Rows: alpha/t + beta·n/t = 1, so that a short and a long collective weigh the same.
    rows = np.stack([1 / times, sizes / times], axis=1)  # (measurement, 2)
    (alpha, beta), *_ = np.linalg.lstsq(rows, np.ones_like(times), rcond=None)
    if alpha < 0:
        alpha, beta = 0.0, float(np.dot(rows[:, 1], np.ones_like(times)) / np.dot(rows[:, 1], rows[:, 1]))
    if beta < 0:
        alpha, beta = float(np.dot(rows[:, 0], np.ones_like(times)) / np.dot(rows[:, 0], rows[:, 0])), 0.0
    return LinkCost(alpha_s=float(alpha), beta_s_per_byte=float(beta))
