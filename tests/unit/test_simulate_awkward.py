"""Files as the world has them: each is simulated, or rejected with its reason; none crashes, hangs or is repaired."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sim_samples import DATA, campaign

from exitwave.simulate.plan import Plan, make_plan
from exitwave.simulate.simulator import get_simulator
from exitwave.simulate.structures.cif import CifError, read_average, read_cif

AWKWARD = DATA / "awkward"
ZONES = [[0, 0, 1], [1, 1, 0], [1, 1, 2]]

# What becomes of each file: the reason for which it is rejected whole, or None where it is simulated along one axis at
# least (an axis without an orthogonal cell within one per cent is rejected by itself).
FATE: dict[str, str | None] = {
    "a_picture": "no line begins with data_",
    "cut_short": "CIF loop ended unexpectedly with incomplete row",
    "deuterium": None,
    "disordered": "site C1 belongs to disorder group 1",
    "dummy_species": "'Q' of site Q1 is not a chemical element",
    "empty": "no line begins with data_",
    "flat_angles": "they lie in a plane",
    "hexagonal_wurtzite": None,
    "impossible_angles": "no three axes have the angles of its cell",
    "long_axis": None,
    "macromolecule": "it holds no atoms",
    "many_atoms": None,
    "missing_centring": "_cell_formula_units_Z 4 of Al are 4 atoms, its sites and operations make 1",
    "missing_hydrogen": "a species is missing or misread",
    "molecular_urea": None,
    "monoclinic": None,
    "nearly_orthogonal": None,
    "no_symmetry": "it names no symmetry",
    "on_the_boundary": None,
    "one_atom": None,
    "overfull": "partial occupancy 0.8 of site Fe1",
    "overlap": "0.400 Å apart",
    "partial_occupancy_alloy": "partial occupancy 0.7 of site Si1",
    "question_marks": "_atom_site_fract_x of site Cu1: a number expected, came ?",
    "rhombohedral_axes": None,
    "same_place": "site Ag1 stands where another site",
    "skewed_cell": None,
    "split_by_rounding": "0.017 Å apart",
    "squeezed": "0.600 Å apart",
    "superheavy": "scattering factors end at 103",
    "triclinic": None,
    "triclinic_oblique": "no orthogonal cell within a strain of 1 %",
    "two_blocks": "it holds 2 crystals",
    "unknown_group": "invalid spacegroup `P 9 9 9`",
    "vacancies": "partial occupancy 0.92 of site Fe1",
    "vacancy_species": "'Va' of site Va1 is not a chemical element",
    "wide_cell": "grid.max_gpts is 512",
    "windows_text": None,
    "wrong_setting": "its cell does not have the symmetry of its space group",
    "zero_height": "_cell_length_c: a positive length expected, came 0",
}


def tiny_plan(cif: Any, zones: list[list[int]] = ZONES, **source: Any) -> Plan:
    """One probe of a few slices, for each structure and axis."""
    content = campaign(
        structures=[{"cif": cif, "zone_axes": zones, **source}],
        split={},
        samples_per_structure=1,
        samples_per_shard=1,
        cell={"min_extent_A": 8},
        sampling={"energy_keV": 200, "semiangle_mrad": 20, "thickness_A": 8},
        grid={"sampling_A": 0.2, "max_gpts": 512},
        scan={"shape": [1, 1], "step_A": 0.5},
        detector={"shape": [8, 8], "max_q_per_A": 1.0},
        label={"shape": [4, 4], "blur_A": 0.3},
    )
    return make_plan(content, base_dir=DATA)


def simulate_all(made: Plan) -> None:
    """Really simulated, in finite numbers, with the intensity that went in and a potential where there are atoms."""
    simulator = get_simulator("fast")
    for spec, sample in zip(made.samples(), simulator.simulate(list(made.samples())), strict=True):
        cbed, potential = sample.arrays["cbed"], sample.arrays["potential"]
        where = f"{spec.structure.source} along {spec.structure.zone_axis}"
        assert np.isfinite(cbed).all() and np.isfinite(potential).all(), where
        assert 0.5 < cbed.sum() <= 1 + 1e-5 and potential.max() > 0, where


def check_cells(made: Plan, folder: Path) -> None:
    """The oriented cell is the file's crystal: same composition, same density but for the recorded strain."""
    for structure in made.structures:
        name = structure.source.split(":", 1)[1].split(" (")[0]
        (path,) = list(folder.rglob(name))[:1]
        atoms = read_cif(path.read_bytes().decode("utf-8-sig", errors="replace"))
        volume = float(np.prod(structure.lengths_A))
        density = len(structure.numbers) / volume
        assert density == pytest.approx(len(atoms) / atoms.get_volume(), rel=3.1 * structure.strain + 1e-6), name
        wanted, found = Counter(atoms.numbers.tolist()), Counter(structure.numbers)
        assert {z: n * len(structure.numbers) for z, n in wanted.items()} == {
            z: n * len(atoms) for z, n in found.items()
        }, name
        assert structure.strain <= 0.01


def test_each_awkward_file_is_simulated_or_rejected_with_its_reason() -> None:
    began = time.perf_counter()
    made = tiny_plan("awkward")
    assert time.perf_counter() - began < 60
    assert {p.stem for p in AWKWARD.iterdir()} == set(FATE)
    kept = {s.source for s in made.structures}
    told: dict[str, list[str]] = {}
    for row in made.rejected:
        told.setdefault(row.source.split(" along ")[0], []).append(row.why)
    for name, why in FATE.items():
        source = f"cif:{name}.cif"
        if why is None:
            assert source in kept, (name, told.get(source))
        else:
            assert source not in kept and any(why in row for row in told[source]), (name, told.get(source))
    # An axis is never lost without a word.
    for source in kept:
        axes = sum(s.source == source for s in made.structures) + len(told.get(source, ()))
        assert axes == len(ZONES), source
    check_cells(made, AWKWARD)
    simulate_all(made)


def test_crystals_are_drawn_from_averages_when_asked() -> None:
    files = [f"awkward/{name}.cif" for name in ("partial_occupancy_alloy", "vacancies", "overfull", "one_atom")]
    made = tiny_plan(files, [[0, 0, 1], [1, 1, 0]], partial_occupancy="sample", occupancy_extent_A=10)
    formulas = {s.source: s.formula for s in made.structures}
    assert formulas == {
        "cif:partial_occupancy_alloy.cif (occupancies drawn in 2 x 2 x 2 cells)": "Ge19Si45",  # 0.3 of 64 are 19.2
        "cif:vacancies.cif (occupancies drawn in 3 x 3 x 3 cells)": "Fe11O12",  # 0.92 of 108 are 99.4
        "cif:one_atom.cif": "Po",
    }
    assert {s.space_group for s in made.structures if "alloy" in s.source} == {227}  # that of the average
    assert [r.source for r in made.rejected] == ["cif:overfull.cif"]
    assert "together they occupy it 1.5 times" in made.rejected[0].why
    simulate_all(made)
    again = tiny_plan(files, [[0, 0, 1], [1, 1, 0]], partial_occupancy="sample", occupancy_extent_A=10)
    assert [s.numbers for s in again.structures] == [s.numbers for s in made.structures]


def test_another_seed_draws_another_crystal() -> None:
    source = {"cif": "awkward/vacancies.cif", "partial_occupancy": "sample"}
    one, two = (
        make_plan(campaign(seed=seed, structures=[source], split={}), base_dir=DATA).structures[0] for seed in (1, 2)
    )
    assert one.key != two.key and one.positions_A != two.positions_A and len(one.numbers) == len(two.numbers)


def test_species_are_dealt_out_in_their_proportions() -> None:
    average = read_average((AWKWARD / "vacancies.cif").read_text(), partial=True)
    assert not average.is_ordered and average.composition() == {"Fe": pytest.approx(3.68), "O": 4}
    with pytest.raises(CifError, match="`partial_occupancy: sample` would draw one"):
        read_average((AWKWARD / "vacancies.cif").read_text(), partial=False)


CRYSTALS_REJECTED = {
    "In.cif": "ASE read I2: a species is missing or misread",
    "SiC_partial_site_occ.cif": "partial occupancy 0.75 of site Si1",
    "issue7.cif": "partial occupancy 0.707 of site Ti1",
    "gamma-Pu.cif": "it stands in the campaign twice",
    "Pu-alpha.cif": "no orthogonal cell",
}


def crystals_folder() -> Path:
    """The CIFs of the package `crystals` (90 in 1.7.0), or a skip that says so."""
    from importlib.util import find_spec

    spec = find_spec("crystals")
    if spec is None or spec.origin is None:
        pytest.skip("the package `crystals` is not installed (pip install exitwave[bench])")
    return Path(spec.origin).parent


def crystals_fate(files: list[str]) -> Plan:
    made = tiny_plan(files)
    kept = {s.source for s in made.structures}
    for file in files:
        name = Path(file).name
        rows = [r.why for r in made.rejected if r.source.startswith(f"cif:{name}")]
        if name in CRYSTALS_REJECTED:
            assert f"cif:{name}" not in kept and any(CRYSTALS_REJECTED[name] in why for why in rows), (name, rows)
        else:
            assert f"cif:{name}" in kept, (name, rows)
            assert sum(s.source == f"cif:{name}" for s in made.structures) + len(rows) == len(ZONES), name
    return made


def test_a_few_files_of_the_package_crystals() -> None:
    folder = crystals_folder()
    names = {"Si.cif", "Bi.cif", "I.cif", "vo2-m1.cif", "In.cif", "SiC_partial_site_occ.cif", "Ga.cif"}
    made = crystals_fate(sorted(str(f) for f in folder.rglob("*.cif") if f.name in names))
    check_cells(made, folder)
    simulate_all(made)


@pytest.mark.long
def test_every_file_of_the_package_crystals() -> None:
    folder = crystals_folder()
    files = sorted(str(f) for f in folder.rglob("*.cif"))
    assert len(files) >= 87
    made = crystals_fate(files)
    check_cells(made, folder)
    simulate_all(made)
