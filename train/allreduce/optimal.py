"""The plan that ends soonest: which gradients to reduce together, by when each is ready and what the link costs. Pure.

Sort the tensors of a chain (one dtype, one device) by the time t_j at which they are ready. A group is then a run of
neighbours: with a cost of alpha + beta·n for n bytes, exchanging two tensors between groups never helps. Let F(j) be
the earliest time at which the first j tensors can all be reduced, S(i+1..j) the bytes of tensors i+1 to j:

    F(0) = 0,    F(j) = min over i < j of  max(F(i), t_j) + alpha + beta·S(i+1..j)

in O(n²), over those i with S(i+1..j) within the maximum size (a tensor above it travels alone). Among plans that end
within a tolerance of F(n), the one with the fewest groups is taken: where the link is idle most cuts cost nothing in
the model, yet each is a call in reality.

Chains share one link; each is planned as if it had the link to itself, and `cost.predicted_end_s` says what all of them
together take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from exitwave.train.allreduce.cost import LinkCost
from exitwave.train.allreduce.groups import GroupPlan, Optimal, TensorInfo, plan_groups

__all__ = ["best_cuts", "plan_optimal"]

Floats = npt.NDArray[np.float64]


def best_cuts(
    ready_s: Sequence[float], nbytes: Sequence[int], link: LinkCost, *, max_bytes: float, tolerance: float = 0.0
) -> list[int]:
    """Where to end the groups of one chain: positions 0 < c_1 < … < c_m = n; group k holds tensors c_{k-1} to c_k - 1.

    Args:
        ready_s: when each tensor is ready, seconds, not decreasing.
        nbytes: the size of each.
        link: the cost of a collective.
        max_bytes: what a group may hold; a larger tensor travels alone.
        tolerance: fraction of the soonest end that may be given away for fewer groups; 0 ends soonest.
    """
    n = len(ready_s)
    times = np.asarray(ready_s, dtype=np.float64)
    if len(nbytes) != n or not n:
        raise ValueError(f"expected as many sizes as times, at least one, got {len(nbytes)} and {n}")
    if np.any(np.diff(times) < 0):
        raise ValueError("ready times must not decrease: sort the chain first")
    before = np.concatenate([[0.0], np.cumsum(np.asarray(nbytes, dtype=np.float64))])  # bytes of the first i tensors
    # The earliest start of a group that ends at tensor j, for j = 1..n.
    firsts = np.minimum(np.searchsorted(before, before[1:] - max_bytes, side="left"), np.arange(n))
    chain = _Chain(times=times, before=before, firsts=firsts, link=link)

    ends = np.zeros(n + 1)
    origin = np.zeros(n + 1, dtype=np.int64)
    for j in range(1, n + 1):  # needs F of all earlier ones: the recurrence itself
        origin[j], ends[j] = chain.best(ends, j)
    cuts = _walk_back([origin] * n, n)
    allowed = ends[n] * (1 + tolerance + 1e-12)

    # The same with exactly k groups, k = 1, 2, …, until one ends soon enough.
    at_most = np.full(n + 1, np.inf)
    at_most[0] = 0.0
    origins: list[npt.NDArray[np.int64]] = []
    for _ in range(len(cuts) - 1):
        fewer, at_most = at_most, np.full(n + 1, np.inf)
        origin = np.zeros(n + 1, dtype=np.int64)
        for j in range(1, n + 1):
            origin[j], at_most[j] = chain.best(fewer, j)
        origins.append(origin)
        if at_most[n] <= allowed:
            return _walk_back(origins[::-1], n)
    return cuts


@dataclass(frozen=True, kw_only=True)
class _Chain:
    times: Floats
    before: Floats
    firsts: npt.NDArray[np.int64]
    link: LinkCost

    def best(self, ends: Floats, j: int) -> tuple[int, float]:
        """The start i of a group (i+1..j) that ends soonest after `ends[i]`, and when it does."""
        first = int(self.firsts[j - 1])
        starts = np.maximum(ends[first:j], self.times[j - 1])
        over = starts + self.link.alpha_s + self.link.beta_s_per_byte * (self.before[j] - self.before[first:j])
        at = int(np.argmin(over))
        return first + at, float(over[at])


def _walk_back(origins: Sequence[npt.NDArray[np.int64]], n: int) -> list[int]:
    """From the last group to the first: `origins[k][j]` is where the k-th group from the end starts if it ends at j."""
    cuts = [n]
    for origin in origins:
        start = int(origin[cuts[-1]])
        if start == 0:
            break
        cuts.append(start)
    return cuts[::-1]


def plan_optimal(
    tensors: Sequence[TensorInfo], ready_s: Mapping[str, float], link: LinkCost, grouping: Optimal
) -> GroupPlan:
    """The plan of all chains. `ready_s`: name -> seconds since some common moment; equal times keep their order."""
    ordered = sorted(tensors, key=lambda tensor: ready_s[tensor.name])
    return plan_groups(ordered, _Measured(grouping=grouping, ready_s=ready_s, link=link))


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """A grouping that knows the times; `chain` comes sorted by them."""

    grouping: Optimal
    ready_s: Mapping[str, float]
    link: LinkCost

    def cut(self, chain: Sequence[TensorInfo], *, whole: int) -> list[list[TensorInfo]]:
        cuts = best_cuts(
            [self.ready_s[tensor.name] for tensor in chain],
            [tensor.nbytes for tensor in chain],
            self.link,
            max_bytes=self.grouping.max_mb * 2**20,
            tolerance=self.grouping.tolerance,
        )
        return [list(chain[a:b]) for a, b in pairwise([0, *cuts])]

    def __str__(self) -> str:
        return str(self.grouping)
