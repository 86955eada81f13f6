"""In which order a campaign brings what a training beside it waits for, and when that may validate. Pure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from exitwave.ingest.arrivals import ReservoirSettings, may_validate
from exitwave.train.spec import TrainSpec
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
    settings = ReservoirSettings(planned=100, watermark=10, capacity=100, max_reuse=3.0)

    def may(arrived: int, val: int, ended: bool = False) -> bool:
        return may_validate(settings, arrived=arrived, val=val, val_planned=8, ended=ended)

    assert not may(10, 0)
    assert not may(19, 7)
    assert may(10, 8)
    assert may(20, 7), "shards of validation that fail for good are not waited for"
    assert not may(20, 0), "there is nothing to validate on yet"
    assert may(10, 0, ended=True), "what is wrong then is told by the validation itself"
