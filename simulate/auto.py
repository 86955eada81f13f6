"""`simulator: auto`: of the fast routes, for each pass the one that is predicted to be cheapest; see route.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from exitwave.simulate.bloch import BlochSimulator
from exitwave.simulate.multislice import FastSimulator
from exitwave.simulate.route import route
from exitwave.simulate.slices import Slices
from exitwave.simulate.smatrix import SMatrixSimulator
from exitwave.simulate.tasks import SampleSpec

__all__ = ["AutoSimulator"]


class AutoSimulator(BlochSimulator):
    """The same choice, and so the same bits, on any machine: it follows from the specification alone."""

    name = "auto"

    def route(self, spec: SampleSpec) -> str:
        return route(spec)

    def pass_patterns(self, members: Sequence[SampleSpec], slices: Slices) -> list[NDArray[np.float64]]:
        taken = route(members[0])
        for kind in (FastSimulator, SMatrixSimulator, BlochSimulator):
            if kind.name == taken:
                return kind.pass_patterns(self, members, slices)
        raise RuntimeError(f"no simulator takes the route {taken!r}")
