"""A CIF is one crystal whose atoms all have a place, or it is rejected with the reason; ASE's leniency is not ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from sim_samples import DATA

from exitwave.simulate.spec import StructureSource
from exitwave.simulate.structures.cif import CifError, parse_formula, read_cif
from exitwave.simulate.structures.sources import Crystal, Rejected, read_sources

CELL = """\
data_{name}
_cell_length_a 4
_cell_length_b 4
_cell_length_c 4
_cell_angle_alpha 90
_cell_angle_beta 90
_cell_angle_gamma 90
_symmetry_space_group_name_H-M '{group}'
"""
SITES = "loop_\n_atom_site_label\n_atom_site_fract_x\n_atom_site_fract_y\n_atom_site_fract_z\n"


def cif(*sites: str, column: str = "", group: str = "P 1", name: str = "x") -> str:
    extra = f"_atom_site_{column}\n" if column else ""
    return CELL.format(group=group, name=name) + SITES + extra + "\n".join(sites) + "\n"


def reason(text: str) -> str:
    with pytest.raises(CifError) as caught:
        read_cif(text)
    return str(caught.value)


def test_every_site_of_a_good_file_is_in_the_crystal() -> None:
    assert len(read_cif(cif("Cu1 0 0 0", "O1 0.5 0.5 0.5"))) == 2
    assert len(read_cif(cif("Cu1 0 0 0", group="F m -3 m"))) == 4
    assert len(read_cif(cif("Cu1 0 0 0 1.00(1)", "O1 0.5 0.5 0.5 ?", column="occupancy"))) == 2
    assert len(read_cif(cif("Cu1 0 0 0 .", "O1 0.5 0.5 0.5 0", column="disorder_group"))) == 2
    assert len(read_cif("data_empty\n_x 1\n" + cif("Cu1 0 0 0") + "data_notes\n_y 2\n")) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (cif("Cu1 0 0 0", "Cu2 0 0 0"), "site Cu2 stands where another site"),
        (cif("Cu1 0 0 0", "Au1 0 0 0"), "site Au1 stands where another site"),
        (cif("Cu1 0 0 0", "Au1 0.5 0.5 0", group="F m -3 m"), "site Au1 stands where another site"),
        (cif("Cu1 0 0 0 0.5", column="occupancy"), "partial occupancy 0.5 of site Cu1"),
        (cif("Cu1 0 0 0 0.5(2)", column="occupancy"), "partial occupancy 0.5 of site Cu1"),
        (cif("Cu1 0 0 0 nan", column="occupancy"), "occupancy nan of site Cu1: a number from 0 to 1 expected"),
        (cif("Cu1 0 0 0 7", column="occupancy"), "occupancy 7 of site Cu1"),
        (cif("Cu1 0 0 0 1", "Au1 0.3 0 0 2", column="disorder_group"), "site Cu1 belongs to disorder group 1"),
        (cif("Cu1 . 0 0"), "_atom_site_fract_x of site Cu1: a number expected, came ."),
        (cif("Cu1 0 1e30 0"), "_atom_site_fract_y of site Cu1"),
        (cif("Cu1 0 0 0").replace("length_a 4", "length_a -4"), "_cell_length_a: a positive length expected, came -4"),
        (
            cif("Cu1 0 0 0").replace("length_b 4", "length_b inf"),
            "_cell_length_b: a positive length expected, came inf",
        ),
        (cif("Cu1 0 0 0").replace("beta 90", "beta 180"), "_cell_angle_beta: an angle between 0 and 180"),
        (
            cif("Cu1 0 0 0").replace("_cell_length_c 4\n", ""),
            "_cell_length_c: a positive length expected, came nothing",
        ),
        (cif("Cu1 0 0 0", name="a") + cif("Au1 0 0 0", name="b"), "it holds 2 crystals (data blocks a, b)"),
        (cif("Cu1 0 0 0") + "_chemical_formula_sum 'Cu Au'\n", "says Cu Au, ASE read Cu: a species is missing"),
        (cif("Cu1 0 0 0", group="Q 99"), "invalid spacegroup `Q 99`"),
        ("", "no line begins with data_"),
        ("<html>no</html>", "no line begins with data_"),
        ("data_x\nnonsense here\n", "ASE cannot read it as CIF: ValueError: Unexpected CIF file entry"),
        ("data_x\n_cell_length_a 4\n", "it holds no atoms"),
    ],
)
def test_what_is_not_one_crystal_is_told_why(text: str, told: str) -> None:
    assert told in reason(text)


def test_indium_that_is_read_as_iodine_is_rejected() -> None:
    told = reason((DATA / "In_read_as_iodine.cif").read_text())
    assert "says In" in told and "I2" in told


def test_a_rejected_file_is_a_row_and_a_name_may_hold_brackets(tmp_path: Path) -> None:
    (tmp_path / "[x]*.cif").write_text(cif("Cu1 0 0 0"))
    (tmp_path / "alloy.cif").write_bytes((DATA / "partial_occupancy.cif").read_bytes())
    sources = (StructureSource(cif="[x]*.cif"), StructureSource(cif="alloy.cif"))
    good, bad = read_sources(sources, base_dir=tmp_path)
    assert isinstance(good, Crystal) and len(good.atoms) == 1
    assert isinstance(bad, Rejected) and bad.source == "cif:alloy.cif"
    assert "partial occupancy 0.5 of site Au1" in bad.why


def test_formulas() -> None:
    counts = parse_formula("Ba O3 Ti")
    assert counts is not None and {k: float(v) for k, v in counts.items()} == {"Ba": 1, "O": 3, "Ti": 1}
    assert parse_formula("?") is None
