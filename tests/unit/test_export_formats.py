"""Exports as the programs of the field read them: axes, units, values."""

from __future__ import annotations

import contextlib
import json
import sys
import tarfile
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from views_data import DETECTOR, DQ, DR, SCAN, arrays_of, make_views_dataset, tree, uid_of

from exitwave.ingest import open_dataset
from exitwave.ingest.dose import counted
from exitwave.ingest.errors import InterruptedRunError, UsageError
from exitwave.ingest.exporting import ExportSpec, export_samples
from exitwave.ingest.selection import select_samples

emdfile = pytest.importorskip("emdfile")
rsciio = pytest.importorskip("rsciio")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_views_dataset(tmp_path_factory.mktemp("export") / "d")


def export(dataset: Path, out: Path, format: str, *uids: str, split: str | None = None, **spec: Any) -> Any:
    data, numbers = select_samples(open_dataset(dataset), uids=uids, split=split)
    return export_samples(data, numbers, ExportSpec(format=format, **spec), out)


def read_emd(path: Path) -> Any:
    """emdfile walks through `sys.modules`; one there that imports others when it is looked at stops it, once."""
    with contextlib.suppress(RuntimeError):
        return emdfile.read(path)
    return emdfile.read(path)


KY = (np.arange(DETECTOR[0]) - DETECTOR[0] // 2) * DQ[0]
KX = (np.arange(DETECTOR[1]) - DETECTOR[1] // 2) * DQ[1]


def test_emdfile_opens_emd_with_dims_units_and_metadata(dataset: Path, tmp_path: Path) -> None:
    export(dataset, tmp_path / "gold.h5", "emd", "#1")
    cube = read_emd(tmp_path / "gold.h5")
    assert type(cube) is emdfile.Array and cube.name == "datacube"
    assert np.array_equal(cube.data, arrays_of(0, 1)["cbed"])
    assert cube.dim_names == ("Ry", "Rx", "Qy", "Qx")
    assert cube.dim_units == ("A", "A", "A^-1", "A^-1")
    expected = (np.arange(SCAN[0]) * DR[0], np.arange(SCAN[1]) * DR[1], KY, KX)
    for found, wanted in zip(cube.dims, expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-12)
    assert cube.units == "fraction of the incident beam"
    about = cube.metadata["exitwave"]
    assert (about["energy_keV"], about["semiangle_mrad"], about["uid"]) == (100.0, 21.0, f"{uid_of(0, 1):016x}")
    assert about["prototype_group"] == 2**63
    atoms = cube.metadata["structure"]
    assert atoms["formula"] == "Au" and atoms["positions_A"].shape == (2, 3)
    calibration = cube.root.metadata["calibration"]
    assert (calibration["R_pixel_size"], calibration["R_pixel_units"]) == (DR[0], "A")
    assert (calibration["Q_pixel_size"], calibration["Q_pixel_units"]) == (DQ[0], "A^-1")
    assert (calibration["qx0_mean"], calibration["qy0_mean"]) == (4.0, 3.0)


def test_emd_with_several_fields_is_a_tree(dataset: Path, tmp_path: Path) -> None:
    export(dataset, tmp_path / "both.emd", "emd", "#0", fields=("cbed", "potential"))
    root = read_emd(tmp_path / "both.emd")
    label = root.tree("potential")
    assert np.array_equal(label.data, arrays_of(0, 0)["potential"])
    assert label.units == "V Å" and label.dim_units == ("A", "A")
    assert label.dims[1][1] == pytest.approx(0.125)
    assert np.array_equal(root.tree("datacube").data, arrays_of(0, 0)["cbed"])


def test_a_py4dstem_file_is_a_datacube_to_emdfiles_hook(dataset: Path, tmp_path: Path) -> None:
    """py4DSTEM registers its classes with emdfile by this hook; its DataCube names rows x and columns y."""
    export(dataset, tmp_path / "cube.h5", "py4dstem", "#0")
    with pytest.raises(Exception, match="Unknown classname"):
        read_emd(tmp_path / "cube.h5")
    hook = types.ModuleType("hooked")
    hook.DataCube = type("DataCube", (emdfile.Array,), {})  # type: ignore[attr-defined]
    hook.Calibration = type("Calibration", (emdfile.Metadata,), {})  # type: ignore[attr-defined]
    hook._emd_hook = True  # type: ignore[attr-defined]
    sys.modules["hooked"] = hook
    try:
        cube = read_emd(tmp_path / "cube.h5")
    finally:
        del sys.modules["hooked"]
    assert type(cube).__name__ == "DataCube" and cube.dim_names == ("Rx", "Ry", "Qx", "Qy")
    assert type(cube.root.metadata["calibration"]).__name__ == "Calibration"


def test_rosettasciio_opens_hspy_with_axes(dataset: Path, tmp_path: Path) -> None:
    from rsciio.hspy import file_reader

    export(dataset, tmp_path / "gold.hspy", "hspy", "#2")
    (signal,) = file_reader(str(tmp_path / "gold.hspy"))
    assert np.array_equal(signal["data"], arrays_of(0, 2)["cbed"])
    axes = [(a["name"], a["size"], a["units"], a["navigate"]) for a in signal["axes"]]
    assert axes == [("y", 3, "Å", True), ("x", 4, "Å", True), ("ky", 8, "1/Å", False), ("kx", 6, "1/Å", False)]
    scales = [(a["scale"], a["offset"]) for a in signal["axes"]]
    np.testing.assert_allclose(scales, [(DR[0], 0), (DR[1], 0), (DQ[0], -4 * DQ[0]), (DQ[1], -3 * DQ[1])])
    metadata = signal["metadata"]
    assert metadata["Signal"]["signal_type"] == "electron_diffraction"
    assert metadata["Acquisition_instrument"]["TEM"]["beam_energy"] == 100.0
    assert signal["original_metadata"]["exitwave"]["defocus_A"] == 20.0
    assert signal["original_metadata"]["structure"]["numbers"].tolist() == [79, 79]
    (lazy,) = file_reader(str(tmp_path / "gold.hspy"), lazy=True)
    assert np.array_equal(lazy["data"].compute(), arrays_of(0, 2)["cbed"])


def test_rosettasciio_opens_emd_as_well(dataset: Path, tmp_path: Path) -> None:
    from rsciio.emd import file_reader

    export(dataset, tmp_path / "gold.emd", "emd", "#0")
    (signal,) = file_reader(str(tmp_path / "gold.emd"))
    assert np.array_equal(signal["data"], arrays_of(0, 0)["cbed"])
    assert [a["name"] for a in signal["axes"]] == ["Ry", "Rx", "Qy", "Qx"]
    np.testing.assert_allclose([a["scale"] for a in signal["axes"]], [*DR, *DQ])
    np.testing.assert_allclose([a["offset"] for a in signal["axes"]], [0, 0, -4 * DQ[0], -3 * DQ[1]], atol=1e-12)
    assert [a["units"] for a in signal["axes"]] == ["Å", "Å", "1 / Å", "1 / Å"]


def test_several_samples_go_into_a_folder(dataset: Path, tmp_path: Path) -> None:
    report = export(dataset, tmp_path / "out", "hspy", split="train")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == sorted(f"{uid_of(task, row):016x}.hspy" for task in (0, 1) for row in range(3))
    assert (report.samples, report.files) == (6, 6)
    with pytest.raises(UsageError, match="one file holds one sample"):
        export(dataset, tmp_path / "x.hspy", "hspy", split="train")


def test_xarray_opens_zarr(dataset: Path, tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    export(dataset, tmp_path / "all.zarr", "zarr")
    data = xarray.open_zarr(tmp_path / "all.zarr")
    assert data["cbed"].dims == ("sample", "Ry", "Rx", "Qy", "Qx") and data.sizes["sample"] == 12
    assert data["cbed"].attrs["units"] == "fraction of the incident beam"
    for i, (task, row) in enumerate((t, r) for t in range(4) for r in range(3)):
        assert np.array_equal(data["cbed"][i].values, arrays_of(task, row)["cbed"])
        assert np.array_equal(data["potential"][i].values, arrays_of(task, row)["potential"])
        assert int(data["uid"][i]) == uid_of(task, row)
    assert data["energy_keV"].values.tolist() == [100 + 50 * t for t in range(4) for _ in range(3)]
    assert data["Q_sampling_y_per_A"].attrs["units"] == "1/Å" and data["energy_keV"].attrs["units"] == "keV"
    assert "energy_keV" in data.coords and data["zone_axis"].shape == (12, 3)
    assert set(data["split"].values.tolist()) == {b"train", b"val", b"test"}


def test_webdataset_reads_the_tars(dataset: Path, tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    export(dataset, tmp_path / "tars", "webdataset", split="train")
    about = json.loads((tmp_path / "tars" / "dataset.json").read_text())
    assert about["samples"] == 6 and about["fields"][0]["axes"] == ["Ry", "Rx", "Qy", "Qx"]
    urls = str(tmp_path / "tars" / about["urls"])
    found = list(webdataset.WebDataset(urls, shardshuffle=False).decode())
    assert [s["__key__"] for s in found] == [f"{uid_of(t, r):016x}" for t in (0, 1) for r in range(3)]
    for sample, (task, row) in zip(found, [(t, r) for t in (0, 1) for r in range(3)], strict=True):
        assert np.array_equal(sample["cbed.npy"], arrays_of(task, row)["cbed"])
        assert sample["params.json"]["energy_keV"] == 100 + 50 * task
        assert sample["params.json"]["formula"] == ("Au", "GaAs")[task]
    export(dataset, tmp_path / "again", "webdataset", split="train")
    assert tree(tmp_path / "tars") == tree(tmp_path / "again")


def test_dose_is_keyed_by_uid_alone(dataset: Path, tmp_path: Path) -> None:
    export(dataset, tmp_path / "one.h5", "emd", "#4", dose_e_per_pattern=1e4)
    export(dataset, tmp_path / "all", "emd", dose_e_per_pattern=1e4)
    one = read_emd(tmp_path / "one.h5")
    among = read_emd(tmp_path / "all" / f"{uid_of(1, 1):016x}.h5")
    assert np.array_equal(one.data, among.data) and one.data.dtype == np.uint16 and one.units == "electrons"
    expected = arrays_of(1, 1)["cbed"].astype(float) * 1e4
    z = (one.data - expected) / np.sqrt(expected + 1e-9)
    assert abs(z.mean()) < 5 / np.sqrt(z.size) and 0.85 < z.std() < 1.15
    assert one.metadata["exitwave"]["dose_e_per_pattern"] == 1e4
    other = counted(arrays_of(1, 1)["cbed"], 1e4, uid=uid_of(1, 1), seed=1)
    assert not np.array_equal(other, one.data)
    for bad in (0.0, -1.0, float("nan"), 1e30):
        with pytest.raises(UsageError, match="--dose"):
            counted(arrays_of(1, 1)["cbed"], bad, uid=1)
    with pytest.raises(UsageError, match="not among the fields potential"):
        export(dataset, tmp_path / "no", "emd", dose_e_per_pattern=1.0, fields=("potential",))


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(dataset: Path, tmp_path: Path) -> None:
    before = tree(dataset)
    (tmp_path / "there.h5").write_bytes(b"mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_bytes(b"mine")
    cases: list[tuple[str, Any]] = [
        ("there already", lambda: export(dataset, tmp_path / "there.h5", "emd", "#0")),
        ("there already", lambda: export(dataset, tmp_path / "full", "zarr")),
        ("lies inside the data set", lambda: export(dataset, dataset / "x", "zarr")),
        ("lies inside the data set", lambda: export(dataset, dataset, "zarr")),
        (
            "no field 'phase'; there are cbed, potential",
            lambda: export(dataset, tmp_path / "a", "emd", fields=("phase",)),
        ),
        ("no sample with this uid", lambda: export(dataset, tmp_path / "a", "emd", "12345")),
        ("expected #0 to #11", lambda: export(dataset, tmp_path / "a", "emd", "#12")),
        ("no split 'tests'; there are", lambda: export(dataset, tmp_path / "a", "emd", split="tests")),
        ("expected one of emd", lambda: export(dataset, tmp_path / "a", "tiff")),
        ("is a file, not a folder", lambda: export(dataset, tmp_path / "there.h5" / "x" / "y", "zarr")),
    ]
    for match, call in cases:
        with pytest.raises(UsageError, match=match):
            call()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "there.h5"]
    assert tree(dataset) == before


@pytest.mark.parametrize("format", ["hspy", "zarr", "webdataset"])
def test_an_interrupted_export_goes_on_and_is_the_same(dataset: Path, tmp_path: Path, format: str) -> None:
    data, numbers = select_samples(open_dataset(dataset))
    done: list[int] = []

    def emit(kind: str, **fields: Any) -> None:
        done.append(fields["done"])

    with pytest.raises(InterruptedRunError, match="after 5 of 12"):
        export_samples(
            data, numbers, ExportSpec(format=format), tmp_path / "x", emit=emit, stopped=lambda: done[-1] == 5
        )
    assert not (tmp_path / "x").exists()
    export_samples(data, numbers, ExportSpec(format=format), tmp_path / "x")
    export_samples(data, numbers, ExportSpec(format=format), tmp_path / "y")
    first, second = tree(tmp_path / "x"), tree(tmp_path / "y")
    assert first.keys() == second.keys()
    assert format == "hspy" or first == second
    assert not list(tmp_path.glob(".*"))


def test_tar_members_are_plain(dataset: Path, tmp_path: Path) -> None:
    export(dataset, tmp_path / "t", "webdataset", "#0", fields=("potential",))
    with tarfile.open(tmp_path / "t" / "data-000000.tar") as tar:
        assert tar.getnames() == [f"{uid_of(0, 0):016x}.potential.npy", f"{uid_of(0, 0):016x}.params.json"]
