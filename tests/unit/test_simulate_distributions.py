"""Draws depend on their four words alone, and stay within what was asked."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitwave.simulate.distributions import bounds, draw, parse

FORMS: list[Any] = [
    {"choice": [100, 200, 300]},
    {"uniform": [-50, 50]},
    {"loguniform": [1, 1e7]},
    {"normal": [0, 5]},
    {"linspace": [0, 1, 5]},
    12.5,
]


def draws(form: Any, count: int, **words: Any) -> np.ndarray:
    known = {"seed": 1, "structure_key": "k", "name": "defocus_A"} | words
    return np.array([draw(parse(form), sample=i, **known) for i in range(count)])


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_draws_stay_within_their_bounds_and_repeat(form: Any) -> None:
    values = draws(form, 500)
    low, high = bounds(parse(form))
    assert low <= values.min() and values.max() <= high
    assert np.array_equal(values, draws(form, 500))


@pytest.mark.parametrize("other", [{"seed": 2}, {"structure_key": "j"}, {"name": "C30_A"}], ids=str)
def test_any_word_changes_the_draw(other: dict[str, Any]) -> None:
    assert not np.any(draws({"uniform": [0, 1]}, 100) == draws({"uniform": [0, 1]}, 100, **other))


def test_a_known_draw_is_the_same_on_every_machine() -> None:
    value = draw(parse({"uniform": [0, 1]}), seed=2026, structure_key="Au", sample=3, name="defocus_A")
    assert value == 0.15986522580643314


def test_uniform_draws_fill_the_interval_evenly() -> None:
    counts, _ = np.histogram(draws({"uniform": [0, 1]}, 8000), bins=16, range=(0, 1))
    chi2 = float(((counts - 500) ** 2 / 500).sum())
    assert chi2 < 37.7  # 15 degrees of freedom, one in a thousand


def test_normal_draws_have_their_mean_and_deviation() -> None:
    values = draws({"normal": [3, 2]}, 8000)
    assert abs(values.mean() - 3) < 0.1 and abs(values.std() - 2) < 0.1


def test_loguniform_is_even_in_the_logarithm() -> None:
    logs = np.log10(draws({"loguniform": [1, 1e4]}, 8000))
    assert abs(logs.mean() - 2) < 0.06 and abs(logs.std() - 4 / math.sqrt(12)) < 0.04


def test_linspace_takes_its_values_in_turn() -> None:
    assert draws({"linspace": [0, 1, 3]}, 6).tolist() == [0, 0.5, 1, 0, 0.5, 1]


@given(st.integers(0, 2**63 - 1), st.text(max_size=20), st.integers(0, 10**12))
def test_every_key_draws(seed: int, key: str, sample: int) -> None:
    assert 0 <= draw(parse({"uniform": [0, 1]}), seed=seed, structure_key=key, sample=sample, name="x") < 1


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ({"uniform": [2, 1]}, "low <= high"),
        ({"loguniform": [0, 1]}, "0 < low"),
        ({"choice": []}, "at least 1"),
        ({"gauss": [0, 1]}, "{uniform: [low, high]}"),
        ({"uniform": [0, 1], "mean": 3}, "mean"),
        ("many", "a number or"),
        (True, "a number"),
        (math.nan, "finite"),
    ],
)
def test_a_wrong_form_says_what_is_expected(form: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told.replace("{", r"\{").replace("[", r"\[")):
        parse(form)
