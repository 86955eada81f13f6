"""The model of many ranks: what a step takes, by protocol, collective and number of ranks. Pure.

1.  A rank computes: forward, then backward, in which tensor group k has its gradients at t_k.
2.  A protocol says when group k may be reduced: `static` at t_k; `bitvector` after one AND allreduce of few bytes,
    begun at t_k; `coordinator` when rank 0 has handled a request for each of the group's tensors from each rank, one
    after the other, and its answer has come down a tree. Cycles follow one another.
3.  The link carries one collective at a time (`cost`): F(k) = max(F(k-1), r_k) + c(n_k), with r_k the moment of step 2
    and c(n) the cost of an allreduce of n bytes among p ranks:

    - ring:  2 (p-1) [alpha + n/p · beta]
    - tree:  2 ⌈log2 p⌉ alpha + 2 n beta, pipelined in pieces (Sanders, Speck, Träff 2009,
      doi:10.1016/j.parco.2009.09.001)
    - hierarchical, g ranks a node: reduce-scatter and all-gather inside, each (g-1) [alpha_in + n/g · beta_in], and
      between them g allreduces of n/g bytes at once among the nodes, which share a node's link: as one of n bytes there

4.  overlap "backward": the step ends at max(end of backward, F(last)) + rest. overlap "step": communication runs beside
    the whole step, which ends at max(computation, sum of costs) at best.
5.  Ranks differ: the slowest of p ranks with independent, normally distributed computation of relative standard
    deviation s is later by s · sqrt(2 ln p) of it (the leading term of the expected maximum).

alpha and beta are those of one message between two ranks (Hockney's model). The efficiency is the step of one rank
alone over that of p ranks (weak scaling: each rank keeps its share of samples).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from exitwave.train.allreduce.cost import LinkCost
from exitwave.train.scaling_inputs import PAPER_EFFICIENCY, SENSITIVITY, SummitRun

__all__ = [
    "Cluster",
    "Workload",
    "at_scale",
    "collective_s",
    "cycle_s",
    "efficiency",
    "sensitivity",
    "step_s",
]

COLLECTIVES = ("ring", "tree", "hierarchical")
PROTOCOLS = ("coordinator", "bitvector", "static")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Ranks and what lies between two of them. `inside`: within a node, where `ranks_per_node` > 1."""

    ranks: int
    across: LinkCost
    ranks_per_node: int = 1
    inside: LinkCost | None = None
    control_alpha_s: float = 0.0  # one control message
    request_s: float = 0.0  # rank 0's time for one request, with the coordinator
    jitter: float = 0.0  # relative standard deviation of a rank's computation

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.ranks_per_node)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One rank's step: when each tensor group is ready (seconds from its begin, in order), and how large it is."""

    ready_s: Sequence[float]
    nbytes: Sequence[float]
    tensors: Sequence[int]
    backward_end_s: float
    rest_s: float = 0.0  # after the reduction: the optimizer

    @property
    def alone_s(self) -> float:
        """The step without other ranks."""
        return self.backward_end_s + self.rest_s


def collective_s(algorithm: str, nbytes: float, cluster: Cluster) -> float:
    """Seconds of one allreduce of `nbytes`. Source: step 3 of the module's prose."""
    across = cluster.across
    if cluster.ranks == 1:
        return 0.0
    if algorithm == "hierarchical" and cluster.ranks_per_node > 1 and cluster.inside is not None:
        g = cluster.ranks_per_node
        inside = 2 * (g - 1) * cluster.inside.time_s(nbytes / g)
        return inside + _flat_s("tree", nbytes, cluster.nodes, across)
    return _flat_s("tree" if algorithm == "hierarchical" else algorithm, nbytes, cluster.ranks, across)


def _flat_s(algorithm: str, nbytes: float, ranks: int, link: LinkCost) -> float:
    if ranks == 1:
        return 0.0
    if algorithm == "ring":
        return 2 * (ranks - 1) * link.time_s(nbytes / ranks)
    if algorithm == "tree":
        return 2 * math.ceil(math.log2(ranks)) * link.alpha_s + 2 * nbytes * link.beta_s_per_byte
    raise ValueError(f"collective {algorithm!r} does not exist: choose from {', '.join(COLLECTIVES)}")


def cycle_s(protocol: str, tensors: int, cluster: Cluster) -> float:
    """Seconds of one negotiation about a group of `tensors`. Source: step 2 of the module's prose."""
    if protocol == "static" or cluster.ranks == 1:
        return 0.0
    rounds = math.ceil(math.log2(cluster.ranks))
    if protocol == "bitvector":
        return rounds * cluster.control_alpha_s
    if protocol == "coordinator":
        return cluster.ranks * tensors * cluster.request_s + (1 + rounds) * cluster.control_alpha_s
    raise ValueError(f"protocol {protocol!r} does not exist: choose from {', '.join(PROTOCOLS)}")


def step_s(
    work: Workload, cluster: Cluster, *, protocol: str = "static", collective: str = "ring", overlap: str = "backward"
) -> float:
    """Seconds of one step on the slowest rank."""
    slower = 1 + cluster.jitter * math.sqrt(2 * math.log(cluster.ranks))
    costs = [collective_s(collective, nbytes, cluster) for nbytes in work.nbytes]
    if overlap == "step":
        return max(slower * work.alone_s, sum(costs))
    agreed = end = 0.0
    for ready, cost, tensors in zip(work.ready_s, costs, work.tensors, strict=True):
        agreed = max(agreed, slower * ready) + cycle_s(protocol, tensors, cluster)
        end = max(end, agreed) + cost
    return max(slower * work.backward_end_s, end) + work.rest_s


def efficiency(work: Workload, cluster: Cluster, **how: str) -> float:
    """Weak scaling: the step alone over the step among `cluster.ranks`."""
    return work.alone_s / step_s(work, cluster, **how)


# ------------------------------------------------------------------------------------------------- the published run


def workload_of(run: SummitRun) -> Workload:
    """Gradients become ready evenly within the backward pass, in groups of equal bytes."""
    groups = run.tensor_groups
    forward = run.step_s * (1 - run.backward_share)
    backward = run.step_s * run.backward_share
    return Workload(
        ready_s=[forward + backward * (k + 1) / groups for k in range(groups)],
        nbytes=[run.gradient_bytes / groups] * groups,
        tensors=[run.tensors * (k + 1) // groups - run.tensors * k // groups for k in range(groups)],
        backward_end_s=run.step_s,
    )


def cluster_of(run: SummitRun) -> Cluster:
    """The machine of the run."""
    return Cluster(
        ranks=run.ranks,
        ranks_per_node=run.ranks_per_node,
        across=LinkCost(alpha_s=run.across_alpha_s, beta_s_per_byte=1 / run.across_bytes_per_s),
        inside=LinkCost(alpha_s=run.inside_alpha_s, beta_s_per_byte=1 / run.inside_bytes_per_s),
        control_alpha_s=run.control_alpha_s,
        request_s=run.request_s,
        jitter=run.jitter,
    )


@dataclass(frozen=True, kw_only=True)
class AtScale:
    """One line of the answer."""

    protocol: str
    collective: str
    overlap: str
    step_s: float
    efficiency: float

    @property
    def to_paper(self) -> float:
        """The difference to the published efficiency."""
        return self.efficiency - PAPER_EFFICIENCY


def at_scale(run: SummitRun) -> list[AtScale]:
    """Every protocol by every collective, and overlap "step"."""
    work, cluster = workload_of(run), cluster_of(run)
    ways = [(p, c, "backward") for c in ("hierarchical", "tree", "ring") for p in PROTOCOLS]
    ways.append(("static", "hierarchical", "step"))
    found = []
    for protocol, collective, overlap in ways:
        seconds = step_s(work, cluster, protocol=protocol, collective=collective, overlap=overlap)
        found.append(
            AtScale(
                protocol=protocol,
                collective=collective,
                overlap=overlap,
                step_s=seconds,
                efficiency=work.alone_s / seconds,
            )
        )
    return found


def sensitivity(run: SummitRun) -> list[tuple[str, float, dict[str, float]]]:
    """One input changed at a time: its name, its value, each protocol's efficiency (hierarchical collective)."""
    rows = []
    for name, values in SENSITIVITY.items():
        for value in values:
            changed = replace(run, **{name: value})  # type: ignore[arg-type]
            work, cluster = workload_of(changed), cluster_of(changed)
            rows.append(
                (name, value, {p: efficiency(work, cluster, protocol=p, collective="hierarchical") for p in PROTOCOLS})
            )
    return rows
