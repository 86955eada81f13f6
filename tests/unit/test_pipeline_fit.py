"""A pipeline whose campaign lacks what comes after it is refused before anything is simulated."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from line import write_pipeline
from online_data import begin, commit

from exitwave.ingest.errors import UsageError
from exitwave.simulate.plan import Plan, make_plan
from exitwave.workflows.pipeline import read_pipeline, run_pipeline
from exitwave.workflows.pipeline_fit import misfit
from exitwave.workflows.pipeline_line import _committed, _measured
from exitwave.workflows.session import open_session


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("plan")
    return make_plan(read_pipeline(write_pipeline(folder))[1].campaign, base_dir=folder)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], None),
        (["train.batch=12"], None),
        (["train.batch=13"], "train.batch: expected at most the 12 samples of split 'train', came 13"),
        (["train.eval_every_steps=12"], None),
        (["train.eval_every_steps=12", "train.val_split=dev"], "nothing to validate on"),
        (["train.eval_every_steps=13", "train.val_split=dev"], None),
        (
            ["evaluate.split=[test,new_prototype]"],
            "evaluate.split: nothing to measure the network on in split 'new_pro",
        ),
    ],
)
def test_what_a_campaign_lacks_is_named(plan: Plan, tmp_path: Path, overrides: list[str], words: str | None) -> None:
    found: Any = misfit(read_pipeline(write_pipeline(tmp_path), overrides)[1], plan)
    assert found is None if words is None else words in found


def test_it_is_said_before_anything_is_made(tmp_path: Path) -> None:
    without_test = (", split: test}", ", split: val}")
    path = write_pipeline(tmp_path, without_test)
    with open_session(quiet=True) as session, pytest.raises(UsageError, match=r"pipeline\.yaml: evaluate\.split"):
        run_pipeline(
            session, path, tmp_path / "run", cluster="inline", workers=None, ranks=None, fresh=False, overrides=()
        )
    assert not (tmp_path / "run").exists()


def test_more_ranks_than_samples_in_a_batch_are_refused_before_the_campaign(tmp_path: Path) -> None:
    with open_session(quiet=True) as session, pytest.raises(UsageError, match="at most as many ranks"):
        run_pipeline(
            session, write_pipeline(tmp_path), tmp_path / "run", cluster="inline", workers=None, ranks=5, fresh=False,
            overrides=(), online=True,
        )  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_a_shard_whose_file_is_gone_is_to_be_made_again(tmp_path: Path) -> None:
    root = begin(tmp_path / "data")
    commit(root, [0, 1, 2])
    wanted = {f"{material:016x}" for material in range(4)}
    assert _committed(root, wanted) == 3
    next((root / "shards").rglob("*1.h5")).unlink()
    next((root / "shards").rglob("*2.h5")).write_bytes(b"torn")
    assert _committed(root, wanted) == 1


def test_metrics_that_a_kill_or_another_split_left_apart_are_measured_again(tmp_path: Path) -> None:
    test, both = tmp_path / "metrics-test.json", tmp_path / "metrics.json"
    assert _measured(tmp_path, "test", leads=True) is None
    (tmp_path / "model.pt").touch()
    test.write_text('{"split": "test"}')
    assert _measured(tmp_path, "test", leads=False) == {"split": "test"}
    assert _measured(tmp_path, "test", leads=True) is None, "killed between the two files"
    both.write_text('{"split": "val"}')
    assert _measured(tmp_path, "test", leads=True) is None, "`exitwave evaluate --split val` since"
    both.write_text(test.read_text())
    assert _measured(tmp_path, "test", leads=True) == {"split": "test"}
    for text in ("", "[1]"):
        test.write_text(text)
        assert _measured(tmp_path, "test", leads=False) is None
    test.write_text("{}")
    os.utime(test, (0, 0))
    assert _measured(tmp_path, "test", leads=False) is None, "of a model before"
