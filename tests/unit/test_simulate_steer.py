"""Where errors send the next samples: shares, whole numbers, regions, rounds of a plan and their files."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exitwave.ingest.errors import DamagedDataError, UsageError
from exitwave.ingest.manifest import load_manifest
from exitwave.simulate.campaign import run_campaign
from exitwave.simulate.campaign_files import fit_to
from exitwave.simulate.cluster_inline import InlineCluster
from exitwave.simulate.plan import Plan, make_plan
from exitwave.simulate.spec import CampaignSpec
from exitwave.simulate.steer import Axis, Tally, quotas, samples_for, shares, smoothed, tallies
from exitwave.simulate.steer_rounds import (
    Round,
    cell_of,
    census,
    choose,
    held_out,
    read_rounds,
    steered,
    trained_structures,
    write_round,
)
from exitwave.simulate.tasks import draw_sample

CAMPAIGN = {
    "name": "steered",
    "seed": 3,
    "simulator": "weak-phase",
    "structures": [
        {"library": ["Au", "Si"], "split": "train"},
        {"prototype": "rocksalt", "elements": ["Mg", "O"], "a_A": 4.212, "split": "test"},
    ],
    "samples_per_structure": 4,
    "samples_per_shard": 3,
    "cell": {"min_extent_A": 16},
    "sampling": {"semiangle_mrad": 15, "thickness_A": {"uniform": [10, 50]}},
    "scan": {"shape": [4, 4], "step_A": 0.6},
    "detector": {"shape": [16, 16], "max_angle_mrad": 30},
    "label": {"shape": [16, 16], "blur_A": 0.4},
}
AXES = (
    Axis(name="structure", labels=("Au", "Si")),
    Axis(name="thickness_A", labels=("thin", "middle", "thick"), edges=(20.0, 40.0)),
)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return make_plan(CampaignSpec.model_validate(CAMPAIGN), base_dir=tmp_path_factory.mktemp("campaign"))


@st.composite
def grids(draw: st.DrawFn) -> tuple[dict[tuple[int, ...], float], dict[tuple[int, ...], Tally]]:
    """Natural shares of some cells of a 4 x 3 grid, and errors of some of them and of others."""
    every = [(a, b) for a in range(4) for b in range(3)]
    cells = draw(st.lists(st.sampled_from(every), min_size=1, unique=True))
    parts = [draw(st.floats(1e-3, 1.0)) for _ in cells]
    natural = {cell: part / math.fsum(parts) for cell, part in zip(cells, parts, strict=True)}
    judged = draw(st.lists(st.sampled_from(every), unique=True))
    errors = {c: Tally(n=(n := draw(st.integers(1, 9))), total=n * draw(st.floats(0, 1e6))) for c in judged}
    return natural, errors


@given(grid=grids(), u=st.floats(0.01, 1), sharpness=st.floats(0, 2), most=st.floats(1, 10))
@settings(max_examples=60, deadline=None)
def test_shares_sum_to_one_keep_the_floor_and_the_bound(grid, u, sharpness, most):
    natural, errors = grid
    share = shares(natural, errors, uniform_share=u, sharpness=sharpness, most=most)
    assert math.fsum(share.values()) == pytest.approx(1, abs=1e-12)
    for cell, part in natural.items():
        assert share[cell] >= u * part * (1 - 1e-6)
        assert share[cell] <= ((1 - u) * most + u) * part * (1 + 1e-6)
    assert share == shares(
        dict(reversed(natural.items())), dict(reversed(errors.items())), uniform_share=u, sharpness=sharpness, most=most
    )


@given(grid=grids(), total=st.integers(1, 500), seed=st.integers(0, 9), number=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_whole_numbers_sum_to_the_budget_and_lie_within_one_of_their_share(grid, total, seed, number):
    natural, _ = grid
    made = quotas(natural, total, seed=seed, number=number)
    assert sum(made.values()) == total
    assert all(abs(made[cell] - part * total) < 1 + 1e-6 for cell, part in natural.items())
    assert made == quotas(natural, total, seed=seed, number=number)


def test_unknown_regions_keep_their_natural_share():
    natural = {(0,): 0.5, (1,): 0.3, (2,): 0.2}
    assert shares(natural, {}, uniform_share=0.1, sharpness=1, most=4) == pytest.approx(natural)
    errors = {(0,): Tally(n=5, total=5.0), (1,): Tally(n=5, total=50.0)}
    share = shares(natural, errors, uniform_share=0.1, sharpness=1, most=4)
    assert share[2,] == pytest.approx(0.2)
    assert share[1,] > 0.3
    assert share[0,] < 0.5


def test_a_cell_without_samples_is_told_by_its_margins():
    errors = {(0, 0): Tally(n=50, total=50.0), (0, 1): Tally(n=50, total=100.0), (1, 0): Tally(n=50, total=100.0)}
    found = smoothed([(0, 0), (0, 1), (1, 0), (1, 1)], errors)
    assert found[1, 1] is not None
    assert found[1, 1] > max(found[0, 1], found[1, 0])  # type: ignore[type-var]


def test_errors_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="nan"):
        tallies([((0,), 1.0), ((1,), float("nan"))])


def test_a_budget_of_seconds_buys_fewer_dear_samples():
    cost = {(0,): 1.0, (1,): 9.0}
    assert samples_for(100, {(0,): 0.5, (1,): 0.5}, cost) == 20
    assert samples_for(100, {(0,): 1.0, (1,): 0.0}, cost) == 100


def test_regions_of_a_campaign_and_what_they_cost(plan):
    counted = census(plan, AXES)
    assert math.fsum(counted.natural.values()) == pytest.approx(1)
    assert set(counted.natural) == {(a, b) for a in range(2) for b in range(3)}
    assert counted.natural[0, 1] == pytest.approx(0.25, abs=0.06)
    assert [s.formula for s in trained_structures(plan)] == ["Au", "Si"]
    assert Axis(name="thickness_A", labels=("a", "b"), edges=(20.0,)).bin(20.0) == 1


def _round(plan: Plan, wanted: dict[tuple[int, ...], int], number: int) -> Round:
    return Round(number=number, split="train", axes=AXES, cells=(), picks=choose(plan, AXES, wanted, number=number))


def test_a_round_takes_what_was_asked_of_each_region(plan):
    wanted = {(0, 0): 3, (0, 2): 5, (1, 1): 2}
    picks = choose(plan, AXES, wanted, number=1)
    assert picks == choose(plan, AXES, wanted, number=1)
    assert picks != choose(plan, AXES, wanted, number=2)
    found: dict[tuple[int, ...], int] = {}
    for pick in picks:
        number, structure = next((k, s) for k, s in enumerate(trained_structures(plan)) if s.key == pick.structure)
        for index, uid in zip(pick.indices, pick.uids, strict=True):
            sample = draw_sample(structure, plan.spec.recipe(), index, "train")
            assert sample.uid == uid
            cell = cell_of(AXES, sample, number)
            found[cell] = found.get(cell, 0) + 1
    assert found == wanted


def test_a_region_that_cannot_be_met_is_given_up(plan):
    axes = (Axis(name="thickness_A", labels=("", ""), edges=(49.99,)),)
    assert sum(len(p.indices) for p in choose(plan, axes, {(0,): 2, (7,): 1}, number=1)) == 2


def test_rounds_add_to_the_plan_and_change_nothing_that_was_there(plan, tmp_path):
    assert steered(plan, tmp_path) is plan
    write_round(tmp_path, Round(number=0, split="steer", axes=AXES, cells=(), picks=held_out(plan, 2)))
    first = steered(plan, tmp_path)
    write_round(tmp_path, _round(first, {(0, 2): 4, (1, 0): 1}, 1))
    second = steered(plan, tmp_path)
    assert second.tasks[: len(first.tasks)] == first.tasks
    assert first.tasks[: len(plan.tasks)] == plan.tasks
    assert second.campaign_hash == plan.campaign_hash
    assert second.n_samples == plan.n_samples + 4 + 5
    assert steered(second, tmp_path) == second
    ids = [task.task_id for task in second.tasks]
    assert len(set(ids)) == len(ids)
    uids = [uid for task in second.tasks for uid in task.uids()]
    assert len(set(uids)) == len(uids)
    assert {task.split for task in second.tasks} == {"train", "test", "steer"}
    assert second.core_seconds > plan.core_seconds
    assert read_rounds(tmp_path)[1] == _round(first, {(0, 2): 4, (1, 0): 1}, 1)


def test_the_data_set_knows_its_rounds_and_another_campaign_is_told_apart(plan, tmp_path):
    data = tmp_path / "data"
    write_round(data, Round(number=0, split="steer", axes=AXES, cells=(), picks=held_out(plan, 1)))
    assert run_campaign(plan, data, InlineCluster()).samples == 14
    write_round(data, _round(steered(plan, data), {(0, 2): 2, (1, 0): 1}, 1))
    fitted = fit_to(plan, data)
    assert fitted == steered(plan, data)
    before = {shard.shard_id for shard in load_manifest(data).shards}
    run_campaign(plan, data, InlineCluster())
    manifest = load_manifest(data)
    assert before < {shard.shard_id for shard in manifest.shards} == {task.shard_id for task in fitted.tasks}
    other = make_plan(CampaignSpec.model_validate({**CAMPAIGN, "seed": 4}), base_dir=tmp_path)
    with pytest.raises(UsageError, match="seed: 3 -> 4"):
        fit_to(other, data)


def test_a_round_is_decided_once(plan, tmp_path):
    made = Round(number=0, split="steer", axes=AXES, cells=(), picks=held_out(plan, 1))
    write_round(tmp_path, made)
    with pytest.raises(UsageError, match="decided"):
        write_round(tmp_path, made)


def test_damaged_missing_and_foreign_rounds_are_refused(plan, tmp_path):
    for number in (0, 2):
        write_round(tmp_path, Round(number=number, split="train", axes=AXES, cells=(), picks=()))
    with pytest.raises(DamagedDataError, match=r"round-0001\.json: this round is missing"):
        read_rounds(tmp_path)
    (tmp_path / "steering" / "round-0002.json").unlink()
    other = make_plan(CampaignSpec.model_validate({**CAMPAIGN, "seed": 4}), base_dir=tmp_path)
    write_round(tmp_path, dataclasses.replace(_round(other, {(0, 1): 2}, 1)))
    with pytest.raises(UsageError, match="are others in this campaign"):
        steered(plan, tmp_path)
    (tmp_path / "steering" / "round-0001.json").write_text('{"number"')
    with pytest.raises(DamagedDataError, match="could not read it"):
        steered(plan, Path(tmp_path))
