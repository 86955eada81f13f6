"""The trainer on a data set that grows: the same again afterwards, on any number of ranks, after any stop."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import train_launch
from line import events, wait_until
from online_data import begin, commit, growing

from exitwave.ingest.arrivals import ARRIVALS_NAME, ReservoirSettings, read_log, steps_allowed
from exitwave.ingest.errors import DamagedDataError, InterruptedRunError, UsageError
from exitwave.train.online import ALL_ARRIVED_NAME, Online, read_online
from exitwave.train.run import load_model, read_curve
from exitwave.train.spec import TrainSpec
from exitwave.train.trainer import train

SETTINGS = ReservoirSettings(planned=32, watermark=8, capacity=32, max_reuse=3.0)
SPEC: dict[str, Any] = {
    **train_launch.SPEC,
    "batch": 4,
    "steps": 24,
    "checkpoint": {"every_steps": 7, "keep": 2},
}


def run(root: Path, out: Path, *, settings: ReservoirSettings = SETTINGS, replay: Path | None = None, **more: Any):
    online = Online(settings=settings) if replay is None else read_online(None, replay)
    spec = TrainSpec.model_validate({**SPEC, **more.pop("spec", {})})
    return train(spec, data=root, out=out, threads=1, online=online, **more)


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_model(out).module.state_dict()


def same(a: Path, b: Path) -> bool:
    left, right = weights(a), weights(b)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A training while 8 shards arrive: (data set, run)."""
    base = tmp_path_factory.mktemp("online")
    root = begin(base / "data")
    commit(root, [100], split="val")
    producer = growing(lambda: commit(root, range(8), pause_s=0.15))
    try:
        run(root, base / "run")
    finally:
        producer.join()
    return root, base / "run"


def test_it_trained_while_data_arrived_and_never_ran_ahead(done):
    root, out = done
    log = read_log(out / ARRIVALS_NAME)
    assert log["finished"] == 24
    assert len(log["entries"]) >= 3, log
    assert log["arrived"][0]["samples"] >= 8
    assert log["arrived"][0]["samples"] < 32
    assert log["arrived"][-1]["samples"] == 32, "what comes last is seen, too"
    for one, after in zip(log["arrived"], [*log["arrived"][1:], {"step": 24}], strict=True):
        allowed = steps_allowed(SETTINGS, batch=4, arrived=one["samples"], ended=False)
        assert allowed is None or after["step"] <= allowed
    known = [event["known_samples"] for event in read_curve(out)]
    assert known == sorted(known)
    assert known[-1] == 32
    assert not (root / "backpressure.json").exists()


def test_done_again_it_has_the_same_weights(done, tmp_path):
    root, out = done
    run(root, tmp_path / "again", replay=out / ARRIVALS_NAME)
    assert same(out, tmp_path / "again")
    assert [e["loss"] for e in read_curve(out)] == [e["loss"] for e in read_curve(tmp_path / "again")]
    steps = iter(range(1000))
    with pytest.raises(InterruptedRunError):
        run(root, tmp_path / "halves", replay=out / ARRIVALS_NAME, stop=lambda: next(steps) > 10)
    run(root, tmp_path / "halves", replay=out / ARRIVALS_NAME)
    assert same(out, tmp_path / "halves"), "interrupted, and gone on with"
    offline = TrainSpec.model_validate(SPEC)
    with pytest.raises(UsageError, match="belongs to another training"):
        train(offline, data=root, out=out, threads=1)
    with pytest.raises(UsageError, match="seed 11 then, 12 now"):
        run(root, tmp_path / "other", replay=out / ARRIVALS_NAME, spec={"seed": 12})


@pytest.mark.long
def test_two_ranks_one_of_them_killed_know_the_same_and_one_does_it_again(tmp_path):
    root = begin(tmp_path / "data")
    commit(root, range(2))
    out, settings = tmp_path / "run", tmp_path / "online.json"
    settings.write_text(json.dumps(SETTINGS.to_json()))
    job: dict[str, Any] = {"spec": SPEC, "data": root, "out": out, "online": str(settings)}

    def produce() -> None:
        wait_until(lambda: bool(events(out / ARRIVALS_NAME)[1:]))  # the first step knows what was there
        commit(root, range(2, 8), pause_s=0.5)

    producer = growing(produce)
    code, output = train_launch.launch(2, **job, kill={"rank": 1, "step": 16})
    assert code != 0, output
    assert len(read_log(out / ARRIVALS_NAME)["entries"]) > 1
    producer.join()
    code, output = train_launch.launch(2, **job)
    assert code == 0, output
    run(root, tmp_path / "again", replay=out / ARRIVALS_NAME)
    two, one = ([e["loss"] for e in read_curve(path)] for path in (out, tmp_path / "again"))
    assert len(two) == 24
    assert np.allclose(one, two, rtol=1e-4, atol=0)


def test_what_a_log_says_is_checked(done, tmp_path):
    root, out = done
    path = tmp_path / ARRIVALS_NAME
    lines = (out / ARRIVALS_NAME).read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    with pytest.raises(UsageError, match="has not finished"):
        read_online(None, path)
    path.write_text("".join([lines[0], lines[2], lines[1], *lines[3:]]))
    with pytest.raises(DamagedDataError, match="do not rise"):
        read_online(None, path)
    with pytest.raises(UsageError, match="no log of arrivals"):
        read_online(None, tmp_path / "absent")
    entry = json.loads(lines[-2])
    path.write_text("".join([*lines[:-2], json.dumps({**entry, "shards_digest": "0"}) + "\n", lines[-1]]))
    with pytest.raises(UsageError, match="taken out or replaced"):
        run(root, tmp_path / "run", replay=path)


def test_the_end_of_a_campaign_ends_the_wait(tmp_path):
    root = begin(tmp_path / "data")
    commit(root, [0])
    out = tmp_path / "run"
    out.mkdir()
    calls = iter(range(1000))
    with pytest.raises(InterruptedRunError, match="before the first step"):
        run(root, out, stop=lambda: next(calls) > 2)
    (out / ALL_ARRIVED_NAME).touch()
    assert run(root, out).step == 24, "four samples of 32, and no more will come: they must do"


@pytest.mark.long
def test_a_stop_while_waiting_for_more_leaves_a_checkpoint(done, tmp_path):
    root = begin(tmp_path / "data")
    commit(root, range(3))
    out = tmp_path / "run"
    told: list[dict[str, Any]] = []
    waited = iter(range(100_000))

    def stop() -> bool:
        return bool(told) and told[-1].get("step") == 9 and next(waited) > 3

    with pytest.raises(InterruptedRunError, match="stopped after step 9"):
        run(root, out, emit=told.append, stop=stop)
    producer = growing(lambda: commit(root, range(3, 8), pause_s=0.05))
    run(root, out)
    producer.join()
    run(root, tmp_path / "again", replay=out / ARRIVALS_NAME)
    assert same(out, tmp_path / "again")


def test_a_small_reservoir_holds_producers_back_and_lets_them_go(tmp_path):
    root = begin(tmp_path / "data")
    settings = ReservoirSettings(planned=32, watermark=4, capacity=8, max_reuse=1.25)
    producer = growing(lambda: commit(root, range(8)))
    run(root, tmp_path / "run", settings=settings, spec={"steps": 10})
    producer.join(20)
    assert not producer.is_alive(), "nobody is held back by a training that has ended"
    run(root, tmp_path / "again", replay=tmp_path / "run" / ARRIVALS_NAME, spec={"steps": 10})
    assert same(tmp_path / "run", tmp_path / "again")


def test_what_cannot_begin_early_is_refused(tmp_path):
    root = begin(tmp_path / "data")
    commit(root, [0])
    for spec, why in (({"task": "classify"}, "measures its whole"), ({"data": {"workers": 1}}, "workers: 0")):
        with pytest.raises(UsageError, match=why):
            run(root, tmp_path / "run", spec=spec)
    with pytest.raises(UsageError, match="expected 1 <= watermark"):
        ReservoirSettings(planned=4, watermark=5, capacity=4, max_reuse=1)
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
