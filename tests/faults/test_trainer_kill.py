"""Kills, stops and bad samples: whatever happens to a rank, the training goes on as if nothing had."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import train_data
import train_launch

from exitwave.ingest.errors import DamagedDataError, ExitwaveError, InterruptedRunError
from exitwave.train import loop
from exitwave.train.run import load_model, read_curve
from exitwave.train.spec import TrainSpec
from exitwave.train.state import latest_checkpoint
from exitwave.train.trainer import train

SPEC = {**train_launch.SPEC, "steps": 24, "checkpoint": {"every_steps": 5, "keep": 2}}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return train_data.make_dataset(tmp_path_factory.mktemp("data") / "set", train=2, val=1, test=1, per_material=12)


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    """The curve of two ranks that nothing happened to."""
    out = tmp_path_factory.mktemp("run") / "undisturbed"
    code, output = train_launch.launch(2, spec=SPEC, data=data, out=out)
    assert code == 0, output
    return _curve(out)


def _curve(run):
    curve = read_curve(run)
    assert [event["step"] for event in curve] == list(range(1, len(curve) + 1))
    return [event["loss"] for event in curve]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _resume_on_one_rank(out, data, undisturbed, *, at):
    """Goes on in this process; the curve is the undisturbed one, to the bit where two ranks trained it."""
    events: list[dict[str, object]] = []
    train(TrainSpec.model_validate(SPEC), data=data, out=out, threads=1, emit=events.append)
    assert (events[0]["kind"], events[0]["step"], events[0]["world_size"]) == ("train_resumed", at, 1)
    curve = _curve(out)
    assert curve[:at] == undisturbed[:at]
    assert np.allclose(curve, undisturbed, rtol=1e-4, atol=0)


def test_after_kill_9_of_a_rank_the_run_resumes_to_the_sample(data, undisturbed, tmp_path):
    rank, step = random.randrange(2), random.randrange(7, 23)
    out = tmp_path / "run"
    code, output = train_launch.launch(2, spec=SPEC, data=data, out=out, kill={"rank": rank, "step": step})
    assert code != 0
    assert all(not _alive(int(pid)) for pid in re.findall(r"pid \d (\d+)", output))
    before = latest_checkpoint(out / "checkpoints")
    # the other rank may be one checkpoint behind the killed one's count, never ahead of it
    assert before is not None
    assert int(before.name[5:]) in (5 * ((step - 1) // 5), 5 * ((step - 1) // 5) - 5), (
        f"rank {rank} killed at step {step}"
    )
    code, output = train_launch.launch(2, spec=SPEC, data=data, out=out)
    assert code == 0, output
    assert _curve(out) == undisturbed, f"rank {rank} killed at step {step}"
    assert len(list((out / "checkpoints").iterdir())) == 2


@pytest.mark.long
@pytest.mark.parametrize("overlap", ["backward", "step"])
def test_torchrun_restarts_the_ranks_and_they_resume(data, undisturbed, tmp_path, overlap):
    out = tmp_path / "run"
    spec = {**SPEC, "engine": {**SPEC["engine"], "overlap": overlap}}
    code, output = train_launch.launch(2, spec=spec, data=data, out=out, kill={"rank": 1, "step": 13}, max_restarts=1)
    assert code == 0, output
    assert len(re.findall(r"^pid ", output, re.MULTILINE)) == 4, output  # both ranks, twice
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [(e["kind"], e["step"]) for e in events if e["kind"] in ("train_started", "train_resumed")] == [
        ("train_started", 0),
        ("train_resumed", 10),
    ]
    assert np.allclose(_curve(out), undisturbed, rtol=1e-4, atol=0)


@pytest.mark.long
def test_resumes_on_another_number_of_ranks(data, undisturbed, tmp_path):
    out = tmp_path / "run"
    code, output = train_launch.launch(2, spec=SPEC, data=data, out=out, kill={"rank": 1, "step": 14})
    assert code != 0, output
    _resume_on_one_rank(out, data, undisturbed, at=10)


def test_stop_on_one_rank_stops_all_with_a_checkpoint_and_exit_75(data, undisturbed, tmp_path):
    out = tmp_path / "run"
    code, output = train_launch.launch(2, spec=SPEC, data=data, out=out, stop={"rank": 1, "step": 8})
    assert code != 0
    assert "InterruptedRunError" in output
    assert latest_checkpoint(out / "checkpoints").name == "step-00000007"
    _resume_on_one_rank(out, data, undisturbed, at=7)


@pytest.mark.long
def test_sigterm_to_the_launcher_leaves_a_checkpoint_and_no_process(data, undisturbed, tmp_path):
    out = tmp_path / "run"
    process = train_launch.start(2, {"spec": SPEC, "data": data, "out": out, "sigterm": True})
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and not ((out / "events.jsonl").exists() and len(read_curve(out)) >= 3):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert all(not _alive(int(pid)) for pid in re.findall(r"pid \d (\d+)", output))
    saved = latest_checkpoint(out / "checkpoints")
    assert saved is not None, output
    at = len(_curve(out))
    assert int(saved.name[5:]) == at, "the checkpoint is that of the last step"
    _resume_on_one_rank(out, data, undisturbed, at=at)


@pytest.mark.long
def test_ranks_do_not_outlive_a_killed_launcher(data, tmp_path):
    process = train_launch.start(2, {"spec": {**SPEC, "steps": 100_000}, "data": data, "out": tmp_path / "run"})
    deadline = time.monotonic() + 90
    path = tmp_path / "run" / "events.jsonl"
    while time.monotonic() < deadline and not (path.exists() and len(read_curve(tmp_path / "run")) >= 2):
        time.sleep(0.05)
    assert process.stdout is not None
    pids: list[int] = []
    while len(pids) < 2:
        line = process.stdout.readline()
        assert line, "the launcher ended before its ranks began"
        pids += [int(pid) for pid in re.findall(r"^pid \d (\d+)", line)]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(_alive(pid) for pid in pids):
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in pids)


def test_a_half_written_checkpoint_is_never_taken(data, tmp_path):
    out, spec = tmp_path / "run", TrainSpec.model_validate({**SPEC, "steps": 12})
    steps = iter(range(100))
    with pytest.raises(InterruptedRunError, match="stopped after step 7"):
        train(spec, data=data, out=out, threads=1, stop=lambda: next(steps) == 7)
    (out / "checkpoints" / ".step-00000009.part").mkdir()
    (out / "checkpoints" / ".step-00000005.old").mkdir()
    events: list[dict[str, object]] = []
    train(spec, data=data, out=out, threads=1, emit=events.append)
    assert (events[0]["kind"], events[0]["step"]) == ("train_resumed", 7)
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000010", "step-00000012"]


def test_a_damaged_checkpoint_is_named(data, tmp_path):
    out, spec = tmp_path / "run", TrainSpec.model_validate({**SPEC, "steps": 12})
    steps = iter(range(100))
    with pytest.raises(InterruptedRunError):
        train(spec, data=data, out=out, threads=1, stop=lambda: next(steps) == 7)
    (out / "checkpoints" / "step-00000007" / ".metadata").unlink()
    with pytest.raises(DamagedDataError, match=r"step-00000007: expected a whole checkpoint"):
        train(spec, data=data, out=out, threads=1)


def test_fresh_starts_again(data, tmp_path):
    out, spec = tmp_path / "run", TrainSpec.model_validate({**SPEC, "steps": 3})
    train(spec, data=data, out=out, threads=1)
    first = _curve(out)
    result = train(spec, data=data, out=out, threads=1, fresh=True)
    assert result.resumed_from == 0
    assert _curve(out) == first


def test_a_loss_that_is_not_finite_names_samples_and_layer_on_every_rank(data, tmp_path):
    spec = {**SPEC, "optimizer": {"lr": 1e30, "warmup_steps": 0, "clip": None, "schedule": "constant"}}
    codes, output = train_launch.launch_plain(2, spec=spec, data=data, out=tmp_path / "run")
    assert codes == [3, 3], output
    messages = re.findall(r"rank (\d): (\w+): step (\d+): (.*)", output)
    assert {rank for rank, *_ in messages} == {"0", "1"}, output
    for _, error, _, text in messages:
        assert error == "DamagedDataError"
        uids = re.findall(r"\b[0-9a-f]{16}\b", text)
        assert uids
        assert all(int(uid, 16) // 100_000 in (1, 2) for uid in uids)
        assert "first layer with such an output: " in text
    assert not (tmp_path / "run" / "model.pt").exists()


@pytest.mark.long
def test_a_flipped_bit_in_a_shard_stops_all_ranks_naming_the_sample(tmp_path):
    data = train_data.make_dataset(tmp_path / "set", train=2, val=0, test=0, per_material=12)
    shard = next(data.glob("shards/*/*.h5"))
    content = bytearray(shard.read_bytes())
    at = content.find(train_data.sample(int(shard.stem, 16), 3)["cbed"].tobytes())
    assert at > 0
    content[at + 1000] ^= 4
    shard.chmod(0o644)
    shard.write_bytes(bytes(content))
    codes, output = train_launch.launch_plain(2, spec=SPEC, data=data, out=tmp_path / "run")
    assert codes == [3, 3], output
    failed = re.findall(r"rank (\d): DamagedDataError: (.*)", output)
    assert {rank for rank, _ in failed} == {"0", "1"}, output
    assert all(shard.stem in text for _, text in failed)


@pytest.mark.parametrize("last", [True, pytest.param(False, marks=pytest.mark.long)])
def test_parameters_that_are_not_finite_are_never_saved(data, tmp_path, last, monkeypatch):
    """With overlap "step" and no clipping nobody looks at gradients: a checkpoint of NaN could never be resumed."""
    spec = {**SPEC, "steps": 5 if last else 8, "engine": {**SPEC["engine"], "overlap": "step"}}
    step = loop.take_step

    def poisoned(training, batch, decide):
        outcome = step(training, batch, decide)
        if training.step == 4:  # the fifth, after which a checkpoint is due
            with torch.no_grad():
                next(training.module.parameters()).fill_(float("nan"))
        return outcome

    monkeypatch.setattr(loop, "take_step", poisoned)
    with pytest.raises(ExitwaveError, match=r"step 5: .* not finite; nothing was saved"):
        train(TrainSpec.model_validate(spec), data=data, out=tmp_path / "run", threads=1)
    assert latest_checkpoint(tmp_path / "run" / "checkpoints") is None
    assert not (tmp_path / "run" / "model.pt").exists()


def test_model_is_safe_to_load(data, tmp_path):
    out = tmp_path / "run"
    train(TrainSpec.model_validate({**SPEC, "steps": 2}), data=data, out=out, threads=1)
    model = load_model(out)  # torch.load(weights_only=True) inside
    assert model.step == 2
    assert model.spec == TrainSpec.model_validate({**SPEC, "steps": 2})
    assert model.mean_image_V.shape == (32, 32)
    (out / "model.pt").write_bytes(b"no model")
    with pytest.raises(DamagedDataError, match=r"model\.pt: expected a trained model"):
        load_model(out)
