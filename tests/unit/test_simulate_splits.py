"""Two test sets that answer two questions, classes that can be learnt, and no split too small to say anything."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from sim_samples import plan

from exitwave.ingest.errors import UsageError
from exitwave.simulate.spec import SplitSpec
from exitwave.simulate.splits import SplitUnit, assign_splits, without_small_classes
from exitwave.train.intervals import groups_of, intervals


def unit(formula: str, prototype: int, space_group: int = 225, fixed: str | None = None) -> SplitUnit:
    return SplitUnit(
        key=f"{formula}-{prototype}",
        source=f"s:{formula}",
        formula=formula,
        prototype_group=prototype,
        fixed=fixed,
        space_group=space_group,
    )


# Compositions occur in several prototypes, prototypes hold several compositions.
UNITS = st.lists(
    st.tuples(st.sampled_from([f"E{i}" for i in range(14)]), st.integers(1, 6)), min_size=10, max_size=40, unique=True
)


@given(UNITS, st.integers(0, 100), st.integers(0, 2), st.integers(0, 3), st.integers(0, 2))
def test_the_two_tests_are_what_they_say_or_are_refused(
    pairs: list[tuple[str, int]], seed: int, prototypes: int, compositions: int, val: int
) -> None:
    units = [unit(f, p) for f, p in pairs]
    split = SplitSpec(new_prototype=prototypes, new_composition=compositions, val=val)
    if not prototypes and not compositions:
        return
    try:
        splits = assign_splits(units, split, seed)
    except UsageError:
        return
    of = {
        part: [u for u, s in zip(units, splits, strict=True) if s == part]
        for part in ("train", "val", "new_composition", "new_prototype")
    }
    trained_prototypes = {u.prototype_group for u in of["train"]}
    trained_formulas = {u.formula for u in of["train"]}
    assert len({u.prototype_group for u in of["new_prototype"]}) == prototypes
    assert len({u.formula for u in of["new_composition"]}) == compositions
    assert len({u.formula for u in of["val"]}) == val
    assert not {u.prototype_group for u in of["new_prototype"]} & (
        trained_prototypes | {u.prototype_group for u in of["val"] + of["new_composition"]}
    )
    assert {u.prototype_group for u in of["new_composition"]} <= trained_prototypes
    for part in ("val", "new_composition", "new_prototype"):
        assert not {u.formula for u in of[part]} & trained_formulas
    dropped = [u for u, s in zip(units, splits, strict=True) if s is None]
    assert {u.formula for u in dropped} <= {u.formula for u in of["new_prototype"]}
    again = assign_splits(units[::-1], split, seed)
    assert again[::-1] == splits


def test_strata_are_taken_in_proportion() -> None:
    groups = [225] * 24 + [194] * 8 + [62] * 8
    units = [unit(f"E{k}", k, group) for k, group in enumerate(groups)]
    for seed in range(10):
        splits = assign_splits(units, SplitSpec(test=10, val=5, stratify="crystal_system"), seed)
        taken = Counter(u.space_group for u, s in zip(units, splits, strict=True) if s == "test")
        assert taken[225] in (5, 6, 7) and taken[194] in (1, 2, 3) and taken[62] in (1, 2, 3)


def test_classes_with_few_compositions_in_training_are_dropped() -> None:
    units = [unit(f"A{k}", k, 225) for k in range(8)] + [unit(f"B{k}", 50 + k, 194) for k in range(3)]
    split = SplitSpec(test=0.25, classes="space_group")
    splits = assign_splits(units, split, 0)
    assert Counter(splits) == {"train": 8, "test": 3}
    kept = without_small_classes(units, splits, split)
    assert [k for u, k in zip(units, kept, strict=True) if u.space_group == 225] == splits[:8]
    assert [k for u, k in zip(units, kept, strict=True) if u.space_group == 194] == [None] * 3
    with pytest.raises(UsageError, match="no space group has 9 compositions in training"):
        without_small_classes(units, splits, SplitSpec(classes="space_group", least_compositions=9))


def test_a_split_with_too_few_units_is_refused() -> None:
    units = [unit(f"E{k}", k) for k in range(10)]
    assert assign_splits(units, SplitSpec(test=3, least_units=3), 0).count("test") == 3
    with pytest.raises(UsageError, match=r"split\.least_units: test holds 2 composition\(s\), at least 3 asked"):
        assign_splits(units, SplitSpec(test=2, least_units=3), 0)
    with pytest.raises(UsageError, match=r"split\.new_composition: 1 composition\(s\) too few"):
        assign_splits(units, SplitSpec(new_composition=1), 0)
    with pytest.raises(UsageError, match=r"split\.val: 3 of 10 .* 2 not yet taken \(test has 8\)"):
        assign_splits(units, SplitSpec(test=8, val=3), 0)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"new_prototype": 1, "test": 1}, "leave `test` and `by` away"),
        ({"new_composition": 1, "by": "prototype"}, "leave `test` and `by` away"),
        ({"classes": "space_group", "by": "structure"}, "classes: split by composition"),
    ],
)
def test_kinds_that_do_not_go_together_are_refused(content: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        SplitSpec.model_validate(content)


def test_a_campaign_divides_into_both_tests() -> None:
    made = plan(
        structures=[{"library": ["Al", "Cu", "Ag", "Au", "Fe", "W", "Mo", "Si", "Ge", "GaAs"]}],
        split={"new_prototype": 1, "new_composition": 2, "val": 1},
        samples_per_structure=1,
    )
    found: dict[str, set[int]] = {}
    for task in made.tasks:
        found.setdefault(task.split, set()).add(task.structure.prototype_group)
    assert set(found) == {"train", "val", "new_composition", "new_prototype"}
    assert not found["new_prototype"] & (found["train"] | found["new_composition"])
    assert found["new_composition"] <= found["train"]
    for spec in made.samples():
        assert spec.params(captured_fraction=1.0)["split"] == spec.split.encode()


def test_intervals_are_over_groups_and_not_over_samples() -> None:
    rng = np.random.default_rng(1)
    group = np.repeat(np.arange(6), 200)
    errors = (1.0 + np.arange(6)[group]) * rng.uniform(0.9, 1.1, group.size)
    low, high = intervals({"model": errors}, group)["model"] or (0, 0)
    value = float(np.sqrt(errors.mean()))
    assert low < value < high
    assert high - low > 0.5  # 1,200 independent samples would give a tenth of it
    assert intervals({"model": errors}, np.zeros(group.size, dtype=np.int64)) == {"model": None}
    assert intervals({"model": errors}, group) == intervals({"model": errors}, group)
    params = np.zeros(4, dtype=[("structure", "<i4"), ("prototype_group", "<u8")])
    params["structure"], params["prototype_group"] = [0, 0, 1, 2], [7, 7, 7, 9]
    assert groups_of(params, "test")[0] == "structure" and groups_of(params, "test")[1].tolist() == [0, 0, 1, 2]
    assert groups_of(params, "new_prototype")[0] == "prototype"
    assert groups_of(params, "new_prototype")[1].tolist() == [0, 0, 0, 1]
