"""A potential cut into slices: the different ones, and the order in which the beam meets them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exitwave.simulate.label import slab_weights

__all__ = ["Slices", "once"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Slices:
    """A potential as its different slices and the order in which the beam meets them.

    `different` is (slices of one period, x, y) in V Å; `order` (slices up to the exit plane,) indexes it. `key` names
    the content: equal keys, equal arrays. It is None where the potential will not come again.
    """

    different: NDArray[np.floating]
    order: NDArray[np.intp]
    key: Any = None

    def stacked(self) -> NDArray[np.floating]:
        """Every slice up to the exit plane, (slices, x, y)."""
        return self.different[self.order]

    def up_to(self, exit_plane: int) -> Slices:
        """The first `exit_plane` slices that the beam meets."""
        return replace(self, order=self.order[:exit_plane])

    def projected(self) -> NDArray[np.float64]:
        """The sum of all slices, (x, y) in V Å."""
        return self.slabs(1)[0]

    def slabs(self, count: int) -> NDArray[np.float64]:
        """The sums of slices in `count` slabs of equal thickness, (slabs, x, y) in V Å; a slice may lie in two."""
        weights = slab_weights(len(self.order), count)
        totals = np.zeros((count, *self.different.shape[1:]))
        for index, piece in enumerate(self.different):
            held = weights[:, self.order == index].sum(axis=1)
            for slab in np.flatnonzero(held):
                totals[slab] += held[slab] * piece
        return totals


def once(slices: NDArray[np.floating]) -> Slices:
    """Slices (slices, x, y) that the beam meets one after the other, none of them twice."""
    return Slices(different=slices, order=np.arange(len(slices)))
