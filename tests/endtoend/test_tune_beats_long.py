"""Is a search worth its time? The best of a few trials, some given up, against one random trial of the same length.

Both are judged on the test split, which neither has seen: on the validation split the best of several is better than
one of them by the very choice.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from line import events, exitwave, write_pipeline
from train_data import make_dataset

TUNE = """\
tune:
  trials: 8
  space:
    train.optimizer.lr: {log_uniform: [1.0e-5, 1.0e-1]}
    train.optimizer.name: {choice: [adamw, sgd]}
    train.model.growth: {int_uniform: [3, 8]}
  sampler: {startup: 4}
  pruner: {startup: 3, warmup: 1}
  budget: {steps: 100, validations: 5}
"""
SEEDS = 5


def best_on_test(pipeline: Path, data: Path, study: Path, *changes: str) -> tuple[float, int]:
    """RMSE (V·Å) of the best trial on the test split, and how many trials were given up."""
    sets = [word for change in changes for word in ("--set", change)]
    run = exitwave("tune", pipeline, "--data", data, "--out", study, "--workers", 2, "--json", *sets, timeout=1200)
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert {e["ranks"] for e in events(study / "events.jsonl") if e["kind"] == "trial_begun"} <= {1, 2}
    measured = exitwave("evaluate", told["best"]["run"], "--data", data, "--split", "test", "--json")
    return float(json.loads(measured.stdout)["metrics"]["model"]["rmse_VA"]), int(told["trials"]["pruned"])


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_the_best_of_eight_beats_a_random_one(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "data", train=8, val=2, test=2, per_material=8)
    pipeline = write_pipeline(
        tmp_path, ("train:\n", f"{TUNE}train:\n"), ("tiny}", "tiny, layers: [1, 1, 1]}"), ("batch: 4", "batch: 8")
    )
    searched, random, given_up = [], [], 0
    for seed in range(SEEDS):
        value, pruned = best_on_test(pipeline, data, tmp_path / f"s{seed}", f"tune.sampler.seed={seed}")
        searched.append(value)
        given_up += pruned
        alone = ("tune.trials=1", f"tune.sampler.seed={seed + 100}", "tune.sampler.name=random")
        random.append(best_on_test(pipeline, data, tmp_path / f"r{seed}", *alone)[0])
    shown = [f"{a:.3g} / {b:.3g}" for a, b in zip(searched, random, strict=True)]
    print(f"test RMSE V·Å, searched / random: {', '.join(shown)}; {given_up} of {SEEDS * 8} given up")
    print(f"medians: {statistics.median(searched):.4g} against {statistics.median(random):.4g}")
    assert statistics.median(searched) < statistics.median(random)
    assert given_up > 0


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_one_after_the_other_the_same_seed_gives_the_same_trials(tmp_path: Path) -> None:
    """Values, validation losses, what is given up and when: all that is told of a trial but its seconds."""
    data = make_dataset(tmp_path / "data", train=2, val=1, test=1, per_material=4)
    pipeline = write_pipeline(tmp_path, ("train:\n", f"{TUNE}train:\n"), ("tiny}", "tiny, layers: [1, 1, 1]}"))
    less = ("--set", "tune.budget.steps=20", "--set", "tune.sampler.startup=2", "--set", "tune.trials=7")
    told = []
    for name, cluster in (("a", ("--cluster", "inline")), ("b", ("--workers", 1))):
        run = exitwave("tune", pipeline, "--data", data, "--out", tmp_path / name, *cluster, *less, timeout=600)
        assert run.returncode == 0, run.stderr
        log = events(tmp_path / name / "events.jsonl")
        kinds = ("trial_asked", "trial_reported", "trial_pruned", "trial_finished")
        trials: list[list[object]] = []
        for e in log:
            if e["kind"] in kinds:
                trials.append([e["kind"], e["n"], e.get("values"), e.get("rung"), e.get("value")])
        told.append(trials)
    assert told[0] == told[1]
    assert any(line[0] == "trial_pruned" for line in told[0])
