"""How a physical parameter of a sample gets its value: a constant, or a draw that is the same everywhere.

A draw is a pure function of four words: the campaign's seed, the key of the structure, the index of the sample within
that structure and the name of the parameter. They are hashed (BLAKE2b) into the state of a SplitMix64 generator, so
that no draw depends on any other: neither the order of structures, nor the number of workers, nor a parameter that
somebody adds later changes the value of this one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from statistics import NormalDist
from typing import Any

from pydantic import BaseModel, Field, model_validator

from exitwave.ingest.mixing import GOLDEN, MASK64, mix64
from exitwave.ingest.strict_model import StrictModel

__all__ = [
    "Choice",
    "Distribution",
    "Linspace",
    "LogUniform",
    "Normal",
    "Uniform",
    "bounds",
    "draw",
    "parse",
    "uniform_stream",
]


def uniform_stream(seed: int, structure_key: str, sample: int, name: str) -> Iterator[float]:
    """Endless numbers in [0, 1), keyed by (seed, structure, sample, name); 53 bits each.

    SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    words = f"{seed}\x00{structure_key}\x00{sample}\x00{name}".encode()
    state = int.from_bytes(hashlib.blake2b(words, digest_size=8, person=b"exitwave-draw-1").digest(), "little")
    while True:
        state = (state + GOLDEN) & MASK64
        yield (mix64(state) >> 11) * 2.0**-53


class Choice(StrictModel):
    """One of the values, each as likely as any other."""

    choice: tuple[float, ...] = Field(min_length=1)

    def value(self, u: float, index: int) -> float:
        return self.choice[min(int(u * len(self.choice)), len(self.choice) - 1)]

    def limits(self) -> tuple[float, float]:
        return min(self.choice), max(self.choice)


class Uniform(StrictModel):
    """Evenly between low and high."""

    uniform: tuple[float, float]

    @model_validator(mode="after")
    def _ordered(self) -> Uniform:
        if self.uniform[0] > self.uniform[1]:
            raise ValueError(f"uniform: [low, high] with low <= high expected, came {list(self.uniform)}")
        return self

    def value(self, u: float, index: int) -> float:
        low, high = self.uniform
        return low + (high - low) * u

    def limits(self) -> tuple[float, float]:
        return self.uniform


class LogUniform(StrictModel):
    """Evenly in the logarithm between low and high, both positive."""

    loguniform: tuple[float, float]

    @model_validator(mode="after")
    def _ordered(self) -> LogUniform:
        if not 0 < self.loguniform[0] <= self.loguniform[1]:
            raise ValueError(f"loguniform: 0 < low <= high expected, came {list(self.loguniform)}")
        return self

    def value(self, u: float, index: int) -> float:
        low, high = self.loguniform
        return low * math.exp(u * math.log(high / low))

    def limits(self) -> tuple[float, float]:
        return self.loguniform


class Normal(StrictModel):
    """Gaussian with mean and standard deviation, cut at `limit` deviations (4 unless told)."""

    normal: tuple[float, float]
    limit: float = Field(default=4.0, gt=0, le=8)

    @model_validator(mode="after")
    def _positive(self) -> Normal:
        if self.normal[1] < 0:
            raise ValueError(f"normal: [mean, deviation] with deviation >= 0 expected, came {list(self.normal)}")
        return self

    def value(self, u: float, index: int) -> float:
        mean, deviation = self.normal
        standard = NormalDist()
        tail = standard.cdf(-self.limit)  # the draw is taken between the two tails, so that no redraw is needed
        return mean + deviation * standard.inv_cdf(tail + (1.0 - 2.0 * tail) * u)

    def limits(self) -> tuple[float, float]:
        mean, deviation = self.normal
        return mean - self.limit * deviation, mean + self.limit * deviation


class Linspace(StrictModel):
    """`num` values from start to stop inclusive; sample k takes number k modulo num: nothing is left to chance."""

    linspace: tuple[float, float, int]

    @model_validator(mode="after")
    def _enough(self) -> Linspace:
        if self.linspace[2] < 1:
            raise ValueError(f"linspace: [start, stop, num] with num >= 1 expected, came {list(self.linspace)}")
        return self

    def value(self, u: float, index: int) -> float:
        start, stop, num = self.linspace
        return start if num == 1 else start + (stop - start) * (index % num) / (num - 1)

    def limits(self) -> tuple[float, float]:
        start, stop, num = self.linspace
        return (start, start) if num == 1 else (min(start, stop), max(start, stop))


def _kind(value: Any) -> str:
    """Which of the forms a value has; chosen by its key, so that an error speaks of that form only."""
    if isinstance(value, BaseModel):
        return type(value).__name__.lower()
    if isinstance(value, dict):
        for name in ("choice", "uniform", "loguniform", "normal", "linspace"):
            if name in value:
                return name
        raise ValueError(
            "a number or one of {choice: [...]}, {uniform: [low, high]}, {loguniform: [low, high]}, "
            f"{{normal: [mean, deviation]}}, {{linspace: [start, stop, num]}} expected, came {value!r}"
        )
    return "constant"


Distribution = float | Choice | Uniform | LogUniform | Normal | Linspace


def parse(value: Any) -> Distribution:
    """A number or a mapping as written in a campaign -> a distribution. Raises ValueError naming the forms."""
    kind = _kind(value)
    if kind == "constant":
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"a number or a distribution expected, came {value!r}")
        if not math.isfinite(value):
            raise ValueError(f"a finite number expected, came {value!r}")
        return float(value)
    models: dict[str, type[StrictModel]] = {
        "choice": Choice,
        "uniform": Uniform,
        "loguniform": LogUniform,
        "normal": Normal,
        "linspace": Linspace,
    }
    if isinstance(value, BaseModel):
        return value  # type: ignore[return-value]
    drawn: Distribution = models[kind].model_validate(value)  # type: ignore[assignment]
    return drawn


def draw(
    distribution: Distribution,
    *,
    seed: int,
    structure_key: str,
    sample: int,
    name: str,
    part: tuple[int, int] = (0, 1),
) -> float:
    """The value of parameter `name` in draw number `sample` of a structure.

    `part` (i, n) asks for the i-th of n values that this draw gives: one from each of n equally likely parts.
    """
    if isinstance(distribution, float | int):
        return float(distribution)
    number, count = part
    u = next(uniform_stream(seed, structure_key, sample, name))
    return float(distribution.value((number + u) / count, sample * count + number))


def bounds(distribution: Distribution) -> tuple[float, float]:
    """The least and the largest value that can be drawn."""
    if isinstance(distribution, float | int):
        return float(distribution), float(distribution)
    return distribution.limits()
