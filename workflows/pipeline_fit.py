"""Whether a campaign brings what the training and the measurements after it need. Pure.

Told before the first sample is simulated: after the last one it would be hours too late, and another configuration is
another run. Samples that fail later are another matter: this is about a campaign of which nothing fails.
"""

from __future__ import annotations

from exitwave.simulate.work import CampaignPlan
from exitwave.train.spec import TrainSpec
from exitwave.workflows.online_spec import planned_samples
from exitwave.workflows.pipeline_spec import PipelineSpec

__all__ = ["misfit"]


def misfit(spec: PipelineSpec, plan: CampaignPlan) -> str | None:
    """What the pipeline asks for that its campaign does not have, or None."""
    planned = {split: planned_samples(plan, split) for split in sorted({task.split for task in plan.tasks})}
    have = "the campaign has " + ", ".join(f"{n} samples of split {split!r}" for split, n in planned.items())
    train = spec.train
    n = planned.get(train.train_split, 0)
    if n < train.batch:
        return (
            f"train.batch: expected at most the {n} samples of split {train.train_split!r}, came {train.batch}; {have}"
        )
    if _validates(train, n) and train.val_split not in planned:
        return (
            f"train.eval_every_steps: there would be nothing to validate on; {have}. Give split {train.val_split!r} "
            "some structures (campaign.split.val), or leave train.eval_every_steps out"
        )
    for split in spec.evaluate.splits:
        if split not in planned:
            return (
                f"evaluate.split: nothing to measure the network on in split {split!r}; {have}. Give it some "
                "structures (campaign.split), or name another split"
            )
    return None


def _validates(train: TrainSpec, samples: int) -> bool:
    """Whether a validation comes before the last step."""
    if train.eval_every_steps is None:
        return False
    limits = [train.epochs * (samples // train.batch)] if train.epochs is not None else []
    limits += [train.steps] if train.steps is not None else []
    return not limits or train.eval_every_steps <= min(limits)
