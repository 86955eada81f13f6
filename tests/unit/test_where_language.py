"""The conditions of --where: what they mean, and what is said of those that mean nothing."""

from __future__ import annotations

import numpy as np
import pytest

from exitwave.ingest.errors import UsageError
from exitwave.ingest.where import columns_of, select_rows

PARAMS = np.array(
    [(60.0, 1, b"train", (0, 0, 1)), (150.0, 2, b"train", (1, 1, 0)), (300.0, 2, b"test", (1, 1, 1))],
    dtype=[("energy_keV", "f8"), ("structure", "i4"), ("split", "S8"), ("zone_axis", "i4", (3,))],
)
COLUMNS = columns_of(PARAMS, {"uid": np.array([2**63, 2**63 + 1, 5], "u8"), "formula": np.array(["Au", "Cu", "Au"])})


def rows(text: str) -> list[int]:
    return np.flatnonzero(select_rows(text, COLUMNS, 3)).tolist()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("energy_keV>=150 and split=='train'", [1]),
        ("energy_keV >= 1.5e2", [1, 2]),
        ("100 < energy_keV <= 150", [1]),
        ("split == 'test' or energy_keV < 100 and formula == 'Au'", [0, 2]),
        ("(split == 'test' or energy_keV < 100) and formula == 'Cu'", []),
        ("not (structure == 2)", [0]),
        ("not not structure == 2", [1, 2]),
        ("structure != 2", [0]),
        ('split in ("val", "test")', [2]),
        ("energy_keV in (60, 300)", [0, 2]),
        ("formula not in ('Au')", [1]),
        ("zone_axis[2] == 1 and zone_axis[0] == 0", [0]),
        (f"uid == {2**63 + 1}", [1]),
        (f"uid == {hex(2**63)}", [0]),
        ("energy_keV > -5", [0, 1, 2]),
        ("1 < 2", [0, 1, 2]),
    ],
)
def test_meaning(text: str, expected: list[int]) -> None:
    assert rows(text) == expected


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "is empty"),
        ("energy_keV = 3", r"at character 12: use == to compare"),
        (
            "energy >= 3",
            r"at character 1: no column energy \(did you mean energy_keV\?\)\. There are: energy_keV, formula",
        ),
        ("split == 3", "at character 7: a text is compared with a number"),
        ("energy_keV", "at character 11: expected a comparison, found the end"),
        ("energy_keV > ", "expected a number, 'text' or a column, found the end"),
        ("energy_keV > 3 split == 'test'", "at character 16: expected `and`, `or` or the end, found split"),
        ("(energy_keV > 3", r"expected '\)', found the end"),
        ("zone_axis == 1", "has 3 elements: name one"),
        ("zone_axis[3] == 1", "has 3 elements"),
        ("structure[0] == 1", "is scalar"),
        ("__import__('os').system('x')", "at character 17"),
        ("split == 'test", 'at character 10: "\'" is not understood'),
        ("and", "found and"),
        ("(" * 400 + "1<2" + ")" * 400, "nested more than 50 deep"),
    ],
)
def test_faults_are_shown_with_their_place(text: str, match: str) -> None:
    with pytest.raises(UsageError, match=match) as error:
        rows(text)
    assert str(error.value).startswith("--where")
