"""Files as other programs write them (RosettaSciIO, emdfile), taken in by the draft that `inspect` makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exitwave.ingest import open_dataset
from exitwave.ingest.foreign_draft import describe_foreign
from exitwave.ingest.foreign_ingest import ingest_files
from exitwave.ingest.foreign_map import MapSpec

DATA = np.random.default_rng(0).random((3, 4, 8, 6)).astype("f4")  # (y, x, ky, kx)
SCALES_NM = (0.05, 0.06, 0.5, 0.7)


def signal() -> dict[str, Any]:
    """What HyperSpy hands to RosettaSciIO."""
    names, units = ("y", "x", "ky", "kx"), ("nm", "nm", "1/nm", "1/nm")
    axes = [
        {"_type": "UniformDataAxis", "name": names[i], "units": units[i], "scale": SCALES_NM[i], "offset": 0.0,
         "size": DATA.shape[i], "navigate": i < 2, "is_binned": False, "index_in_array": i}
        for i in range(4)
    ]  # fmt: skip
    microscope = {"beam_energy": 200.0, "convergence_angle": 20.0}
    metadata = {"General": {"title": "mine"}, "Signal": {"signal_type": "electron_diffraction"},
                "Acquisition_instrument": {"TEM": microscope}}  # fmt: skip
    return {
        "data": DATA, "axes": axes, "metadata": metadata, "original_metadata": {}, "attributes": {"_lazy": False},
        "tmp_parameters": {}, "package_info": {"package": "hyperspy", "package_version": "2.0"},
        "learning_results": {}, "models": [],
    }  # fmt: skip


def ingested(path: Path, out: Path, **more: Any) -> tuple[Any, Any]:
    draft = {**describe_foreign(path).draft}
    draft["parameters"] = {**draft["parameters"], **more}
    ingest_files([path], MapSpec.model_validate(draft), out)
    sample = open_dataset(out)[0]
    return sample["cbed"], sample["params"]


def check(cbed: Any, params: Any) -> None:
    assert np.array_equal(cbed, DATA)
    columns = ("R_sampling_y_A", "R_sampling_x_A", "Q_sampling_y_per_A", "Q_sampling_x_per_A")
    np.testing.assert_allclose([params[name] for name in columns], [0.5, 0.6, 0.05, 0.07], rtol=1e-8)


def test_hspy_of_rosettasciio(tmp_path: Path) -> None:
    pytest.importorskip("rsciio.hspy").file_writer(str(tmp_path / "a.hspy"), signal())
    cbed, params = ingested(tmp_path / "a.hspy", tmp_path / "d")
    check(cbed, params)
    assert (params["energy_keV"], params["semiangle_mrad"]) == (200.0, 20.0)


def test_berkeley_emd_of_rosettasciio_stands_the_other_way_round(tmp_path: Path) -> None:
    pytest.importorskip("rsciio.emd").file_writer(str(tmp_path / "a.emd"), signal())
    assert describe_foreign(tmp_path / "a.emd").draft["fields"]["cbed"]["axes"] == ["Qx", "Qy", "Rx", "Ry"]
    cbed, params = ingested(tmp_path / "a.emd", tmp_path / "d", energy_keV=300)
    check(cbed, params)
    assert params["energy_keV"] == 300


def test_emd_of_emdfile(tmp_path: Path) -> None:
    emdfile = pytest.importorskip("emdfile")
    array = emdfile.Array(
        data=DATA, name="cube", dims=[[0, 0.5], [0, 0.6], [0, 0.05], [0, 0.07]],
        dim_names=["Rx", "Ry", "Qx", "Qy"], dim_units=["A", "A", "A^-1", "A^-1"],
    )  # fmt: skip
    emdfile.Root(name="root").add_to_tree(array)
    emdfile.save(str(tmp_path / "a.h5"), array)
    check(*ingested(tmp_path / "a.h5", tmp_path / "d"))


def test_a_zarr_store_in_hyperspys_layout(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    root = zarr.open_group(str(tmp_path / "a.zspy"), mode="w", zarr_format=2)
    group = root.create_group("Experiments").create_group("mine")
    group.create_array("data", data=DATA, chunks=(1, 1, 8, 6))
    for i, axis in enumerate(signal()["axes"]):
        group.create_group(f"axis-{i}").attrs.update(axis)
    group.create_group("metadata").create_group("TEM").attrs.update(beam_energy=200.0)
    cbed, params = ingested(tmp_path / "a.zspy", tmp_path / "d")
    check(cbed, params)
    assert params["energy_keV"] == 200
