"""Bad input, damaged data, a full disk: one readable message, the right exit code, nothing half-written left behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from line import events, exitwave, planned_uids, uids_of, write_pipeline

DATA = Path(__file__).resolve().parents[1] / "data"
AU = "    - library: [Au, Si]\n      split: train\n"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("data")
    path = write_pipeline(folder)
    done = exitwave("simulate", path, "--out", folder / "data", "--cluster", "inline")
    assert done.returncode == 0, done.stderr
    return path, folder / "data"


def refused(done: subprocess.CompletedProcess[str], *expected: str, code: int = 2) -> None:
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for text in expected:
        assert text in done.stderr


@pytest.mark.parametrize(
    ("verbs", "before", "after", "expected"),
    [
        ("plan simulate run", "  scan: {", "  scann: {", "campaign.scann: unknown key; did you mean `scan`?"),
        (
            "plan run",
            "energy_keV: 200",
            "energy_keV: 2e5",
            "campaign.sampling.energy_keV: 200000: expected 1..1000 keV",
        ),
        ("simulate run", "library: [Au, Si]", "cif: none.cif", "campaign.structures[0].cif: "),
        ("run train", "batch: 4", "batch: many", "train.batch: expected a whole number, got 'many'"),
    ],
)
def test_configuration_names_file_line_and_key(
    tmp_path: Path, verbs: str, before: str, after: str, expected: str
) -> None:
    path, out = write_pipeline(tmp_path, (before, after)), tmp_path / "out"
    key = after.strip().partition(":")[0]
    number, line = next((i, t) for i, t in enumerate(path.read_text().splitlines(), 1) if f"{key}:" in t)
    place = f"{path}:{number}:{line.index(key) + 1}: {expected}"
    for verb in verbs.split():
        data = ["--data", tmp_path] if verb == "train" else []
        where = [] if verb == "plan" else ["--out", out]
        refused(exitwave(verb, path, *data, *where), place)
        assert not out.exists()


def test_an_output_that_cannot_be_written(dataset: tuple[Path, Path], tmp_path: Path) -> None:
    path, data = dataset
    (tmp_path / "file").write_text("x")
    inside = tmp_path / "file" / "out"
    refused(exitwave("simulate", path, "--out", inside, "--cluster", "inline"), str(inside))
    refused(exitwave("run", path, "--out", inside), str(tmp_path / "file"))
    refused(exitwave("run", path, "--out", tmp_path / "file"), "this is a file")
    refused(exitwave("train", path, "--data", data, "--out", inside), str(tmp_path / "file"))
    refused(exitwave("stage", data, "--cache", inside), str(tmp_path / "file"))
    refused(exitwave("simulate", path, "--out", "/proc/nothing", "--cluster", "inline"), "/proc/nothing")


def test_a_data_set_of_another_format_version(dataset: tuple[Path, Path], tmp_path: Path) -> None:
    path, data = dataset
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    manifest = copy / "manifest.jsonl"
    manifest.write_bytes(manifest.read_bytes().replace(b'"version":1', b'"version":7', 1))
    for arguments in (
        ("verify", copy),
        ("status", copy),
        ("stage", copy, "--cache", tmp_path / "c"),
        ("report", copy),
        ("train", path, "--data", copy, "--out", tmp_path / "r"),
        ("simulate", path, "--out", copy),
    ):
        refused(exitwave(*arguments), f"{manifest}:1", "version 7", "version 1")


def test_another_campaign_on_the_same_data_set(dataset: tuple[Path, Path]) -> None:
    path, data = dataset
    refused(exitwave("simulate", path, "--out", data, "--set", "seed=6", "--cluster", "inline"), "seed: 5 -> 6")


def test_a_campaign_is_no_training_and_no_pipeline(tmp_path: Path) -> None:
    path = tmp_path / "campaign.yaml"
    path.write_text("name: x\nstructures:\n  - library: [Au]\n")
    refused(exitwave("train", path, "--data", tmp_path, "--out", tmp_path / "r"), f"{path}:2:1: this is a campaign")
    refused(exitwave("run", path, "--out", tmp_path / "r"), "a pipeline is expected")


def test_partial_occupancy_is_a_rejected_row_while_others_remain(tmp_path: Path) -> None:
    shutil.copy(DATA / "partial_occupancy.cif", tmp_path / "alloy.cif")
    path = write_pipeline(tmp_path, (AU, AU + "    - cif: alloy.cif\n      split: train\n"))
    done = exitwave("plan", path, "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rejected"]
    assert "alloy.cif" in row["source"] and "occupan" in row["why"]
    alone = tmp_path / "alone.yaml"
    alone.write_text("name: x\nstructures:\n  - cif: alloy.cif\n")
    refused(exitwave("plan", alone), f"{alone}:2:1: structures: none remains", "occupan")


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def test_damage_is_found_and_named(dataset: tuple[Path, Path], tmp_path: Path) -> None:
    from exitwave.ingest import load_manifest, open_dataset

    path, data = dataset
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    index = next(i for i in range(24) if open_dataset(copy).record_of(i)[0].split == "train")
    record, row = open_dataset(copy).record_of(index)
    extent = record.extent("cbed")
    flip(copy / record.path, extent.offset + row * extent.stride + 5)
    uid = int(open_dataset(copy).uids[index])
    done = exitwave("verify", copy, "--json")
    assert done.returncode == 3
    report = json.loads(done.stdout)
    assert report["ok"] is False and len(load_manifest(copy).shards) == report["shards"]
    assert [(b["shard"], b["uid"], b["field"]) for b in report["bad"]] == [(record.shard_id, uid, "cbed")]
    refused(exitwave("stage", copy, "--cache", tmp_path / "cache"), record.shard_id, code=3)
    refused(exitwave("train", path, "--data", copy, "--out", tmp_path / "r", "--ranks", 2), record.shard_id, code=3)


def test_evaluating_what_is_not_trained(dataset: tuple[Path, Path], tmp_path: Path) -> None:
    _, data = dataset
    refused(exitwave("evaluate", tmp_path, "--data", data), "model.pt")


def test_plan_refuses_what_has_no_room(tmp_path: Path) -> None:
    path = write_pipeline(tmp_path, ("max_angle_mrad: 30}", "max_angle_mrad: 30}\n  fields: [cbed]"))
    big = exitwave("plan", path, "--set", "scan.shape=[256, 256]", "--set", "detector.shape=[4096, 4096]")
    refused(big, "the disk has", "free", "fewer samples")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if made.returncode != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_in_mid_run_is_resumable(small_disk: Path, tmp_path: Path) -> None:
    path = write_pipeline(tmp_path, ("samples_per_structure: 6", "samples_per_structure: 12"))
    data = small_disk / "data"
    done = exitwave("simulate", path, "--out", data, "--workers", 1)
    assert done.returncode == 75, done.stderr
    assert "Traceback" not in done.stderr
    assert "is full" in done.stderr and "are left and need about" in done.stderr
    assert f"exitwave simulate {path} --out {data} --workers 1" in done.stderr
    committed = uids_of(data)
    assert 0 < len(committed) < 48
    assert exitwave("verify", data).returncode == 0
    assert [p for p in data.rglob("*.part") if p.is_file()] == []
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    assert exitwave("simulate", path, "--out", data, "--workers", 1).returncode == 0
    assert sorted(uids_of(data)) == sorted(planned_uids(path))
    before = [e for e in events(data / "events.jsonl") if e["kind"] == "shard_committed"]
    assert len({e["shard_id"] for e in before}) == len(before) == 16


@pytest.mark.long
@pytest.mark.parametrize(
    "left_B",
    [
        pytest.param(120_000, id="for-half-a-checkpoint", marks=pytest.mark.long),
        pytest.param(20_000, id="for-next-to-nothing"),
    ],
)
def test_a_full_disk_in_training_is_resumable(
    dataset: tuple[Path, Path], small_disk: Path, tmp_path: Path, left_B: int
) -> None:
    path, data = dataset
    run, filler = small_disk / "run", small_disk / "filler"
    filler.write_bytes(bytes((1 << 20) - left_B))
    command = ("train", path, "--data", data, "--out", run, "--ranks", 2, "--set", "steps=6")
    done = exitwave(*command)
    assert done.returncode == 75, done.stderr
    assert "Traceback" not in done.stderr
    assert "no space left" in done.stderr or "the disk is full" in done.stderr
    assert [p.name for p in run.rglob("*.part")] == []
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    assert exitwave(*command).returncode == 0
    assert (run / "model.pt").exists()


def test_a_closed_pipe_is_no_error(dataset: tuple[Path, Path]) -> None:
    _, data = dataset
    command = f"exec 2>&1; {sys.executable} -m exitwave.workflows inspect {data} | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0" and "Traceback" not in done.stdout
