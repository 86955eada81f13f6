"""Which samples to train on while more of them arrive: a reservoir against the bias towards the early ones. Pure.

The rules are those of Melissa (Meyer et al., "Training deep surrogate models with large scale online learning",
arXiv 2306.16133; arXiv 2309.16743): (1) below the capacity, what arrives is appended. (2) When full, it overwrites a
random one of those that were *seen*, that is drawn at least once: nothing is lost unused. (3) With none seen, it is
refused: the producers wait. (4) From the watermark on, batches are drawn uniformly; below it, the trainer waits.

All choices come from (seed, number of the choice), so that the same arrivals and draws in the same order give the same
reservoir. An item is any number; here, that of a sample by its arrival.
"""

from __future__ import annotations

from collections import Counter

from exitwave.ingest.errors import UsageError
from exitwave.ingest.mixing import GOLDEN, mix64

__all__ = ["Reservoir"]


class Reservoir:
    """At most `capacity` items; UsageError unless 1 <= watermark <= capacity."""

    def __init__(self, *, capacity: int, watermark: int, seed: int) -> None:
        if not 1 <= watermark <= capacity:
            raise UsageError(
                f"reservoir: watermark {watermark}, capacity {capacity}; expected 1 <= watermark <= capacity"
            )
        self.capacity = capacity
        self.watermark = watermark
        self._key = mix64(seed + GOLDEN)
        self._choices = 0
        self.items: list[int] = []
        self._uses: list[int] = []  # of the item in each slot
        self._seen: list[int] = []  # slots, and where each stands in this list
        self._place: dict[int, int] = {}
        self._gone: Counter[int] = Counter()  # uses of the items that were overwritten

    def _choose(self, n: int) -> int:
        self._choices += 1
        return mix64(self._key + self._choices * GOLDEN) % n

    def offer(self, item: int) -> bool:
        """Takes an item in; False when it must wait, since all that is here has yet to be seen."""
        if len(self.items) < self.capacity:
            self.items.append(item)
            self._uses.append(0)
            return True
        if not self._seen:
            return False
        at = self._choose(len(self._seen))
        slot, last = self._seen[at], self._seen.pop()
        if last != slot:
            self._seen[at], self._place[last] = last, at
        del self._place[slot]
        self._gone[self._uses[slot]] += 1
        self.items[slot], self._uses[slot] = item, 0
        return True

    def ready(self, *, all_arrived: bool = False) -> bool:
        """Whether batches may be drawn: past the watermark, or no more will come."""
        return len(self.items) >= (1 if all_arrived else self.watermark)

    def draw(self, n: int) -> list[int]:
        """A batch, uniformly: different items, unless there are fewer than `n`. ValueError from an empty reservoir."""
        if not self.items:
            raise ValueError("nothing to draw from")
        slots: list[int] = []
        taken: set[int] = set()
        for _ in range(n):
            slot = self._choose(len(self.items))
            while slot in taken:
                slot = self._choose(len(self.items))
            slots.append(slot)
            taken.add(slot)
            if len(taken) == len(self.items):
                taken.clear()
        for slot in slots:
            self._uses[slot] += 1
            if slot not in self._place:
                self._place[slot] = len(self._seen)
                self._seen.append(slot)
        return [self.items[slot] for slot in slots]

    def reuse(self) -> dict[int, int]:
        """How many items were drawn how often: uses -> items, of those here and those overwritten."""
        return dict(sorted((self._gone + Counter(self._uses)).items()))
