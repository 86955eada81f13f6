"""`deterministic: any-ranks`: the same training to the bit on 1, 2 and 3 ranks, in float32, at a full learning rate."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time

import pytest
import torch
import train_data
import train_launch

from exitwave.train.run import load_model, read_curve
from exitwave.train.spec import TrainSpec
from exitwave.train.trainer import train

# the learning rate at which plain float32 curves of 1 and 2 ranks part within 50 steps
SPEC = {
    **train_launch.SPEC,
    "deterministic": "any-ranks",
    "optimizer": {"lr": 2e-3, "warmup_steps": 5},
    "checkpoint": {"every_steps": 10, "keep": 2},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return train_data.make_dataset(tmp_path_factory.mktemp("data") / "set", train=3, val=1, test=1, per_material=12)


@pytest.fixture(scope="module")
def one_rank(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "one"
    train(TrainSpec.model_validate(SPEC), data=data, out=out, threads=2)  # any-ranks takes one thread by itself
    losses = _losses(out)
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    return out


def _losses(run):
    curve = read_curve(run)
    assert [event["step"] for event in curve] == list(range(1, 51))
    return [event["loss"] for event in curve]


def _same(run, other):
    assert _losses(run) == _losses(other)
    a, b = load_model(run).module.state_dict(), load_model(other).module.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.long
def test_three_ranks_are_one_rank_to_the_bit(data, one_rank, tmp_path):
    code, output = train_launch.launch(3, spec=SPEC, data=data, out=tmp_path / "run")
    assert code == 0, output
    _same(tmp_path / "run", one_rank)


def test_killed_and_resumed_on_other_numbers_of_ranks_is_the_same_to_the_bit(data, one_rank, tmp_path):
    out, rank, step = tmp_path / "run", random.randrange(2), random.randrange(12, 45)
    code, output = train_launch.launch(2, spec=SPEC, data=data, out=out, kill={"rank": rank, "step": step})
    assert code != 0, output
    train(TrainSpec.model_validate(SPEC), data=data, out=out)
    _same(out, one_rank)


@pytest.mark.long
def test_killed_at_any_time_and_resumed_on_any_number_of_ranks_it_is_the_same_to_the_bit(data, tmp_path):
    """Ten times, any rank, wherever it is: before the first step, in a collective, in the middle of a checkpoint."""
    out, draw = tmp_path / "run", random.Random()
    spec = {**SPEC, "steps": 20, "checkpoint": {"every_steps": 2, "keep": 2}}
    train(TrainSpec.model_validate(spec), data=data, out=tmp_path / "undisturbed")
    story = []
    for _ in range(10):
        ranks = draw.choice([1, 2, 3])
        process = train_launch.start(ranks, {"spec": spec, "data": data, "out": out})
        pids: dict[int, int] = {}
        assert process.stdout is not None
        while len(pids) < ranks and (line := process.stdout.readline()):
            if found := re.match(r"pid (\d) (\d+)", line):
                pids[int(found[1])] = int(found[2])
        time.sleep(draw.uniform(0.0, 12.0))
        rank = draw.randrange(ranks)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[rank], signal.SIGKILL)
        process.communicate(timeout=120)
        story.append(f"rank {rank} of {ranks}, after {len(read_curve(out)) if out.exists() else 0} steps")
        if (out / "model.pt").exists():
            break
    code, output = train_launch.launch(2, spec=spec, data=data, out=out)
    assert code == 0, (story, output)
    print("; ".join(story))
    curve, undisturbed = read_curve(out), read_curve(tmp_path / "undisturbed")
    assert [event["loss"] for event in curve] == [event["loss"] for event in undisturbed], story
    assert len(curve) == 20


def test_it_is_the_plain_training_but_for_rounding(data, one_rank, tmp_path):
    plain = {**SPEC, "deterministic": True, "steps": 5}
    train(TrainSpec.model_validate(plain), data=data, out=tmp_path / "plain", threads=1)
    curve = [event["loss"] for event in read_curve(tmp_path / "plain")]
    schedule_of_50 = _losses(one_rank)[:1]  # the learning rates differ from the second step on
    assert curve[:1] == pytest.approx(schedule_of_50, rel=1e-6)
