"""Which job a folder has, whether another is submitted, and what a cancelled or silent Slurm makes of it: against
commands that say what a file says, and write down how they were called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from exitwave.ingest.errors import InterruptedRunError, UsageError
from exitwave.ingest.files import write_atomic
from exitwave.train.spec import TrainSpec
from exitwave.workflows.config import dump_yaml
from exitwave.workflows.nodes_spec import LaunchSection
from exitwave.workflows.nodes_submit import NodeJob, _outcome, follow_job, job_name, job_of, submit_job
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
    return NodeJob(
        spec=spec, data=folder / "data", out=out, launch=LaunchSection(nodes=2), nodes=2, ranks=2,
        name=job_name("run", out), cache=None,
    )  # fmt: skip


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
    (made.state / "train.yaml").write_text(dump_yaml(SPEC.canonical(), comment=["at another time"]))
    write_atomic(made.state / "job.sh", job_of(made).encode())
    tool("squeue", "echo 101 RUNNING")
    assert submit(made) == "101"
    with pytest.raises(UsageError, match="job 101 is at another training"):
        submit(job(tmp_path, TrainSpec(steps=11)))
    other = NodeJob(**{**vars(made), "data": tmp_path / "other"})
    with pytest.raises(UsageError, match="job 101 is at another training"):
        submit(other)


def test_a_cancelled_job_that_was_over_has_ended_well(tmp_path: Path, tool: Tool) -> None:
    """And a scancel that fails is tried again."""
    made = job(tmp_path)
    (made.state / "101-0").mkdir()
    assert isinstance(_outcome(made, "101", cancelled=True), InterruptedRunError)
    tool("squeue", f"[ -e {made.state}/101-0/ended ] || echo 101 RUNNING")
    tool("scancel", f"[ -e {tmp_path}/once ] && echo 0 > {made.state}/101-0/ended; touch {tmp_path}/once; exit 1")
    with open_session(quiet=True) as session:
        session.stop.set()
        follow_job(session, made, "101", lambda event: None)
    assert (tmp_path / "called").read_text().count("scancel 101") == 2
