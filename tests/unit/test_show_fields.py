"""`show`, `inspect` and exports of every kind of field: encoded, compressed, volumes, through-focal series, unknown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from views_data import LABEL, arrays_of, encoded, make_views_dataset, uid_of

from exitwave.ingest import open_dataset
from exitwave.ingest.errors import UsageError
from exitwave.ingest.exporting import ExportSpec, export_samples
from exitwave.ingest.schema import FieldSpec
from exitwave.workflows.inspecting import inspect_path, show_sample
from exitwave.workflows.pictures import _panels

MORE = (
    *encoded(),
    FieldSpec(name="images", dtype="float32", shape=(5, *LABEL), axes=("F", "H", "W"), unit="fraction"),
    FieldSpec(name="focus_A", dtype="float32", shape=(5,), axes=("F",), unit="Å"),
    FieldSpec(name="volume", dtype="float32", shape=(4, *LABEL), axes=("Z", "H", "W"), unit="V Å"),
    FieldSpec(name="own", dtype="float32", shape=(2, 3, 7, 5)),
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("show")
    return make_views_dataset(folder / "d", "t", fields=MORE, compression="bitshuffle-lz4")


def test_every_field_has_a_picture(dataset: Path, tmp_path: Path) -> None:
    titles = [panel.title for panel in _panels(open_dataset(dataset)[0])]
    assert titles[:3] == ["pattern at the centre, √", "mean pattern, √", "detected fraction"]
    assert titles[3] == "projected potential, V·Å"
    assert [t.split(",")[0] for t in titles if t.startswith("image")] == [f"image {f} of 5" for f in (1, 3, 5)]
    assert sum(t.startswith("potential of slab") for t in titles) == 3 and titles[-1] == "own"
    shown = show_sample(dataset, "#1", tmp_path / "new" / "one.png")
    assert shown["uid"] == f"{uid_of(0, 1):016x}" and shown["params"]["semiangle_mrad"] == 21.0
    assert (tmp_path / "new" / "one.png").read_bytes().startswith(b"\x89PNG")


def test_a_page_has_the_picture_and_the_parameters(dataset: Path, tmp_path: Path) -> None:
    show_sample(dataset, f"{uid_of(0, 0):x}", tmp_path / "one.html")
    text = (tmp_path / "one.html").read_text(encoding="utf-8")
    assert "data:image/png;base64," in text and "<th>semiangle_mrad</th><td>20.0</td>" in text
    assert "http" not in text
    show_sample(dataset, "#2", tmp_path / "one.html")  # another sample, in its place
    assert "<td>22.0</td>" in (tmp_path / "one.html").read_text(encoding="utf-8")
    (tmp_path / "d.png").mkdir()
    for bad, match in ((tmp_path / "x.tiff", "ends in .png"), (tmp_path, "ends in"), (tmp_path / "d.png", "a folder")):
        with pytest.raises(UsageError, match=match):
            show_sample(dataset, "#0", bad)


def test_inspect_tells_them(dataset: Path) -> None:
    found: Any = inspect_path(dataset)
    assert [f["name"] for f in found["fields"]] == ["cbed", "potential", "images", "focus_A", "volume", "own"]
    shard = next((dataset / "shards").rglob("*.h5"))
    assert next(f["dtype"] for f in inspect_path(shard)["fields"]) == "<f2"


@pytest.mark.parametrize("format", ["emd", "hspy", "zarr", "webdataset"])
def test_exports_hold_values_not_codes(dataset: Path, tmp_path: Path, format: str) -> None:
    data = open_dataset(dataset)
    out = tmp_path / ("x" if format in ("zarr", "webdataset") else f"x.{'h5' if format == 'emd' else 'hspy'}")
    names = tuple(f.name for f in MORE)
    export_samples(data, [0], ExportSpec(format=format, fields=names), out)
    wanted = data[0]
    stored = arrays_of(0, 0, MORE)["cbed"].astype("f4")
    np.testing.assert_allclose(wanted["cbed"], (stored * 0.5) ** 2, rtol=1e-6)
    if format == "emd":
        root = pytest.importorskip("emdfile").read(out)
        found = {name: root.tree("datacube" if name == "cbed" else name).data for name in names if name != "own"}
    elif format == "hspy":
        signals = pytest.importorskip("rsciio.hspy").file_reader(str(out))
        found = {s["metadata"]["General"]["title"].split()[-1]: s["data"] for s in signals}
    elif format == "zarr":
        opened = pytest.importorskip("xarray").open_zarr(out)
        found = {name: opened[name][0].values for name in names}
    else:
        tar = str(out / "data-000000.tar")
        (one,) = pytest.importorskip("webdataset").WebDataset(tar, shardshuffle=False).decode()
        found = {name: one[f"{name.lower()}.npy"] for name in names}
    for name, array in found.items():
        assert array.dtype == np.float32 and np.array_equal(array, wanted[name]), name
