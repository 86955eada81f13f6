"""What goes wrong around a training while data arrives: logs that are none, other settings, full and closed disks."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import train_launch
from online_data import begin, commit

from exitwave.ingest.arrivals import ARRIVALS_NAME, ArrivalLog, ReservoirSettings, steps_allowed
from exitwave.ingest.errors import DamagedDataError, UsageError
from exitwave.ingest.growing import BACKPRESSURE_NAME, GrowingDataset, ReservoirSampler, held_back
from exitwave.train.online import Online, read_online, refuse_replay
from exitwave.train.spec import TrainSpec
from exitwave.train.trainer import train
from exitwave.workflows.online import OnlineRun, find_replay
from exitwave.workflows.online_spec import OnlineSection
from exitwave.workflows.pipeline_folder import refuse_the_other_way
from exitwave.workflows.session import open_session

SETTINGS = ReservoirSettings(planned=32, watermark=4, capacity=8, max_reuse=3.0)
SPEC = TrainSpec.model_validate({**train_launch.SPEC, "batch": 4, "steps": 3})
BY_TIME = {"steps": None, "epochs": None, "max_seconds": 1e-6, "deterministic": False}


def test_any_max_reuse_is_a_number_of_steps() -> None:
    endless = ReservoirSettings(planned=32, watermark=4, capacity=8, max_reuse=1e308)
    assert steps_allowed(endless, batch=1, arrived=31, ended=False) == 2**53


def test_a_replay_of_what_is_no_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no log of arrivals"):
        read_online(None, find_replay(tmp_path))  # a folder that is there, and holds none
    log = ArrivalLog(tmp_path / "bare", {})
    log.append(0, 3)
    log.finish(2)
    with pytest.raises(DamagedDataError, match="settings of a reservoir"):
        read_online(None, tmp_path / "bare")
    ArrivalLog(tmp_path / "empty", SETTINGS.to_json()).finish(2)
    with pytest.raises(DamagedDataError, match="no sample that was there"):
        read_online(None, tmp_path / "empty")


def test_a_replay_that_would_be_another_training_or_delete_its_own_log_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "train" / ARRIVALS_NAME
    refuse_replay(SPEC, log, tmp_path / "again")
    with pytest.raises(UsageError, match="max_seconds"):
        refuse_replay(TrainSpec.model_validate({**train_launch.SPEC, **BY_TIME}), log, tmp_path / "again")
    with pytest.raises(UsageError, match="another --out"):
        refuse_replay(SPEC, log, tmp_path / "again" / ".." / "train")


def test_another_section_online_is_refused_before_the_campaign_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "train"
    refuse_the_other_way(run, SPEC, SETTINGS)
    run.mkdir()
    (run / "train.json").write_text(json.dumps({"spec": SPEC.canonical(), "online": SETTINGS.to_json()}))
    refuse_the_other_way(run, SPEC, SETTINGS)
    other = ReservoirSettings(**{**SETTINGS.to_json(), "capacity": 16})
    with pytest.raises(UsageError, match="capacity: was 8, now 16"):
        refuse_the_other_way(run, SPEC, other)
    with pytest.raises(UsageError, match="began with --online"):
        refuse_the_other_way(run, SPEC, None)
    (run / "model.pt").touch()
    refuse_the_other_way(run, SPEC, other)  # it is trained: nothing follows from the section any more
    (run / "train.json").write_text("[1]")
    refuse_the_other_way(run, SPEC, other)


def test_time_that_is_over_before_the_first_step_ends_the_training_as_ever(tmp_path: Path) -> None:
    root = begin(tmp_path / "data")
    commit(root, [0])
    spec = TrainSpec.model_validate({**train_launch.SPEC, "batch": 4, **BY_TIME})
    assert train(spec, data=root, out=tmp_path / "run", threads=1, online=Online(settings=SETTINGS)).step == 0


@pytest.mark.long
def test_a_replay_leaves_a_log_that_is_checked_like_the_first(tmp_path: Path) -> None:
    root = begin(tmp_path / "data")
    commit(root, range(8))
    train(SPEC, data=root, out=tmp_path / "run", threads=1, online=Online(settings=SETTINGS))
    again = read_online(None, tmp_path / "run" / ARRIVALS_NAME)
    train(SPEC, data=root, out=tmp_path / "again", threads=1, online=again)
    first, second = (
        [json.loads(line) for line in (tmp_path / name / ARRIVALS_NAME).read_text().splitlines()]
        for name in ("run", "again")
    )
    assert [{**e, "t": 0} for e in first] == [{**e, "t": 0} for e in second]


def test_a_data_set_that_may_not_be_written_to_is_trained_on(tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(root)]).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        begin(root)
        commit(root, [0, 1])
        subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
        sampler = ReservoirSampler(
            GrowingDataset(root), rank=0, world_size=1, global_batch=4, seed=1, capacity=4, watermark=4, steps=4
        )
        assert len(list(sampler)) == 4  # four samples wait for a place at first, and nobody can be told
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


@pytest.mark.parametrize("text", ['{"hold":true,"why":"","time":1' + "0" * 400 + "}", "[" * 100_000, "[]", "\x00"])
def test_a_word_to_the_campaign_that_is_none_holds_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / BACKPRESSURE_NAME).write_text(text)
    assert held_back(tmp_path) is None


def test_a_training_that_cannot_even_start_lets_the_campaign_end(tmp_path: Path) -> None:
    root = begin(tmp_path / "data")
    commit(root, [0])
    folder = tmp_path / "run"
    (folder / "train.log").mkdir(parents=True)
    with open_session(quiet=True) as session:
        both = OnlineRun(
            session=session, planned=cast(Any, SimpleNamespace()), spec=SPEC, section=OnlineSection(), dataset=root,
            folder=folder, feed=lambda event: None, live=cast(Any, SimpleNamespace()),
            part=lambda name: contextlib.nullcontext(),
        )  # fmt: skip
        (folder / "online.json").write_text(json.dumps(SETTINGS.to_json()))
        began = time.monotonic()
        assert isinstance(both._training(1), IsADirectoryError)
        assert not session.stop.is_set()
        assert time.monotonic() - began < 5
