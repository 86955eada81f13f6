"""Plans of tensor groups, their cost, the bits of readiness, the fusion buffers: everything pure."""

from __future__ import annotations

import itertools

import pytest
import torch
from allreduce_ranks import info
from hypothesis import given
from hypothesis import strategies as st

from exitwave.ingest.errors import UsageError
from exitwave.train.allreduce import cost, readiness
from exitwave.train.allreduce.fusion import FusionBuffers, runs_of
from exitwave.train.allreduce.groups import (
    ByBytes,
    ByCount,
    ByLayerBlocks,
    GroupPlan,
    Optimal,
    TensorGroup,
    assign_blocks,
    parse_grouping,
    plan_groups,
)
from exitwave.train.allreduce.step_mode import plan_for_steps

infos = st.lists(
    st.tuples(st.integers(0, 5000), st.sampled_from(["float32", "float64", "float16"]), st.sampled_from("abc")),
    min_size=1,
    max_size=40,
).map(lambda rows: [info(f"p{i}", n, d, block=b) for i, (n, d, b) in enumerate(rows)])
groupings = st.one_of(
    st.floats(1e-4, 1.0).map(ByBytes), st.integers(1, 20).map(ByCount), st.just(ByLayerBlocks()), st.just(Optimal())
)


@given(infos, groupings)
def test_every_grouping_is_a_partition_that_keeps_chains_in_order(tensors, grouping):
    plan = plan_groups(tensors, grouping)
    by_name = {t.name: t for t in tensors}
    assert sorted(n for g in plan.groups for n in g.names) == sorted(by_name)
    for group in plan.groups:
        assert {(by_name[n].dtype, by_name[n].device) for n in group.names} == {(group.dtype, group.device)}
        assert group.nbytes == sum(by_name[n].nbytes for n in group.names)
    for dtype in ("float32", "float64", "float16"):
        chain = [n for g in plan.groups if g.dtype == dtype for n in g.names]
        assert chain == [t.name for t in tensors if t.dtype == dtype]
    lasts = [max(int(n[1:]) for n in g.names) for g in plan.groups]
    assert lasts == sorted(lasts)
    assert GroupPlan.from_json(plan.to_json()) == plan
    assert str(parse_grouping(str(grouping))) == str(grouping)


@given(infos, st.floats(1e-4, 0.05))
def test_bytes_keeps_its_cap_and_wastes_none(tensors, cap):
    plan = plan_groups(tensors, ByBytes(cap))
    for group in plan.groups:
        assert group.nbytes <= cap * 2**20 or len(group.names) == 1
    for dtype in ("float32", "float64", "float16"):
        sizes = [g.nbytes for g in plan.groups if g.dtype == dtype]
        firsts = [next(t.nbytes for t in tensors if t.name == g.names[0]) for g in plan.groups if g.dtype == dtype]
        assert all(a + b > cap * 2**20 for a, b in zip(sizes, firsts[1:], strict=False))


def test_count_gives_that_many_even_groups():
    plan = plan_groups([info(f"p{i}") for i in range(10)], ByCount(4))
    assert [len(g.names) for g in plan.groups] == [2, 3, 2, 3]


def test_blocks_are_exact_paths_and_look_through_containers_and_wrappers():
    names = ["net.layer1.w", "net.layer10.w", "net.blocks.1.a.w", "net.blocks.1.b.w", "net.blocks.10.a.w", "net.scale"]
    blocks = assign_blocks(names, frozenset({"net.blocks"}))
    assert blocks == dict(
        zip(names, ["net.layer1", "net.layer10", "net.blocks.1", "net.blocks.1", "net.blocks.10", "net"], strict=True)
    )
    assert assign_blocks(["a.w", "b"]) == {"a.w": "a", "b": ""}
    assert assign_blocks(["only.w"]) == {"only.w": "only"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bytes", ByBytes(25)),
        ("bytes:1.5", ByBytes(1.5)),
        ("count:3", ByCount(3)),
        ("layer-blocks", ByLayerBlocks()),
        ("optimal", Optimal(50)),
        ("optimal:8", Optimal(8)),
    ],
)
def test_groupings_by_name(text, expected):
    assert parse_grouping(text) == expected


@pytest.mark.parametrize("text", ["optimal:x", "optimal:0", "bytes:x", "bytes:-1", "count:0", "layer-blocks:2", ""])
def test_unknown_groupings_are_refused_by_name(text):
    with pytest.raises(UsageError, match="grouping"):
        parse_grouping(text)


def test_plans_refuse_what_is_no_partition():
    one = TensorGroup(index=0, names=("a", "b"), dtype="float32", device="cpu", nbytes=8)
    two = TensorGroup(index=1, names=("c", "b"), dtype="float32", device="cpu", nbytes=8)
    with pytest.raises(UsageError, match=r"b is in tensor groups 0 and 1"):
        GroupPlan(grouping="bytes", groups=(one, two))
    with pytest.raises(UsageError, match="not a plan"):
        GroupPlan.from_json('{"groups": 3}')
    with pytest.raises(UsageError, match="one name"):
        plan_groups([info("a"), info("a")], ByBytes())


def test_a_plan_prints_its_tensors_by_name():
    text = str(plan_groups([info("conv.weight", 1000), info("conv.bias")], ByBytes()))
    assert "1 tensor groups by bytes:25, 2 tensors" in text
    assert "conv.weight, conv.bias" in text


# ----------------------------------------------------------------------------------------------------- readiness


@given(st.integers(0, 200), st.data())
def test_bits_survive_packing_and_and_combines_them(n, data):
    ranks = data.draw(
        st.lists(
            st.tuples(st.sets(st.integers(0, max(n - 1, 0))) if n else st.just(set()), *[st.booleans()] * 3),
            min_size=1,
            max_size=6,
        )
    )
    words = None
    for ready, shutdown, uncached, invalid in ranks:
        own = readiness.pack(ready, n, shutdown=shutdown, uncached=uncached, invalid=invalid)
        assert len(own) == readiness.n_words(n)
        words = own if words is None else tuple(a & b for a, b in zip(words, own, strict=True))
    agreed = readiness.unpack(words, n)
    assert agreed.ready == frozenset.intersection(*(frozenset(r[0]) for r in ranks))
    assert (agreed.shutdown, agreed.uncached, agreed.invalid) == tuple(any(r[i] for r in ranks) for i in (1, 2, 3))


def test_messages_have_the_published_sizes_and_wrong_ones_are_refused():
    assert 8 * readiness.n_words(72) == 16
    assert 8 * readiness.n_words(1024) == 136
    with pytest.raises(ValueError, match="expected 2 words"):
        readiness.unpack((0,), 72)
    with pytest.raises(ValueError, match="outside"):
        readiness.pack([72], 72, shutdown=False, uncached=False, invalid=False)


@given(st.integers(1, 200), st.data())
def test_invalid_bits_survive_or(n, data):
    sets = data.draw(st.lists(st.sets(st.integers(0, n - 1)), min_size=1, max_size=5))
    ored = [0] * readiness.n_words(n)
    for marked in sets:
        ored = [a | b for a, b in zip(ored, readiness.pack_bits(marked, n), strict=True)]
    assert readiness.bits_of(ored, n) == frozenset().union(*sets)


# ---------------------------------------------------------------------------------------------------------- cost


def test_a_chain_ends_when_the_link_is_free_and_the_group_ready():
    link = cost.LinkCost(alpha_s=1.0, beta_s_per_byte=0.5)
    assert cost.finish_times_s([0.0, 1.0, 10.0], [2, 4, 2], link) == [2.0, 5.0, 12.0]
    assert cost.exposed_s([0.0, 1.0, 10.0], [2, 4, 2], link) == 2.0
    assert cost.exposed_s([], [], link) == 0.0


@given(st.floats(1e-5, 1e-1), st.floats(1e-10, 1e-7))
def test_the_link_is_recovered_from_its_own_times(alpha, beta):
    true = cost.LinkCost(alpha_s=alpha, beta_s_per_byte=beta)
    sizes = [10**k for k in range(3, 9)]
    fitted = cost.fit_link(sizes, [true.time_s(n) for n in sizes])
    assert fitted.time_s(5e6) == pytest.approx(true.time_s(5e6), rel=1e-6)
    with pytest.raises(ValueError, match="two sizes"):
        cost.fit_link([5, 5], [1.0, 1.0])


# -------------------------------------------------------------------------------------------------------- fusion


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.randoms())
def test_runs_keep_the_order_and_join_only_neighbours(arena_of, random):
    order = random.sample(range(len(arena_of)), len(arena_of))
    runs = runs_of(order, arena_of)
    assert list(itertools.chain(*runs)) == order
    for run in runs:
        for a, b in itertools.pairwise(run):
            assert arena_of[a] == arena_of[b]
            assert b > a
            assert all(arena_of[g] != arena_of[a] for g in range(a + 1, b))


def test_views_tile_the_arena_with_the_parameters_own_strides():
    params = {
        "scalar": torch.zeros(()),
        "conv": torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "half": torch.zeros(3, dtype=torch.float16),
        "empty": torch.zeros(0),
        "w": torch.zeros(5),
    }
    tensors = [info(n, p.numel(), str(p.dtype)[6:]) for n, p in params.items()]
    plan = plan_groups(tensors, ByCount(3))
    buffers = FusionBuffers(plan, params)
    for k, (name, view) in enumerate(buffers.views.items()):
        assert view.shape == params[name].shape
        assert view.dtype == params[name].dtype
        if params[name].numel():
            assert view.stride() == params[name].stride()
        view.fill_(k + 1)
    for k, view in enumerate(buffers.views.values()):
        assert bool((view == k + 1).all())  # nothing overlaps
    for group in plan.groups:
        buffers.write_tail(group.index, 0.25, [True] * len(group.names))
        assert buffers.read_tail(group.index) == (0.25, [True] * len(group.names))
        payload = buffers.payload([group.index])
        assert payload.numel() == sum(params[n].numel() for n in group.names) + 1 + len(group.names)
    arenas = [buffers.arena_of(g) for g in range(len(plan))]
    for run in runs_of(range(len(plan)), arenas):
        assert buffers.payload(run).numel() == sum(buffers.payload([g]).numel() for g in run)


@pytest.mark.parametrize(
    ("megabytes", "seconds", "groups"),
    [
        (3.5, 0.005, 1),  # a fast link: more groups would cost more than they hide
        (3.5, 0.030, 7),
        (3.5, 0.070, 11),
        (0.5, 1e-4, 1),
        (72.0, 1.5, 32),
    ],
)
def test_step_mode_makes_as_many_groups_as_the_link_is_worth(megabytes, seconds, groups):
    nbytes = int(megabytes * 2**20) + 12  # no round number of anything
    link = cost.LinkCost(alpha_s=0.0, beta_s_per_byte=seconds / nbytes)
    cap = plan_for_steps(Optimal(), nbytes, link).cap_mb * 2**20
    assert round(nbytes / cap) == groups
    assert groups > 1 or cap >= nbytes
    assert plan_for_steps(Optimal(max_mb=0.25), nbytes, link).cap_mb <= 0.25
    assert plan_for_steps(Optimal(), 0, link).cap_mb > 0
