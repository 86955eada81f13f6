"""The folder of `exitwave run`: what may change between attempts, and what --fresh does not remove."""

from __future__ import annotations

from pathlib import Path

import pytest
from line import write_pipeline

from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import FileLock
from exitwave.simulate.lease import Lease
from exitwave.workflows.pipeline import read_pipeline
from exitwave.workflows.pipeline_folder import claim


def made(tmp_path: Path) -> tuple[Path, Path]:
    """The pipeline's file, and its folder with a data set that has one file."""
    path, out = write_pipeline(tmp_path), tmp_path / "run"
    (out / "dataset").mkdir(parents=True)
    (out / "dataset" / "one").write_text("kept")
    claim(out, read_pipeline(path)[1], fresh=False)
    return path, out


def test_fresh_removes_nothing_under_a_running_campaign(tmp_path: Path) -> None:
    path, out = made(tmp_path)
    spec = read_pipeline(path)[1]
    with Lease(out / "dataset"), pytest.raises(UsageError, match=r"another controller is running .* pid \d+"):
        claim(out, spec, fresh=True)
    assert (out / "dataset" / "one").exists() and (out / "pipeline.yaml").exists()
    assert claim(out, spec, fresh=True) is False
    assert not (out / "dataset").exists()


@pytest.mark.parametrize("part", ["train", "rounds/round-0000"])
def test_fresh_removes_nothing_under_a_training(tmp_path: Path, part: str) -> None:
    path, out = made(tmp_path)
    (out / part).mkdir(parents=True)
    with FileLock(out / part / ".lock"), pytest.raises(UsageError, match="is training there"):
        claim(out, read_pipeline(path)[1], fresh=True)
    assert (out / "dataset" / "one").exists() and (out / "pipeline.yaml").exists()


@pytest.mark.parametrize("part", ["train/train.json", "train/.slurm/job.json", "rounds/round-0000/train.json"])
def test_a_training_may_be_another_one_while_none_has_begun(tmp_path: Path, part: str) -> None:
    path, out = made(tmp_path)
    (out / part).parent.mkdir(parents=True)
    (out / part).write_text("{}")
    lower = read_pipeline(path, ["train.optimizer.lr=1e-5"])[1]
    with pytest.raises(UsageError, match=r"(?s)train.optimizer.lr: was .* Or remove \S+/train"):
        claim(out, lower, fresh=False)
    other = read_pipeline(path, ["train.optimizer.lr=1e-5", "campaign.seed=6"])[1]
    with pytest.raises(UsageError) as caught:
        claim(out, other, fresh=False)
    assert "Or remove" not in str(caught.value)
    (out / part).unlink()
    assert claim(out, lower, fresh=False) is True
    with pytest.raises(UsageError, match=r"campaign.seed"):
        claim(out, other, fresh=False)
