"""Pictures before hours are spent: a few real samples on one page that needs nothing beside it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from sim_samples import plan

from exitwave.simulate.cost import estimate_seconds
from exitwave.simulate.simulator import simulate_sample
from exitwave.workflows.cli import run
from exitwave.workflows.preview import choose_samples, pattern_grid, virtual_bright_field, write_preview

CAMPAIGN = """\
name: shown first
simulator: weak-phase
structures: [{library: [Si, Al, Cu]}]
samples_per_structure: 2
samples_per_shard: 2
cell: {min_extent_A: 16}
sampling: {semiangle_mrad: 18, thickness_A: {uniform: [4, 10]}}
scan: {shape: [2, 2], step_A: 0.5}
grid: {sampling_A: 0.25}
detector: {shape: [16, 16], max_q_per_A: 1.2}
label: {shape: [8, 8]}
"""


def test_the_cheapest_sample_of_each_structure_is_chosen() -> None:
    made = plan(sampling={"thickness_A": {"uniform": [4, 40]}}, samples_per_structure=8)
    chosen = choose_samples(made, 2)
    assert len({s.structure.index for s in chosen}) == 2
    for sample in chosen:
        costs = [estimate_seconds(s, made.simulator) for s in made.samples() if s.structure is sample.structure]
        assert estimate_seconds(sample, made.simulator) == min(costs)


def test_pictures_are_what_they_say() -> None:
    cbed = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    grid = pattern_grid(cbed)
    assert grid.shape == (8, 15)
    assert (grid[4:, 5:10] == cbed[1, 1]).all()
    assert pattern_grid(np.zeros((20, 20, 2, 2)), most=6).shape == (12, 12)
    spec = next(iter(plan().samples()))
    sample = simulate_sample(spec, simulator="weak-phase")
    bright = virtual_bright_field(sample.arrays["cbed"], sample.params)
    total = sample.arrays["cbed"].sum((-2, -1))
    assert bright.shape == (2, 2) and (bright > 0.5 * total).all() and (bright <= total + 1e-6).all()


def test_the_page_stands_alone_and_holds_the_samples(tmp_path: Path) -> None:
    made = plan(simulator="weak-phase")
    report = write_preview(made, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert report.samples == report.structures == 3
    assert page.count("<img") == 12 and page.count('src="data:image/png;base64,') == 12
    assert not re.search(r'(src|href)="(?!data:)', page)
    for word in ("Si along [0 0 1]", "semi-angle", "18 mrad", "bright field", "12 samples of 3 structures"):
        assert word in page


def test_time_is_bounded_and_one_sample_is_always_made(tmp_path: Path) -> None:
    assert write_preview(plan(simulator="weak-phase"), tmp_path / "page.html", budget_s=0.0).samples == 1


def test_both_verbs_show_it(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(CAMPAIGN)
    assert run(["plan", str(path), "--report", str(tmp_path / "p.html"), "--quiet"]) == 0
    assert "Si along" in (tmp_path / "p.html").read_text()
    words = ["simulate", str(path), "--out", str(tmp_path / "d"), "--preview", "--cluster", "inline", "--quiet"]
    assert run(words) == 0
    assert "Cu along" in (tmp_path / "d-preview.html").read_text()
    assert (tmp_path / "d" / "manifest.jsonl").exists()
