"""The seam between a campaign and the physics: anything that turns sample specifications into samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from exitwave.ingest.errors import UsageError
from exitwave.simulate.tasks import SampleSpec

__all__ = [
    "MOST_EXCESS",
    "Sample",
    "Simulator",
    "UnphysicalError",
    "get_simulator",
    "prepared_simulator",
    "resolve_simulator",
    "simulate_sample",
    "simulator_names",
]


# Of the incident beam, what a pattern may hold beyond all of it.
MOST_EXCESS = 1e-5


class UnphysicalError(UsageError):
    """A simulation gave what cannot be, for its configuration is too coarse; nothing of it is kept."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a simulation makes: a row of `/params` and one array per field of the recipe."""

    uid: int
    params: np.void
    arrays: dict[str, np.ndarray]


class Simulator(Protocol):
    """`name` and `version` go into shards and manifest. `simulate` yields one sample per specification, in order."""

    name: str
    version: str

    def simulate(self, specs: Sequence[SampleSpec]) -> Iterator[Sample]: ...


def simulator_names() -> tuple[str, ...]:
    return ("auto", "fast", "smatrix", "bloch", "abtem", "weak-phase")


def resolve_simulator(name: str) -> str:
    """The name that stands in plans, shards and hashes. `auto` is one of its own: it chooses for each pass among
    the fast routes, from the specification alone (route.py), never from the machine."""
    return name


def get_simulator(name: str = "auto") -> Simulator:
    """A simulator by name. Raises UsageError naming those that exist."""
    if name == "auto":
        from exitwave.simulate.auto import AutoSimulator

        return AutoSimulator()
    if name == "fast":
        from exitwave.simulate.multislice import FastSimulator

        return FastSimulator()
    if name == "smatrix":
        from exitwave.simulate.smatrix import SMatrixSimulator

        return SMatrixSimulator()
    if name == "bloch":
        from exitwave.simulate.bloch import BlochSimulator

        return BlochSimulator()
    if name == "abtem":
        from exitwave.simulate.abtem_backend import AbtemSimulator

        return AbtemSimulator()
    if name == "weak-phase":
        from exitwave.simulate.weak_phase import WeakPhaseSimulator

        return WeakPhaseSimulator()
    raise UsageError(f"simulator {name!r} does not exist; there are {', '.join(simulator_names())}")


_prepared: dict[str, Simulator] = {}


def prepared_simulator(name: str) -> Simulator:
    """The simulator of this process by that name; the first call imports and configures it, for one thread."""
    if name not in _prepared:
        from exitwave.simulate.threads import limit_threads

        _prepared[name] = get_simulator(name)
        limit_threads()
    return _prepared[name]


def simulate_sample(spec: SampleSpec, *, simulator: str = "auto") -> Sample:
    """One sample, in this process, without a cluster."""
    return next(iter(get_simulator(simulator).simulate([spec])))
