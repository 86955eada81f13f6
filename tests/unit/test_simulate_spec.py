"""A campaign refuses what makes no sense, naming the place and the usual slip."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from sim_samples import campaign

from exitwave.simulate.spec import CampaignSpec, Recipe, StructureSource


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        ("sampling", {"energy_keV": 200000}, "expected 1..1000 keV; given in eV?"),
        ("sampling", {"energy_keV": {"choice": [100, 200000]}}, "200000: expected 1..1000 keV"),
        ("sampling", {"semiangle_mrad": 0.02}, "given in rad"),
        ("sampling", {"enrgy_keV": 200}, "enrgy_keV"),
        ("sampling", {"thickness_A": {"uniform": [0, 10]}}, "expected 0.1"),
        ("label", {"shape": [32, 16]}, "one proportion"),
        ("detector", {"shape": [32, 32]}, "exactly one of max_angle_mrad and max_q_per_A"),
        ("scan", {"shape": [0, 4]}, "1..4096"),
        ("fields", ["cbed", "cbed"], "each name once"),
        ("fields", ["phase"], "cbed"),
        ("split", {"test": 1.5}, "fraction"),
        ("structures", [{"library": "Au", "cif": "x.cif"}], "exactly one of"),
        ("structures", [{"prototype": "fcc", "elements": ["Au"]}], "a_A"),
        ("structures", [{"library": "Au", "a_A": 4.0}], "prototype"),
        ("structures", [{"library": "Au", "zone_axes": [[0, 0, 0]]}], "no direction"),
        ("structures", [{"library": "Au", "zone_axes": [[51, 1, 0]]}], "less than or equal to 50"),
        ("structures", [{"builder": {"name": "bulk", "kwargs": {"a": float("nan")}}}], "finite numbers expected"),
        ("structures", [], "at least 1"),
        ("samples_per_structure", 10**9, "less than or equal to 1000000"),
        ("sampling", {"scan_origin": [float("nan"), 0]}, "finite"),
        ("sampling", {"scan_origin": [1e300, 0]}, "100000"),
        ("scan", {"step_A": 1e-300}, "greater than or equal to 0.001"),
        ("seed", -1, "greater than or equal to 0"),
    ],
)
def test_a_wrong_value_is_refused_with_a_hint(place: str, value: Any, told: str) -> None:
    with pytest.raises(ValidationError) as caught:
        campaign(**{place: value})
    assert told in str(caught.value)
    assert all(error["loc"] == () or error["loc"][0] == place for error in caught.value.errors())


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("seed", True),
        ("seed", "1"),
        ("seed", 1.0),
        ("name", 3),
        ("split", {"val": True}),
        ("split", {"val": float("nan")}),
        ("scan", {"step_A": "0.5"}),
        ("scan", {"step_A": float("inf")}),
        ("scan", {"shape": [True, 4]}),
        ("sampling", {"energy_keV": {"choice": ["200"]}}),
        ("sampling", {"thickness_A": {"linspace": [4, 8, 2.0]}}),
        ("sampling", {"thickness_A": {"normal": [4, float("nan")]}}),
    ],
)
def test_nothing_is_converted_on_the_way_in(place: str, value: Any) -> None:
    with pytest.raises(ValidationError):
        campaign(**{place: value})


def test_lists_stand_for_tuples_and_whole_numbers_for_real_ones() -> None:
    spec = campaign(scan={"shape": [8, 8], "step_A": 1}, label={"shape": [8, 8]})
    assert (spec.scan.shape, spec.scan.step_A, type(spec.scan.step_A)) == ((8, 8), 1.0, float)
    source = StructureSource.model_validate({"builder": {"name": "bulk", "args": ["Cu", [1, [2]]]}})
    assert source.builder is not None and source.builder.args == ("Cu", (1, (2,)))


def test_a_campaign_survives_json() -> None:
    spec = campaign()
    assert CampaignSpec.model_validate_json(spec.model_dump_json()) == spec
    assert CampaignSpec.model_validate(spec.model_dump(mode="json")) == spec


def test_the_recipe_is_the_campaign_without_its_structures() -> None:
    spec = campaign()
    recipe = spec.recipe()
    assert type(recipe) is Recipe
    assert recipe.model_dump() == {k: v for k, v in spec.model_dump().items() if k in Recipe.model_fields}


def test_label_pixels_cover_the_scanned_field() -> None:
    recipe = campaign(scan={"shape": [8, 4], "step_A": 0.6}, label={"shape": [32, 16]}).recipe()
    assert recipe.label_sampling_A * 32 == pytest.approx(8 * 0.6)
