"""The `tune:` section of a pipeline: what is searched, for what, with how many trials of which length.

    tune:
      trials: 20
      space:
        train.optimizer.lr: { log_uniform: [1e-4, 1e-2] }
        train.model.growth: { int_uniform: [4, 16] }
        train.optimizer.name: { choice: [adamw, lamb] }
      budget: { steps: 400, validations: 10 }

Whether the keys of the space exist and take such values is checked in `tune_space`, at the same moment.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, model_validator

from exitwave.ingest.strict_model import StrictModel

__all__ = ["MAXIMIZED", "BudgetSpec", "ObjectiveSpec", "PrunerSpec", "Range", "SamplerSpec", "TuneSpec"]

_KINDS = ("uniform", "log_uniform", "int_uniform", "int_log_uniform", "choice")
MAXIMIZED = ("r2", "psnr", "ssim", "top1")


class Range(StrictModel):
    """The values that one key may take; exactly one of these. Both ends of a range belong to it."""

    uniform: tuple[float, float] | None = None
    log_uniform: tuple[float, float] | None = None
    int_uniform: tuple[int, int] | None = None
    int_log_uniform: tuple[int, int] | None = None
    choice: tuple[Any, ...] | None = None

    @property
    def kind(self) -> str:
        return next(name for name in _KINDS if getattr(self, name) is not None)

    @property
    def ends(self) -> tuple[Any, ...]:
        """The lowest and the highest value, or all choices."""
        found: tuple[Any, ...] = getattr(self, self.kind)
        return found

    @model_validator(mode="after")
    def _not_empty(self) -> Range:
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"expected exactly one of {', '.join(_KINDS)}, got {' and '.join(given) or 'none'}")
        ends = list(self.ends)
        if self.kind == "choice":
            if len(ends) < 2:
                raise ValueError(f"choice: expected at least two values to choose from, got {ends}")
            if len({repr(value) for value in ends}) < len(ends):
                raise ValueError(f"choice: expected each value once, got {ends}")
            return self
        low, high = ends
        if not low < high:
            raise ValueError(f"{self.kind}: expected [low, high] with low < high, got {ends}: the range is empty")
        if not math.isfinite(float(high) - float(low)):
            raise ValueError(f"{self.kind}: the range is wider than any number, got {ends}")
        if "log" in self.kind and low <= 0:
            raise ValueError(f"{self.kind}: a logarithmic range begins above 0, got {ends}")
        return self


class ObjectiveSpec(StrictModel):
    """What the best trial is best in, on the validation split.

    metric: `loss`, the validation loss after the last step, or one of those of `exitwave evaluate` (`rmse_VA`, …).
    direction: by default that of the metric.
    """

    metric: Literal["loss", "rmse_VA", "rmse_V", "rmse_V_fitted", "r2", "psnr", "ssim", "top1"] = "loss"
    direction: Literal["minimize", "maximize"] | None = None

    @property
    def maximize(self) -> bool:
        return self.direction == "maximize" if self.direction else self.metric in MAXIMIZED

    @model_validator(mode="after")
    def _towards_the_better(self) -> ObjectiveSpec:
        if self.direction is not None and (self.direction == "maximize") != (self.metric in MAXIMIZED):
            better = "larger" if self.metric in MAXIMIZED else "smaller"
            raise ValueError(
                f"direction: {self.direction} looks for the worst: of {self.metric} the {better} is better"
            )
        return self


class SamplerSpec(StrictModel):
    """How the next trial's values are chosen: `tpe` learns from the trials before it, after `startup` random ones."""

    name: Literal["tpe", "random"] = "tpe"
    seed: int = Field(default=0, ge=0, lt=2**32)
    startup: int = Field(default=6, ge=1)


class PrunerSpec(StrictModel):
    """When a trial is given up: its validation loss is worse than that of `percentile` % of the finished trials at the
    same point. Not before `startup` trials are finished, nor in a trial's first `warmup` validations.
    """

    name: Literal["percentile", "none"] = "percentile"
    percentile: float = Field(default=50.0, gt=0, lt=100, description="50: the median")
    startup: int = Field(default=4, ge=1)
    warmup: int = Field(default=2, ge=0)


class BudgetSpec(StrictModel):
    """How long each trial trains: so many optimizer steps, or seconds; with so many validations on the way."""

    steps: int | None = Field(default=None, ge=1)
    seconds: float | None = Field(default=None, gt=0)
    validations: int = Field(default=10, ge=1, le=1000)

    @model_validator(mode="after")
    def _one(self) -> BudgetSpec:
        if (self.steps is None) == (self.seconds is None):
            raise ValueError("how long does each trial train? give steps or seconds, one of them")
        if self.steps is not None and self.steps % self.validations:
            raise ValueError(
                f"steps: expected a multiple of validations, so that the last step is validated; got {self.steps} with "
                f"validations: {self.validations}"
            )
        return self


class TuneSpec(StrictModel):
    """A search. `max_seconds` bounds the whole of it: what runs then stops at a checkpoint."""

    trials: int = Field(ge=1, le=100_000)
    space: dict[str, Range] = Field(min_length=1)
    objective: ObjectiveSpec = ObjectiveSpec()
    sampler: SamplerSpec = SamplerSpec()
    pruner: PrunerSpec = PrunerSpec()
    budget: BudgetSpec
    max_seconds: float | None = Field(default=None, gt=0)
