"""The smaller parts of the command line: help, templates, ranks' errors, identities, the doctor, exit codes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from line import write_pipeline
from slurm_stand_in import SlurmStandIn

from exitwave.ingest.errors import DamagedDataError, ExitwaveError, InterruptedRunError, UsageError
from exitwave.ingest.events import EventTail
from exitwave.workflows import cli
from exitwave.workflows.commands import app
from exitwave.workflows.doctor import examine
from exitwave.workflows.doctor_site import check_slurm, check_tls
from exitwave.workflows.launch import why_ranks_ended
from exitwave.workflows.pipeline import read_pipeline
from exitwave.workflows.pipeline_folder import claim, refuse_foreign
from exitwave.workflows.rank import check_mesh
from exitwave.workflows.scaffold import template_names, template_text, write_template
from exitwave.workflows.session import json_text

ROOT = Path(__file__).resolve().parents[2]
VERBS = [
    "init",
    "plan",
    "simulate",
    "status",
    "failures",
    "retry",
    "verify",
    "stage",
    "inspect",
    "show",
    "export",
    "ingest",
    "subset",
    "merge",
    "migrate",
    "train",
    "evaluate",
    "predict",
    "export-model",
    "run",
]
VERBS += ["report", "serve", "tune", "doctor", "bench"]

# --- help -----------------------------------------------------------------------------------------------------------


def test_help_is_light_and_complete() -> None:
    code = (
        "import sys; from exitwave.workflows.cli import run; code = run(['--help']);"
        "heavy = [m for m in ('torch', 'numpy', 'dask', 'abtem', 'matplotlib', 'h5py') if m in sys.modules];"
        "sys.exit(f'imported {heavy}' if heavy or code else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    places = [done.stdout.index(f"│ {verb} ") for verb in VERBS]
    assert places == sorted(places)  # in the order of use


def test_bare_exitwave_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 0
    assert "exitwave init quickstart.yaml" in "".join(capsys.readouterr())


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_tells_a_newcomer_how_to_go_on(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"exitwave {verb}" in text
    for heading in ("Example", "Next", "Exit codes"):
        assert heading in text


def test_the_registered_verbs_are_these() -> None:
    cli.register_verbs()
    assert [c.name for c in sorted(app.registered_commands, key=lambda c: c.rich_help_panel)] == VERBS


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["pln"], "Did you mean 'plan'?"),
        (["plan"], "CAMPAIGN.yaml"),
        (["plan", "x.yaml", "--nope"], "--nope"),
        (["simulate", "x.yaml", "--out", "d", "--workers", "0"], "--workers"),
        (["stage", "d", "--cache", "c", "--capacity", "20 parsecs"], "--capacity: expected a size"),
        (["train", "no.yaml", "--data", "d", "--out", "r"], "no.yaml: no such file"),
        (["verify", "/nonexistent"], "no such folder"),
        (["bench", "everything"], "does not exist: choose allreduce, ingest, pipeline, simulate or spatial"),
        (["status", "/nonexistent"], "no such folder"),
        (["report", "/nonexistent"], "no such folder"),
        (["inspect", "/nonexistent"], "no such file"),
        (["init", "/tmp/x.yaml", "--template", "nope"], "quickstart, classify"),
    ],
)
def test_wrong_use_is_exit_2_with_one_message(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    out, err = capsys.readouterr()
    assert expected in err and out == "" and "Traceback" not in err


# --- exit codes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError("a.yaml:1:2: k: wrong"), 2, "a.yaml:1:2: k: wrong"),
        (DamagedDataError("shard x"), 3, "shard x"),
        (InterruptedRunError("stopped"), 75, "exitwave run p.yaml --out r"),
        (ExitwaveError("rank 1 was killed"), 1, "rank 1 was killed"),
        (KeyboardInterrupt(), 75, "before anything was started"),
        (OSError(28, "No space left on device", "f"), 75, "The disk is full while writing f"),
        (PermissionError(13, "Permission denied", "/x"), 2, "/x: cannot be used: permission denied"),
        (KeyError("boom"), 1, "The traceback is in "),
    ],
)
def test_every_error_has_its_code(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", "p.yaml", "--out", "r", "--fresh"]
    assert cli._explain(error, arguments, debug=False) == code
    text = capsys.readouterr().err
    assert said in text and "Traceback" not in text and "--fresh" not in text
    if "traceback is in" in text:
        path = Path(text.partition("traceback is in ")[2].partition(";")[0])
        assert "KeyError" in path.read_text()
        path.unlink()


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ValueError("inside")
    except ValueError as error:
        assert cli._explain(error, ["plan", "--debug"], debug=True) == 1
    assert "Traceback" in capsys.readouterr().err


def test_json_is_strict() -> None:
    import numpy as np

    text = json_text({"a": float("nan"), "b": np.float32(0.5), "c": np.arange(2), "d": (1, b"x"), "e": Path("p")})
    assert json.loads(text) == {"a": None, "b": 0.5, "c": [0, 1], "d": [1, "x"], "e": "p"}


# --- templates ------------------------------------------------------------------------------------------------------


def test_templates_are_valid_and_the_example_is_the_template(tmp_path: Path) -> None:
    assert {"quickstart", "reconstruct", "classify", "regress", "volume", "seed-small"} <= set(template_names())
    assert template_names()[0] == "quickstart"
    for name in ("quickstart", "reconstruct", "classify"):
        assert template_text(name) == (ROOT / "examples" / f"{name}.yaml").read_text(), name
    for name in template_names():
        write_template(name, tmp_path / f"{name}.yaml")
    for name in ("quickstart", "reconstruct", "classify"):
        read_pipeline(tmp_path / f"{name}.yaml")
    with pytest.raises(UsageError, match="exists already"):
        write_template("quickstart", tmp_path / "quickstart.yaml")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.long] if n == "reconstruct" else []) for n in template_names()],  # 906 crystals
)
def test_every_template_can_be_planned(name: str, tmp_path: Path) -> None:
    from exitwave.workflows.campaigns import read_campaign

    write_template(name, tmp_path / f"{name}.yaml")
    plan = read_campaign(tmp_path / f"{name}.yaml", []).plan
    lost = [r for r in plan.rejected if "no orthogonal cell" not in r.why]
    held = {"reconstruct": ("new_composition", "new_prototype")}.get(name, ("test",))
    assert all(plan.by_split()["train"] > plan.by_split()[split] > 0 for split in held), name
    assert plan.rejected_samples <= 0.02 * plan.n_samples, (name, lost)
    assert len({r.source for r in lost}) <= 0.15 * len(plan.structures), (name, lost)


# What makes a campaign's cheapest shard small enough to be simulated here.
_TINY = {
    "reconstruct": [
        "campaign.samples_per_structure=3",
        "campaign.scan.shape=[2,2]",
    ],
    "classify": ["campaign.samples_per_structure=4", "campaign.samples_per_shard=4"],
    "regress": ["samples_per_structure=8", "samples_per_shard=8", "scan.shape=[2,2]", "scan.step_A=0.96"],
    "volume": ["samples_per_structure=4", "samples_per_shard=4", "scan.shape=[2,2]", "scan.step_A=3.2"],
    "seed-small": ["samples_per_structure=2", "samples_per_shard=2", "scan.shape=[1,1]", "scan.step_A=25"],
}


@pytest.mark.parametrize(
    "name",
    [
        *("quickstart", "classify", "regress", "volume"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("reconstruct", "seed-small")),
    ],
)
def test_every_template_can_be_simulated(name: str, tmp_path: Path) -> None:
    """init, then a plan and a campaign of the same file with the sizes set down: its cheapest shard."""
    from exitwave.ingest import open_dataset
    from exitwave.simulate.campaign import run_campaign
    from exitwave.simulate.cluster_inline import InlineCluster
    from exitwave.workflows.campaigns import read_campaign

    write_template(name, tmp_path / "c.yaml")
    sizes = _TINY.get(name, ["campaign.samples_per_structure=1", "campaign.scan.shape=[2,2]"])
    plan = read_campaign(tmp_path / "c.yaml", sizes).plan
    cheapest = sorted(plan.tasks, key=lambda task: task.estimated_seconds())[:1]
    few = dataclasses.replace(plan, tasks=tuple(cheapest))
    result = run_campaign(few, tmp_path / "d", InlineCluster())
    assert (result.failed, result.samples) == (0, few.n_samples)
    data = open_dataset(tmp_path / "d")
    for name_, shape in ((f.name, f.shape) for f in plan.fields):
        values = data[0][name_]
        assert values.shape == shape and np.isfinite(values).all() and (name_ == "focus_A" or values.any())
    if name == "volume":
        assert data[0]["volume"].sum(axis=0) == pytest.approx(data[0]["potential"], abs=1e-3)


def test_the_quickstart_is_what_was_promised() -> None:
    from exitwave.workflows.campaigns import read_campaign

    plan = read_campaign(ROOT / "examples" / "quickstart.yaml").plan
    formulas = {
        split: {t.structure.formula for t in plan.tasks if t.split == split} for split in ("train", "val", "test")
    }
    assert len(formulas["train"]) >= 12 and len(formulas["test"]) == 4
    assert not formulas["train"] & (formulas["test"] | formulas["val"])
    assert plan.n_samples >= 256 and plan.rejected == () and plan.warnings == ()
    assert max(max(s.grid_yx) for s in plan.samples()) <= 128
    assert {s.recipe.scan.shape for s in plan.samples()} == {(8, 8)}
    assert max(max(s.structure.extent_yx_A) for s in plan.samples()) <= 50


# --- identity of a run ----------------------------------------------------------------------------------------------


def test_a_run_belongs_to_one_configuration(tmp_path: Path) -> None:
    path, out = write_pipeline(tmp_path), tmp_path / "run"
    out.mkdir()
    _, spec = read_pipeline(path)
    assert claim(out, spec, fresh=False) is False
    assert claim(out, spec, fresh=False) is True
    _, elsewhere = read_pipeline(path, ["cluster.workers=1", "ranks=1", "stage.capacity=1GB"])
    assert claim(out, elsewhere, fresh=False) is True  # where it runs is no part of what it is
    _, other = read_pipeline(path, ["campaign.seed=6", "train.batch=2"])
    with pytest.raises(UsageError) as caught:
        claim(out, other, fresh=False)
    assert "campaign.seed: was 5, now 6" in str(caught.value) and "train.batch: was 4, now 2" in str(caught.value)
    (out / "dataset").mkdir()
    (out / "mine.txt").write_text("kept")
    assert claim(out, other, fresh=True) is False
    assert not (out / "dataset").exists() and (out / "mine.txt").exists()


def test_a_folder_of_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        refuse_foreign(tmp_path)


@pytest.mark.parametrize(
    "text", ["stage.capacity=much", "ranks=0", "cluster.kin=local", "train.batch=none", "campaign=3"]
)
def test_faults_of_a_pipeline_name_the_option(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_pipeline(write_pipeline(tmp_path), [text])
    assert str(caught.value).startswith(f"--set {text}: {text.partition('=')[0]}: ")


# --- ranks ----------------------------------------------------------------------------------------------------------


def rank_error(out: Path, rank: int, **fields: Any) -> None:
    (out / "rank-errors").mkdir(exist_ok=True)
    record = {"rank": rank, "t": 100 + rank, "exit_code": 1, "message": "boom"} | fields
    (out / "rank-errors" / f"rank-{rank}.json").write_text(json.dumps(record))


def test_the_rank_that_caused_it_is_shown(tmp_path: Path) -> None:
    rank_error(tmp_path, 0, t=1, message="rank 0 of 2: lost contact with another rank")
    rank_error(tmp_path, 1, t=2, message="shard abc is damaged", exit_code=3)
    error = why_ranks_ended(tmp_path, 1, stopped=False, log=tmp_path / "train.log")
    assert isinstance(error, DamagedDataError) and str(error) == "rank 1: shard abc is damaged"


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    rank_error(tmp_path, 0, message="rank 0 of 2: lost contact with another rank")
    log = "Root Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 7)\n"
    (tmp_path / "train.log").write_text(log)
    error = why_ranks_ended(tmp_path, 1, stopped=False, log=tmp_path / "train.log")
    assert type(error) is ExitwaveError and "rank 1 was killed by SIGKILL" in str(error)
    assert "lost contact" in str(
        why_ranks_ended(tmp_path, 1, stopped=False, log=tmp_path / "train.log", since=len(log))
    )  # that was an earlier attempt
    assert "rank 0 was killed by SIGKILL" in str(
        why_ranks_ended(tmp_path, -9, stopped=False, log=tmp_path / "train.log")
    )  # a lone rank, without torchrun
    assert "torchrun, which runs the ranks, was killed by SIGKILL" in str(
        why_ranks_ended(tmp_path, -9, stopped=False, log=tmp_path / "train.log", ranks=2)
    )


def test_ranks_that_stopped_are_an_interruption(tmp_path: Path) -> None:
    rank_error(tmp_path, 0, exit_code=75, message="stopped after step 4")
    assert isinstance(why_ranks_ended(tmp_path, 1, stopped=True, log=tmp_path / "train.log"), InterruptedRunError)
    assert isinstance(why_ranks_ended(tmp_path / "none", 1, stopped=True, log=tmp_path / "none"), InterruptedRunError)
    assert type(why_ranks_ended(tmp_path / "none", 1, stopped=False, log=tmp_path / "none")) is ExitwaveError


def test_the_log_is_followed_by_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": "old"}\n')
    tail = EventTail(path, from_end=True)
    assert tail.read() == []
    with path.open("a") as file:
        file.write('{"kind": "a"}\n{"kin')
        file.flush()
        assert [e["kind"] for e in tail.read()] == ["a"]
        file.write('d": "b"}\nnot json\n{"kind": "c"}\n')
    assert [e["kind"] for e in tail.read()] == ["b", "c"]
    path.unlink()
    assert tail.read() == []
    path.write_text('{"kind": "anew"}\n')
    assert [e["kind"] for e in tail.read()] == ["anew"]


@pytest.mark.parametrize(("mesh", "ranks"), [("2x2", 2), ("3x1", 2), ("x", 1), ("0x1", 1), ("two", 2)])
def test_meshes_that_do_not_exist_are_refused(mesh: str, ranks: int) -> None:
    with pytest.raises(UsageError, match=f"--mesh {mesh}"):
        check_mesh(mesh, ranks)


def test_meshes_that_exist() -> None:
    assert check_mesh("auto", 3) is None
    assert check_mesh("3x1", 3) == (3, 1)
    assert check_mesh("2x3", 6) == (2, 3)


# --- doctor ---------------------------------------------------------------------------------------------------------


def test_the_doctor_looks_at_everything(tmp_path: Path) -> None:
    began = time.monotonic()
    document = examine(tmp_path)
    assert time.monotonic() - began < 60
    names = [c["name"] for c in document["checks"]]
    assert {"python", "packages", "dask", "fft", "disk", "fsync", "locks", "ports", "torch", "gpu"} <= set(names)
    assert {"file system", "O_DIRECT", "open files", "slurm", "tls", "chromium"} <= set(names)
    assert document["ok"], [c for c in document["checks"] if c["state"] == "fail"]
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_asks_slurm_and_looks_at_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = SlurmStandIn(tmp_path / "slurm")
    monkeypatch.setenv("PATH", "/nowhere")
    assert check_slurm(tmp_path).state == "ok" and "none is needed" in check_slurm(tmp_path).found
    monkeypatch.setenv("PATH", str(stand_in.bin))
    assert (check_slurm(tmp_path).state, check_slurm(tmp_path).found[:14]) == ("ok", "squeue answers")
    (stand_in.folder / "silent").touch()
    answer = check_slurm(tmp_path)
    assert answer.state == "warn" and "Unable to contact" in answer.found and answer.hint
    (stand_in.bin / "sbatch").unlink()
    assert check_slurm(tmp_path).found == "sbatch missing"
    monkeypatch.setenv("HOME", str(tmp_path))
    key = tmp_path / ".config" / "exitwave" / "tls" / "key.pem"
    key.parent.mkdir(parents=True)
    key.touch(mode=0o644)
    found = check_tls(tmp_path)
    assert found.state == "fail" and found.hint == f"chmod 600 {key}"
