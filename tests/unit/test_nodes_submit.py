"""Which job a folder has, whether another is submitted, and what a cancelled or silent Slurm makes of it: against
commands that say what a file says, and write down how they were called."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import line
import pytest

from exitwave.ingest.errors import InterruptedRunError, UsageError
from exitwave.train.spec import TrainSpec
from exitwave.workflows import nodes_submit
from exitwave.workflows.nodes_spec import LaunchSection
from exitwave.workflows.nodes_submit import (
    NodeJob,
    _outcome,
    follow_job,
    job_name,
    job_of,
    refuse_while_job,
    submit_job,
)
from exitwave.workflows.pipeline import run_pipeline
from exitwave.workflows.resolved import dump_yaml
from exitwave.workflows.session import open_session

SPEC = TrainSpec(steps=10)
Tool = Callable[[str, str], None]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    folder = tmp_path / "bin"
    folder.mkdir()

    def write(name: str, script: str) -> None:
        path = folder / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/called\n{script}\n')
        path.chmod(0o755)

    for name in ("sbatch", "squeue", "scancel"):
        write(name, "exit 0")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return write


def job(folder: Path, spec: TrainSpec = SPEC) -> NodeJob:
    out = folder / "run"
    (out / ".slurm").mkdir(parents=True, exist_ok=True)
    made = NodeJob(
        spec=spec, data=folder / "data", out=out, launch=LaunchSection(nodes=2), nodes=2, ranks=2,
        name=job_name("run", out), cache=None,
    )  # fmt: skip
    if not (out / ".slurm" / "job.sh").exists():
        (made.state / "train.yaml").write_text(dump_yaml(spec.canonical(), comment=["at another time"]))
        (made.state / "job.sh").write_text(job_of(made))
    return made


def submit(made: NodeJob) -> str:
    with open_session(quiet=True) as session:
        return submit_job(session, made, job_of(made))


def test_a_job_is_named_after_its_folder(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    names = {job_name("run", tmp_path / way / "run") for way in (".", "b/..", "b")}
    assert len(names) == 2 and all(name.startswith("exitwave-run-") for name in names)


def test_a_job_whose_number_nobody_wrote_down_is_found(tmp_path: Path, tool: Tool) -> None:
    """The command was killed between sbatch's answer and its record."""
    made = job(tmp_path)
    tool("squeue", f'case "$*" in *--name={made.name}*) echo 98 PENDING; echo 101 RUNNING;; esac')
    assert submit(made) == "101"
    assert "sbatch" not in (tmp_path / "called").read_text()


def test_nothing_is_submitted_while_squeue_is_silent(tmp_path: Path, tool: Tool) -> None:
    made = job(tmp_path)
    (made.state / "job.json").write_text(f'{{"job": "101", "name": "{made.name}"}}')
    tool("squeue", "exit 1")
    with pytest.raises(InterruptedRunError, match="squeue does not answer"):
        submit(made)
    assert "sbatch" not in (tmp_path / "called").read_text()


def test_a_job_at_another_training_is_not_followed(tmp_path: Path, tool: Tool) -> None:
    made = job(tmp_path)
    tool("squeue", "echo 101 RUNNING")
    assert submit(made) == "101"
    with pytest.raises(UsageError, match="job 101 is at another training"):
        submit(job(tmp_path, TrainSpec(steps=11)))
    for change in ({"data": tmp_path / "other"}, {"fresh": True}):
        with pytest.raises(UsageError, match="job 101 is at another training"):
            submit(replace(made, **change))
    shutil.rmtree(made.state)  # somebody deleted the folder under the job
    with pytest.raises(UsageError, match="job 101 is at another training"):
        submit(made)


def test_a_pipeline_says_before_the_campaign_what_its_training_lacks(tmp_path: Path, tool: Tool) -> None:
    pipeline = line.write_pipeline(tmp_path)

    def run(**options: object) -> None:
        with open_session(quiet=True) as session:
            run_pipeline(
                session, pipeline, tmp_path / "whole", cluster="inline", workers=None, overrides=[],
                **{"ranks": None, "fresh": False, "nodes": 2, **options},
            )  # fmt: skip

    with pytest.raises(UsageError, match="3 ranks on 2 nodes"):
        run(ranks=3)
    (tmp_path / "bin" / "squeue").unlink()
    with pytest.raises(UsageError, match="squeue not found"):
        run()
    assert not (tmp_path / "whole").exists()


def test_a_folder_is_not_deleted_under_its_job(tmp_path: Path, tool: Tool) -> None:
    made = job(tmp_path)
    refuse_while_job(tmp_path)
    (made.state / "job.json").write_text(f'{{"job": "101", "name": "{made.name}"}}')
    refuse_while_job(tmp_path)  # it is over
    tool("squeue", "echo 101 RUNNING")
    with pytest.raises(UsageError, match="job 101 is at it: `scancel 101` first"):
        refuse_while_job(tmp_path)
    tool("squeue", "exit 1")
    with pytest.raises(UsageError, match="squeue does not answer"):
        refuse_while_job(tmp_path)


def test_a_cancelled_job_that_was_over_has_ended_well(
    tmp_path: Path, tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a scancel that fails is tried again."""
    monkeypatch.setattr(nodes_submit, "_ASK_S", 0.2)
    made = job(tmp_path)
    (made.state / "101-0").mkdir()
    assert isinstance(_outcome(made, "101", cancelled=True), InterruptedRunError)
    tool("squeue", f"[ -e {made.state}/101-0/ended ] || echo 101 RUNNING")
    tool("scancel", f"[ -e {tmp_path}/once ] && echo 0 > {made.state}/101-0/ended; touch {tmp_path}/once; exit 1")
    with open_session(quiet=True) as session:
        session.stop.set()
        follow_job(session, made, "101", lambda event: None)
    assert (tmp_path / "called").read_text().count("scancel 101") == 2
