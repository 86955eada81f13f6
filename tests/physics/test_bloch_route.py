"""The Bloch route: the same numbers as multislice where a crystal repeats on its grid, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sim_samples import DATA, campaign, four_atoms, recipe

from exitwave.ingest.errors import UsageError
from exitwave.simulate.abtem_backend import AbtemSimulator
from exitwave.simulate.bloch import BlochSimulator
from exitwave.simulate.multislice import FastSimulator
from exitwave.simulate.plan import make_plan
from exitwave.simulate.route import repeats, route
from exitwave.simulate.simulator import UnphysicalError, get_simulator, simulate_sample
from exitwave.simulate.smatrix import SMatrixSimulator
from exitwave.simulate.spec import CampaignSpec
from exitwave.simulate.tasks import SampleSpec, draw_sample

COMMENSURATE = {"sampling_A": 0.25, "commensurate": True}


def of_cells(cells: tuple[int, int] = (3, 2), *, x_A: float = 4.1, y_A: float = 5.3, **changes: Any) -> SampleSpec:
    """Four atoms in a cell that is not square, side by side; a few probes of 12 mrad."""
    structure = replace(four_atoms(x_A=x_A, y_A=y_A), repeat_xy=cells)
    content: dict[str, Any] = {
        "grid": COMMENSURATE,
        "scan": {"shape": [3, 2], "step_A": 0.9},
        "label": {"shape": [6, 4]},
        "detector": {"shape": [24, 20], "max_angle_mrad": 28},
    }
    sampling = {"semiangle_mrad": 12, "thickness_A": 24, "defocus_A": 30} | changes.pop("sampling", {})
    return draw_sample(structure, recipe(sampling=sampling, **content | changes), 0, "train")


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tilted, aberrated": {"sampling": {"tilt_x_mrad": 9, "tilt_y_mrad": -4, "C30_A": 2e4, "C21_A": 200, "C12_A": 20}},
    "turned crystal, turned scan": {"sampling": {"crystal_rotation_deg": 20, "scan_rotation_deg": 35}},
    "odd cells of odd points": {"x_A": 3.7, "y_A": 5.2, "cells": (2, 4)},
    "one row of cells": {"cells": (5, 1)},
    "source and jitter": {"sampling": {"source_fwhm_A": 2.0, "scan_jitter_A": 0.2}},
    "wide aperture": {"sampling": {"semiangle_mrad": 27}},
    "detector of few points": {"detector": {"shape": [4, 6], "max_angle_mrad": 13}},
}


@pytest.mark.parametrize("case", CASES)
def test_it_gives_what_abtem_gives(case: str) -> None:
    """In float64 within 1e-12 of the largest, in float32 within 5e-5; two exit planes and two defoci of one pass."""
    spec = of_cells(**CASES[case])
    assert repeats(spec)
    other = replace(spec, exit_plane=spec.exit_plane - 3, values={**spec.values, "defocus_A": -60.0})
    members = [spec, other]
    for precision, tolerance in (("float32", 5e-5), ("float64", 1e-12)):
        abtem, bloch = (kind(precision=precision) for kind in (AbtemSimulator, BlochSimulator))
        with abtem.configured():
            slices = abtem.static_slices(spec)
            theirs, ours = (simulator.pass_patterns(members, slices) for simulator in (abtem, bloch))
        for one, two in zip(theirs, ours, strict=True):
            assert np.abs(one - two).max() <= tolerance * one.max()


def test_whole_samples_agree_with_the_other_routes() -> None:
    spec = of_cells(images={"focus_A": [-20, 20]}, volume={"slabs": 3})
    made = {name: simulate_sample(spec, simulator=name) for name in ("bloch", "fast", "smatrix")}
    for name in ("fast", "smatrix"):
        for field, array in made[name].arrays.items():
            difference = np.abs(array - made["bloch"].arrays[field]).max()
            assert difference <= (5e-6 * array.max() if field == "cbed" else 0.0), (name, field)
    assert made["bloch"].params["simulator"] == b"bloch"


def test_a_neighbour_a_batch_and_what_came_before_leave_the_bits_alone() -> None:
    spec = of_cells()
    other = replace(spec, exit_plane=5, values={**spec.values, "defocus_A": -60.0})
    found = set()
    for batch in (1, 2, 4):
        simulator = BlochSimulator(batch=batch)
        list(simulator.simulate([of_cells((2, 2)), of_cells(sampling={"energy_keV": 80})]))
        together = list(simulator.simulate([other, spec]))
        (alone,) = simulator.simulate([spec])
        found |= {sample.arrays["cbed"].tobytes() for sample in (together[1], alone)}
    assert len(found) == 1


def test_it_exists_only_where_the_crystal_repeats_on_its_grid() -> None:
    assert repeats(of_cells()) and route(of_cells((1, 1))) != "bloch"
    for spec, why in (
        (of_cells(phonons={"count": 1, "rms_A": 0.05}), "atoms at rest"),
        (of_cells(grid=COMMENSURATE | {"projection": "finite"}), "finite rounds them"),
        (of_cells((3, 3), grid={"sampling_A": 0.25}), "grid.commensurate: true"),
    ):
        assert not repeats(spec) and route(spec) != "bloch"
        with pytest.raises(UsageError, match=why):
            simulate_sample(spec, simulator="bloch")


def test_a_displaced_atom_is_not_what_it_assumes() -> None:
    """The comparison with multislice sees a cell that differs from the others: far more than its tolerance."""
    spec = of_cells()
    fast, bloch = FastSimulator(), BlochSimulator()
    with fast.configured():
        slices = fast.static_slices(spec)
        different = slices.different.copy()
        different[0, -8:, -8:] += 20.0
        one, two = (s.pass_patterns([spec], replace(slices, different=different, key=None))[0] for s in (fast, bloch))
    assert np.abs(one - two).max() > 1e-3 * one.max()


def test_auto_takes_it_where_it_is_cheapest_and_has_its_bits() -> None:
    spec = of_cells((4, 4), scan={"shape": [12, 12], "step_A": 0.9}, label={"shape": [12, 12]})
    assert route(spec) == "bloch"
    assert [simulator.name for simulator in (BlochSimulator, SMatrixSimulator)] == ["bloch", "smatrix"]
    (auto,) = get_simulator("auto").simulate([spec])
    (bloch,) = BlochSimulator().simulate([spec])
    assert auto.params["simulator"] == b"bloch" and auto.arrays["cbed"].tobytes() == bloch.arrays["cbed"].tobytes()


def test_a_commensurate_grid_has_whole_points_in_every_cell_and_moves_no_recipe_without_it() -> None:
    for cells in ((3, 2), (13, 13), (7, 1)):
        spec = of_cells(cells)
        for points, extent, count in zip(spec.grid_yx, spec.structure.extent_yx_A, cells[::-1], strict=True):
            assert points % count == 0 and points % 2 == 0 and extent / points <= 0.25
    plain = campaign()
    assert "commensurate" not in plain.model_dump(mode="json")["grid"]
    asked = campaign(grid={"sampling_A": 0.25, "commensurate": True})
    assert CampaignSpec.model_validate(asked.model_dump(mode="json")) == asked
    one, two = (make_plan(spec, base_dir=DATA) for spec in (plain, asked))
    assert not {s.uid for s in one.samples()} & {s.uid for s in two.samples()}


def test_more_than_the_beam_is_refused_and_what_may_give_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = of_cells()
    for name in ("fast", "bloch", "abtem"):
        with monkeypatch.context() as patched:
            kind = type(get_simulator(name))
            made = kind.pass_patterns
            patched.setattr(kind, "pass_patterns", lambda *given, made=made: [p * 3.0 for p in made(*given)])
            with pytest.raises(UnphysicalError, match=r"of the beam, at most 1\.00001 expected"):
                simulate_sample(spec, simulator=name)
    heavy = {"structures": [{"builder": {"name": "bulk", "args": ["Bi", "fcc"], "kwargs": {"a": 5.0}}}], "split": {}}
    coarse, fine = (
        make_plan(campaign(**heavy, grid={"sampling_A": step}), base_dir=DATA).warnings for step in (0.25, 0.18)
    )
    assert any("more than the beam" in text for text in coarse)
    assert not any("more than the beam" in text for text in fine)


def test_a_campaign_that_asks_for_it_is_told_what_is_missing() -> None:
    with pytest.raises(ValueError, match="atoms at rest"):
        campaign(simulator="bloch", phonons={"count": 1, "rms_A": 0.05})
    with pytest.raises(UsageError, match=r"grid\.commensurate: true gives them"):
        make_plan(campaign(simulator="bloch", structures=[{"library": ["Cu"]}], split={}), base_dir=DATA)
    made = make_plan(campaign(simulator="bloch", grid={"sampling_A": 0.25, "commensurate": True}), base_dir=DATA)
    assert made.n_samples == 12 and 0 < made.core_seconds < 60
