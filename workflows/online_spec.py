"""The `online:` section of a pipeline, and what its defaults come to for a campaign and a training. Pure.

watermark_samples   training samples that are committed before the first step
capacity_samples    samples that are drawn from at a time; more wait, and hold the campaign back, until these were
                    seen (Melissa's rule, see docs/online.md)
max_reuse           uses of a sample, on average, that those arrived so far are good for
worker_niceness     how far the campaign's processes stand behind the ranks when both want a core (nice(1))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import Field

from exitwave.ingest.arrivals import ReservoirSettings
from exitwave.ingest.errors import UsageError
from exitwave.ingest.mixing import mix64
from exitwave.ingest.strict_model import StrictModel
from exitwave.simulate.work import CampaignPlan, CampaignTask
from exitwave.train.spec import TrainSpec

__all__ = ["SETTINGS_NAME", "OnlineSection", "arrival_order", "planned_samples", "settings_of"]

SETTINGS_NAME = "online.json"  # in the training's folder: what its ranks are told
_WATERMARK_SHARE = 0.1
_WATERMARK_BATCHES = 2


class OnlineSection(StrictModel):
    """How `exitwave run --online` trains while the campaign runs; of no meaning without --online."""

    watermark_samples: int | None = Field(
        default=None, ge=1, description="before the first step; null: a tenth of the training samples, or two batches"
    )
    capacity_samples: int | None = Field(default=None, ge=1, description="of the reservoir; null: all of them")
    max_reuse: float | None = Field(
        default=None, gt=0, description="uses a sample ahead of the campaign; null: as often as the whole training does"
    )
    worker_niceness: int = Field(default=10, ge=0, le=19, description="the ranks come first, workers take the rest")


def planned_samples(plan: CampaignPlan, split: str) -> int:
    """Samples of a split, if nothing fails."""
    return sum(len(task.sample_indices) for task in plan.tasks if task.split == split)


def settings_of(section: OnlineSection, plan: CampaignPlan, spec: TrainSpec) -> ReservoirSettings:
    """The section with its defaults filled in.

    Raises UsageError where it does not fit the campaign, or where nothing says how often a sample is to be used.
    """
    planned = planned_samples(plan, spec.train_split)
    if planned < spec.batch:
        raise UsageError(f"train.batch: expected at most the {planned} training samples of the campaign: {spec.batch}")
    few = max(_WATERMARK_BATCHES * spec.batch, round(_WATERMARK_SHARE * planned))
    capacity = section.capacity_samples or planned
    watermark = section.watermark_samples or min(few, capacity)
    if watermark > planned:
        raise UsageError(f"online.watermark_samples: expected at most the {planned} training samples, got {watermark}")
    if capacity > planned:
        capacity = planned
    if watermark > capacity or spec.batch > capacity:
        raise UsageError(
            f"online.capacity_samples: expected at least the watermark of {watermark} and the batch of {spec.batch} "
            f"samples, got {capacity}"
        )
    reuse = section.max_reuse
    if reuse is None:
        limits = [spec.epochs * (planned // spec.batch)] if spec.epochs is not None else []
        limits += [spec.steps] if spec.steps is not None else []
        if not limits:
            raise UsageError(
                "online.max_reuse: a training that only time ends (train.max_seconds) could end before the campaign "
                "does; say how often a sample may be used before the last has come, for example max_reuse: 10"
            )
        reuse = min(limits) * spec.batch / planned
    return ReservoirSettings(planned=planned, watermark=watermark, capacity=capacity, max_reuse=reuse)


def arrival_order(spec: TrainSpec, plan: CampaignPlan, watermark: int) -> Callable[[CampaignTask], Any]:
    """What the campaign's tasks are sorted by.

    1. Training samples up to the watermark: the ranks have something to do as soon as can be.
    2. Validation, meanwhile; whole, so that its losses can be compared from the first to the last.
    3. The other training samples. All of them are in one random order, so that what has arrived is at any time a fair
       part of what will.
    4. What is for the test.
    """

    def chance(task: CampaignTask) -> int:
        return mix64(spec.seed + task.index)

    first: set[int] = set()
    samples = 0
    for task in sorted((task for task in plan.tasks if task.split == spec.train_split), key=chance):
        if samples >= watermark:
            break
        first.add(task.index)
        samples += len(task.sample_indices)
    place = {spec.val_split: 1, spec.train_split: 2}

    def key(task: CampaignTask) -> tuple[int, int]:
        return 0 if task.index in first else place.get(task.split, 3), chance(task)

    return key
