"""Tensors follow the numbers of `tiles.moves`: strips travel, are put in place, and their gradients travel back.

`Fetch` is the one differentiable primitive under every layer: a tile by some bounds becomes the range of places that an
operation needs, whatever that is: a halo from the next rank or from several, less than the tile, nothing at all, or
another rank's tile. What lies outside of the dim is filled with a constant. Backward is its adjoint: each strip's
gradient goes back to the strip's owner, who adds
them up in the order of ranks (so that results never depend on timing).

The functions come in two halves, `begin` and `finish`, so that a caller may compute between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exitwave.train.spatial.links import Axis, Exchange, empty_like_strip
from exitwave.train.spatial.tiles import Moves

__all__ = ["Fetch", "Flight", "assemble", "begin_fetch", "begin_return", "finish_return"]


@dataclass
class Flight:
    """Strips on their way to this rank: `strips[i]` belongs to the i-th receive (or, on the way back, send)."""

    exchange: Exchange
    strips: list[Tensor]

    def land(self) -> list[Tensor]:
        """The strips, when all have come."""
        self.exchange.wait()
        return self.strips


def begin_fetch(x: Tensor, dim: int, move: Moves, axis: Axis) -> Flight:
    """Start sending what others need of `x` (this rank's tile along `dim`) and receiving what it lacks."""
    start = move.own[0]
    sends = [(peer, x.narrow(dim, low - start, high - low).contiguous()) for peer, low, high in move.sends]
    strips = [empty_like_strip(x, dim, high - low) for _, low, high in move.receives]
    peers = [peer for peer, _, _ in move.receives]
    return Flight(axis.exchange(sends, list(zip(peers, strips, strict=True))), strips)


def assemble(x: Tensor, dim: int, move: Moves, strips: list[Tensor], fill: float = 0.0) -> Tensor:
    """What this rank needs, of its tile `x`, the received `strips` and `fill` outside; `x` itself where that is it."""
    if move.nothing:
        return x
    start = move.need[0]
    out = empty_like_strip(x, dim, move.size)
    before, after = move.padding
    if before:
        out.narrow(dim, 0, before).fill_(fill)
    if after:
        out.narrow(dim, move.size - after, after).fill_(fill)
    low, high = move.keep
    if high > low:
        out.narrow(dim, low - start, high - low).copy_(x.narrow(dim, low - move.own[0], high - low))
    for (_, low, high), strip in zip(move.receives, strips, strict=True):
        out.narrow(dim, low - start, high - low).copy_(strip)
    return out


def begin_return(gradient: Tensor, dim: int, move: Moves, axis: Axis, computed: list[Tensor] | None = None) -> Flight:
    """Start sending the gradients of received strips to their owners, and receiving those of what was sent.

    They are cut from `gradient`, unless `computed` already; then `gradient` is any tensor of its shape.
    """
    start = move.need[0]
    if computed is None:
        computed = [gradient.narrow(dim, low - start, high - low).contiguous() for _, low, high in move.receives]
    sends = [(peer, strip) for (peer, _, _), strip in zip(move.receives, computed, strict=True)]
    strips = [empty_like_strip(gradient, dim, high - low) for _, low, high in move.sends]
    peers = [peer for peer, _, _ in move.sends]
    return Flight(axis.exchange(sends, list(zip(peers, strips, strict=True))), strips)


def finish_return(gradient: Tensor, dim: int, move: Moves, strips: list[Tensor]) -> Tensor:
    """The gradient of the tile: that of what was kept, plus the returned strips.

    `gradient` itself, changed in place, where shapes allow: the caller gives it up.
    """
    if move.nothing:
        own = gradient
    elif move.keep == move.own and move.own[1] > move.own[0]:
        own = gradient.narrow(dim, move.own[0] - move.need[0], move.own[1] - move.own[0])
    else:
        own = empty_like_strip(gradient, dim, move.own[1] - move.own[0]).zero_()
        low, high = move.keep
        if high > low:
            kept = gradient.narrow(dim, low - move.need[0], high - low)
            own.narrow(dim, low - move.own[0], high - low).copy_(kept)
    for (_, low, high), strip in zip(move.sends, strips, strict=True):
        own.narrow(dim, low - move.own[0], high - low).add_(strip)
    return own


class Fetch(torch.autograd.Function):
    """(tile, dim, moves, axis, fill) -> the range of places `moves.need` along `dim`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, move: Moves, axis: Axis, fill: float) -> Tensor:
        ctx.how = (dim, move, axis)
        out = assemble(x, dim, move, begin_fetch(x, dim, move, axis).land(), fill)
        return out.view_as(out) if out is x else out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        dim, move, axis = ctx.how
        strips = begin_return(gradient, dim, move, axis).land()
        if move.sends and (move.nothing or move.keep == move.own):
            gradient = gradient.clone()  # autograd may hold it for another use
        return finish_return(gradient, dim, move, strips), None, None, None, None
