"""What one pass serves: several samples whose expensive part is the same.

A *pass* is one set of everything that decides on the propagation: crystal, energy, aperture, tilt, scan, phonons. From
it a simulator can take several thicknesses (exit planes of one propagation) and, by way of a scattering matrix, several
aberrations. `fan_out: {thickness_A: 4, defocus_A: 2}` asks for eight samples a pass; all the other parameters are drawn
once for the eight.

1. Sample k belongs to pass k // width, where width is the product of the counts. Within its pass it has a number for
   each parameter; thickness runs fastest, so that neighbours share a propagation wherever they can.
2. A parameter that fans out n-fold takes one value from each of n equally likely parts of its distribution, all at
   the same place of their part, which is drawn once a pass (systematic sampling: Cochran, "Sampling Techniques",
   chapter 8). Values of one pass are thus apart, and each is still a pure function of (seed, structure, sample).
3. Without `fan_out` every pass has one sample, and the draws are those of a campaign that never heard of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, model_validator

from exitwave.ingest.strict_model import StrictModel
from exitwave.simulate.distributions import Choice, Distribution, Linspace, bounds

__all__ = ["FanOut"]

MAX_WIDTH = 1024

Count = Annotated[int, Field(ge=1, le=256)]


class FanOut(StrictModel):
    """How many values of a parameter one pass serves; the fastest first, 1 for a parameter drawn once a pass.

    Only these can: thickness through exit planes, defocus and the other aberrations through the scattering matrix.
    """

    thickness_A: Count = 1
    defocus_A: Count = 1
    C12_A: Count = 1
    phi12_deg: Count = 1
    C21_A: Count = 1
    phi21_deg: Count = 1
    C23_A: Count = 1
    phi23_deg: Count = 1
    C30_A: Count = 1
    C32_A: Count = 1
    phi32_deg: Count = 1
    C34_A: Count = 1
    phi34_deg: Count = 1
    C50_A: Count = 1

    @model_validator(mode="before")
    @classmethod
    def _can_fan_out(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for name in value:
                if name not in cls.model_fields:
                    raise ValueError(
                        f"{name} cannot fan out, one pass serves a single value of it; "
                        f"those that can: {', '.join(cls.model_fields)}"
                    )
        return value

    @model_validator(mode="after")
    def _bounded(self) -> FanOut:
        if self.width > MAX_WIDTH:
            raise ValueError(f"{self.width} samples a pass, at most {MAX_WIDTH} expected")
        return self

    @property
    def width(self) -> int:
        """Samples of one pass."""
        return math.prod(self.counts().values())

    def counts(self) -> dict[str, int]:
        """Parameter -> values a pass, the fastest first, only those above one."""
        named = ((name, int(getattr(self, name))) for name in type(self).model_fields)
        return {name: count for name, count in named if count > 1}

    def numbers(self, sample_index: int) -> tuple[int, dict[str, tuple[int, int]]]:
        """The pass of a sample, and for each parameter that fans out its (number, count) within the pass."""
        rest = sample_index
        found: dict[str, tuple[int, int]] = {}
        for name, count in self.counts().items():
            rest, number = divmod(rest, count)
            found[name] = (number, count)
        return rest, found

    def conflicts(self, drawn: dict[str, Distribution]) -> Iterator[str]:
        """What is wrong with fanning out these distributions: too few different values."""
        for name, count in self.counts().items():
            distribution = drawn[name]
            low, high = bounds(distribution)
            values = 1 if low == high else None
            if isinstance(distribution, Choice):
                values = len(set(distribution.choice))
            elif isinstance(distribution, Linspace):
                values = distribution.linspace[2] if low != high else 1
            if values is not None and values < count:
                yield (
                    f"fan_out.{name}: {count} different values a pass asked, sampling.{name} has {values}; "
                    "give it a distribution with as many"
                )
