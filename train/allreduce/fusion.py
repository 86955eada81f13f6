"""Fusion buffers: the memory in which gradients live and which travels as it is.

All tensor groups of one dtype on one device share one arena, laid out in the order of reduction. Each group is a slice:

    | tensor 0 | tensor 1 | … | control tail: weight, used 0, used 1, … |

A gradient's *view* has the parameter's own shape and strides, so that an optimizer reads it as fast as any other
tensor. The control tail rides in the same collective and costs no message. Summed over the ranks, `weight` says whether
the ranks' shares of the batch make up a whole, and `used i` how many ranks had a gradient for tensor i. Neighbouring
groups are neighbours in memory: those that are reduced together travel as one slice, without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from exitwave.train.allreduce.groups import GroupPlan

__all__ = ["FusionBuffers", "runs_of"]


@dataclass(frozen=True, kw_only=True)
class _Slice:
    """Where one tensor group lies: [start, tail) holds gradients, [tail, stop) the control tail."""

    arena: int
    start: int
    tail: int
    stop: int


class FusionBuffers:
    """The arenas of one plan. `tensors`: name -> parameter (its shape, strides, dtype and device are taken)."""

    def __init__(self, plan: GroupPlan, tensors: Mapping[str, torch.Tensor]) -> None:
        self.views: dict[str, torch.Tensor] = {}
        self._slices: list[_Slice] = []
        kinds = list(dict.fromkeys((group.dtype, group.device) for group in plan.groups))
        ends = [0] * len(kinds)
        for group in plan.groups:
            arena = kinds.index((group.dtype, group.device))
            start = ends[arena]
            tail = start + sum(tensors[name].numel() for name in group.names)
            ends[arena] = tail + 1 + len(group.names)
            self._slices.append(_Slice(arena=arena, start=start, tail=tail, stop=ends[arena]))
        of_kind = {kind: next(g for g in plan.groups if (g.dtype, g.device) == kind) for kind in kinds}
        self.arenas = [
            torch.zeros(end, dtype=(like := tensors[of_kind[kind].names[0]]).dtype, device=like.device)
            for kind, end in zip(kinds, ends, strict=True)
        ]
        for group, place in zip(plan.groups, self._slices, strict=True):
            offset = place.start
            for name in group.names:
                like = tensors[name]
                flat = self.arenas[place.arena][offset : offset + like.numel()]
                self.views[name] = flat.as_strided(like.shape, _dense_strides(like), flat.storage_offset())
                offset += like.numel()

    def arena_of(self, group: int) -> int:
        """The arena in which a tensor group lies."""
        return self._slices[group].arena

    def gradients_of(self, group: int) -> torch.Tensor:
        """The flat slice that holds a group's gradients, one after the other, without the tail."""
        place = self._slices[group]
        return self.arenas[place.arena][place.start : place.tail]

    def parts_of(self, group: int, arena: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """A group's gradients and its control tail, in its own arena or in another one of the same layout."""
        place = self._slices[group]
        arena = self.arenas[place.arena] if arena is None else arena
        return arena[place.start : place.tail], arena[place.tail : place.stop]

    def payload(self, groups: Sequence[int], arena: torch.Tensor | None = None) -> torch.Tensor:
        """The contiguous slice that carries `groups`, neighbours as `runs_of` gives them; `arena` as in `parts_of`."""
        first, last = self._slices[groups[0]], self._slices[groups[-1]]
        return (self.arenas[first.arena] if arena is None else arena)[first.start : last.stop]

    def write_tail(self, group: int, weight: float, used: Sequence[bool] | None = None) -> None:
        """Fill a group's control tail before it travels; `used` None: every tensor has a gradient."""
        place = self._slices[group]
        tail = self.arenas[place.arena][place.tail : place.stop]
        if used is None:
            tail.fill_(1.0)
            tail[0] = weight
        else:
            tail.copy_(torch.tensor([weight, *map(float, used)], dtype=tail.dtype))

    def read_tail(self, group: int) -> tuple[float, list[bool]]:
        """The reduced tail: sum of weights, and for each tensor whether any rank had a gradient."""
        place = self._slices[group]
        weight, *used = self.arenas[place.arena][place.tail : place.stop].tolist()
        return weight, [count > 0.5 for count in used]


def _dense_strides(like: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own strides where it is dense (also channels-last), else those of a contiguous one."""
    return torch.empty_like(like, device="meta").stride()


def runs_of(groups: Sequence[int], arena_of: Sequence[int]) -> list[tuple[int, ...]]:
    """Cut a list of tensor groups, to be reduced in this order, into runs that lie side by side in one arena.

    `arena_of[g]` is the arena of group g. Within an arena groups lie in the order of their index.

    >>> runs_of([0, 1, 3, 2], [0, 0, 0, 0])
    [(0, 1), (3,), (2,)]
    """
    follower: dict[int, int] = {}
    last_in_arena: dict[int, int] = {}
    for group, arena in enumerate(arena_of):
        if arena in last_in_arena:
            follower[last_in_arena[arena]] = group
        last_in_arena[arena] = group
    runs: list[list[int]] = []
    for group in groups:
        if runs and follower.get(runs[-1][-1]) == group:
            runs[-1].append(group)
        else:
            runs.append([group])
    return [tuple(run) for run in runs]
