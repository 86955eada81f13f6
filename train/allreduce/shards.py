"""How a tensor group is dealt out to the ranks in `overlap="step"`: rows of gradients, rows of parameters, shares.

A group's tensors lie one after the other in a flat vector, each in the order of its own memory (so a channels-last
tensor stays one). The vector is cut into equal rows, row r for rank r, wherever the cuts fall. Twice:

    parameters   (ranks, n)          the module's parameters *are* views of it, so a gather needs no copy
    gradients    (ranks, n + tail)   what is reduce-scattered; each row carries a control tail (as in `fusion`):
                                     the sum of weights, and for each tensor in the row how many ranks had a gradient

A *share* is what an optimizer acts on: a run of tensors, or parts of them, within this rank's row that belong to one
parameter group of the optimizer. It is one flat tensor, for the fewest calls; when one of its tensors turns out to be
unused in some step, it is split into a share for each tensor, since an optimizer skips what has no gradient.

`cut_rows` is pure; `GroupShards` holds the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn

from exitwave.ingest.errors import UsageError

__all__ = ["GroupShards", "Piece", "Share", "cut_rows"]

_ALIGN = 16  # elements: rows begin where vector registers like it
_LARGE_BYTES = 32 * 2**10  # as in `reducer`


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Elements [start, stop) of tensor `member` (its place in the group), at `offset` of row `row`."""

    member: int
    start: int
    stop: int
    row: int
    offset: int


def cut_rows(sizes: Sequence[int], ranks: int) -> tuple[int, list[Piece]]:
    """The length of a row, and the pieces of the tensors of `sizes` elements, in order.

    >>> length, pieces = cut_rows([20, 20], 2)
    >>> length, [(p.member, p.start, p.stop, p.row, p.offset) for p in pieces]
    (32, [(0, 0, 20, 0, 0), (1, 0, 12, 0, 20), (1, 12, 20, 1, 0)])
    """
    length = -(-sum(sizes) // (ranks * _ALIGN)) * _ALIGN
    pieces = []
    begin = 0
    for member, size in enumerate(sizes):
        done = 0
        while done < size:
            row, offset = divmod(begin + done, length)
            count = min(size - done, length - offset)
            pieces.append(Piece(member=member, start=done, stop=done + count, row=row, offset=offset))
            done += count
        begin += size
    return length, pieces


@dataclass(kw_only=True)
class Share:
    """What the optimizer sees: `parameter` is a slice of this rank's row; `pieces` say which tensors it holds."""

    parameter: nn.Parameter
    gradient: torch.Tensor
    pieces: tuple[Piece, ...]
    param_group: int  # of the optimizer

    @property
    def begin(self) -> int:
        """Where it begins in the row."""
        return self.pieces[0].offset


class GroupShards:
    """The memory of one tensor group. `members`: its parameters; `param_groups`: of the optimizer, one for each.

    The parameters' data move into the rows.
    """

    def __init__(self, members: Sequence[nn.Parameter], param_groups: Sequence[int], *, rank: int, size: int) -> None:
        self.members = list(members)
        self.rank = rank
        like = members[0]
        self.length, self.pieces = cut_rows([p.numel() for p in members], size)
        self._of_member: list[list[Piece]] = [[] for _ in members]
        self._of_row: list[list[Piece]] = [[] for _ in range(size)]
        for piece in self.pieces:
            self._of_member[piece.member].append(piece)
            self._of_row[piece.row].append(piece)
        tail = 1 + max(len(row) for row in self._of_row)
        with torch.no_grad():
            self.parameters = like.new_zeros((size, self.length))
            self.gradients = like.new_zeros((size, self.length + tail))
            self._views: list[torch.Tensor | None] = []  # a member's place among the gradients; None where it is cut
            begin = 0
            for parameter, pieces in zip(self.members, self._of_member, strict=True):
                flat = self.parameters.view(-1)[begin : begin + parameter.numel()]
                place = _shaped(flat, parameter)
                place.copy_(parameter)
                parameter.data = place
                begin += parameter.numel()
                self._views.append(
                    _shaped(self._row_slice(self.gradients, pieces[0]), parameter) if len(pieces) == 1 else None
                )
        self.batches, self.single = self._cut_batches()
        self._all_used = [True] * len(members)
        self.shares = [
            self._share(tuple(run), group)
            for group, run in groupby(self._of_row[rank], key=lambda piece: param_groups[piece.member])
        ]

    @property
    def nbytes(self) -> int:
        """Of the parameters."""
        return self.parameters.numel() * self.parameters.element_size()

    def _row_slice(self, rows: torch.Tensor, piece: Piece) -> torch.Tensor:
        return rows[piece.row, piece.offset : piece.offset + piece.stop - piece.start]

    def _cut_batches(self) -> tuple[list[tuple[list[int], torch.Tensor]], frozenset[int]]:
        """Runs of small neighbours in one row, and the slice that holds them; and the members outside of runs."""
        batches: list[tuple[list[int], torch.Tensor]] = []
        small = [
            view is not None and view.is_contiguous() and view.numel() * view.element_size() < _LARGE_BYTES
            for view in self._views
        ]
        keys = [(self._of_member[m][0].row, m - i) for i, m in enumerate(m for m, s in enumerate(small) if s)]
        order = [m for m, s in enumerate(small) if s]
        for _, run in groupby(zip(keys, order, strict=True), key=lambda pair: pair[0]):
            members = [m for _, m in run]
            first, last = self._of_member[members[0]][0], self._of_member[members[-1]][0]
            flat = self.gradients[first.row, first.offset : last.offset + last.stop - last.start]
            batches.append((members, flat))
        return batches, frozenset(m for m, s in enumerate(small) if not s)

    # ------------------------------------------------------------------------------------------ gradients in

    def place(self, member: int, weight: float) -> bool:
        """Write a member's gradient x `weight`, or zeros, to its place and let `.grad` go; False if it had none."""
        parameter, view = self.members[member], self._views[member]
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None and (gradient.is_sparse or gradient.dtype != self.gradients.dtype):
            kind = "sparse" if gradient.is_sparse else str(gradient.dtype).removeprefix("torch.")
            expected = str(self.gradients.dtype).removeprefix("torch.")
            raise UsageError(
                f"overlap='step': the gradient of a parameter {tuple(parameter.shape)} is {kind}, expected dense "
                f"{expected}"
            )
        if gradient is None or weight == 0.0:  # not 0·x: a rank without samples may hold NaN
            for piece in self._of_member[member]:
                self._row_slice(self.gradients, piece).zero_()
        elif view is not None:
            torch.mul(gradient.detach(), weight, out=view)
        else:
            flat = gradient.detach().as_strided((gradient.numel(),), (1,), gradient.storage_offset())
            if gradient.stride() != parameter.stride() and gradient.numel() > 1:
                flat = torch.empty_like(flat)
                _shaped(flat, parameter).copy_(gradient)
            for piece in self._of_member[member]:
                torch.mul(flat[piece.start : piece.stop], weight, out=self._row_slice(self.gradients, piece))
        return gradient is not None

    def place_batch(self, batch: int, weight: float) -> bool:
        """Write all of a run of small members by two calls; False, nothing done, if one is not as it should be."""
        members, flat = self.batches[batch]
        gradients = [self.members[m].grad for m in members]
        if weight == 0.0 or any(
            g is None or g.is_sparse or not g.is_contiguous() or g.dtype != flat.dtype for g in gradients
        ):
            return False
        torch.mul(torch.cat([g.detach().view(-1) for g in gradients if g is not None]), weight, out=flat)
        for m in members:
            self.members[m].grad = None
        return True

    def write_tails(self, weight: float, used: Sequence[bool] | None = None) -> None:
        """Fill the control tails before the rows travel; `used` None: every member has a gradient."""
        tails = self.gradients[:, self.length :]
        tails.fill_(1.0)
        tails[:, 0] = weight
        for member, is_used in enumerate(used or ()):
            if not is_used:
                for piece in self._of_member[member]:
                    tails[piece.row, 1 + self._of_row[piece.row].index(piece)] = 0.0

    def read_tail(self) -> tuple[float, list[bool]]:
        """Of this rank's reduced row: the sum of weights, and for each piece whether any rank had a gradient."""
        weight, *counts = self.gradients[self.rank, self.length :].tolist()
        return weight, [count > 0.5 for count in counts[: len(self._of_row[self.rank])]]

    # --------------------------------------------------------------------------------------------- shares out

    def _share(self, pieces: tuple[Piece, ...], param_group: int) -> Share:
        begin, end = pieces[0].offset, pieces[-1].offset + pieces[-1].stop - pieces[-1].start
        return Share(
            parameter=nn.Parameter(self.parameters[self.rank, begin:end]),
            gradient=self.gradients[self.rank, begin:end],
            pieces=pieces,
            param_group=param_group,
        )

    def split(self, share: Share) -> list[Share]:
        """Replace a share by one for each of its pieces."""
        parts = [self._share((piece,), share.param_group) for piece in share.pieces]
        at = next(i for i, one in enumerate(self.shares) if one is share)
        self.shares[at : at + 1] = parts
        return parts

    def own_gradients(self) -> torch.Tensor:
        """This rank's row of reduced gradients, without the tail."""
        return self.gradients[self.rank, : self.length]


def _shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`flat` as a tensor of `like`'s shape and memory order."""
    strides = torch.empty_like(like, device="meta").stride()
    return flat.as_strided(like.shape, strides, flat.storage_offset())
