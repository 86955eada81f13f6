"""Reading, checking and turning crystals: what is wrong is rejected with its reason, what is right keeps its atoms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk
from ase.data import chemical_symbols
from ase.geometry import get_distances
from sim_samples import DATA

from exitwave.ingest.errors import UsageError
from exitwave.simulate.spec import StructureSource
from exitwave.simulate.structures.orient import OrientationError, orient
from exitwave.simulate.structures.preflight import _ELEMENT_ORDER, check_crystal, reduced_formula, symmetry_of
from exitwave.simulate.structures.prototypes import PROTOTYPES, build_prototype
from exitwave.simulate.structures.sources import Crystal, Rejected, library_names, read_sources

LIBRARY = Path(__file__).resolve().parents[2] / "simulate/structures/library"


def read_one(source: StructureSource, base_dir: Path = DATA) -> Crystal:
    (crystal,) = read_sources((source,), base_dir=base_dir)
    assert isinstance(crystal, Crystal)
    return crystal


def crystal_of(atoms: Atoms) -> Crystal:
    return Crystal(atoms=atoms, source="t", licence="", key="k", zone_axes=((0, 0, 1),), split=None)


@pytest.mark.parametrize("name", library_names())
def test_every_shipped_structure_passes_and_has_its_declared_space_group(name: str) -> None:
    crystal = read_one(StructureSource(library=(name,)))
    assert check_crystal(crystal) is None
    text = (LIBRARY / f"{name}.cif").read_text()
    declared = [line.split()[1] for line in text.splitlines() if line.startswith("_space_group_IT_number")]
    assert [str(symmetry_of(crystal.atoms).space_group)] == declared[:1] or not declared
    sources = (LIBRARY / "SOURCES.md").read_text()
    assert f"| `{name}` |" in sources


@pytest.mark.parametrize(
    ("atoms", "told"),
    [
        (Atoms("Au2", positions=[[0, 0, 0], [0.5, 0, 0]], cell=[8, 8, 8], pbc=True), "0.500 Å apart"),
        (Atoms("Au2", positions=[[0.1, 0, 0], [7.9, 0, 0]], cell=[8, 8, 8], pbc=True), "0.200 Å apart"),
        (Atoms("Au", cell=[4, 4, 0], pbc=True), "singular"),
        (Atoms("Au", cell=[[4, 0, 0], [4, 0, 0], [0, 0, 4]], pbc=True), "singular"),
        (Atoms("Au", positions=[[np.nan, 0, 0]], cell=[4, 4, 4], pbc=True), "finite"),
        (Atoms("X", cell=[4, 4, 4], pbc=True), "known chemical element"),
        (Atoms("Au", cell=[4, 4, 4], pbc=(True, True, False)), "periodic"),
        (Atoms(cell=[4, 4, 4], pbc=True), "no atoms"),
    ],
)
def test_what_cannot_be_simulated_is_rejected(atoms: Atoms, told: str) -> None:
    reason = check_crystal(crystal_of(atoms))
    assert reason is not None and told in reason


def test_an_unreadable_cif_is_a_rejected_row_and_a_missing_one_a_slip(tmp_path: Path) -> None:
    (tmp_path / "bad.cif").write_text("this is no CIF\n")
    rows = list(read_sources((StructureSource(cif="."),), base_dir=tmp_path))
    assert len(rows) == 1 and isinstance(rows[0], Rejected) and "bad.cif" in rows[0].source
    for source, told in [
        (StructureSource(cif="none.cif"), r"structures\[0\].cif: .*none.cif does not exist"),
        (StructureSource(cif="*.mmcif"), "no file matches"),
        (StructureSource(library=("Unobtainium",)), "not shipped; there are Ag, Al"),
        (StructureSource(ase_db="x.db"), "does not exist"),
        (StructureSource(cif="~nobody-of-this-name/x.cif"), r"structures\[0\].cif: .*no user of that name"),
        (StructureSource(ase_db="~nobody-of-this-name/x.db"), r"structures\[0\].ase_db: .*no user of that name"),
        (StructureSource(cif=f"{'x' * 5000}.cif"), r"structures\[0\]: .*cannot be read"),
        (StructureSource.model_validate({"builder": {"name": "bulkk"}}), "ase.build has no 'bulkk'"),
        (StructureSource.model_validate({"builder": {"name": "bulk", "args": ["Zz"]}}), "refused it"),
        (StructureSource(prototype="perovskit", elements=("Sr",), a_A=3.9), "known ones: .*bcc"),
        (StructureSource(prototype="rocksalt", elements=("Na",), a_A=5.6), "2 site"),
        (StructureSource(prototype="fcc", elements=("Qq",), a_A=4), "not a chemical element"),
        (StructureSource(prototype="fcc", elements=("Au",), a_A=4, c_A=5), "cubic"),
    ]:
        with pytest.raises(UsageError, match=told):
            list(read_sources((source,), base_dir=tmp_path))


def test_an_ase_database_is_read_by_its_rows(tmp_path: Path) -> None:
    from ase.db import connect

    with connect(tmp_path / "a.db") as database:
        database.write(bulk("Cu", cubic=True), kind="metal")
        database.write(bulk("Si", cubic=True), kind="other")
    crystal = read_one(StructureSource(ase_db="a.db", select="kind=metal"), tmp_path)
    assert reduced_formula(crystal.atoms) == "Cu"
    with pytest.raises(UsageError, match="no row"):
        list(read_sources((StructureSource(ase_db="a.db", select="kind=gas"),), base_dir=tmp_path))


def test_the_key_is_the_content_not_the_place(tmp_path: Path) -> None:
    text = (LIBRARY / "Au.cif").read_bytes()
    (tmp_path / "gold.cif").write_bytes(text)
    assert read_one(StructureSource(cif="gold.cif"), tmp_path).key == read_one(StructureSource(library=("Au",))).key


@pytest.mark.parametrize(
    ("name", "elements", "group", "atoms"),
    [
        ("fcc", ("Cu",), 225, 4),
        ("bcc", ("Fe",), 229, 2),
        ("hcp", ("Mg",), 194, 2),
        ("diamond", ("Si",), 227, 8),
        ("rocksalt", ("Na", "Cl"), 225, 8),
        ("zincblende", ("Ga", "As"), 216, 8),
        ("wurtzite", ("Zn", "O"), 186, 4),
        ("cesiumchloride", ("Cs", "Cl"), 221, 2),
        ("fluorite", ("Ca", "F"), 225, 12),
        ("perovskite", ("Sr", "Ti", "O"), 221, 5),
        ("rhenium-trioxide", ("Re", "O"), 221, 4),
        ("hexaboride", ("La", "B"), 221, 7),
        ("L12", ("Au", "Cu"), 221, 4),
        ("A15", ("Sn", "Nb"), 223, 8),
        ("cuprite", ("Cu", "O"), 224, 6),
        ("heusler", ("Al", "Mn", "Cu"), 225, 16),
        ("half-heusler", ("Sn", "Ti", "Ni"), 216, 12),
        ("laves", ("Mg", "Cu"), 227, 24),
        ("spinel", ("Mg", "Al", "O"), 227, 56),
        ("pyrite", ("Fe", "S"), 205, 12),
        ("diboride", ("Mg", "B"), 191, 3),
        ("nickeline", ("Ni", "As"), 194, 4),
        ("rutile", ("Ti", "O"), 136, 6),
    ],
)
def test_prototypes_have_their_space_group_and_count(name: str, elements: Any, group: int, atoms: int) -> None:
    assert name in PROTOTYPES
    cell = build_prototype(name, elements, 4.5)
    assert len(cell) == atoms and symmetry_of(cell).space_group == group


def test_a_prototype_group_does_not_depend_on_the_cell_chosen() -> None:
    small, large = bulk("Cu"), bulk("Cu", cubic=True) * (2, 1, 1)
    assert symmetry_of(small) == symmetry_of(large)
    assert symmetry_of(bulk("Cu")).prototype_group == symmetry_of(bulk("Au")).prototype_group
    assert symmetry_of(bulk("Cu")).prototype_group != symmetry_of(bulk("Fe")).prototype_group


FORMULAS = "NaCl GaAs SiC SrTiO3 MgO CaF2 BaTiO3 CsCl VO2 FeAs CeO2 InP ZnS PbS LiNbO3 LaAlO3 NH3 H2O WC Si"


@pytest.mark.parametrize("formula", FORMULAS.split())
def test_formulas_are_written_as_people_write_them(formula: str) -> None:
    atoms = Atoms(formula, cell=[5, 5, 5])
    assert reduced_formula(atoms) == reduced_formula(atoms[::-1] * (2, 2, 1)) == formula


def test_every_element_has_its_place_in_a_formula() -> None:
    assert sorted(_ELEMENT_ORDER.split()) == sorted(chemical_symbols[1:104])


ZONES = [(0, 0, 1), (1, 1, 0), (1, 1, 1), (1, 1, 2), (0, 1, 3)]


@pytest.mark.parametrize("zone", ZONES, ids=str)
@pytest.mark.parametrize("name", ["Au", "Fe", "Si", "GaAs", "BaTiO3", "VO2-rutile", "Mg"])
def test_an_oriented_cell_is_the_same_crystal(name: str, zone: tuple[int, int, int]) -> None:
    atoms = read_one(StructureSource(library=(name,))).atoms
    cell = orient(atoms, zone, max_strain=0.02, slice_thickness_A=2.0, max_atoms=10_000)
    volume = float(np.prod(cell.lengths_A))
    density = len(atoms) / atoms.get_volume()
    assert len(cell.numbers) / volume == pytest.approx(density, rel=4 * cell.strain + 1e-6)
    turned = Atoms(numbers=cell.numbers, positions=cell.positions_A, cell=cell.lengths_A, pbc=True)
    assert reduced_formula(turned) == reduced_formula(atoms)
    # Distances from an atom to its surroundings are those of the crystal, to within the strain.
    for number in np.unique(atoms.numbers):
        assert _shells(turned, number) == pytest.approx(_shells(atoms, number), rel=2 * cell.strain + 1e-5)
    # The beam runs along the zone axis: the period is the length of its lattice vector, or of a part of it.
    along = np.linalg.norm(np.asarray(zone) @ atoms.cell.array)
    assert along / cell.lengths_A[2] == pytest.approx(round(along / cell.lengths_A[2]), abs=1e-6)


def _shells(atoms: Atoms, number: int, count: int = 24) -> np.ndarray:
    """The shortest distances from the first atom of an element, over periodic images."""
    first = int(np.flatnonzero(atoms.numbers == number)[0])
    reach = np.maximum(1, np.ceil(9.0 / atoms.cell.cellpar()[:3])).astype(int)
    big = atoms * tuple(2 * reach + 1)
    centre = atoms.positions[first] + reach @ atoms.cell.array
    distances = np.sort(get_distances(centre[None], big.positions)[1][0])
    return distances[1 : count + 1]


@pytest.mark.parametrize("zone", ZONES, ids=str)
def test_no_atom_sits_on_a_slice_boundary(zone: tuple[int, int, int]) -> None:
    for name in ("Si", "GaAs", "Au"):
        atoms = read_one(StructureSource(library=(name,))).atoms
        cell = orient(atoms, zone, max_strain=0.01, slice_thickness_A=2.0, max_atoms=10_000)
        heights = np.mod([p[2] for p in cell.positions_A], cell.lengths_A[2] / cell.slices)
        thickness = cell.lengths_A[2] / cell.slices
        assert np.minimum(heights, thickness - heights).min() > 0.05


def test_the_turned_crystal_is_not_mirrored() -> None:
    """Quartz-like handedness: a chiral set of four atoms keeps the sign of its triple product."""
    chiral = Atoms(
        "HHeLiBe",
        scaled_positions=[[0, 0, 0], [0.3, 0, 0], [0, 0.25, 0], [0, 0, 0.2]],
        cell=[7, 8, 9],
        pbc=True,
    )
    for zone in [(0, 0, 1), (1, 0, 0), (0, 1, 0)]:
        cell = orient(chiral, zone, max_strain=0.0, slice_thickness_A=2.0, max_atoms=10_000)
        place = dict(zip(cell.numbers, np.asarray(cell.positions_A), strict=True))
        lengths = np.asarray(cell.lengths_A)
        legs = [(place[n] - place[1] + lengths / 2) % lengths - lengths / 2 for n in (2, 3, 4)]
        assert np.linalg.det(legs) == pytest.approx(2.1 * 2.0 * 1.8)


def test_too_much_strain_is_refused_with_the_least_found() -> None:
    triclinic = Atoms("Au", cell=[[5, 0, 0], [1.3, 6, 0], [0.7, 1.9, 7]], pbc=True)
    with pytest.raises(OrientationError, match=r"no orthogonal cell within a strain of 0.1 %|no lattice vectors"):
        orient(triclinic, (0, 0, 1), max_strain=0.001, slice_thickness_A=2.0, max_atoms=10_000)


@pytest.mark.parametrize(
    ("atoms", "zone", "told"),
    [
        (bulk("Cu", cubic=True), (49, 47, 1), r"one period along this axis holds \d+ atoms, cell.max_atoms is 500"),
        (Atoms("Cu", cell=[4, 4, 1e7], pbc=True), (0, 0, 1), r"period along this axis is 1e\+07 Å, at most 1000 Å"),
    ],
)
def test_a_period_that_nobody_could_simulate_is_never_built(
    atoms: Atoms, zone: tuple[int, int, int], told: str
) -> None:
    with pytest.raises(OrientationError, match=told):
        orient(atoms, zone, max_strain=0.01, slice_thickness_A=2.0, max_atoms=500)
