"""In which order a campaign brings what a training beside it waits for, and when that may validate. Pure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from exitwave.ingest.arrivals import may_validate
from exitwave.train.spec import TrainSpec
from exitwave.workflows.online import left_out
from exitwave.workflows.online_spec import arrival_order

TASKS = st.lists(st.tuples(st.sampled_from(["train", "val", "test", "new"]), st.integers(1, 5)), max_size=60)


def plan_of(tasks: list[tuple[str, int]]) -> Any:
    made = [SimpleNamespace(index=k, split=split, sample_indices=tuple(range(n))) for k, (split, n) in enumerate(tasks)]
    return SimpleNamespace(tasks=made)


@given(tasks=TASKS, watermark=st.integers(1, 80), seed=st.integers(0, 2**32))
def test_the_watermark_then_validation_then_the_rest_then_the_test(
    tasks: list[tuple[str, int]], watermark: int, seed: int
) -> None:
    plan, spec = plan_of(tasks), TrainSpec.model_validate({"seed": seed, "epochs": 1})
    order = sorted(plan.tasks, key=arrival_order(spec, plan, watermark))
    splits = [task.split for task in order]
    trains = [task for task in order if task.split == "train"]
    head = splits.index("val") if "val" in splits else len(trains)
    assert set(splits[:head]) <= {"train"}
    ahead = [len(task.sample_indices) for task in trains[:head]]
    if "val" in splits:  # as many as the watermark takes, not one shard more
        assert sum(ahead) >= min(watermark, sum(len(task.sample_indices) for task in trains))
        assert sum(ahead[:-1]) < watermark
    places = {"train": 1, "val": 0, "test": 2, "new": 2}
    after = [places[split] for split in splits[head:]]
    assert after == sorted(after)
    # training samples stand in one random order, whatever the watermark: none of the two parts is another kind of part
    whole = sorted(plan.tasks, key=arrival_order(spec, plan, 10**6))
    assert [task.index for task in trains] == [task.index for task in whole if task.split == "train"]


def test_validation_waits_until_it_is_whole_or_never_will_be() -> None:
    assert not may_validate(val=7, val_planned=8, ended=False), "the eighth may still come, after all training samples"
    assert may_validate(val=8, val_planned=8, ended=False)
    assert may_validate(val=7, val_planned=8, ended=True), "shards that fail for good are not waited for any longer"
    assert not may_validate(val=0, val_planned=8, ended=True), "all of them failed: there is nothing to validate on"
    assert may_validate(val=0, val_planned=0, ended=True), "none was planned: the validation itself says what is wrong"


def test_validations_left_out_are_counted_once_and_not_where_they_were_done_again() -> None:
    def event(kind: str, step: int) -> dict[str, Any]:
        return {"kind": kind, "step": step}

    events = [event("train_eval_postponed", step) for step in (5, 10, 5, 10, 15)]
    assert left_out([*events, event("train_eval", 15), event("train_eval", 20)]) == (2, 4)
    assert left_out([event("train_eval", 5)]) == (0, 1)
    assert left_out([]) == (0, 0)
