"""Other people's files into shards: values, axes, parameters; and what does not fit is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from pydantic import ValidationError
from views_data import DQ, DR, arrays_of, make_views_dataset, tree

from exitwave.ingest import open_dataset, verify_dataset
from exitwave.ingest.errors import DamagedDataError, InterruptedRunError, UsageError
from exitwave.ingest.exporting import ExportSpec, export_samples
from exitwave.ingest.foreign_draft import describe_foreign
from exitwave.ingest.foreign_ingest import ingest_files
from exitwave.ingest.foreign_map import MapSpec

RNG = np.random.default_rng(5)
CUBES = RNG.random((5, 4, 6, 8, 7)).astype("f4")  # (sample, Ry, Rx, Qy, Qx)
LABELS = RNG.random((5, 8, 12))


def write_h5(path: Path, **extra: Any) -> Path:
    """Axes as (sample, Qx, Qy, Rx, Ry), as a program that counts x first writes them."""
    with h5py.File(path, "w") as file:
        data = file.create_dataset("run/data", data=extra.get("cubes", CUBES).transpose(0, 4, 3, 2, 1) * 100)
        data.attrs["step_nm"] = 0.05
        file["run/label"] = LABELS
        file["run/thickness"] = np.arange(5) * 10.0
        file["run/set"] = np.array(["train", "train", "val", "test", "train"], dtype="S5")
        file["run"].attrs["kV"] = 200
        file["run"].attrs["material"] = "SrTiO3"
    return path


def spec(**changes: Any) -> MapSpec:
    base: dict[str, Any] = {
        "fields": {
            "cbed": {"array": "/run/data", "axes": ["sample", "Qx", "Qy", "Rx", "Ry"], "scale": 0.01},
            "potential": {"array": "/run/label", "axes": ["sample", "H", "W"]},
        },
        "parameters": {
            "energy_keV": {"attribute": "/run@kV"},
            "R_sampling_y_A": {"attribute": "/run/data@step_nm", "scale": 10.0},
            "thickness_A": {"array": "/run/thickness"},
            "zone_axis": [1, 1, 0],
            "semiangle_mrad": 21.4,
        },
        "split": {"array": "/run/set"},
        "structure": {"formula": {"attribute": "/run@material"}, "space_group": 221},
    }
    return MapSpec.model_validate({**base, **changes})


def test_hdf5_with_other_axes_units_and_parameters(tmp_path: Path) -> None:
    report = ingest_files([write_h5(tmp_path / "a.h5")], spec(), tmp_path / "d")
    assert report.splits == {"train": 3, "val": 1, "test": 1}
    assert report.unmapped == ("Q_sampling_y_per_A", "Q_sampling_x_per_A", "R_sampling_x_A", "potential_sampling_A")
    assert verify_dataset(tmp_path / "d").ok
    data = open_dataset(tmp_path / "d")
    assert data.fields[0].axes == ("Ry", "Rx", "Qy", "Qx") and data.fields[0].shape == (4, 6, 8, 7)
    assert data.fields[0].unit == "fraction of the incident beam"
    for i, number in enumerate([0, 1, 4]):
        sample = data.split("train")[i]
        np.testing.assert_allclose(sample["cbed"], CUBES[number], rtol=1e-6)
        np.testing.assert_allclose(sample["potential"], LABELS[number], rtol=1e-6)
        params = sample["params"]
        assert (params["energy_keV"], params["thickness_A"], params["semiangle_mrad"]) == (200, 10.0 * number, 21.4)
        assert params["R_sampling_y_A"] == pytest.approx(0.5) and params["zone_axis"].tolist() == [1, 1, 0]
    info = data.structure(0).info
    assert (info.formula, info.space_group, info.source) == ("SrTiO3", 221, "a.h5")
    (step,) = data.manifest.header.provenance
    assert (
        step["verb"] == "ingest" and step["files"] == ["a.h5"] and step["map"]["parameters"]["semiangle_mrad"] == 21.4
    )


def test_the_same_files_make_the_same_bytes_and_uids_anywhere(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    ingest_files([write_h5(tmp_path / "a.h5")], spec(), tmp_path / "d1")
    ingest_files([write_h5(tmp_path / "x" / "a.h5")], spec(), tmp_path / "d2")
    first, second = tree(tmp_path / "d1" / "shards"), tree(tmp_path / "d2" / "shards")
    assert open_dataset(tmp_path / "d1").uids.tolist() == open_dataset(tmp_path / "d2").uids.tolist()
    assert list(first) == list(second)


def test_a_large_scan_is_cut_into_tiles(tmp_path: Path) -> None:
    cube, label = RNG.random((9, 12, 8, 8)).astype("f4"), RNG.random((27, 48)).astype("f4")
    with h5py.File(tmp_path / "scan.h5", "w") as file:
        file["cube"], file["label"] = cube, label
    mapping = spec(
        fields={
            "cbed": {"array": "/cube", "axes": ["Ry", "Rx", "Qy", "Qx"], "flip": ["Ry"]},
            "potential": {"array": "/label", "axes": ["H", "W"], "flip": ["H"]},
        },
        parameters={"R_sampling_y_A": 0.5, "R_sampling_x_A": 0.5, "scan_origin_y_A": 1.0, "scan_rotation_deg": 90.0},
        split="test",
        structure=None,
        tile={"Ry": 4, "Rx": 4},
    )
    report = ingest_files([tmp_path / "scan.h5"], mapping, tmp_path / "d")
    assert report.samples == 6  # two tiles of 4 in 9 rows, three in 12 columns
    data = open_dataset(tmp_path / "d")
    assert data.fields[1].shape == (12, 16)
    up, up_label = cube[::-1], label[::-1]
    for i, (y, x) in enumerate((y, x) for y in range(2) for x in range(3)):
        sample = data[i]
        assert np.array_equal(sample["cbed"], up[4 * y : 4 * y + 4, 4 * x : 4 * x + 4])
        assert np.array_equal(sample["potential"], up_label[12 * y : 12 * y + 12, 16 * x : 16 * x + 16])
        # probe (i, j) lies at y = y0 + (i cos + j sin) step, x = x0 + (j cos - i sin) step
        assert sample["params"]["scan_origin_y_A"] == pytest.approx(1.0 + 2.0 * x)
        assert sample["params"]["scan_origin_x_A"] == pytest.approx(-2.0 * y)


def test_counts_are_normalised_and_the_pattern_is_centred(tmp_path: Path) -> None:
    counts = np.zeros((2, 2, 6, 6), "u2")
    counts[..., 1, 4] = [[10, 20], [30, 40]]
    np.save(tmp_path / "counts.npy", counts)
    mapping = spec(
        fields={
            "cbed": {
                "array": "/",
                "axes": ["Ry", "Rx", "Qy", "Qx"],
                "normalise": "mean-pattern",
                "centre": {"Qy": 1, "Qx": 4},
            }
        },
        parameters={},
        split="train",
        structure=None,
    )
    ingest_files([tmp_path / "counts.npy"], mapping, tmp_path / "d")
    cbed = open_dataset(tmp_path / "d")[0]["cbed"]
    np.testing.assert_allclose(cbed[:, :, 3, 3], np.array([[10, 20], [30, 40]]) / 25)
    assert cbed.sum() == pytest.approx(4.0)
    whole = MapSpec.model_validate(
        {"fields": {"cbed": {"array": "/", "axes": ["Ry", "Rx", "Qy", "Qx"], "dtype": "uint16", "unit": "electrons"}}}
    )
    ingest_files([tmp_path / "counts.npy"], whole, tmp_path / "e")
    data = open_dataset(tmp_path / "e")
    assert np.array_equal(data[0]["cbed"], counts) and data.fields[0].unit == "electrons"
    with pytest.raises(UsageError, match="no structure"):
        data.structure(0)


@pytest.mark.parametrize("format", ["emd", "py4dstem", "hspy", "zarr"])
def test_an_export_comes_back_by_its_own_draft(tmp_path: Path, format: str) -> None:
    source = open_dataset(make_views_dataset(tmp_path / "d", "t"))
    suffix = {"hspy": ".hspy", "zarr": ""}.get(format, ".h5")
    export_samples(source, [0], ExportSpec(format=format, fields=("cbed", "potential")), tmp_path / f"one{suffix}")
    report = describe_foreign(tmp_path / f"one{suffix}")
    assert report.kind == {"hspy": "hspy", "zarr": "Zarr"}.get(format, "EMD")
    mapping = MapSpec.model_validate(report.draft)
    ingest_files([tmp_path / f"one{suffix}"], mapping, tmp_path / "back")
    sample, wanted = open_dataset(tmp_path / "back")[0], arrays_of(0, 0)
    assert np.array_equal(sample["cbed"], wanted["cbed"])
    assert np.array_equal(sample["potential"], wanted["potential"])
    if format != "zarr":
        params = sample["params"]
        found = [
            params[f"{c}"] for c in ("R_sampling_y_A", "R_sampling_x_A", "Q_sampling_y_per_A", "Q_sampling_x_per_A")
        ]
        np.testing.assert_allclose(found, [*DR, *DQ])
        assert (params["energy_keV"], params["semiangle_mrad"]) == (100.0, 20.0)


def test_what_does_not_fit_is_refused_by_file_and_path(tmp_path: Path) -> None:
    good = write_h5(tmp_path / "a.h5")
    bad = CUBES.copy()
    bad[3, 1, 2, 3, 4] = np.nan
    write_h5(tmp_path / "nan.h5", cubes=bad)
    write_h5(tmp_path / "small.h5", cubes=CUBES[:, :, :, :6])
    (tmp_path / "text.h5").write_text("hello world, no HDF5 here")
    (tmp_path / "torn.h5").write_bytes(good.read_bytes()[:3000])
    (tmp_path / "folder").mkdir()

    def fields(**changes: Any) -> MapSpec:
        cbed = {"array": "/run/data", "axes": ["sample", "Qx", "Qy", "Rx", "Ry"], **changes}
        return spec(fields={"cbed": cbed})

    def params(**values: Any) -> MapSpec:
        return spec(parameters=values)

    extra = {
        "x": {"array": "/run/thickness", "axes": ["Z"]},
        "y": {"array": "/run/label", "axes": ["H", "sample", "W"]},
    }
    two = ["a.h5", "small.h5"]
    cases: list[tuple[str, list[str], MapSpec]] = [
        (r"nan\.h5: /run/data, sample 3: holds values that are not finite, the first at .*'Ry': 1", ["nan.h5"], spec()),
        (r"small\.h5: /run/data gives samples of cbed of shape \(4, 6, 6, 7\).*a\.h5 have", two, spec()),
        (r"text\.h5: neither HDF5", ["text.h5"], spec()),
        (r"absent\.h5: no such file", ["absent.h5"], spec()),
        (r"folder: a folder, and no Zarr store", ["folder"], spec()),
        (r"a\.h5: there is no /run/date in it; the arrays are: /run/data", ["a.h5"], fields(array="/run/date")),
        (r"a\.h5: /run is a group, expected an array; in it: /run/data", ["a.h5"], fields(array="/run")),
        (r"a\.h5: /run/data has 5 axes .* the map names 4", ["a.h5"], fields(axes=["Ry", "Rx", "Qy", "Qx"])),
        (r"/run/set, for thickness_A: .* is no number", ["a.h5"], params(thickness_A={"array": "/run/set"})),
        (r"/run has no attribute 'keV'; there are: kV", ["a.h5"], params(energy_keV={"attribute": "/run@keV"})),
        (r"energy_keV is 200000.*given in eV\?", ["a.h5"], params(energy_keV=200000)),
        (r"/run/label, for thickness_A: shape \(5, 8, 12\)", ["a.h5"], params(thickness_A={"array": "/run/label"})),
        (r"an intensity is negative", ["a.h5"], fields(offset=-5.0)),
        (r"are not all whole numbers of uint16", ["a.h5"], fields(dtype="uint16")),
        (r"a tile of 9 along Ry, and the scan has 4", ["a.h5"], spec(tile={"Ry": 9})),
        (r"fits none of the patterns", ["a.h5"], spec(split={"by_file": {"b*": "train"}})),
        (r"split 'the_training_set_of_mine'", ["a.h5"], spec(split="the_training_set_of_mine")),
        (r"another number of samples", ["a.h5"], spec(fields={**spec().model_dump()["fields"], **extra})),
    ]
    for match, names, mapping in cases:
        with pytest.raises(UsageError, match=match):
            ingest_files([tmp_path / name for name in names], mapping, tmp_path / "d")
        assert not (tmp_path / "d").exists()
    with pytest.raises(DamagedDataError, match=r"torn\.h5: cannot be opened as HDF5"):
        ingest_files([tmp_path / "torn.h5"], spec(), tmp_path / "d")
    with pytest.raises(UsageError, match="is a file, not a folder"):
        ingest_files([good], spec(), good / "d")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"parameters": {"energy_kev": 3}}, "did you mean energy_keV"),
        ({"parameters": {"temperature_K": 3}}, "declare your own under `columns:`"),
        ({"parameters": {"energy_keV": {"attribute": "/x"}}}, "PATH@NAME"),
        ({"parameters": {"energy_keV": {}}}, "give either"),
        ({"fields": {}}, "at least one field"),
        ({"split": {"fractions": {"train": 0.5}}}, "sum to 1"),
        ({"tile": {"H": 3}}, "Ry and Rx"),
        ({"fields": {"cbed": {"array": "/a", "axes": ["Ry", "Ry"]}}}, "each axis once"),
        ({"fields": {"cbed": {"array": "/a", "axes": ["Ry"], "flip": ["Qx"]}}}, "no axis 'Qx'"),
        ({"unknown": 1}, "Extra inputs"),
    ],
)
def test_a_map_that_means_nothing_is_refused(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        spec(**change)


def test_own_columns_and_splits_by_file(tmp_path: Path) -> None:
    for name in ("one_test.h5", "two.h5"):
        write_h5(tmp_path / name)
    mapping = spec(
        parameters={"temperature_K": 77.5, "batch": "B7"},
        columns={"temperature_K": "f8", "batch": "S8"},
        split={"by_file": {"*_test*": "test", "*": "train"}},
    )
    report = ingest_files([tmp_path / "one_test.h5", tmp_path / "two.h5"], mapping, tmp_path / "d")
    assert report.splits == {"test": 5, "train": 5}
    params = open_dataset(tmp_path / "d").params
    assert set(params["temperature_K"]) == {77.5} and set(params["batch"]) == {b"B7"}


def test_an_interrupted_ingest_goes_on(tmp_path: Path) -> None:
    path = write_h5(tmp_path / "a.h5")
    mapping = spec(shard_bytes=6000, split="train")  # one sample a shard
    seen: list[int] = []

    def emit(kind: str, **fields: Any) -> None:
        seen.append(fields["done"])

    with pytest.raises(InterruptedRunError, match="after 3 of 5"):
        ingest_files([path], mapping, tmp_path / "d", emit=emit, stopped=lambda: seen[-1] == 3)
    assert not (tmp_path / "d").exists()
    report = ingest_files([path], mapping, tmp_path / "d", emit=emit)
    assert report.samples == 5 and report.shards == 5 and verify_dataset(tmp_path / "d").ok
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.h5", "d"]
