"""A campaign refuses what makes no sense, naming the place and the usual slip."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from sim_samples import campaign

from exitwave.simulate.spec import CampaignSpec, Recipe


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
        ("structures", [], "at least 1"),
        ("seed", -1, "greater than or equal to 0"),
    ],
)
def test_a_wrong_value_is_refused_with_a_hint(place: str, value: Any, told: str) -> None:
    with pytest.raises(ValidationError) as caught:
        campaign(**{place: value})
    assert told in str(caught.value)
    assert all(error["loc"] == () or error["loc"][0] == place for error in caught.value.errors())


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
