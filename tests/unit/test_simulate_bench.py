"""The benchmark of the multislice loop: its document, on a grid that takes no time; its speed is nobody's test."""

from __future__ import annotations

import json

import pytest

from exitwave.simulate.bench import bench_simulate
from exitwave.workflows.tables import bench_table


def test_the_document_has_every_way_and_every_target() -> None:
    notes: list[str] = []
    document = bench_simulate(grids=[64], rounds=2, planning_s=0.2, note=notes.append)
    assert list(document) == ["bench", "machine", "rows", "targets"] and document["bench"] == "simulate"
    assert json.loads(json.dumps(document)) == document
    assert [row["what"] for row in document["rows"]] == ["floor", "fast", "abtem-eager", "abtem-lazy"]
    for row in document["rows"]:
        assert 0 < row["least"] <= row["us_per_probe_slice"] <= row["most"]
        assert (row["grid"], row["probes"], row["slices"], row["rounds"]) == (64, 4, 8, 2)
    median = {row["what"]: row["us_per_probe_slice"] for row in document["rows"]}
    floor, abtem = document["targets"]
    peer = min(median["abtem-eager"], median["abtem-lazy"])
    assert floor["value"] == pytest.approx(median["fast"] / median["floor"], rel=0.01)
    assert abtem["value"] == pytest.approx(peer / median["fast"], rel=0.01)
    for target in (floor, abtem):
        assert set(target) == {"name", "value", "target", "holds"}
    assert notes and bench_table(document).renderables
