"""A model trained on small windows is applied to EMD and HyperSpy files of a larger scan of a material never seen."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import train_data as fake

from exitwave.ingest.errors import DamagedDataError, UsageError
from exitwave.ingest.export import ExportedSample, write_emd, write_hspy
from exitwave.ingest.microscopy import open_scan
from exitwave.ingest.schema import FieldSpec
from exitwave.train.predict import Given, complaints, predict, resolve
from exitwave.train.run import load_model
from exitwave.train.spec import TrainSpec
from exitwave.train.tiling import starts
from exitwave.train.trainer import train
from exitwave.workflows.predicting import predict_file
from exitwave.workflows.session import open_session

SPEC = TrainSpec.model_validate(
    {
        "model": {"preset": "tiny", "growth": 8, "stem": [32]},
        "data": {"detector_bin": 8},
        "steps": 80,
        "optimizer": {"lr": 3e-3, "warmup_steps": 10},
        "seed": 4,
    }
)
LARGE, MATERIAL = 20, 50  # positions each way; the training knows windows of 8 and materials 0 to 5


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predict")
    data = fake.make_dataset(folder / "set", train=6, val=1, test=1, per_material=12, scan=8, label=16)
    train(SPEC, data=data, out=folder / "run", threads=1)
    return folder / "run"


@pytest.fixture(scope="module")
def large() -> dict[str, Any]:
    """A scan of 12 Å of a material that no training saw, with noise."""
    made = fake.sample(MATERIAL, 0, scan=LARGE, label=2 * LARGE)
    noise = np.random.default_rng(0)
    made["cbed"] = noise.poisson(made["cbed"] * 1e4).astype(np.float32)
    return made


def exported(made: dict[str, Any], cbed: Any = None) -> ExportedSample:
    field = FieldSpec(name="cbed", dtype="<f4", shape=made["cbed"].shape, axes=("Ry", "Rx", "Qy", "Qx"))
    return ExportedSample(
        uid=made["uid"],
        params=made["params"][()],
        arrays={"cbed": made["cbed"] if cbed is None else cbed},
        fields=(field,),
        units={"cbed": "counts"},
        structure=None,
        provenance={},
    )


@pytest.fixture(scope="module")
def files(large: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    write_emd(folder / "scan.emd", exported(large))
    write_hspy(folder / "scan.hspy", exported(large))
    return {"emd": folder / "scan.emd", "hspy": folder / "scan.hspy"}


def predicted(run: Path, source: Path, out: Path, **options: Any) -> dict[str, Any]:
    """What the verb does, in this process."""
    plain: dict[str, Any] = {"scan_shape": None, "scan_step_A": None, "center": None, "flip": "none", "transpose": None}
    with open_session(quiet=True) as session:
        return predict_file(session, run, source, out, **(plain | {"force": False} | options))


def energy(large: dict[str, Any]) -> float:
    return float(large["params"]["energy_keV"])


def test_what_is_given_otherwise_than_the_file_says_is_taken_and_told(
    run: Path, large: dict[str, Any], files: dict[str, Path], tmp_path: Path
) -> None:
    given = energy(large) + 20
    told = predicted(run, files["emd"], tmp_path / "p.emd", energy_keV=given, force=True)
    assert told["conditions"]["energy_keV"] == given
    (line,) = told["conditions"]["contradicted"]
    assert line == f"energy_keV: the file says {energy(large):g}; {given:g} was given, and is taken"


@pytest.mark.parametrize("kind", ["emd", "hspy"])
def test_a_large_scan_becomes_one_calibrated_image(
    kind: str, run: Path, large: dict[str, Any], files: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / f"potential.{kind}"
    told = predicted(run, files[kind], out)
    assert told["windows"] == 49 and told["views"] == 8 and told["outside_training"] == []
    assert told["conditions"]["origin"]["semiangle_mrad"] == told["conditions"]["origin"]["energy_keV"] == "file"
    assert (tmp_path / "potential.png").read_bytes().startswith(b"\x89PNG")
    from rsciio import emd, hspy

    reader = {"emd": emd, "hspy": hspy}[kind].file_reader
    for name in (out, tmp_path / f"potential-uncertainty.{kind}"):
        (signal,) = reader(str(name))
        axes = [(a["name"], a["units"], round(float(a["scale"]), 6), float(a["offset"])) for a in signal["axes"]]
        assert axes == [("y", "Å", 0.3, 0.0), ("x", "Å", 0.3, 0.0)]
        assert signal["data"].shape == (40, 40) and np.isfinite(signal["data"]).all()
        if name == out:
            truth, made = large["potential"].astype(float), signal["data"].astype(float)
            assert np.corrcoef(truth.ravel(), made.ravel())[0, 1] > 0.9


def test_there_are_no_seams(run: Path, large: dict[str, Any], files: dict[str, Path]) -> None:
    """The error within a pixel of a window's rim is at most 1.1 times what it is elsewhere."""
    model, scan = load_model(run), open_scan(files["hspy"])
    made = predict(model, scan, resolve(scan, Given()))
    error = made.potential_VA - large["potential"]
    error = error - error.mean()
    rims = {at * 2 + shift for at in starts(LARGE, 8, margin=2) for shift in (0, 16)} - {0, 2 * LARGE}
    seam = np.zeros((40, 40), dtype=bool)
    for rim in rims:
        seam[rim - 1 : rim + 1, :] = seam[:, rim - 1 : rim + 1] = True
    inner = np.zeros_like(seam)
    inner[4:-4, 4:-4] = True  # the scan's own border is no seam
    at_seams, elsewhere = (float(np.sqrt((error[inner & where] ** 2).mean())) for where in (seam, ~seam))
    assert 100 < (inner & seam).sum() < inner.sum() - 100
    assert at_seams <= 1.1 * elsewhere
    assert made.uncertainty_VA.shape == (40, 40) and (made.uncertainty_VA > 0).mean() > 0.9


def test_an_error_is_no_larger_for_a_window_s_rim_lying_there(run: Path, large: dict[str, Any]) -> None:
    """Where rims lie on atoms the error is larger for the atoms' sake: the same pixels with the rims elsewhere tell."""
    from exitwave.ingest.microscopy import Scan4D

    given = Given(energy_keV=energy(large), q_sampling_per_A=1 / fake.EXTENT_A, rotation_deg=0.0, semiangle_mrad=20.0)
    model, side = load_model(run), 2 * LARGE
    errors, rimmed = [], []
    for cut in (0, 1):  # a scan that starts later has its windows elsewhere
        scan = Scan4D(data=large["cbed"][cut:, cut:], title="cut", scan_step_A=(0.6, 0.6))
        made = predict(model, scan, resolve(scan, given)).potential_VA
        error = np.full((side, side), np.nan)
        error[2 * cut :, 2 * cut :] = made - large["potential"][2 * cut :, 2 * cut :]
        error = error[6:-6, 6:-6]  # the borders of both scans left out
        errors.append((error - error.mean()) ** 2)
        rim = np.zeros((side, side), dtype=bool)
        for at in {2 * (s + cut) + d for s in starts(LARGE - cut, 8, margin=2) for d in (0, 16)} - {2 * cut, side}:
            rim[at - 1 : at + 1, :] = rim[:, at - 1 : at + 1] = True
        rimmed.append(rim[6:-6, 6:-6])
    square, rim = np.stack(errors), np.stack(rimmed)
    once = rim[0] != rim[1]  # on a rim of one of the two alone
    assert once.sum() > 100
    there, elsewhere = (float(np.where(which, square, 0).sum(axis=0)[once].mean()) for which in (rim, ~rim))
    assert (there / elsewhere) ** 0.5 <= 1.1


def test_what_the_file_lacks_is_estimated_and_what_is_turned_is_turned_back(run: Path, large: dict[str, Any]) -> None:
    from exitwave.ingest.microscopy import Scan4D

    bare = Scan4D(data=large["cbed"].transpose(0, 1, 3, 2), title="bare", scan_step_A=(0.6, 0.6))
    given = Given(energy_keV=energy(large), q_sampling_per_A=1 / fake.EXTENT_A)
    found = resolve(bare, given)
    assert found.transposed and abs(found.rotation_deg) < 6
    assert found.semiangle_mrad == pytest.approx(20, rel=0.05)
    assert {name for name, how in found.origin.items() if how == "estimated"} == {
        "semiangle_mrad", "center", "rotation_deg",
    }  # fmt: skip
    assert len(found.notes) == 3
    straight = Scan4D(data=large["cbed"], title="straight", scan_step_A=(0.6, 0.6))
    model = load_model(run)
    known = Given(energy_keV=energy(large), q_sampling_per_A=1 / fake.EXTENT_A, rotation_deg=0.0, semiangle_mrad=20.0)
    best = predict(model, straight, resolve(straight, known)).potential_VA
    from dataclasses import replace

    again = predict(model, bare, resolve(bare, replace(known, transpose=True))).potential_VA
    assert np.corrcoef(best.ravel(), again.ravel())[0, 1] > 0.99


def test_a_finer_scan_is_resampled_and_a_file_is_read_by_the_row(run: Path) -> None:
    fine = fake.sample(MATERIAL, 0, scan=2 * LARGE, label=2 * LARGE, step_A=0.3)
    rows = []

    class Watched:
        shape = fine["cbed"].shape

        def __getitem__(self, key: Any) -> Any:
            rows.append(key[0])
            return fine["cbed"][key]

    from exitwave.ingest.microscopy import Scan4D

    scan = Scan4D(data=Watched(), title="fine", scan_step_A=(0.3, 0.3), rotation_deg=0.0, semiangle_mrad=20.0)
    given = Given(energy_keV=float(fine["params"]["energy_keV"]), q_sampling_per_A=1 / fake.EXTENT_A)
    made = predict(load_model(run), scan, resolve(scan, given))
    assert made.scan_step_A == pytest.approx(0.6) and made.sampling_A == pytest.approx(0.3)
    assert all(row.stop - row.start == 1 for row in rows[1:])  # the first look apart
    truth = fine["potential"][: made.potential_VA.shape[0], : made.potential_VA.shape[1]]
    assert np.corrcoef(truth.ravel(), made.potential_VA.ravel())[0, 1] > 0.9


def test_bad_input_is_one_message_each(
    run: Path, large: dict[str, Any], files: dict[str, Path], tmp_path: Path
) -> None:
    def refused(source: Path, out: str = "o.hspy", **options: Any) -> str:
        with pytest.raises(UsageError) as caught:
            predicted(run, source, tmp_path / out, **options)
        assert not (tmp_path / out).exists()
        return str(caught.value)

    emd = files["emd"]
    silent = Path(shutil.copy(emd, tmp_path / "silent.emd"))
    with h5py.File(silent, "r+") as file:
        del file["exitwave/metadatabundle/calibration/energy_keV"]
    assert "give --energy-keV" in refused(silent)
    assert "given in eV?" in refused(emd, energy_keV=200000.0)
    text = refused(emd, energy_keV=300.0, semiangle_mrad=35.0)
    assert "energy_keV is 300 keV, the model was trained on 100 to 200 keV" in text and "--force" in text
    assert "semiangle_mrad is 35 mrad, the model was trained on 20 mrad" in text
    assert "expected a name ending in .hspy or .emd" in refused(emd, out="o.tif", energy_keV=200.0)
    assert "expected two numbers" in refused(emd, energy_keV=200.0, center="here")
    assert "expected none, y, x or yx" in refused(emd, energy_keV=200.0, flip="z")
    assert "no such file" in refused(tmp_path / "none.emd")
    (tmp_path / "words.emd").write_text("not a file of that kind")
    assert "not readable as EMD" in refused(tmp_path / "words.emd")
    shutil.copy(silent, tmp_path / "scan.h5")  # as py4DSTEM calls it
    assert "give --energy-keV" in refused(tmp_path / "scan.h5")
    shutil.copy(emd, tmp_path / "scan.xyz")
    assert "RosettaSciIO reads no files called .xyz" in refused(tmp_path / "scan.xyz")
    done = subprocess.run(
        [sys.executable, "-m", "exitwave.workflows", "predict", run, silent, "--out", tmp_path / "o.hspy"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "give --energy-keV" in done.stderr and "Traceback" not in done.stderr


def test_what_cannot_be_predicted_says_so(
    run: Path, large: dict[str, Any], files: dict[str, Path], tmp_path: Path
) -> None:
    model = load_model(run)
    small = fake.sample(MATERIAL, 1, scan=5, label=10)
    write_hspy(tmp_path / "small.hspy", exported(small))
    scan = open_scan(tmp_path / "small.hspy")
    with pytest.raises(UsageError, match=r"5x5 positions.*window needs 8x8"):
        predict(model, scan, resolve(scan, Given()))
    holes = large["cbed"].copy()
    holes[3, 4, 5, 6] = np.nan
    write_hspy(tmp_path / "holes.hspy", exported(large, holes))
    with pytest.raises(DamagedDataError, match="not finite"):
        resolve(open_scan(tmp_path / "holes.hspy"), Given())
    coarse = open_scan(files["hspy"])
    found = complaints(model, coarse, resolve(coarse, Given(scan_step_A=(1.5, 1.5), q_sampling_per_A=0.02)))
    assert any("too coarse" in line for line in found) and any("the detector reaches" in line for line in found)
    with pytest.raises(UsageError, match="4x4 positions, but the file holds 400 patterns"):
        open_scan(files["hspy"], scan_shape=(4, 4))
