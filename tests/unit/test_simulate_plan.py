"""A plan is a pure function of the campaign: order, workers and titles change no sample; what is wrong is told."""

from __future__ import annotations

import json
import math
import pickle
import re
import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_samples import DATA, campaign, plan

from exitwave.ingest.errors import UsageError
from exitwave.simulate.cost import calibrate
from exitwave.simulate.detector import flat_field_ripple
from exitwave.simulate.plan import Plan, make_plan
from exitwave.simulate.spec import CampaignSpec, SplitSpec
from exitwave.simulate.splits import SplitUnit, assign_splits
from exitwave.simulate.structures.sources import library_names
from exitwave.simulate.tasks import whole_slices


def uids(made: Plan) -> set[int]:
    return {sample.uid for sample in made.samples()}


def test_the_order_of_structures_changes_no_sample() -> None:
    forward, backward = (
        plan(structures=[{"library": ["Si", "Al", "Cu"]}]),
        plan(structures=[{"library": ["Cu"]}, {"library": ["Al", "Si"]}]),
    )
    assert uids(forward) == uids(backward)
    splits = [{t.structure.source: t.split for t in made.tasks} for made in (forward, backward)]
    assert splits[0] == splits[1]


def test_more_structures_and_samples_keep_the_old_ones() -> None:
    few = plan(split={})
    more = plan(split={}, samples_per_structure=6, structures=[{"library": ["Au", "Si", "Al", "Cu"]}])
    assert uids(few) < uids(more)


def test_shards_of_another_size_hold_the_same_samples() -> None:
    assert uids(plan(samples_per_shard=1)) == uids(plan(samples_per_shard=4))


def test_two_plans_are_equal_and_a_title_takes_no_part() -> None:
    one, two = plan(), plan(name="another title")
    assert one.campaign_hash == two.campaign_hash
    assert [t.shard_id for t in one.tasks] == [t.shard_id for t in two.tasks]


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 4},
        {"label": {"shape": [8, 8], "blur_A": 0.4}},
        {"scan": {"shape": [2, 2], "step_A": 0.4}},
        {"detector": {"shape": [16, 16], "max_q_per_A": 1.1}},
    ],
    ids=str,
)
def test_another_experiment_has_another_uid(change: dict[str, Any]) -> None:
    assert not uids(plan()) & uids(plan(**change))


def test_a_known_plan_is_the_same_on_every_machine() -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from sim_samples import plan; p = plan();"
        "print(p.campaign_hash, [t.shard_id for t in p.tasks], 'abtem' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(DATA.parent / "support")], capture_output=True, text=True, check=True
    )
    here = plan()
    assert done.stdout.strip() == f"{here.campaign_hash} {[t.shard_id for t in here.tasks]} False False"


def test_the_summary_is_the_contracts() -> None:
    summary = plan(structures=[{"library": ["Si", "Al", "Cu"]}, {"cif": "*.cif"}]).summary(workers=2)
    assert json.loads(json.dumps(summary)) == summary
    assert summary["samples"] == 12 and summary["shards"] == 6 and summary["structures"] == 3
    assert sum(summary["splits"].values()) == 12 and set(summary["splits"]) == {"train", "val", "test"}
    whys = {row["source"]: row["why"] for row in summary["rejected"]}
    assert "says In" in whys["cif:In_read_as_iodine.cif"]
    assert "partial occupancy" in whys["cif:partial_occupancy.cif"]
    arrays = 12 * 4 * (2 * 2 * 16 * 16 + 8 * 8)
    assert arrays < summary["bytes"] < arrays + 12 * 1000 + 6 * 65000
    assert 0 < summary["core_hours"] < 1 and summary["eta_s"] == pytest.approx(summary["core_hours"] * 1800)
    assert 4e8 < summary["memory_per_worker_bytes"] < 2e9


def test_tasks_are_small_and_travel() -> None:
    for task in plan().tasks:
        message = pickle.dumps(task)
        assert len(message) < 8000
        assert pickle.loads(message).samples()[0].uid == task.samples()[0].uid


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"cell": {"min_extent_A": 16, "max_atoms": 50}}, "max_atoms is 50"),
        ({"grid": {"sampling_A": 0.25, "max_gpts": 64}}, "grid.max_gpts is 64"),
        ({"grid": {"sampling_A": 0.5}}, "antialias cutoff"),
        ({"sampling": {"defocus_A": 5000}}, "quarter of the cell"),
        ({"sampling": {"semiangle_mrad": 90, "energy_keV": 200}}, "wider than the detector"),
    ],
)
def test_where_nothing_can_be_simulated_the_reason_is_told(change: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        plan(**change)


def test_splits_that_fail_for_rejected_structures_name_them() -> None:
    with pytest.raises(
        UsageError, match=r"(?s)nothing is left to train on.*1 structures were rejected: cif:partial_occ"
    ):
        plan(structures=[{"library": ["Si", "Al"]}, {"cif": "partial_occupancy.cif"}])


def test_rejected_draws_are_counted_and_not_drawn_again() -> None:
    full = plan(sampling={"defocus_A": {"uniform": [-400, 400]}, "semiangle_mrad": 15, "thickness_A": 5})
    assert 0 < full.rejected_samples < 12
    assert full.n_samples + full.rejected_samples == 12
    assert any("samples: the probe's radius" in r.why for r in full.rejected)
    assert max(abs(s.values["defocus_A"]) for s in full.samples()) < 400


def test_the_same_structure_twice_counts_once() -> None:
    twice = plan(structures=[{"library": ["Si", "Al", "Cu", "Si"]}])
    assert uids(twice) == uids(plan())
    assert [r.why for r in twice.rejected] == ["it stands in the campaign twice; the first counts"]


def test_samples_that_are_one_experiment_are_refused() -> None:
    constant = {"scan_origin": [0, 0], "thickness_A": 8}
    with pytest.raises(UsageError, match=r"samples 0 and 1 of library:Si\.cif are the same experiment"):
        plan(sampling=constant)
    assert plan(sampling=constant, samples_per_structure=1).n_samples == 3


def test_more_samples_than_can_be_planned_are_refused_before_any_is_drawn() -> None:
    with pytest.raises(UsageError, match="samples_per_structure: 500000 samples of 3 structures are 1500000, at most"):
        plan(samples_per_structure=500_000)


def test_zone_axes_make_structures_of_one_split() -> None:
    many = plan(structures=[{"library": ["Si", "Al", "Cu"], "zone_axes": [[0, 0, 1], [1, 1, 0], [1, 1, 1]]}])
    assert len(many.structures) == 9
    by_source: dict[str, set[str]] = {}
    for task in many.tasks:
        by_source.setdefault(task.structure.source, set()).add(task.split)
    assert all(len(splits) == 1 for splits in by_source.values())


def test_coarse_detectors_and_steps_are_warned_of() -> None:
    told = " ".join(plan(scan={"shape": [2, 2], "step_A": 2.0}).warnings)
    assert "undersamples the probe" in told


def test_a_scan_beyond_the_periodic_cell_is_warned_of() -> None:
    assert not any("repeat sooner" in text for text in plan().warnings)
    told = " ".join(plan(scan={"shape": [2, 2], "step_A": 60}).warnings)
    assert "3 structure(s) are scanned over 120 Å but repeat sooner" in told and "cell.min_extent_A of 120" in told


def test_a_supercell_too_small_for_the_pixels_is_warned_of_with_its_ripple_and_cure() -> None:
    changes: dict[str, Any] = {"detector": {"shape": [32, 32], "max_q_per_A": 1.2}}
    (told,) = [text for text in plan(**changes).warnings if "ripple" in text]
    assert "3 structure(s)" in told and "library:Si.cif along [0 0 1]" in told
    assert "Q/2 = 0.0375 /Å" in told and "cell.min_extent_A of 26.7 does that" in told
    worst = max(flat_field_ripple(s.extent_yx_A[0], 0.075, 32) for s in plan(**changes).structures)
    assert f"ripple by up to {100 * worst:.0f} %" in told and worst > 0.05
    cured = plan(**changes, cell={"min_extent_A": 26.7})
    assert not any("ripple" in text for text in cured.warnings)


def test_the_defaults_fit_each_other_for_every_shipped_structure_at_any_usual_energy() -> None:
    content = {
        "name": "defaults",
        "structures": [
            {"library": list(library_names())},
            {"library": ["Si", "Au"], "zone_axes": [[1, 1, 0], [1, 1, 1], [1, 1, 2]]},
        ],
        "sampling": {"energy_keV": {"linspace": [60, 300, 5]}},
        "samples_per_structure": 5,
    }
    made = make_plan(CampaignSpec.model_validate(content), base_dir=DATA)
    assert (made.rejected, made.rejected_samples) == ((), 0)
    assert made.n_samples == 5 * (len(library_names()) + 6)
    assert not any("ripple" in text for text in made.warnings)


def test_planning_a_thousand_samples_is_quick() -> None:
    began = time.perf_counter()
    make_plan(campaign(samples_per_structure=330), base_dir=DATA)
    assert time.perf_counter() - began < 20


def test_calibration_measures_real_samples() -> None:
    measured = calibrate(plan(simulator="weak-phase"), budget_s=0.2)
    assert measured.measured_samples >= 1 and measured.core_seconds > 0


@given(
    wanted=st.floats(0, 1),
    slice_A=st.floats(0.5, 5),
    low=st.floats(0.1, 50),
    width=st.floats(0, 100),
)
def test_thickness_stays_within_its_bounds(wanted: float, slice_A: float, low: float, width: float) -> None:
    thickness, high = low + wanted * width, low + width
    slices = whole_slices(thickness, slice_A, (low, high))
    assert slices >= 1 and abs(slices * slice_A - thickness) <= slice_A * (1 + 1e-9)
    fits = max(1, math.ceil(low / slice_A)) * slice_A <= high
    if fits:
        assert low - 1e-6 <= slices * slice_A <= high + 1e-6
    else:
        assert slices == max(1, round(thickness / slice_A))


def test_no_sample_is_thinner_or_thicker_than_asked() -> None:
    sampling = {"thickness_A": {"uniform": [10, 14]}}
    made = plan(split={}, samples_per_structure=40, sampling=sampling, detector={"shape": [16, 16], "max_q_per_A": 1.2})
    found = [sample.thickness_A for sample in made.samples()]
    assert len(found) == 120 and 10 <= min(found) <= max(found) <= 14


# -- splits ------------------------------------------------------------------------------------------------------------


def unit(formula: str, group: int = 1, fixed: str | None = None) -> SplitUnit:
    return SplitUnit(
        key=f"{formula}-{group}", source=f"s:{formula}", formula=formula, prototype_group=group, fixed=fixed
    )


FORMULAS = st.lists(st.sampled_from([f"E{i}" for i in range(12)]), min_size=6, max_size=40)


@given(FORMULAS, st.integers(0, 1000))
def test_no_composition_straddles_splits(formulas: list[str], seed: int) -> None:
    units = [unit(f, k) for k, f in enumerate(formulas)]
    wanted = max(0, (len(set(formulas)) - 1) // 2)
    splits = assign_splits(units, SplitSpec(val=wanted, test=wanted), seed)
    where: dict[str, set[str | None]] = {}
    for each, split in zip(units, splits, strict=True):
        where.setdefault(each.formula, set()).add(split)
    assert all(len(s) == 1 for s in where.values())
    counts = [s for (s,) in where.values()]
    assert counts.count("test") == counts.count("val") == wanted


def test_a_fixed_split_takes_its_composition_along_and_counts() -> None:
    units = [unit("A", 1, "test"), unit("A", 2), unit("B"), unit("C"), unit("D")]
    splits = assign_splits(units, SplitSpec(test=2, val=1), 0)
    assert splits[0] == splits[1] == "test" and sorted(map(str, splits[2:])) == ["test", "train", "val"]


def test_contradicting_or_impossible_splits_are_refused() -> None:
    with pytest.raises(UsageError, match="may not straddle"):
        assign_splits([unit("A", 1, "test"), unit("A", 2, "train"), unit("B")], SplitSpec(), 0)
    with pytest.raises(UsageError, match=r"split\.test: 5 of 2"):
        assign_splits([unit("A"), unit("B")], SplitSpec(test=5), 0)
    with pytest.raises(UsageError, match="nothing is left to train on"):
        assign_splits([unit("A"), unit("B")], SplitSpec(test=1, val=1), 0)


def test_by_prototype_drops_training_structures_of_a_test_composition() -> None:
    units = [unit("A", 1), unit("A", 2), unit("B", 2), unit("C", 3)]
    for seed in range(20):
        splits = assign_splits(units, SplitSpec(by="prototype", test=1), seed)
        tested = {u.formula for u, s in zip(units, splits, strict=True) if s == "test"}
        assert not tested & {u.formula for u, s in zip(units, splits, strict=True) if s == "train"}


def test_the_split_of_a_composition_hangs_on_no_way_of_writing_it() -> None:
    one, other = ["NaCl", "GaAs", "SrTiO3", "Si", "MgO", "SiC"], ["ClNa", "AsGa", "O3SrTi", "Si", "MgO", "CSi"]
    for seed in range(5):
        split = SplitSpec(val=1, test=2)
        assert assign_splits([unit(f) for f in one], split, seed) == assign_splits(
            [unit(f) for f in other], split, seed
        )


def test_fractions_are_of_units() -> None:
    splits = assign_splits([unit(f"E{i}") for i in range(20)], SplitSpec(val=0.1, test=0.25), 0)
    assert splits.count("val") == 2 and splits.count("test") == 5


@pytest.mark.parametrize(
    ("name", "sampling_A", "semiangle_mrad", "warned"),
    [("Au", 0.25, 20, True), ("Au", 0.25, 12, False), ("Au", 0.2, 20, False), ("Al", 0.25, 20, True)],
)
def test_a_grid_whose_waves_may_hold_more_than_the_beam_is_told(
    name: str, sampling_A: float, semiangle_mrad: float, warned: bool
) -> None:
    sampling = {"energy_keV": 200, "semiangle_mrad": semiangle_mrad, "thickness_A": 20}
    grid = {"sampling_A": sampling_A, "max_gpts": 256}
    made = plan(structures=[{"library": [name]}], split={"val": 0, "test": 0}, sampling=sampling, grid=grid)
    assert any("more than the beam" in warning for warning in made.warnings) == warned, made.warnings


def test_uranium_needs_a_finer_grid_still() -> None:
    uranium = [{"prototype": "rocksalt", "elements": ["U", "C"], "a_A": 4.96}]
    told = [
        plan(structures=uranium, split={"val": 0, "test": 0}, grid={"sampling_A": a, "max_gpts": 256}).warnings
        for a in (0.2, 0.19)
    ]
    assert ["sampling_A of 0.19" in " ".join(warnings) for warnings in told] == [True, False]
