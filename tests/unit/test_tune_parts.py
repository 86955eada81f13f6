"""The search space and its faults, the record of a search, what Optuna is asked, and the loop's small decisions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from exitwave.ingest.errors import DamagedDataError, ExitwaveError, UsageError
from exitwave.train.spec import TrainSpec
from exitwave.workflows.config import load_document, parse_document, validate
from exitwave.workflows.pipeline import read_pipeline
from exitwave.workflows.pipeline_spec import PipelineSections
from exitwave.workflows.resolved import dump_yaml
from exitwave.workflows.tune import _best_pipeline, _claim, read_study
from exitwave.workflows.tune_loop import ranks_for, rung_of
from exitwave.workflows.tune_record import Folding, Trial, best_so_far, best_trial, counts, fold
from exitwave.workflows.tune_sampler import gives_up, importance, next_values
from exitwave.workflows.tune_space import misfit, trial_spec
from exitwave.workflows.tune_spec import TuneSpec
from exitwave.workflows.tune_trial import failure_state

HEAD = "name: x\ntrain: {steps: 10, eval_every_steps: 5}\n"


def tune(**more: Any) -> TuneSpec:
    base = {
        "trials": 20,
        "space": {"train.optimizer.lr": {"log_uniform": [1e-4, 1e-1]}, "train.batch": {"int_uniform": [2, 8]}},
        "budget": {"steps": 100, "validations": 10},
    }
    return TuneSpec.model_validate(base | more)


def fault_of(tmp_path: Path, text: str, head: str = HEAD) -> str:
    """What is said of the `tune:` section `text`, the file's name left out."""
    path = tmp_path / "p.yaml"
    path.write_text(head + text)
    with pytest.raises(UsageError) as error:
        validate(load_document(path), PipelineSections)
    return str(error.value).replace(f"{path}:", "")


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ("train.optimizer.lrr: {uniform: [0.1, 1]}", "6:5: tune.space.train.optimizer.lrr: unknown key; did you mean"),
        ("train.batch.x: {int_uniform: [1, 2]}", "6:5: tune.space.train.batch.x: `batch` is a single value"),
        ("trian.batch: {int_uniform: [1, 2]}", "6:5: tune.space.trian.batch: no such key to search"),
        ("train.batch: {int_uniform: [4, 4]}", "[low, high] with low < high, got [4, 4]: the range is empty"),
        ("train.optimizer.lr: {log_uniform: [0, 1]}", "a logarithmic range begins above 0"),
        ("train.optimizer.lr: {uniform: [-1.0e+308, 1.0e+308]}", "the range is wider than any number"),
        ("train.optimizer.lr: {uniform: [0.1, 1], choice: [1, 2]}", "exactly one of uniform, log_uniform"),
        ("train.optimizer.lr: {loguniform: [0.1, 1]}", "did you mean `log_uniform`?"),
        ("train.batch: {choice: [4]}", "at least two values"),
        ("train.batch: {choice: [4, 4]}", "each value once"),
        ("train.batch: {int_uniform: [0, 4]}", "expected a value >= 1, got 0"),
        ("train.optimizer.name: {choice: [adamw, adam]}", "got 'adam'; did you mean 'adamw'?"),
        ("campaign.seed: {int_uniform: [1, 3]}", "the data set is simulated once, for all trials"),
        ("train.task: {choice: [classify, regress]}", "it changes what is asked of the network"),
        ("train.steps: {int_uniform: [1, 3]}", "tune.budget says how long"),
        ("train.loss.delta: {uniform: [0.5, 1]}", "it changes the measure itself"),
        ("train.loss: {choice: [{name: mse}, {name: l1}]}", "it changes the measure itself"),
        (
            "train.data: {choice: [{dose_e_per_pattern: 9}, {dose_e_per_pattern: 1}]}",
            "it holds train.data.input, which",
        ),
        ("train.series.crop: {int_uniform: [4, 8]}", "it changes what is asked of the network"),
        ("train: {choice: [{steps: 1}, {steps: 2}]}", "it holds train.task, which is not searched"),
    ],
)
def test_a_space_that_cannot_be_searched_is_refused_at_its_place(tmp_path: Path, space: str, said: str) -> None:
    told = fault_of(tmp_path, f"tune:\n  trials: 3\n  space:\n    {space}\n  budget: {{steps: 10}}\n")
    assert said in told
    assert told.startswith("6:")


def test_the_rest_of_the_section_is_checked_too(tmp_path: Path) -> None:
    good = "  space:\n    train.batch: {int_uniform: [1, 4]}\n"
    assert "3:1: tune: a search needs a `train:`" in fault_of(
        tmp_path, f"tune:\n  trials: 3\n{good}  budget: {{steps: 10}}\n", head="name: x\nranks: 1\n"
    )
    assert "multiple of validations" in fault_of(
        tmp_path, f"tune:\n  trials: 3\n{good}  budget: {{steps: 11, validations: 2}}\n"
    )
    assert "steps or seconds, one of them" in fault_of(tmp_path, f"tune:\n  trials: 3\n{good}  budget: {{}}\n")
    assert "expected loss, rmse_VA" in fault_of(
        tmp_path, f"tune:\n  trials: 3\n{good}  budget: {{steps: 10}}\n  objective: {{metric: top1}}\n"
    )
    assert "looks for the worst" in fault_of(
        tmp_path,
        f"tune:\n  trials: 3\n{good}  budget: {{steps: 10}}\n  objective: {{metric: r2, direction: minimize}}\n",
    )
    assert "set train.eval_every_steps" in fault_of(
        tmp_path, f"tune:\n  trials: 3\n{good}  budget: {{seconds: 9}}\n", head="name: x\ntrain: {steps: 10}\n"
    )


def test_values_that_only_fit_with_others_are_not_refused() -> None:
    """`larc` needs sgd: a space in which some combinations cannot be is a space; those trials fail with the reason."""
    data = {
        "train": {"steps": 10},
        "tune": {
            "trials": 3,
            "space": {
                "train.optimizer.larc.trust": {"uniform": [0.01, 0.1]},
                "train.optimizer.name": {"choice": ["adamw", "sgd"]},
            },
            "budget": {"steps": 10},
        },
    }
    sections = PipelineSections.model_validate(data)
    assert sections.tune is not None and sections.train is not None
    apart = {"train.optimizer.larc.trust": 0.02, "train.optimizer.name": "adamw"}
    assert "does not notice" in misfit(sections.tune, sections.train, apart)
    together = {"train.optimizer.larc.trust": 0.02, "train.optimizer.name": "sgd"}
    spec = trial_spec(sections.tune, sections.train, together)
    assert spec.optimizer.larc is not None and spec.optimizer.larc.trust == 0.02
    assert (spec.steps, spec.epochs, spec.eval_every_steps) == (10, None, 1)


def test_a_budget_of_seconds_is_one() -> None:
    spec = trial_spec(tune(budget={"seconds": 9.0}), TrainSpec(epochs=3, eval_every_steps=7), {"train.batch": 4})
    assert (spec.max_seconds, spec.steps, spec.epochs, spec.batch, spec.deterministic) == (9.0, None, None, 4, False)


def test_a_record_is_what_was_told_of_it() -> None:
    lines = [
        {"kind": "study_started", "t": 10.0, "trials": 3, "dataset_id": "d"},
        {"kind": "trial_asked", "t": 11.0, "n": 0, "values": {"a": 1}},
        {"kind": "trial_begun", "t": 11.0, "n": 0, "ranks": 1},
        {"kind": "trial_reported", "t": 12.0, "n": 0, "rung": 1, "step": 5, "value": 0.5},
        {"kind": "trial_lost", "t": 13.0, "n": 0, "step": 4, "why": "died"},
        {"kind": "study_started", "t": 100.0, "trials": 3, "dataset_id": "d"},  # a kill lay between
        {"kind": "trial_begun", "t": 101.0, "n": 0, "ranks": 2},
        {"kind": "trial_reported", "t": 102.0, "n": 0, "rung": 1, "step": 5, "value": 0.7},  # told already
        {"kind": "trial_reported", "t": 103.0, "n": 0, "rung": 2, "step": 10, "value": None},  # not finite
        {"kind": "trial_finished", "t": 104.0, "n": 0, "step": 10, "value": 0.25, "seconds": 3.0},
        {"kind": "trial_failed", "t": 105.0, "n": 0, "state": "error", "why": "too late"},
        {"kind": "trial_asked", "t": 105.0, "n": 1, "values": {"a": 2}},
        {"kind": "trial_asked", "t": 105.0, "n": 1, "values": {"a": 3}},  # twice: the first one counts
        {"kind": "trial_pruned", "t": 106.0, "n": 1, "rung": 1, "value": 0.9, "why": "worse"},
        {"kind": "trial_stopped", "t": 107.0, "n": 1, "step": 7, "seconds": 2.0},
    ]
    study = fold(lines)
    first, second = study.trials
    assert (first.state, first.value, first.step, first.ranks, first.attempts) == ("finished", 0.25, 10, 2, 2)
    assert first.reports[1] == 0.5 and math.isnan(first.reports[2])
    assert (second.state, second.values, second.step, second.seconds) == ("pruned", {"a": 2}, 7, 2.0)
    assert study.seconds == pytest.approx(3 + 7)
    assert counts(study) == {"finished": 1, "running": 0, "pruned": 1, "failed": 0}
    for cut in range(len(lines)):  # a kill after any line leaves a record that goes on
        folding = Folding()
        for line in [*lines[:cut], *lines[max(cut - 1, 0) :]]:
            folding.add(line)
        assert [t.state for t in folding.study.trials] == ["finished", "pruned"]


def test_deaths_count_until_there_is_a_new_checkpoint() -> None:
    died = {"kind": "trial_lost", "n": 0, "why": "died"}
    lines: list[dict[str, Any]] = [{"kind": "trial_asked", "n": 0, "values": {}}]
    losses = []
    for step in (0, 0, 4, 4, 8):
        lines.append({**died, "step": step})
        losses.append(fold(lines).trial(0).losses)
    assert losses == [1, 2, 1, 2, 1]


def test_the_best_is_the_best() -> None:
    trials = [
        Trial(number=0, values={}, state="finished", value=0.5),
        Trial(number=1, values={}, state="pruned", value=None, reports={1: 0.1}),
        Trial(number=2, values={}, state="finished", value=0.4),
        Trial(number=3, values={}, state="finished", value=0.4),
        Trial(number=4, values={}, state="failed"),
    ]
    low, high = best_trial(trials, maximize=False), best_trial(trials, maximize=True)
    assert low is not None and high is not None and (low.number, high.number) == (2, 0)
    assert best_so_far(trials, maximize=False) == [(0, 0.5), (2, 0.4)]
    assert best_so_far(trials, maximize=True) == [(0, 0.5)] and best_so_far([], maximize=True) == []
    many = [Trial(number=n, values={}, state="finished", value=float(-n)) for n in range(20_000)]
    assert len(best_so_far(many, maximize=False)) == 20_000  # in a moment: a report of a long search draws them
    assert best_trial(trials[1:2], maximize=False) is None


def search(spec: TuneSpec, n: int, *, killed_after: int | None = None) -> list[Trial]:
    """A search of a bowl around lr 1e-2, each trial's loss falling towards its depth."""
    trials: list[Trial] = []
    for number in range(n):
        if number == killed_after:  # what another process would read
            trials = [Trial(**{f: getattr(t, f) for f in t.__dataclass_fields__}) for t in trials]
        values = next_values(spec, trials, number)
        depth = (math.log10(values["train.optimizer.lr"]) + 2) ** 2 + 0.01 * values["train.batch"]
        reports: dict[int, float] = {}
        state = "finished"
        trials.append(Trial(number=number, values=values))
        for rung in range(1, 11):
            reports[rung] = depth + 1 / rung
            trials[number] = Trial(number=number, values=values, reports=dict(reports))
            if rung < 10 and gives_up(spec, trials, number, rung):
                state = "pruned"
                break
        value = depth if state == "finished" else None
        trials[number] = Trial(number=number, values=values, reports=reports, state=state, value=value)  # type: ignore[arg-type]
    return trials


def test_the_same_seed_searches_the_same_and_learns() -> None:
    trials = search(tune(), 24)
    assert trials == search(tune(), 24, killed_after=9)
    assert trials != search(tune(sampler={"seed": 1}), 24)
    best = best_trial(trials, maximize=False)
    assert best is not None and best.value is not None and best.value < 0.08
    pruned = [t for t in trials if t.state == "pruned"]
    assert pruned and all(len(t.reports) >= 3 for t in pruned)  # warm-up: two rungs do not count
    assert all(t.state == "finished" for t in trials[:4])  # and the first trials are finished whatever they are
    shares = importance(tune(), trials)
    assert set(shares) == {"train.optimizer.lr", "train.batch"} and sum(shares.values()) == pytest.approx(1)
    assert all(t.state == "finished" for t in search(tune(pruner={"name": "none"}), 8))


def test_choices_of_any_kind_come_back_as_they_were_written() -> None:
    choices = [["com"], [], None, 3, "adamw", True]
    spec = tune(space={"train.data.physics": {"choice": choices}}, sampler={"name": "random"})
    drawn = [next_values(spec, [], n)["train.data.physics"] for n in range(40)]
    assert all(value in choices for value in drawn)
    assert {repr(value) for value in drawn} == {repr(value) for value in choices}


def test_rungs_and_ranks() -> None:
    steps, seconds = tune(), tune(budget={"seconds": 20.0, "validations": 4})
    assert [rung_of(steps, {"step": s}) for s in (9, 10, 95, 100)] == [0, 1, 9, 10]
    assert [rung_of(seconds, {"clock_s": s}) for s in (4.9, 5.0, 19.0, 26.0)] == [0, 1, 3, 4]
    assert [ranks_for(workers=8, left=n, batch=16) for n in (20, 8, 5, 4, 2, 1)] == [1, 1, 1, 2, 4, 8]
    assert ranks_for(workers=8, left=1, batch=2) == 2


def test_failures_are_told_apart() -> None:
    assert failure_state(DamagedDataError("step 3: expected a finite loss, got NaN")) == "diverged"
    assert failure_state(ExitwaveError("rank 1: step 3: the loss is finite but its gradient is not")) == "diverged"
    assert failure_state(ExitwaveError("step 3: gradients overflow fp16 however small the loss scale")) == "diverged"
    told = "sample 0f: expected finite numbers in cbed, 1 of 9 values are not"
    assert failure_state(DamagedDataError(told)) == "damaged data"  # no rate of learning mends that
    assert failure_state(DamagedDataError("/finite/shard.h5: its checksum is another")) == "damaged data"
    assert failure_state(UsageError("detector_bin")) == "configuration"
    assert failure_state(RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 bytes")) == "memory"
    assert failure_state(MemoryError()) == "memory"
    assert failure_state(KeyError("x")) == "error"


def test_a_study_takes_more_trials_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(HEAD + "tune:\n  trials: 3\n  space: {train.batch: {int_uniform: [1, 4]}}\n  budget: {steps: 10}\n")

    def claim(*overrides: str) -> None:
        _claim(tmp_path, read_study(path, overrides, needs_campaign=False)[1], tmp_path / "data")

    claim()
    claim("tune.trials=5", "tune.max_seconds=9", "ranks=2", "cluster.workers=2")
    with pytest.raises(UsageError, match=r"tune\.trials: was 5, now 3"):
        claim()
    with pytest.raises(UsageError, match=r"tune\.space\.train\.batch\.int_uniform\[1\]: was 4, now 5"):
        claim("tune.trials=5", "tune.space={train.batch: {int_uniform: [1, 5]}}")
    with pytest.raises(UsageError, match=r"train\.optimizer\.lr: was 0\.002, now 0\.1"):
        claim("tune.trials=5", "train.optimizer.lr=0.1")
    with pytest.raises(UsageError, match="no `campaign:` section"):
        read_study(path)


def test_the_section_in_the_documentation_is_one() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "tune.md").read_text(encoding="utf-8")
    section = text.partition("```yaml\n")[2].partition("```")[0]
    document = parse_document(HEAD + section, source="tune.md", folder=Path())
    spec = validate(document, PipelineSections).tune
    assert spec is not None and spec.trials == 20 and len(spec.space) == 4


def test_the_best_pipeline_is_one_wherever_it_lies(tmp_path: Path) -> None:
    """What was given and nothing else, so that every verb takes it; files by their whole path."""
    text = (Path(__file__).resolve().parents[2] / "examples" / "quickstart.yaml").read_text(encoding="utf-8")
    text = text.replace("    # - cif: structures/*.cif", "    - cif: structures/*.cif")
    (tmp_path / "p.yaml").write_text(text)
    space = "tune={trials: 2, space: {train.optimizer.lr: {log_uniform: [1e-4, 1e-2]}}, budget: {steps: 200}}"
    _, sections = read_study(tmp_path / "p.yaml", [space])
    assert sections.tune is not None and sections.train is not None
    best = trial_spec(sections.tune, sections.train, {"train.optimizer.lr": 0.005})
    (tmp_path / "best.yaml").write_text(dump_yaml(_best_pipeline(sections, best, tmp_path)))
    _, again = read_pipeline(tmp_path / "best.yaml")
    assert again.train == best and again.tune is None and again.cluster == sections.cluster
    assert sections.campaign is not None and again.campaign.sampling == sections.campaign.sampling
    assert any(s.cif == str(tmp_path / "structures/*.cif") for s in again.campaign.structures)
