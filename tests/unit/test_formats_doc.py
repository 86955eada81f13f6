"""The mapping files of docs/formats.md are mapping files, and its conditions can be read."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from exitwave.ingest.foreign_map import MapSpec
from exitwave.ingest.where import parse_where
from exitwave.workflows.config import parse_document, validate

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
BLOCKS = [textwrap.dedent(block) for block in re.findall(r"(?:^    .*\n)+", TEXT, flags=re.MULTILINE)]
MAPS = [b for b in BLOCKS if b.startswith(("fields:", "name:"))] + re.findall(r"`(fields: \{.*?\})`\n", TEXT)


@pytest.mark.parametrize("text", MAPS)
def test_maps(text: str) -> None:
    text = text.replace("{fractions: {train: 0.9, …}}", "{fractions: {train: 1.0}}")
    spec = validate(parse_document(text, source="formats.md", folder=Path()), MapSpec)
    assert "cbed" in spec.fields


def test_there_are_maps_and_conditions() -> None:
    assert len(MAPS) == 6
    (conditions,) = [b for b in BLOCKS if b.startswith("energy_keV>=150")]
    for line in conditions.splitlines():
        parse_where(line)
