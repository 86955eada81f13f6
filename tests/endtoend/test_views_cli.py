"""The verbs of views on the command line: JSON, exit codes, messages, and that one feeds the next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from views_data import arrays_of, make_views_dataset

from exitwave.ingest import load_manifest, open_dataset
from exitwave.workflows.cli import run


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return make_views_dataset(tmp_path / "d")


def document(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> Any:
    capfd.readouterr()
    assert run([*map(str, arguments), "--json", "--quiet"]) == 0
    out, _ = capfd.readouterr()
    return json.loads(out)


def refused(capfd: pytest.CaptureFixture[str], code: int, *arguments: str | Path) -> str:
    capfd.readouterr()
    assert run(list(map(str, arguments))) == code
    out, err = capfd.readouterr()
    assert out == "" and "Traceback" not in err
    return err


def test_export_inspect_draft_and_ingest(dataset: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = document(capfd, "export", dataset, "--format", "hspy", "--split", "train", "--out", tmp_path / "h")
    assert (found["samples"], found["files"], found["fields"]) == (6, 6, ["cbed"])
    files = sorted((tmp_path / "h").iterdir())
    seen = document(capfd, "inspect", files[0])
    assert seen["facts"]["format"] == "hspy" and any(a["shape"] == [3, 4, 8, 6] for a in seen["arrays"])
    capfd.readouterr()
    assert run(["inspect", str(files[0]), "--draft-map"]) == 0
    (tmp_path / "map.yaml").write_text(capfd.readouterr().out)
    back = document(capfd, "ingest", *files, "--map", tmp_path / "map.yaml", "--out", tmp_path / "back")
    assert back["samples"] == 6 and back["splits"] == {"train": 6} and back["unmapped"] == []
    assert np.array_equal(open_dataset(tmp_path / "back")[0]["cbed"], arrays_of(0, 0)["cbed"])
    assert document(capfd, "verify", tmp_path / "back")["ok"]
    assert run(["inspect", str(files[0])]) == 0 and run(["inspect", str(tmp_path / "back")]) == 0


def test_faults_have_one_message_and_a_code(dataset: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    export = ["export", dataset, "--out", tmp_path / "x", "--format"]
    assert "character 8: '&'" in refused(capfd, 2, *export, "zarr", "--where", "(3 < 4)&colour==1")
    assert "no column colour" in refused(capfd, 2, *export, "zarr", "--where", "colour==1")
    assert "no split 'tset'" in refused(capfd, 2, *export, "zarr", "--split", "tset")
    assert "no sample with this uid" in refused(capfd, 2, *export, "emd", "--uid", "77")
    assert "no sample is chosen" in refused(capfd, 2, *export, "emd", "--where", "energy_keV > 9000")
    (tmp_path / "map.yaml").write_text("fields:\n  cbed: {array: /data, axis: [Ry, Rx, Qy, Qx]}\nsplit: train\n")
    message = refused(capfd, 2, "ingest", dataset, "--map", tmp_path / "map.yaml", "--out", tmp_path / "y")
    assert "map.yaml:2:" in message and "axes" in message
    (tmp_path / "noise.bin").write_bytes(b"\x00" * 100)
    assert "neither HDF5" in refused(capfd, 2, "inspect", tmp_path / "noise.bin")
    shard = next((dataset / "shards").rglob("*.h5"))
    data = bytearray(shard.read_bytes())
    at = data.find(arrays_of(int(shard.stem[2:], 16), 1)["cbed"].tobytes())
    data[at + 5] ^= 1
    shard.write_bytes(data)
    message = refused(capfd, 3, *export, "webdataset")
    assert shard.stem in message and "cbed" in message and "uid 0x" in message
    assert not (tmp_path / "x").exists()


def test_subset_merge_and_migrate(dataset: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    high = document(capfd, "subset", dataset, "--where", "energy_keV >= 200", "--out", tmp_path / "high")
    low = document(capfd, "subset", dataset, "--where", "energy_keV < 200", "--out", tmp_path / "low")
    assert (high["samples"], low["samples"], high["splits"]) == (6, 6, {"val": 3, "test": 3})
    both = document(capfd, "merge", tmp_path / "high", tmp_path / "low", "--out", tmp_path / "both")
    assert both["samples"] == 12 and document(capfd, "verify", tmp_path / "both")["ok"]
    assert sorted(open_dataset(tmp_path / "both").uids) == sorted(open_dataset(dataset).uids)
    assert document(capfd, "migrate", tmp_path / "both")["kept"] == ""
    message = refused(capfd, 2, "subset", dataset, "--where", "energy>=200", "--out", tmp_path / "z")
    assert "did you mean energy_keV" in message and "\n  energy>=200\n  ^" in message


def test_a_data_set_made_of_others_answers_every_verb(
    dataset: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It has no plan and no campaign; nothing may call it broken, and no campaign may be resumed into it."""
    document(capfd, "subset", dataset, "--split", "train", "--out", tmp_path / "s")
    status = document(capfd, "status", tmp_path / "s")
    assert status["samples"]["committed"] == status["samples"]["planned"] == 6
    assert status["state"] == "complete; made by `exitwave subset`"
    assert document(capfd, "failures", tmp_path / "s") == []
    manifests = [load_manifest(folder).header for folder in (dataset, tmp_path / "s")]
    assert manifests[0].campaign_hash != manifests[1].campaign_hash
    assert manifests[1].provenance[-1]["sources"][0]["campaign_hash"] == manifests[0].campaign_hash
    document(capfd, "export", dataset, "--format", "emd", "--uid", "#0", "--out", tmp_path / "x.h5")
    (tmp_path / "map.yaml").write_text("fields: {cbed: {array: /exitwave/datacube/data, axes: [Ry, Rx, Qy, Qx]}}\n")
    made = document(capfd, "ingest", tmp_path / "x.h5", "--map", tmp_path / "map.yaml", "--out", tmp_path / "i")
    assert made["unmapped"][0] == "energy_keV"
    assert run(["report", str(tmp_path / "i"), "--quiet"]) == 0  # no label, no structure, no parameters
    assert (tmp_path / "i" / "report.html").exists()
    assert document(capfd, "show", tmp_path / "i", "#0", "--out", tmp_path / "p.png")["formula"] == "?"
