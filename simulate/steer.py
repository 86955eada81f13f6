"""Where the next samples of a campaign are worth most: the trainer's errors -> how many samples of each region.

Pure functions: equal errors, seed and budget give an equal plan, on any machine.

1. A *region* is a cell of a grid: structures, and bins of parameters. Under the campaign's own distributions it has a
   `natural` share, and its samples a cost.
2. What a network that was trained so far gets wrong is measured on samples that are drawn as the campaign draws them
   and that no network is trained on. A cell holds few of them, so its error is drawn towards a prior: the product of
   the margins, structure by bin, over the mean, as `PSEUDO` further samples would. Errors are judged relative to
   their mean, by a power below one (`sharpness`). Where an error falls with a power b of the number n of samples,
   a n^-b, the sum over cells is least for n proportional to a^(1/(1+b)): 2/3 for b = 1/2, as in Neyman's allocation
   (Cochran, "Sampling Techniques", chapter 5), and within the 0.4 to 0.7 of prioritized replay (Schaul et al.,
   arXiv:1511.05952).
3. A cell's share is `(1 - u) natural x importance + u natural`: the importance is at most `most`, and the part u is
   uniform, so that no region starves, whatever the errors say. A cell that nothing is known of keeps its natural share.
4. Shares become whole numbers by one keyed draw (systematic sampling, Cochran, chapter 8): each is within one of
   what it should be, and their sum is exact.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exitwave.simulate.distributions import uniform_stream

__all__ = ["PSEUDO", "Axis", "Cell", "Tally", "quotas", "samples_for", "shares", "smoothed", "tallies"]

Cell = tuple[int, ...]
# Samples that the prior of a cell counts as.
PSEUDO = 4.0


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One direction of the grid of regions: bins between `edges` (the inner ones), or one bin for each structure."""

    name: str
    labels: tuple[str, ...]
    edges: tuple[float, ...] = ()

    def bin(self, value: float) -> int:
        """The bin of a value: the lower edge belongs to it. Structures are counted from 0."""
        if self.name == "structure":
            return int(value)
        return bisect_right(self.edges, value)


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Errors of the samples of one cell: how many, and their sum."""

    n: int
    total: float


def tallies(judged: Sequence[tuple[Cell, float]]) -> dict[Cell, Tally]:
    """Errors by cell. ValueError for one that is not a number of at least 0: a plan must not hang on it."""
    found: dict[Cell, Tally] = {}
    for cell, error in judged:
        if not (math.isfinite(error) and error >= 0):
            raise ValueError(f"an error of at least 0 expected in {cell}, came {error}")
        before = found.get(cell, Tally(n=0, total=0.0))
        found[cell] = Tally(n=before.n + 1, total=before.total + error)
    return found


def smoothed(cells: Sequence[Cell], errors: Mapping[Cell, Tally]) -> dict[Cell, float | None]:
    """The error of each cell, relative to the mean of all; None where nothing is known of any of its bins."""
    n, total = sum(t.n for t in errors.values()), math.fsum(t.total for t in errors.values())
    if n == 0 or total == 0:
        return dict.fromkeys(cells)
    mean = total / n
    margins: dict[tuple[int, int], Tally] = {}
    for cell in sorted(errors):
        for axis, number in enumerate(cell):
            before = margins.get((axis, number), Tally(n=0, total=0.0))
            margins[axis, number] = Tally(n=before.n + errors[cell].n, total=before.total + errors[cell].total)
    found: dict[Cell, float | None] = {}
    for cell in cells:
        known = [margins[key] for key in enumerate(cell) if key in margins]
        if not known:
            found[cell] = None
            continue
        prior = math.prod((t.total / mean + PSEUDO) / (t.n + PSEUDO) for t in known)
        here = errors.get(cell, Tally(n=0, total=0.0))
        found[cell] = (here.total / mean + PSEUDO * prior) / (here.n + PSEUDO)
    return found


def shares(
    natural: Mapping[Cell, float],
    errors: Mapping[Cell, Tally],
    *,
    uniform_share: float,
    sharpness: float,
    most: float,
) -> dict[Cell, float]:
    """The part of the next samples that each cell gets; they sum to 1. See the module's text.

    Args:
        natural: the part of samples that falls into each cell as the campaign draws them; sums to 1.
        uniform_share: 0..1, the part that is drawn as the campaign draws.
        sharpness: the power of the relative error.
        most: at least 1; how many times its natural share a cell may get of the rest.
    """
    cells = sorted(natural)
    relative = smoothed(cells, errors)
    weight = {c: max(r, 1e-9) ** sharpness for c in cells if (r := relative[c]) is not None}
    mass = math.fsum(natural[c] for c in weight)
    scale = _scale(natural, weight, mass, most)
    made = {}
    for cell in cells:
        steered = natural[cell] * min(most, scale * weight[cell]) if cell in weight else natural[cell]
        made[cell] = (1 - uniform_share) * steered + uniform_share * natural[cell]
    whole = math.fsum(made.values())
    return {cell: share / whole for cell, share in made.items()}


def _scale(natural: Mapping[Cell, float], weight: Mapping[Cell, float], mass: float, most: float) -> float:
    """What weights are multiplied with so that, none above `most`, they keep the mass of their cells: by bisection."""
    low, high = -60.0, 60.0
    for _ in range(80):
        middle = (low + high) / 2
        held = math.fsum(natural[c] * min(most, math.exp(middle) * w) for c, w in weight.items())
        low, high = (middle, high) if held < mass else (low, middle)
    return math.exp((low + high) / 2)


def samples_for(budget_s: float, share: Mapping[Cell, float], cost_s: Mapping[Cell, float]) -> int:
    """How many samples of those shares `budget_s` core-seconds pay for; at least one."""
    each = math.fsum(share[cell] * cost_s[cell] for cell in share)
    return max(1, round(budget_s / each))


def quotas(share: Mapping[Cell, float], total: int, *, seed: int, number: int) -> dict[Cell, int]:
    """Whole samples of each cell in round `number`: exactly `total` in all, each within one of its share of it."""
    start = next(uniform_stream(seed, "steer", number, "quotas"))
    cells = sorted(share)
    made: dict[Cell, int] = {}
    reached, before = 0.0, 0
    for k, cell in enumerate(cells):
        reached += share[cell]
        end = total if k == len(cells) - 1 else min(total, math.floor(reached * total + start))
        made[cell] = end - before
        before = end
    return made
