"""The section `adaptive:`, the decision on a round, and what status and report tell of rounds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from exitwave.ingest.errors import DamagedDataError, UsageError
from exitwave.simulate.plan import Plan, make_plan
from exitwave.simulate.spec import CampaignSpec
from exitwave.simulate.steer_rounds import Round, read_rounds, steered, write_round
from exitwave.train.judge import Judged
from exitwave.train.spec import TrainSpec
from exitwave.workflows.adaptive import Hands, _by_region, judging_spec, next_round, read_errors, run_rounds
from exitwave.workflows.adaptive_facts import adaptive_facts, adaptive_status
from exitwave.workflows.adaptive_spec import AdaptiveSection, axes_of, conflict

CAMPAIGN: dict[str, Any] = {
    "name": "steered",
    "simulator": "weak-phase",
    "structures": [{"library": ["Au", "Si"], "split": "train"}],
    "samples_per_structure": 3,
    "cell": {"min_extent_A": 16},
    "sampling": {"semiangle_mrad": 15, "energy_keV": {"choice": [100, 200]}, "thickness_A": {"uniform": [10, 50]}},
    "scan": {"shape": [4, 4], "step_A": 0.6},
    "detector": {"shape": [16, 16], "max_angle_mrad": 30},
    "label": {"shape": [16, 16], "blur_A": 0.4},
}
SPEC = TrainSpec(epochs=5, eval_every_steps=10)


def section(**changes: Any) -> AdaptiveSection:
    regions = {"structure": "each", "thickness_A": [30]}
    return AdaptiveSection.model_validate({"samples_per_round": 30, "regions": regions, "pool": 8, **changes})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return make_plan(CampaignSpec.model_validate(CAMPAIGN), base_dir=tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def dataset(base: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set whose round 0 is decided."""
    folder = tmp_path_factory.mktemp("data")
    hands = Hands(simulate=_refuse, train=_refuse, note=print)
    with pytest.raises(_Stopped):
        run_rounds(base, folder, folder / "rounds", section(), SPEC, hands)
    return folder


class _Stopped(Exception):
    pass


def _refuse(*_: Any) -> int:
    raise _Stopped


def _errors(plan: Plan, formula: str = "Au") -> list[Judged]:
    """Thick samples of one structure are four times as wrong."""
    return [
        Judged(
            uid=sample.uid,
            loss=4.0 if sample.structure.formula == formula and sample.thickness_A >= 30 else 1.0,
            mse_VA2=0.0,
            thickness_A=sample.thickness_A,
        )
        for task in plan.tasks
        if task.split == "steer"
        for sample in task.samples()
    ]


def _decided(plan: Plan, errors: list[Judged], **changes: Any) -> Round:
    return next_round(plan, section(**changes), errors, number=1, split="steer")


def test_errors_draw_samples_and_nothing_else_does(base: Plan, dataset: Path) -> None:
    plan = steered(base, dataset)
    errors = _errors(plan)
    assert len(errors) == 16
    made = _decided(plan, errors)
    assert made == _decided(plan, errors[::-1])
    assert made == Round.from_json(json.loads(json.dumps(made.to_json())))
    by_cell = {row.cell: row for row in made.cells}
    assert by_cell[0, 1].share > 1.3 * by_cell[0, 1].natural
    assert min(row.share / row.natural for row in made.cells) > 0.3
    assert {cell: row.planned for cell, row in by_cell.items()} == {cell: row.taken for cell, row in by_cell.items()}
    assert sum(row.taken * row.cost_s for row in made.cells) == pytest.approx(made.budget_s, rel=0.05)
    even = _decided(plan, errors, uniform_share=1.0)
    assert all(row.share == pytest.approx(row.natural) for row in even.cells)


def test_a_loss_that_is_no_number_counts_as_the_worst(base: Plan, dataset: Path) -> None:
    plan = steered(base, dataset)
    errors = _errors(plan)
    thick = next(k for k, row in enumerate(errors) if row.loss == 4.0)
    lost = [dataclasses.replace(row, loss=float("nan")) if k == thick else row for k, row in enumerate(errors)]
    made = _decided(plan, lost)
    assert made.judge["no_numbers"] == 1
    assert made.cells == _decided(plan, errors).cells
    json.dumps(made.to_json(), allow_nan=False)


def test_a_network_that_lost_its_mind_steers_nothing_and_says_the_way_on(base: Plan, dataset: Path) -> None:
    plan = steered(base, dataset)
    errors = [dataclasses.replace(row, loss=float("inf")) for row in _errors(plan)]
    with pytest.raises(UsageError, match=r"round 1 cannot be steered: .* all 16 .*Lower train.optimizer.lr and remove"):
        _decided(plan, errors)


def test_a_decided_round_is_not_judged_again(base: Plan, dataset: Path, tmp_path: Path) -> None:
    for made in read_rounds(dataset):
        write_round(tmp_path, made)
    plan = steered(base, tmp_path)
    write_round(tmp_path, _decided(plan, _errors(plan)))
    simulated: list[int] = []

    def simulate(plan: Plan) -> int:
        simulated.append(plan.n_samples)
        return 0

    hands = Hands(simulate=simulate, train=_refuse, note=print)
    with pytest.raises(_Stopped):  # at the judge of round 2
        run_rounds(base, tmp_path, tmp_path / "rounds", section(), SPEC, hands)
    assert simulated == [plan.n_samples + read_rounds(tmp_path)[1].n_samples]

    status = adaptive_status(tmp_path)
    assert status is not None
    assert (status["rounds"], status["decided"]) == (2, 1)
    assert {row["axis"] for row in status["by_round"][0]["regions"]} == {"structure", "thickness_A"}
    facts = adaptive_facts(tmp_path, None)
    assert facts is not None
    assert [name for name, _ in facts.regions] == [
        "Au [0 0 1]",
        "Si [0 0 1]",
        "thickness below 30 Å",
        "thickness from 30 Å",
    ]
    assert facts.pictures[0][1].startswith("data:image/png;base64,")
    assert "Au [0 0 1], thickness from 30 Å" in facts.rounds[0][-1]
    assert adaptive_status(dataset.parent) is None


@pytest.mark.parametrize(
    ("changes", "campaign", "train", "words"),
    [
        ({"regions": {"dose_e_per_A2": 3}}, {}, {}, "the dose is drawn when a sample is loaded"),
        ({"regions": {"tilt": 3}}, {}, {}, "regions.tilt: one of structure, atomic_number, energy_keV"),
        ({"regions": {"defocus_A": 3}}, {}, {}, "0 for all samples"),
        ({"regions": {"thickness_A": [5, 30]}}, {}, {}, "edges within 10..50"),
        ({"pool": 0}, {}, {}, "pool: at least 1"),
        ({}, {"fan_out": {"thickness_A": 3}, "samples_per_structure": 3, "samples_per_shard": 3}, {}, "fan_out away"),
        ({}, {}, {"task": "classify"}, "train.task is classify"),
        ({}, {}, {"train_split": "other"}, "would not see them"),
    ],
)
def test_what_does_not_go_together_is_refused(
    changes: dict[str, Any], campaign: dict[str, Any], train: dict[str, Any], words: str
) -> None:
    reason = conflict(
        section(**changes), CampaignSpec.model_validate({**CAMPAIGN, **campaign}), SPEC.model_copy(update=train)
    )
    assert reason is not None
    assert words in reason


@pytest.mark.parametrize(
    "regions", [{"structure": 3}, {"thickness_A": "each"}, {"thickness_A": [3, 2]}, {"thickness_A": []}, {}]
)
def test_regions_that_are_none_are_refused(regions: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"regions|expected"):
        section(regions=regions)


@pytest.mark.parametrize("bins", [[90], [1, 2]])
def test_bins_that_all_crystals_share_are_refused(base: Plan, bins: list[float]) -> None:
    with pytest.raises(UsageError, match="all 2 structures fall into one"):
        axes_of(section(regions={"atomic_number": bins}), base)
    assert len(axes_of(section(regions={"atomic_number": 3}), base)[0].labels) == 3


def test_a_validation_split_that_is_not_there_is_refused_at_once(base: Plan, tmp_path: Path) -> None:
    hands = Hands(simulate=_refuse, train=_refuse, note=print)
    with pytest.raises(UsageError, match="split 'val'"):
        run_rounds(base, tmp_path, tmp_path, section(pool=0, regions={"energy_keV": 2}), SPEC, hands)


def test_the_judge_is_trained_as_the_network_but_for_its_length() -> None:
    made = judging_spec(section(judge_steps=7), SPEC)
    assert (made.steps, made.epochs, made.eval_every_steps, made.trackers) == (7, None, None, ())
    assert made.model == SPEC.model
    assert made.seed == SPEC.seed


def test_a_campaign_that_trains_on_nothing_is_not_steered(base: Plan, tmp_path: Path) -> None:
    plan = dataclasses.replace(base, tasks=())  # each of its samples for training was rejected
    hands = Hands(simulate=_refuse, train=_refuse, note=print)
    with pytest.raises(UsageError, match="no sample for training"):
        run_rounds(plan, tmp_path, tmp_path, section(), SPEC, hands)


@pytest.mark.parametrize("text", ["", "[1]", '[{"uid": 1}]', '[{"uid":"x","loss":1,"mse_VA2":1,"thickness_A":1}]', "7"])
def test_errors_that_cannot_be_read_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "errors.json").write_text(text)
    with pytest.raises(DamagedDataError, match="makes it again"):
        read_errors(tmp_path / "errors.json")


def test_errors_of_other_samples_are_named(base: Plan, dataset: Path) -> None:
    plan = steered(base, dataset)
    strange = dataclasses.replace(_errors(plan)[0], uid=5)
    with pytest.raises(UsageError, match=r"1 of 17 samples .* \(uid 5\)"):
        _decided(plan, [*_errors(plan), strange])


def test_a_loss_that_is_no_number_does_not_cost_the_report(base: Plan, dataset: Path) -> None:
    plan = steered(base, dataset)
    errors = _errors(plan)
    errors[3] = dataclasses.replace(errors[3], loss=float("nan"))
    told = _by_region(plan, read_rounds(dataset)[0].axes, errors, "steer")
    json.dumps(told, allow_nan=False)
    assert sum(row["n"] for row in told["cells"]) == len(told["errors"]) == 15
    assert told["no_numbers"] == [errors[3].uid]


def test_a_round_with_numbers_missing_is_damaged(base: Plan, dataset: Path, tmp_path: Path) -> None:
    path = tmp_path / "steering" / "round-0000.json"
    path.parent.mkdir()
    good = json.loads((dataset / "steering" / "round-0000.json").read_text())
    for changes in (
        {"picks": [{**good["picks"][0], "indices": [], "uids": []}]},
        {"picks": [{**good["picks"][0], "uids": good["picks"][0]["uids"][1:]}]},
        {"cells": [{**good["cells"][0], "cell": [0]}]},
        {"options": 3},
    ):
        path.write_text(json.dumps({**good, **changes}))
        with pytest.raises(DamagedDataError, match="could not read it"):
            steered(base, tmp_path)
