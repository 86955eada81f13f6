"""The model of many ranks: its limits, its terms, and what it says of the published run."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from exitwave.train.allreduce.bench_control import control_rows, control_table, control_targets
from exitwave.train.allreduce.bench_scaling import message_cost, scale_rows, scaling_table
from exitwave.train.allreduce.cost import LinkCost, exposed_s
from exitwave.train.scaling import Cluster, Workload, at_scale, collective_s, cycle_s, efficiency, step_s
from exitwave.train.scaling_inputs import SENSITIVITY, SOURCES, SUMMIT

LINK = LinkCost(alpha_s=1e-3, beta_s_per_byte=1e-8)
WORK = Workload(ready_s=[0.5, 0.8, 1.0], nbytes=[1e6, 2e6, 3e6], tensors=[3, 2, 1], backward_end_s=1.0, rest_s=0.1)


def test_one_rank_takes_what_it_computes():
    assert step_s(WORK, Cluster(ranks=1, across=LINK)) == pytest.approx(1.1)
    assert efficiency(WORK, Cluster(ranks=1, across=LINK), protocol="coordinator") == 1.0


def test_two_ranks_are_the_recurrence_of_the_grouping():
    whole = LinkCost(alpha_s=2e-3, beta_s_per_byte=1e-8)  # a ring of two: 2 (alpha + n/2 beta)
    expected = 1.1 + exposed_s(WORK.ready_s, [1_000_000, 2_000_000, 3_000_000], whole)
    assert step_s(WORK, Cluster(ranks=2, across=LINK)) == pytest.approx(expected)
    fitted = message_cost([(n, whole.time_s(n)) for n in (10**3, 10**5, 10**7)])
    assert fitted.alpha_s == pytest.approx(1e-3, rel=1e-6)
    assert fitted.beta_s_per_byte == pytest.approx(1e-8, rel=1e-6)


def test_collectives_have_their_published_costs():
    def many(p, **options):
        return Cluster(ranks=p, across=LINK, **options)

    assert collective_s("ring", 1e6, many(4)) == pytest.approx(6 * (1e-3 + 1e-8 * 1e6 / 4))
    assert collective_s("tree", 1e6, many(5)) == pytest.approx(2 * 3 * 1e-3 + 2e6 * 1e-8)
    inside = LinkCost(alpha_s=1e-6, beta_s_per_byte=1e-10)
    nodes = many(12, ranks_per_node=6, inside=inside)
    assert collective_s("hierarchical", 6e6, nodes) == pytest.approx(10 * (1e-6 + 1e-4) + 2e-3 + 2 * 6e6 * 1e-8)
    assert collective_s("hierarchical", 1e6, many(8)) == collective_s("tree", 1e6, many(8))
    with pytest.raises(ValueError, match="choose from ring"):
        collective_s("star", 1, many(2))


def test_control_grows_as_the_protocols_do():
    def cost(protocol, p):
        return cycle_s(protocol, 8, Cluster(ranks=p, across=LINK, control_alpha_s=1e-5, request_s=1e-6))

    assert cost("static", 10_000) == 0
    assert cost("bitvector", 1024) == pytest.approx(2 * cost("bitvector", 32))
    assert cost("coordinator", 100_000) == pytest.approx(10 * cost("coordinator", 10_000), rel=0.01)
    with pytest.raises(ValueError, match="choose from coordinator"):
        cost("gossip", 2)


def test_the_published_run_by_its_frozen_inputs():
    answers = {(one.protocol, one.collective, one.overlap): one for one in at_scale(SUMMIT)}
    static = answers["static", "hierarchical", "backward"]
    # By hand: all but the last group hides; 2·5·(5 µs + 440/9/6 MB / 50 GB/s) + 2·13·5 µs + 2·440/9 MB / 25 GB/s.
    last = 10 * (5e-6 + 440e6 / 54 / 50e9) + 26 * 5e-6 + 2 * 440e6 / 9 / 25e9
    assert static.step_s == pytest.approx(1.57 + last, rel=1e-9)
    assert static.to_paper == pytest.approx(1.57 / (1.57 + last) - 0.93)
    coordinator = answers["coordinator", "hierarchical", "backward"]
    assert coordinator.step_s > 27_600 * 72 * 1e-6  # rank 0 handles two million requests
    assert answers["bitvector", "hierarchical", "backward"].efficiency == pytest.approx(static.efficiency, abs=1e-3)
    assert answers["static", "hierarchical", "step"].efficiency == 1.0
    assert set(SENSITIVITY) <= set(SOURCES) == set(vars(SUMMIT))
    late = {one.protocol: one for one in at_scale(replace(SUMMIT, jitter=0.01))}["static"]
    assert late.step_s == pytest.approx(1.57 * (1 + 0.01 * math.sqrt(2 * math.log(27_600))), rel=0.01)
    said = scaling_table([], scale_rows())
    for word in ("27,600", "published efficiency 0.93", "request_s", "(-0.334)"):
        assert word in said


def test_control_messages_are_linear_logarithmic_and_none():
    rows = control_rows((2, 3, 16, 64))
    targets = control_targets(rows)
    assert [target["holds"] for target in targets] == [True] * 3
    counts = {(row["protocol"], row["ranks"]): row["busiest_messages"] for row in rows}
    assert counts["bitvector", 16] == 9 * 2 * 4
    assert counts["bitvector", 3] == 9 * 4  # one excess rank: hands in, is told
    assert counts["coordinator", 64] == 9 * (63 + 6)
    assert counts["static", 64] == 0
    assert "coordinator     64" in control_table(rows)
