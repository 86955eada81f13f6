"""The plan that ends soonest: exact on every small case, never behind the other ways; measuring and switching."""

from __future__ import annotations

import itertools
import json
import threading
import time

import pytest
import torch
from allreduce_ranks import info, on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from exitwave.ingest.errors import UsageError
from exitwave.train.allreduce import ByBytes, ByCount, GroupedAllreduce, GroupPlan, Optimal
from exitwave.train.allreduce.cost import LinkCost, finish_times_s, predicted_end_s
from exitwave.train.allreduce.groups import plan_groups
from exitwave.train.allreduce.optimal import best_cuts, plan_optimal
from exitwave.train.allreduce.timeline import Span, to_chrome

links = st.builds(
    LinkCost,
    alpha_s=st.sampled_from([0.0, 0.1, 1.0, 5.0]),
    beta_s_per_byte=st.sampled_from([0.0, 0.01, 0.1, 1.0]),
)
chains = st.lists(st.tuples(st.floats(0, 20), st.integers(0, 30)), min_size=1, max_size=9).map(sorted)


def end_s(chain, cuts, link: LinkCost) -> float:
    pieces = [chain[a:b] for a, b in itertools.pairwise([0, *cuts])]
    ready = [max(t for t, _ in piece) for piece in pieces]
    return finish_times_s(ready, [sum(n for _, n in piece) for piece in pieces], link)[-1]


def partitions(n: int):
    """Every way to cut n neighbours."""
    for inner in itertools.product([False, True], repeat=n - 1):
        yield [i + 1 for i, cut in enumerate(inner) if cut] + [n]


@settings(deadline=None)
@given(chains, links, st.sampled_from([5, 20, 1000]))
def test_no_partition_ends_sooner(chain, link, max_bytes):
    times, sizes = [t for t, _ in chain], [n for _, n in chain]
    cuts = best_cuts(times, sizes, link, max_bytes=max_bytes)
    soonest = min(
        end_s(chain, other, link)
        for other in partitions(len(chain))
        if all(b - a == 1 or sum(sizes[a:b]) <= max_bytes for a, b in itertools.pairwise([0, *other]))
    )
    assert cuts[-1] == len(chain)
    for a, b in itertools.pairwise([0, *cuts]):
        assert a < b and (b - a == 1 or sum(sizes[a:b]) <= max_bytes)
    assert end_s(chain, cuts, link) == pytest.approx(soonest, rel=1e-9, abs=1e-12)
    fewest = min(
        len(other)
        for other in partitions(len(chain))
        if end_s(chain, other, link) <= soonest * (1 + 1e-12)
        and all(b - a == 1 or sum(sizes[a:b]) <= max_bytes for a, b in itertools.pairwise([0, *other]))
    )
    assert len(cuts) == fewest


@settings(max_examples=30, deadline=None)
@given(chains.filter(lambda chain: len(chain) <= 5), links)
def test_no_other_order_helps(chain, link):
    cuts = best_cuts([t for t, _ in chain], [n for _, n in chain], link, max_bytes=1e9)
    soonest = min(
        end_s(order, other, link) for order in itertools.permutations(chain) for other in partitions(len(chain))
    )
    assert end_s(chain, cuts, link) == pytest.approx(soonest, rel=1e-9, abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 0.5), st.integers(0, 10**6)), min_size=1, max_size=200).map(sorted), links)
def test_a_tolerance_gives_away_no_more_than_it_says_and_buys_fewer_groups(chain, link):
    times, sizes = [t for t, _ in chain], [n for _, n in chain]
    exact = best_cuts(times, sizes, link, max_bytes=4e6)
    loose = best_cuts(times, sizes, link, max_bytes=4e6, tolerance=0.05)
    assert end_s(chain, loose, link) <= 1.05 * end_s(chain, exact, link) * (1 + 1e-9)
    assert len(loose) <= len(exact)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 0.1), st.integers(0, 10**5)), min_size=1, max_size=60), st.floats(1e-3, 1))
def test_a_plan_is_never_behind_a_fixed_cap(rows, cap):
    tensors = [info(f"p{i}", n) for i, (_, n) in enumerate(rows)]
    ready = {f"p{i}": t for i, (t, _) in enumerate(rows)}
    link = LinkCost(alpha_s=2e-4, beta_s_per_byte=1 / 125e6)
    best = plan_optimal(tensors, ready, link, Optimal(tolerance=0.0))
    ordered = sorted(tensors, key=lambda tensor: ready[tensor.name])
    for other in (ByBytes(cap), ByCount(4)):
        assert predicted_end_s(best, ready, link) <= predicted_end_s(plan_groups(ordered, other), ready, link) + 1e-12


def test_chains_of_each_dtype_are_planned_apart_and_cover_everything():
    tensors = [info(f"p{i}", 1000, "float64" if i % 3 == 0 else "float32") for i in range(12)]
    ready = {tensor.name: (7 * i % 12) / 100 for i, tensor in enumerate(tensors)}
    plan = plan_optimal(tensors, ready, LinkCost(alpha_s=1e-4, beta_s_per_byte=1e-8), Optimal())
    assert {name for group in plan.groups for name in group.names} == set(ready)
    assert len({group.dtype for group in plan.groups}) == 2
    ends = [max(ready[name] for name in group.names) for group in plan.groups]
    assert ends == sorted(ends)
    with pytest.raises(ValueError, match="must not decrease"):
        best_cuts([2.0, 1.0], [1, 1], LinkCost(alpha_s=1, beta_s_per_byte=1), max_bytes=10)


# ------------------------------------------------------------------------------------------------ within the engine


def net() -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh())])


@pytest.mark.parametrize("protocol", ["static", "bitvector", "coordinator"])
def test_all_ranks_switch_to_one_plan_after_the_same_reduction(protocol, tmp_path):
    torch.manual_seed(0)
    reference = net()
    state = {k: v.clone() for k, v in reference.state_dict().items()}
    x = torch.randn(3, 5, 8)

    def work(rank, data, control):
        model = net()
        model.load_state_dict(state)
        engine = GroupedAllreduce(
            model,
            protocol=protocol,
            grouping="optimal:0.0005",
            transports=(data, control),
            timeout_s=20,
            timeline=True,
        )
        first, gradients = engine.plan, []
        for step in range(9):
            model.zero_grad(set_to_none=step % 2 == 0)
            engine(x[rank] * (step + 1)).square().mean().backward()
            assert (engine.planning is None) == (step < 6), "the switch is by count"
            assert engine.finite()
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        engine.write_timeline(tmp_path / "trace.json")
        engine.close()
        return first, engine.plan, engine.planning, gradients

    results = on_ranks(3, work)
    for result in results:
        assert not isinstance(result, Exception), result.__notes__
        first, plan, planning, gradients = result
        assert plan == results[0][1] == planning.plan
        assert planning == results[0][2]
        assert first == planning.before
        assert "optimal" in str(planning) and "sooner" in str(planning)
        assert GroupPlan.from_json(json.dumps(json.loads(planning.to_json())["plan"])) == plan
        for step, own in enumerate(gradients):
            reference.zero_grad()
            sum(reference(x[r] * (step + 1)).square().mean() / 3 for r in range(3)).backward()
            for name, parameter in reference.named_parameters():
                torch.testing.assert_close(own[name], parameter.grad, rtol=1e-5, atol=1e-7)
    assert_opens_in_perfetto(json.loads((tmp_path / "trace.json").read_text()))
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for rank in range(3):
        for kind in ("computation", "collective", "exposed"):
            spans = [e for e in trace if e["pid"] == rank and e.get("cat") == kind]
            assert {e["args"]["step"] for e in spans} == set(range(9))
            assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in spans)


class Drifting(nn.Module):
    """Its backward pass waits before one layer's gradients: for each rank a time that a test may change."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.shared = self.layers[0]  # used first and last
        self.branches = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.slow, self.seconds = 3, 0.0

    def forward(self, x, branch):
        for k, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if k == self.slow and self.seconds:
                x.register_hook(lambda g, s=self.seconds: time.sleep(s))
        return self.shared(self.branches[branch](x))


def test_the_plan_is_made_again_when_the_ready_times_drift_on_all_ranks_together():
    changes = threading.Barrier(3)

    def work(rank, data, control):
        torch.manual_seed(0)
        model = Drifting()
        engine = GroupedAllreduce(
            model, grouping=Optimal(max_mb=1, recheck=3), transports=(data, control), timeout_s=20
        )
        link = LinkCost(alpha_s=5e-3, beta_s_per_byte=2.5e-6)  # all in one group, unless there is time before the last
        engine._tuner._link = link
        engine._measure_again = lambda: link
        plans, made = [], []
        for step in range(40):
            if step == 20:
                changes.wait(20)
                model.seconds = 0.1 if rank == 1 else 0.0  # on one rank alone: all follow
            model.zero_grad(set_to_none=step % 2 == 0)
            engine(torch.ones(2, 32), rank % 2).square().mean().backward()
            plans.append(engine.plan)
            made.append(engine.counters.plans)
        planning, counters = engine.planning, engine.counters
        gradient = model.layers[0].weight.grad.clone()
        engine.close()
        return plans, made, planning, counters, gradient

    results = on_ranks(3, work)
    for result in results:
        assert not isinstance(result, Exception), result.__notes__
        plans, made, planning, counters, gradient = result
        assert plans == results[0][0], "ranks changed their plans differently"
        assert made[5] == 0 and made[6] == 1, "the first plan comes by count"
        assert made[-1] > made[19], "the drift went unnoticed"
        assert len(plans[-1]) > len(plans[19])
        assert counters.steps == 40
        assert torch.equal(gradient, results[0][4])
        ready = planning.ready_s
        assert ready["layers.0.weight"] == max(ready.values()) or ready["layers.0.weight"] > ready["layers.1.weight"]
        assert ready["branches.0.weight"] >= ready["layers.0.weight"], "unused on rank 1: ready at the end there"


def test_a_steady_run_keeps_its_plan_and_recheck_0_never_looks_again():
    def work(rank, data, control, recheck):
        engine = GroupedAllreduce(
            net(), grouping=Optimal(max_mb=1e-3, recheck=recheck), transports=(data, control), timeout_s=20
        )
        engine._tuner._link = LinkCost(alpha_s=10.0, beta_s_per_byte=0.0)  # so dear that one group is best, always
        engine._measure_again = lambda: LinkCost(alpha_s=10.0, beta_s_per_byte=0.0)
        for _ in range(25):
            engine(torch.ones(2, 8)).square().mean().backward()
        engine.close()
        return engine.counters.plans, engine.counters.steps

    for recheck in (2, 0):
        assert on_ranks(2, lambda *args, r=recheck: work(*args, r)) == [(1, 25)] * 2


def test_a_saved_plan_is_used_from_the_start_and_measured_no_more():
    plan = plan_optimal(
        [info("1.bias", 2), info("1.weight", 6), info("0.bias", 3), info("0.weight", 6)],
        {"1.bias": 0.1, "1.weight": 0.0, "0.weight": 0.2, "0.bias": 0.2},
        LinkCost(alpha_s=0.01, beta_s_per_byte=1e-9),
        Optimal(),
    )

    def work(rank, data, control):
        engine = GroupedAllreduce(
            nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)),
            grouping=GroupPlan.from_json(plan.to_json()),
            transports=(data, control),
        )
        for _ in range(8):
            engine(torch.ones(1, 2)).sum().backward()
        engine.close()
        return engine.plan, engine.planning

    assert on_ranks(2, work) == [(plan, None)] * 2


def test_a_timeline_is_asked_for_before_it_is_written(tmp_path):
    with pytest.raises(UsageError, match="timeline=True"):
        GroupedAllreduce(net()).write_timeline(tmp_path / "x.json")
    spans = [Span(kind="collective", name="g", begin_s=10.0, end_s=10.5, step=1, nbytes=8)]
    (event,) = (e for e in to_chrome([[], spans])["traceEvents"] if e["ph"] == "X")
    assert (event["ph"], event["pid"], event["ts"], event["dur"]) == ("X", 1, 0.0, 0.5e6)


def assert_opens_in_perfetto(document: dict) -> None:
    """What the Trace Event Format asks of complete events, and of rows: no two events of one overlap."""
    document = json.loads(json.dumps(document, allow_nan=False))
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    named = set()
    for event in document["traceEvents"]:
        assert event["ph"] in ("M", "X") and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["name"], str) and event["name"]
        if event["ph"] == "M":
            named.add((event["pid"], event["tid"], event["name"]))
        else:
            assert event["ts"] >= 0 and event["dur"] >= 0
            assert (event["pid"], event["tid"], "thread_name") in named, "a row without a name"
            rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in rows.values():
        for (_, end), (begin, _) in itertools.pairwise(sorted(spans)):
            assert begin >= end - 1e-3  # a nanosecond: times are sums of floating-point numbers


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from(["computation", "collective", "exposed"]), st.floats(0, 10), st.floats(0, 3)),
            max_size=30,
        ),
        min_size=1,
        max_size=3,
    )
)
def test_traces_are_of_the_format_that_perfetto_opens(ranks):
    spans = [
        [Span(kind=kind, name="s", begin_s=begin, end_s=begin + long, step=0) for kind, begin, long in row]
        for row in ranks
    ]
    document = to_chrome(spans)
    assert_opens_in_perfetto(document)
    assert sum(e["ph"] == "X" for e in document["traceEvents"]) == sum(map(len, ranks))
