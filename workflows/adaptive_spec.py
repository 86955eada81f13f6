"""The section `adaptive:` of a pipeline: rounds in which the network's errors say what is simulated next."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator

from exitwave.ingest.errors import UsageError
from exitwave.ingest.strict_model import StrictModel
from exitwave.simulate.distributions import Choice, bounds
from exitwave.simulate.plan import Plan
from exitwave.simulate.spec import CampaignSpec
from exitwave.simulate.steer import Axis
from exitwave.simulate.steer_rounds import mean_atomic_number, trained_structures
from exitwave.train.spec import TrainSpec

__all__ = ["AdaptiveSection", "axes_of", "conflict", "cost_of"]

Bins = Annotated[int, Field(ge=2, le=64)]
Edges = Annotated[tuple[float, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]


class AdaptiveSection(StrictModel):
    """Round 0 is the campaign itself; each of `rounds` more adds training samples where the network's errors are.

    samples_per_round: a round costs what so many samples drawn by the campaign would cost, in core-seconds by the model
        of the cost: it takes fewer of dear ones, more of cheap ones.
    regions: what the errors are sorted by. `structure: each`; any parameter of `sampling`, and `atomic_number` (mean
        over a crystal's atoms): a number of equal bins, or the edges between bins.
    pool: samples of each training structure that only judge (split `steer`); 0 judges on the training's validation
        split, whose structures are others.
    uniform_share: the part of a round that is drawn as the campaign draws. 1: all of it, and nothing is judged.
    sharpness: the power of a region's relative error; most_often: at most so many times its natural share.
    judge_steps: optimizer steps of the network that judges, trained from its beginning in each round.
    """

    rounds: int = Field(default=2, ge=1, le=100)
    samples_per_round: int = Field(ge=1, le=1_000_000)
    regions: dict[str, Literal["each"] | Bins | Edges] = Field(min_length=1)
    pool: int = Field(default=4, ge=0, le=10_000)
    uniform_share: float = Field(default=0.3, gt=0, le=1)
    sharpness: float = Field(default=0.7, ge=0, le=2)
    most_often: float = Field(default=4.0, ge=1, le=100)
    judge_steps: int = Field(default=200, ge=1)

    @field_validator("regions")
    @classmethod
    def _each_structure(
        cls, value: dict[str, Literal["each"] | int | tuple[float, ...]]
    ) -> dict[str, Literal["each"] | int | tuple[float, ...]]:
        for name, bins in value.items():
            if (bins == "each") != (name == "structure"):
                raise ValueError(f"{name}: `structure: each`, and bins for any other, expected; came {bins!r}")
            if isinstance(bins, tuple) and (not bins or list(bins) != sorted(set(bins))):
                raise ValueError(f"{name}: edges in rising order expected, came {list(bins)}")
        return value


def conflict(section: AdaptiveSection, campaign: CampaignSpec, train: TrainSpec) -> str | None:
    """Why the section does not go with the rest of the pipeline, or None."""
    if train.task != "reconstruct" or train.data.input is not None:
        return f"a network that reconstructs potentials is expected, train.task is {train.task}"
    if train.train_split != "train":
        return (
            f"rounds add to split 'train', train.train_split is {train.train_split!r}: the network would not see them"
        )
    if campaign.fan_out.width > 1:
        return "a round chooses samples one by one: leave campaign.fan_out away"
    drawn = campaign.sampling.drawn()
    for name, bins in section.regions.items():
        if name in ("structure", "atomic_number"):
            continue
        if name.startswith("dose"):
            return f"regions.{name}: the dose is drawn when a sample is loaded, no simulation knows of it"
        if name not in drawn:
            known = ", ".join(["structure", "atomic_number", *drawn])
            return f"regions.{name}: one of {known} expected"
        low, high = bounds(drawn[name])
        if low == high:
            return f"regions.{name}: campaign.sampling.{name} is {low:g} for all samples: nothing to choose between"
        if isinstance(bins, tuple) and not low < bins[0] <= bins[-1] < high:
            return f"regions.{name}: edges within {low:g}..{high:g}, campaign.sampling.{name}, expected"
    if not section.pool and "structure" in section.regions:
        return "pool: at least 1 expected where regions has `structure`: the validation split has other structures"
    return None


def cost_of(section: AdaptiveSection, plan: Plan) -> str:
    """What the rounds add to the plan of round 0, in words for a person."""
    added = section.rounds * section.samples_per_round
    judging = section.pool * len(trained_structures(plan)) if section.uniform_share < 1 else 0
    hours = plan.core_seconds / max(1, plan.n_samples) * (added + judging) / 3600
    pool = f" and {judging} samples that judge" if judging else ""
    return f"{section.rounds} rounds add about {added} samples{pool} to these, about {hours:.2g} core-hours"


def axes_of(section: AdaptiveSection, plan: Plan) -> tuple[Axis, ...]:
    """The grid of regions. UsageError where the crystals leave nothing to choose between."""
    structures = trained_structures(plan)
    drawn = plan.spec.sampling.drawn()
    axes = []
    for name, bins in section.regions.items():
        if bins == "each":
            labels = tuple(f"{s.formula} [{' '.join(map(str, s.zone_axis))}]" for s in structures)
            axes.append(Axis(name=name, labels=labels))
            continue
        if isinstance(bins, tuple):
            edges = bins
        elif name in drawn and isinstance(found := drawn[name], Choice):
            edges = tuple((a + b) / 2 for a, b in pairwise(sorted(set(found.choice))))
        else:
            means = [mean_atomic_number(structure) for structure in structures]
            low, high = bounds(drawn[name]) if name in drawn else (min(means), max(means))
            edges = tuple(low + (high - low) * k / bins for k in range(1, bins))
        if name == "atomic_number" and len({bisect_right(edges, mean_atomic_number(s)) for s in structures}) == 1:
            raise UsageError(
                f"adaptive.regions.atomic_number: all {len(structures)} structures fall into one of its bins "
                f"({', '.join(_labels(edges))}): there is nothing to choose between; leave it out, or give other edges"
            )
        axes.append(Axis(name=name, labels=_labels(edges), edges=edges))
    return tuple(axes)


def _labels(edges: tuple[float, ...]) -> tuple[str, ...]:
    inner = [f"{a:.4g} to {b:.4g}" for a, b in pairwise(edges)]
    return (f"below {edges[0]:.4g}", *inner, f"from {edges[-1]:.4g}")
