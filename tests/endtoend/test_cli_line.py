"""The command line from end to end, in small: every verb as a real process, on one line that is run once."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from line import environment, events, exitwave, planned_uids, processes_naming, uids_of, write_pipeline

UID = "#0"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A pipeline file and the folder that `run` made of it."""
    folder = tmp_path_factory.mktemp("line")
    path = write_pipeline(folder)
    done = exitwave("run", path, "--out", folder / "run")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "RMSE on split test: network" in done.stdout and "report.html" in done.stdout
    assert "simulate: 24 of 24 samples (100 %)" in done.stderr and "train: 12 of 12 steps (100 %)" in done.stderr
    return path, folder / "run"


def document(*arguments: object, code: int = 0) -> Any:
    """What a verb prints with --json: one document on stdout and nothing else."""
    done = exitwave(*arguments, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def test_the_run_left_a_whole_line(made: tuple[Path, Path]) -> None:
    path, run = made
    assert sorted(uids_of(run / "dataset")) == sorted(planned_uids(path))
    assert (run / "report.html").stat().st_size > 100_000
    assert not [p for p in run.rglob("*.part") if p.is_file()]
    assert processes_naming(run) == []
    resolved = (run / "pipeline.yaml").read_text()
    assert resolved.startswith("# A pipeline, as resolved") and "weight_decay: 0.01" in resolved
    kinds = [(e["kind"], e.get("part")) for e in events(run / "events.jsonl")]
    parts = [part for kind, part in kinds if kind == "part_finished"]
    assert parts == ["simulate", "stage", "train", "evaluate", "report"]


def test_the_same_again_does_nothing_twice(made: tuple[Path, Path]) -> None:
    path, run = made
    model = (run / "train" / "model.pt").stat().st_mtime_ns
    done = exitwave("run", path, "--out", run, "--quiet")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    skipped = [e["part"] for e in events(run / "events.jsonl") if e["kind"] == "part_skipped"]
    assert skipped[-3:] == ["simulate", "train", "evaluate"]
    assert (run / "train" / "model.pt").stat().st_mtime_ns == model
    assert len(set(uids_of(run / "dataset"))) == 24


def test_another_configuration_is_refused_with_the_difference(made: tuple[Path, Path]) -> None:
    path, run = made
    done = exitwave("run", path, "--out", run, "--set", "train.steps=13")
    assert done.returncode == 2
    assert "train.steps: was 12, now 13" in done.stderr and "--fresh" in done.stderr


def test_status_says_what_is_done(made: tuple[Path, Path]) -> None:
    _, run = made
    status = document("status", run)
    assert status["samples"] == {"planned": 24, "committed": 24, "failed": 0, "rejected": 0}
    assert status["shards"] == {"pending": 0, "running": 0, "committed": 8, "failed": 0, "rejected": 0}
    assert status["state"] == "complete" and status["stages"]["train"] == "done"
    assert (status["trainer"]["step"], status["trainer"]["state"]) == (12, "ended")  # as the page showed it
    assert {"rate_samples_per_s", "eta_s", "attempts", "cluster", "dashboard"} <= set(status)
    watched = exitwave("status", run, "--watch", timeout=60)
    assert watched.returncode == 0 and "24 of 24 samples, complete" in watched.stdout
    assert document("failures", run / "dataset") == []


def test_status_imports_little(made: tuple[Path, Path]) -> None:
    """It is asked for often, on machines that have better to do: nothing that simulates, trains, plans or draws."""
    _, run = made
    heavy = ["torch", "dask", "distributed", "abtem", "scipy", "matplotlib", "h5py", "bokeh", "exitwave.simulate.plan"]
    script = (
        "import sys; from exitwave.workflows.cli import run; code = run(['status', sys.argv[1], '--json']);"
        f"print([m for m in {heavy} if m in sys.modules], code, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script, run], capture_output=True, text=True, env=environment())
    assert done.stderr.strip() == "[] 0"


def test_plan_says_what_it_would_cost(made: tuple[Path, Path]) -> None:
    path, _ = made
    plan = document("plan", path)
    assert (plan["samples"], plan["shards"], plan["structures"], plan["rejected"]) == (24, 8, 4, [])
    assert plan["bytes"] > 0 and plan["core_hours"] > 0 and plan["eta_s"] > 0 and plan["memory_per_worker_bytes"] > 0
    more = document("plan", path, "--set", "samples_per_structure=9")
    assert more["samples"] == 36


def test_verify_and_stage(made: tuple[Path, Path], tmp_path: Path) -> None:
    _, run = made
    verified = document("verify", run / "dataset")
    assert (verified["ok"], verified["shards"], verified["samples"], verified["bad"]) == (True, 8, 24, [])
    first = document("stage", run / "dataset", "--cache", tmp_path, "--capacity", "1GB")
    assert first["bytes_copied"] > 0
    assert document("stage", run / "dataset", "--cache", tmp_path)["bytes_copied"] == 0
    small = exitwave("stage", run / "dataset", "--cache", tmp_path / "small", "--capacity", "1kB")
    assert small.returncode == 2 and "Traceback" not in small.stderr


def test_looking_at_data(made: tuple[Path, Path], tmp_path: Path) -> None:
    _, run = made
    found = document("inspect", run / "dataset")
    assert [f["name"] for f in found["fields"]] == ["cbed", "potential"]
    assert {s["formula"] for s in found["structures"]} >= {"Au", "Si", "MgO"}
    shard = next((run / "dataset" / "shards").rglob("*.h5"))
    assert document("inspect", shard)["facts"]["samples"] == 3
    picture = tmp_path / "sample.png"
    shown = document("show", run / "dataset", found["uids"][1], "--out", picture)
    assert shown["index"] == 1 and shown["params"]["energy_keV"] == 200
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert exitwave("show", run / "dataset", "ffff").returncode == 2
    text = exitwave("show", run / "dataset", UID, "--out", picture)
    assert text.returncode == 0 and "thickness_A" in text.stdout


@pytest.mark.long
def test_evaluate_again_on_another_split(made: tuple[Path, Path]) -> None:
    _, run = made
    kept = (run / "train" / "metrics.json").read_bytes()
    result = document("evaluate", run / "train", "--data", run / "dataset", "--split", "val")
    assert result["split"] == "val" and result["n"] == 6
    assert {"model", "idpc", "com", "mean"} <= set(result["metrics"])
    assert {"rmse_V", "rmse_V_fitted", "rmse_VA", "r2", "psnr", "ssim"} <= set(result["metrics"]["model"])
    assert {"by_thickness", "by_dose", "ms_per_sample"} <= set(result)
    (run / "train" / "metrics.json").write_bytes(kept)
    missing = exitwave("evaluate", run / "train", "--data", run / "dataset", "--split", "nope")
    assert missing.returncode == 2 and "nope" in missing.stderr


def test_a_report_on_a_data_set_alone(made: tuple[Path, Path], tmp_path: Path) -> None:
    _, run = made
    out = tmp_path / "data.html"
    done = exitwave("report", run / "dataset", "--out", out)
    assert done.returncode == 0, done.stderr
    html = out.read_text()
    assert "24 samples of 4 structures are committed" in html and "data:image/png;base64," in html
    assert exitwave("report", run / "train", "--out", tmp_path / "train.html").returncode == 0


def test_step_by_step_on_one_rank(made: tuple[Path, Path], tmp_path: Path) -> None:
    path, _ = made
    data, run = tmp_path / "data", tmp_path / "run"
    made_data = document("simulate", path, "--out", data, "--cluster", "inline")
    assert made_data["failed"] == 0
    trained = document("train", path, "--data", data, "--out", run, "--ranks", "1", "--set", "steps=3")
    assert trained["steps"] == 3 and (run / "model.pt").exists()
    once_more = exitwave("train", path, "--data", data, "--out", run, "--ranks", "1", "--set", "steps=3")
    assert once_more.returncode == 0 and "Nothing was left to train" in once_more.stdout
    again = exitwave("train", path, "--data", data, "--out", run, "--ranks", "1", "--set", "steps=4")
    assert again.returncode == 2 and "steps: 3 -> 4" in again.stderr
    fresh = document("train", path, "--data", data, "--out", run, "--ranks", "1", "--set", "steps=2", "--fresh")
    assert fresh["steps"] == 2


def test_under_an_outer_torchrun(made: tuple[Path, Path], tmp_path: Path) -> None:
    path, run = made
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += [
        "--nproc-per-node=2",
        "--module",
        "exitwave.workflows",
        "train",
        str(path),
        "--data",
        str(run / "dataset"),
    ]
    command += ["--out", str(tmp_path / "outer"), "--set", "steps=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Trained 2 steps") == 1  # rank 0 alone speaks
    assert (tmp_path / "outer" / "model.pt").exists()


def test_on_a_terminal_there_are_bars(made: tuple[Path, Path], tmp_path: Path) -> None:
    _, run = made
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "exitwave.workflows", "stage", str(run / "dataset"), "--cache", str(tmp_path)]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment() | {"TERM": "xterm-256color"})
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert process.wait(60) == 0
    assert "━".encode() in shown and b"8 shards ready" in shown
