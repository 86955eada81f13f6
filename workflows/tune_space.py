"""The search space against the configuration it is about, and one trial's configuration out of it (pure).

A key of the space is a dotted key of the pipeline file. It is refused, at its place in the file, when no such key
exists, when it does not take the values of its range, and when trials that differ in it could not be compared:

- `campaign.…`: the data set is simulated once, for all trials.
- What is asked of the network (its task, its splits, the noise of its patterns): another question, not a better answer.
- What the budget says, and what does not change the result at all.
- `train.loss.…` while the validation loss is what trials are judged by: two trials would be measured by two measures.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from exitwave.train.spec import TrainSpec
from exitwave.workflows.faults import Fault, faults_of
from exitwave.workflows.tune_spec import Range, TuneSpec

__all__ = ["misfit", "space_faults", "trial_spec"]

_COMBINATIONS = 32
_OTHER_QUESTION = "it changes what is asked of the network, and trials would not be comparable"
_BUDGET = "tune.budget says how long each trial trains and how often it is validated"
_NO_RESULT = "it changes nothing that a trial is judged by"
_REFUSED = {
    "campaign": "the data set is simulated once, for all trials; to compare data sets, search on each of them",
    "train.task": _OTHER_QUESTION,
    "train.train_split": _OTHER_QUESTION,
    "train.val_split": _OTHER_QUESTION,
    "train.data.input": _OTHER_QUESTION,
    "train.data.target": _OTHER_QUESTION,
    "train.data.dose_e_per_pattern": _OTHER_QUESTION,
    "train.data.detector": _OTHER_QUESTION,
    "train.series.input": _OTHER_QUESTION,
    "train.series.target": _OTHER_QUESTION,
    "train.series.targets": _OTHER_QUESTION,
    "train.series.crop": _OTHER_QUESTION,
    "train.series.dose_e_per_pixel": _OTHER_QUESTION,
    "train.series.store": _NO_RESULT,
    "train.series.overlap": _NO_RESULT,
    "train.steps": _BUDGET,
    "train.epochs": _BUDGET,
    "train.max_seconds": _BUDGET,
    "train.eval_every_steps": _BUDGET,
    "train.checkpoint": _NO_RESULT,
    "train.trackers": _NO_RESULT,
    "train.device": _NO_RESULT,
    "train.engine": _NO_RESULT,
    "train.data.workers": _NO_RESULT,
    "train.data.ahead": _NO_RESULT,
}
_METRICS = {
    "reconstruct": ("loss", "rmse_VA", "rmse_V", "rmse_V_fitted", "r2", "psnr", "ssim"),
    "classify": ("loss", "top1"),
}


def trial_spec(tune: TuneSpec, train: TrainSpec, values: Mapping[str, Any]) -> TrainSpec:
    """What one trial trains: `train` with the values of its keys and the search's budget.

    Raises ValueError (pydantic's ValidationError) where these values do not go together.
    """
    return TrainSpec.model_validate(_data(tune, train, values))


def _data(tune: TuneSpec, train: TrainSpec, values: Mapping[str, Any]) -> dict[str, Any]:
    data = copy.deepcopy(train.canonical())
    for key, value in values.items():
        _put(data, key.split(".")[1:], value)
    budget = tune.budget
    data |= {"epochs": None, "steps": budget.steps, "max_seconds": budget.seconds}
    if budget.steps is not None:
        data["eval_every_steps"] = budget.steps // budget.validations
    if budget.seconds is not None:
        data["deterministic"] = False  # how many steps that are depends on the machine
    return data


def _put(data: dict[str, Any], parts: list[str], value: Any) -> None:
    """ValueError where the way leads through a single value."""
    for part in parts[:-1]:
        if data.get(part) is None:
            data[part] = {}
        data = data[part]
        if not isinstance(data, dict):
            raise ValueError(f"`{part}` is a single value; it has no keys")
    data[parts[-1]] = value


def space_faults(tune: TuneSpec, train: TrainSpec | None) -> list[Fault]:
    """All that is wrong with the space, each at its key (paths begin with `tune`)."""
    if train is None:
        return [Fault(path=("tune",), message="a search needs a `train:` section to change")]
    faults = list(_objective_faults(tune, train))
    for key, values in tune.space.items():
        why = _refused(key, tune) or _cannot(key, values, tune, train)
        if why:
            faults.append(Fault(path=("tune", "space", key), message=why))
    return faults


def _objective_faults(tune: TuneSpec, train: TrainSpec) -> Iterator[Fault]:
    known = _METRICS.get(train.task, ("loss",))
    if tune.objective.metric not in known:
        yield Fault(
            path=("tune", "objective", "metric"),
            message=f"expected {', '.join(known)} for train.task: {train.task}, got {tune.objective.metric!r}",
        )
    if tune.budget.seconds is not None and train.eval_every_steps is None and tune.objective.metric == "loss":
        yield Fault(
            path=("tune", "budget", "seconds"),
            message="nobody knows how many steps that are: set train.eval_every_steps, for a validation to judge by",
        )
    loss = [key for key in tune.space if _is_loss(key)]
    if loss and tune.objective.metric != "loss" and tune.pruner.name != "none":
        yield Fault(
            path=("tune", "space", loss[0]),
            message="pruning compares validation losses, and this changes their measure: set tune.pruner.name: none",
        )


def _is_loss(key: str) -> bool:
    return key == "train.loss" or key.startswith("train.loss.")


def _refused(key: str, tune: TuneSpec) -> str:
    for name, why in _REFUSED.items():
        if key == name or key.startswith(f"{name}."):
            return why
        if name.startswith(f"{key}."):
            return f"it holds {name}, which is not searched ({why}); name the keys in it that are"
    if not key.startswith("train.") or key.endswith(".") or ".." in key:
        return "no such key to search: expected a key of the training, such as train.optimizer.lr"
    if _is_loss(key) and tune.objective.metric == "loss":
        return "it changes the measure itself; judge by another: tune.objective.metric: rmse_VA"
    clash = next((other for other in tune.space if other.startswith(f"{key}.")), None)
    return f"{clash} is a part of it, and is searched as well" if clash else ""


def _cannot(key: str, values: Range, tune: TuneSpec, train: TrainSpec) -> str:
    """Why the key does not take a value of its range, whatever the other keys are; "" where it takes all."""
    for value in values.ends:
        first = misfit(tune, train, {key: value})
        if first and all(misfit(tune, train, {**others, key: value}) for others in _others(tune, key)):
            return f"{first} (with {key}: {value})" if values.kind != "choice" or str(value) not in first else first
    return ""


def _others(tune: TuneSpec, key: str) -> Iterator[dict[str, Any]]:
    """Some combinations of the other keys' values, the same each time."""
    draw = random.Random(key)
    others = {k: v.ends for k, v in tune.space.items() if k != key and not _refused(k, tune)}
    for _ in range(_COMBINATIONS if others else 0):
        yield {name: draw.choice(ends) for name, ends in others.items()}


def misfit(tune: TuneSpec, train: TrainSpec, values: Mapping[str, Any]) -> str:
    """Why a trial of these values cannot be trained; "" where it can."""
    try:
        data = _data(tune, train, values)
    except ValueError as error:
        return str(error)
    try:
        TrainSpec.model_validate(data)
    except ValidationError as error:
        return "; ".join(fault.message for fault in faults_of(error, TrainSpec, data))
    return ""
