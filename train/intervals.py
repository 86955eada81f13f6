"""How sure a score is: intervals over held-out groups, since samples of one material are no independent trials.

A group is a prototype where the test set is `new_prototype`, else a structure. Groups are drawn with replacement and
the score is taken anew (Efron and Tibshirani, "An Introduction to the Bootstrap", chapter 13, percentile interval); the
draws are seeded, so that an evaluation says the same twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FEW_GROUPS", "groups_of", "intervals"]

# With fewer held-out prototypes a score is an anecdote about these, no estimate for others.
FEW_GROUPS = 5
_DRAWS = 1000
_LEVEL = 0.95


def groups_of(params: np.ndarray[Any, Any], split: str) -> tuple[str, npt.NDArray[np.int64]]:
    """What a group is (`prototype` or `structure`), and the group of each sample (N,)."""
    kind = "prototype" if split == "new_prototype" else "structure"
    column = params["prototype_group"] if kind == "prototype" else params["structure"]
    return kind, np.unique(column, return_inverse=True)[1].astype(np.int64)


def intervals(
    squared_error: Mapping[str, npt.NDArray[np.floating[Any]]], group: npt.NDArray[np.int64]
) -> dict[str, list[float] | None]:
    """95 % interval of the root mean square error of each method; None where there is a single group.

    `squared_error`: method -> mean squared error of each sample (N,); `group` (N,).
    """
    count = int(group.max()) + 1
    if count < 2:
        return dict.fromkeys(squared_error)
    size = np.bincount(group, minlength=count).astype(float)
    drawn = np.random.default_rng(0).integers(0, count, size=(_DRAWS, count))
    tail = 50.0 * (1.0 - _LEVEL)
    found: dict[str, list[float] | None] = {}
    for method, errors in squared_error.items():
        total = np.bincount(group, weights=errors, minlength=count)
        scores = np.sqrt(total[drawn].sum(1) / size[drawn].sum(1))
        low, high = np.percentile(scores, [tail, 100.0 - tail])
        found[method] = [float(low), float(high)]
    return found
