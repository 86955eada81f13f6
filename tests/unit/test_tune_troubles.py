"""What goes wrong around a search: the data grows or is gone, every trial fails, nothing fits, clocks, old folders."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
from train_data import make_dataset

from exitwave.ingest.errors import DamagedDataError, InterruptedRunError, UsageError
from exitwave.ingest.events import EventLog, read_events
from exitwave.ingest.manifest import load_manifest
from exitwave.simulate.cluster_outcome import Outcome
from exitwave.simulate.lease import Lease
from exitwave.train.spec import TrainSpec
from exitwave.workflows.config import load_document
from exitwave.workflows.resolved import dump_yaml
from exitwave.workflows.tune import _claim, _refuse_growing, _refuse_other_data, _resolved, read_study
from exitwave.workflows.tune_loop import StudyLoop
from exitwave.workflows.tune_record import fold
from exitwave.workflows.tune_spec import TuneSpec

TUNE = {"trials": 12, "space": {"train.batch": {"int_uniform": [1, 64]}}, "budget": {"steps": 10}}
PIPELINE = "name: x\ntrain: {steps: 10, eval_every_steps: 5}\n"
SECTION = "tune: {trials: 3, space: {train.batch: {int_uniform: [1, 4]}}, budget: {steps: 10}}\n"


class Answering:
    """A cluster whose tasks end as `answer` says of their number, and train nothing."""

    name, n_workers, queued, dashboard_link = "answering", 2, False, None

    def __init__(self, answer: Callable[[int], dict[str, Any]]) -> None:
        self.answer, self.waiting = answer, list[str]()

    @property
    def running(self) -> Mapping[str, float]:
        return {}

    def start(self, simulator: str) -> None: ...

    def submit(self, key: str, function: Callable[..., Any], *args: Any) -> None:
        self.waiting.append(key)

    def wait(self, timeout_s: float) -> list[Outcome]:
        keys, self.waiting = self.waiting, []
        return [
            Outcome(key=key, kind="ok", result={"host": "h", "seconds": 1.0, **self.answer(int(key))}) for key in keys
        ]

    def cancel(self, keys: Collection[str] | None = None, *, begun: bool = False) -> list[str]:
        gone, self.waiting = self.waiting, []
        return gone

    def publish(self, snapshot: Mapping[str, Any]) -> None: ...

    def close(self, *, page: bool = False) -> None: ...


def loop(
    folder: Path, answer: Callable[[int], dict[str, Any]], tune: Mapping[str, Any] = TUNE, **more: Any
) -> StudyLoop:
    log = EventLog(folder / "events.jsonl")
    log.emit("study_started", trials=tune["trials"], dataset_id="d")
    options: dict[str, Any] = {"stop": threading.Event(), "feed": lambda event: None, **more}
    return StudyLoop(
        folder, TuneSpec.model_validate(tune), TrainSpec(steps=10), folder, Answering(answer), log,
        one_machine=True, **options,
    )  # fmt: skip


def finished(number: int) -> dict[str, Any]:
    return {"ended": "finished", "value": 1.0, "step": 10}


def failed(state: str) -> Callable[[int], dict[str, Any]]:
    return lambda number: {"ended": "failed", "state": state, "why": "Input/output error"}


def test_a_machine_that_fails_every_trial_does_not_wear_out_the_search(tmp_path: Path) -> None:
    with pytest.raises(DamagedDataError, match=r"5 trials failed one after the other.*Input/output error.*goes on"):
        loop(tmp_path, failed("error")).execute()
    assert len(fold(read_events(tmp_path / "events.jsonl")).trials) <= 6
    study = loop(tmp_path, finished).execute()  # mended: the others are what they are
    assert sorted({t.state for t in study.trials}) == ["failed", "finished"]
    assert len(study.trials) == 12 and sum(t.state == "failed" for t in study.trials) == 5


def test_values_that_fail_are_answers(tmp_path: Path) -> None:
    study = loop(tmp_path, failed("diverged")).execute()
    assert [t.failure for t in study.trials] == ["diverged"] * 12


def test_trials_do_not_fail_by_data_that_is_gone(tmp_path: Path) -> None:
    """They go on when it is back, under their numbers, with their values."""

    def gone() -> None:
        if began["gone"]:
            raise UsageError("d: no such folder.")

    def answer(number: int) -> dict[str, Any]:
        began["gone"] = number >= 2
        return finished(number) if number < 2 else failed("configuration")(number)

    began = {"gone": False}
    with pytest.raises(UsageError, match="no such folder"):
        loop(tmp_path, answer, same_data=gone).execute()
    before = fold(read_events(tmp_path / "events.jsonl")).trials
    assert [t.state for t in before] == ["finished", "finished", "running", "running"]
    study = loop(tmp_path, finished).execute()
    assert [t.state for t in study.trials] == ["finished"] * 12
    assert [t.values for t in study.trials[:4]] == [t.values for t in before]


def test_ctrl_c_is_heard_where_no_combination_fits(tmp_path: Path) -> None:
    """Trials that cannot be trained fail at once, one after the other, in one go."""
    stop = threading.Event()
    space = {
        "train.optimizer.larc.trust": {"uniform": [0.01, 0.1]},
        "train.optimizer.name": {"choice": ["adamw", "lamb"]},
    }
    tune = {**TUNE, "trials": 100_000, "space": space, "sampler": {"name": "random"}}
    with pytest.raises(InterruptedRunError, match="stopped"):
        loop(tmp_path, finished, tune, stop=stop, feed=lambda event: stop.set()).execute()
    assert len(fold(read_events(tmp_path / "events.jsonl")).trials) == 1


def test_all_trials_share_the_same_data(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "data", train=1, val=1, test=0, per_material=2)
    manifest = load_manifest(data)
    named, n = manifest.header.dataset_id, manifest.n_samples
    _refuse_other_data(tmp_path, data, named, n)
    with pytest.raises(UsageError, match="another data set"):
        _refuse_other_data(tmp_path, data, "another", n)
    with pytest.raises(UsageError, match=f"its {n - 2} samples; now it has {n}"):
        _refuse_other_data(tmp_path, data, named, n - 2)
    _refuse_growing(data)
    with Lease(data), pytest.raises(UsageError, match="its campaign is running"):
        _refuse_growing(data)
    (data / manifest.shards[0].path).unlink()
    with pytest.raises(DamagedDataError, match="1 of 2 shards are gone"):
        _refuse_other_data(tmp_path, data, named, n)


def test_a_trial_that_was_given_up_is_told_so_after_a_kill(tmp_path: Path) -> None:
    """Its line was written, and its file `stop` was not: on another machine it trains on for nothing."""
    log = EventLog(tmp_path / "events.jsonl")
    log.emit("trial_asked", n=0, values={"train.batch": 1})
    log.emit("trial_pruned", n=0, rung=1, value=2.0, why="worse")
    (tmp_path / "trials" / "0").mkdir(parents=True)
    loop(tmp_path, finished).execute()
    assert (tmp_path / "trials" / "0" / "stop").read_text() == "pruned\n"


def test_a_clock_that_is_set_back_gives_no_time(tmp_path: Path) -> None:
    started = {"kind": "study_started", "trials": 3, "dataset_id": "d", "samples": 7}
    lines = [{**started, "t": 1000.0}, {"kind": "trial_asked", "n": 0, "values": {}, "t": 10.0}]
    assert (fold(lines).seconds, fold(lines).samples) == (0.0, 7)
    assert fold([*lines, {**started, "t": 20.0}, {"kind": "trial_begun", "n": 0, "t": 25.0}]).seconds == 5.0


def test_a_search_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    """Its file lacks a key, and has one that is gone; the file is a pipeline itself, also with --data."""
    (tmp_path / "p.yaml").write_text(PIPELINE + SECTION)
    _, sections = read_study(tmp_path / "p.yaml", needs_campaign=False)
    assert sections.train is not None
    old = _resolved(sections, tmp_path / "d") | {"data": "/somewhere"}
    for name in set(old["train"]) - sections.train.model_fields_set:
        del old["train"][name]
    (tmp_path / "tune.yaml").write_text(dump_yaml(old))
    odd = Path('/tmp/a\nname: "y"')
    _claim(tmp_path, sections, odd)
    _, again = read_study(tmp_path / "tune.yaml", needs_campaign=False)
    assert _resolved(again, odd) == _resolved(sections, odd)
    assert json.dumps(str(odd)) in (tmp_path / "tune.yaml").read_text()
    for damaged in ("name: x\n", "tune: null\n", "tune: {}\n"):
        (tmp_path / "tune.yaml").write_text(damaged)
        with pytest.raises(UsageError, match=r"tune\.yaml: damaged"):
            _claim(tmp_path, sections, odd)
    assert load_document(tmp_path / "p.yaml").data["name"] == "x"
