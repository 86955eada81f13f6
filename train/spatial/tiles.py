"""Tiles and halos as numbers: who owns what of a dim that is split over ranks, and what must travel (pure functions).

A dim of N places is split by *bounds* 0 = b[0] <= b[1] <= … <= b[R] = N: rank r owns [b[r], b[r+1]). Tiles may be of
any size, also empty. The arithmetic is driven by outputs:

1. A window of k places, d apart, moved by s over N places with p places of padding on both sides makes
   M = floor((N + 2p - ke)/s) + 1 outputs, ke = d(k-1) + 1 (`Window.outputs`).
2. The owner of inputs [a, b) owns outputs [A, B), A = ceil(a/s), but the first A is 0 and the last B is M
   (`Window.output_bounds`): an output lies where the first place of its window, padding left aside, lies.
3. For them it needs inputs [A·s - p, (B-1)·s - p + ke) (`Window.needs`): places of others (the halo, of one neighbour
   or of several), places outside of [0, N) (padding), and not always all of its own (a trim).
4. A rank with B <= A has no output. It needs nothing and still sends what others need.
5. Transposed: outputs [A, B) need inputs ceil((A + p - d(k-1))/s) .. floor((B-1 + p)/s) (`TransposedWindow.needs`).

`moves` turns bounds and needs into the messages of one rank. What a rank sends is what the others receive, since all
ranks compute both from the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from exitwave.ingest.errors import UsageError

__all__ = ["Bounds", "Moves", "Piece", "Range", "TransposedWindow", "Window", "even_bounds", "moves", "scaled_bounds"]

Range = tuple[int, int]  # [low, high)
Bounds = tuple[int, ...]


def even_bounds(n: int, parts: int, multiple_of: int = 1) -> Bounds:
    """Bounds of `n` places over `parts` ranks, as even as possible, all but the last multiples of `multiple_of`.

    Earlier tiles are the larger ones; where there are fewer multiples than ranks, the last tiles are empty.
    Raises UsageError for a negative `n`, or `parts` or `multiple_of` below one.
    """
    if n < 0 or parts < 1 or multiple_of < 1:
        raise UsageError(f"tiles: expected n >= 0, parts >= 1, multiple_of >= 1, got {n}, {parts}, {multiple_of}")
    blocks = -(-n // multiple_of)
    small, larger = divmod(blocks, parts)
    starts = [r * small + min(r, larger) for r in range(parts + 1)]
    return tuple(min(n, start * multiple_of) for start in starts)


def scaled_bounds(bounds: Bounds, outputs: int) -> Bounds:
    """Bounds of `outputs` places in the proportions of `bounds`: what a resize makes of tiles."""
    n = max(bounds[-1], 1)
    return (0, *(-(-b * outputs // n) for b in bounds[1:-1]), outputs)


@dataclass(frozen=True, kw_only=True)
class Window:
    """A convolution or pooling along one dim. `before` and `after` are the padding; they differ for "same" only."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0
    ceil_mode: bool = False

    @property
    def extent(self) -> int:
        """ke: places from the first to the last of a window."""
        return self.dilation * (self.kernel - 1) + 1

    def outputs(self, n: int) -> int:
        """M. Zero or less: the window does not fit."""
        room = n + self.before + self.after - self.extent
        m = (room + (self.stride - 1 if self.ceil_mode else 0)) // self.stride + 1
        # with ceil_mode a last window may hang over the end, if it begins inside of the input or its left padding
        if self.ceil_mode and (m - 1) * self.stride >= n + self.before:
            m -= 1
        return max(m, 0)

    def output_bounds(self, bounds: Bounds) -> Bounds:
        """Whose the outputs are."""
        m = self.outputs(bounds[-1])
        return (0, *(min(m, -(-a // self.stride)) for a in bounds[1:-1]), m)

    def need(self, outputs: Range) -> Range:
        """Inputs that outputs [A, B) need, places of padding included; (0, 0) where there are no outputs."""
        first, end = outputs
        if end <= first:
            return (0, 0)
        return (first * self.stride - self.before, (end - 1) * self.stride - self.before + self.extent)

    def needs(self, output_bounds: Bounds) -> tuple[Range, ...]:
        """`need` of every rank."""
        return tuple(self.need(pair) for pair in _pairs(output_bounds))

    def inside(self, held: Range) -> Range:
        """The outputs that inputs [low, high) alone suffice for; empty (x, x) where there are none."""
        low, high = held
        first = -(-(low + self.before) // self.stride)
        end = (high + self.before - self.extent) // self.stride + 1
        return (first, max(first, end))


@dataclass(frozen=True, kw_only=True)
class TransposedWindow:
    """A transposed convolution along one dim: M = (N-1)s - 2p + d(k-1) + output_padding + 1."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    padding: int = 0
    output_padding: int = 0

    @property
    def reach(self) -> int:
        """Places that one input reaches beyond its first output: d(k-1)."""
        return self.dilation * (self.kernel - 1)

    def outputs(self, n: int) -> int:
        """M. Zero or less: nothing is left of the padding's crop."""
        return (n - 1) * self.stride - 2 * self.padding + self.reach + self.output_padding + 1

    def output_bounds(self, bounds: Bounds) -> Bounds:
        """Whose the outputs are: input a begins those of its owner at a·s, so that k = s tiles meet exactly."""
        m = self.outputs(bounds[-1])
        return (0, *(min(m, a * self.stride) for a in bounds[1:-1]), m)

    def need(self, outputs: Range, n: int) -> Range:
        """Inputs [low, high) within [0, n) for outputs [A, B), never empty unless there are no outputs.

        low is at most the input whose first output is A or before it, so that what the local operation makes begins at
        A or before; an output that no input reaches (stride over kernel, output_padding) is then still within it.
        """
        first, end = outputs
        if end <= first:
            return (0, 0)
        low = -(-(first + self.padding - self.reach) // self.stride)
        low = min(max(0, min(low, (first + self.padding) // self.stride)), n - 1)
        high = min(n, (end - 1 + self.padding) // self.stride + 1)
        return (low, max(high, low + 1))

    def needs(self, output_bounds: Bounds, n: int) -> tuple[Range, ...]:
        """`need` of every rank."""
        return tuple(self.need(pair, n) for pair in _pairs(output_bounds))

    def crop(self, outputs: Range, held: Range) -> tuple[int, int]:
        """(places to cut before A, local output_padding) when the local operation runs on inputs `held`, unpadded.

        It makes outputs low·s - p .. (high-1)·s - p + d(k-1); output_padding extends that to B - 1 where it ends early.
        """
        first, end = outputs
        begins = held[0] * self.stride - self.padding
        ends = (held[1] - 1) * self.stride - self.padding + self.reach + 1
        return (first - begins, max(0, end - ends))


Piece = tuple[int, int, int]  # (peer, low, high)


@dataclass(frozen=True, kw_only=True)
class Moves:
    """What one rank does so that it holds `need` after it held `own`: ranges in places of the whole dim.

    `sends` and `receives` are in the order of peers; a receive is never larger than the peer's tile.
    """

    n: int
    own: Range
    need: Range
    keep: Range  # what it needs of its own, (x, x) if nothing
    sends: tuple[Piece, ...]
    receives: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Places that it holds afterwards."""
        return self.need[1] - self.need[0]

    @property
    def nothing(self) -> bool:
        """True when this rank already holds exactly what it needs (others may still want something of it)."""
        return self.need == self.own

    @property
    def padding(self) -> tuple[int, int]:
        """Places before 0 and from n on that it needs."""
        low, high = self.need
        return (max(0, min(high, 0) - low), max(0, high - max(low, self.n)))


def moves(bounds: Bounds, needs: Sequence[Range], rank: int) -> Moves:
    """The messages of rank `rank` when tiles by `bounds` are to become ranges by `needs` (one a rank)."""
    tiles = _pairs(bounds)
    own, need = tiles[rank], needs[rank]
    others = [peer for peer in range(len(tiles)) if peer != rank]
    return Moves(
        n=bounds[-1],
        own=own,
        need=need,
        keep=_overlap(own, need),
        sends=_pieces((peer, _overlap(own, needs[peer])) for peer in others),
        receives=_pieces((peer, _overlap(tiles[peer], need)) for peer in others),
    )


def _pairs(bounds: Bounds) -> tuple[Range, ...]:
    return tuple(pairwise(bounds))


def _overlap(one: Range, other: Range) -> Range:
    low = max(one[0], other[0])
    return (low, max(low, min(one[1], other[1])))


def _pieces(found: Iterable[tuple[int, Range]]) -> tuple[Piece, ...]:
    return tuple((peer, low, high) for peer, (low, high) in found if high > low)
