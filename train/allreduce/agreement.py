"""Before any data moves: do all ranks hold the same thing? And then: rank 0's values everywhere.

Mismatched sizes make gloo abort the process, so nothing mismatched may reach it. Ranks compare a hash of fixed size
first; only when hashes differ do they send the descriptions themselves, and then every rank finds the same first
difference and raises the same words.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from exitwave.ingest.errors import UsageError
from exitwave.train.transport import Handle, Transport

__all__ = ["MismatchError", "SameSettings", "broadcast_tensors", "describe", "first_difference", "verify_same"]

T = TypeVar("T")
_CHUNK_BYTES = 32 * 2**20


class MismatchError(UsageError):
    """Ranks hold or ask for different things; raised on every rank, in the same words."""


def describe(tensor: torch.Tensor) -> str:
    """What has to agree about a tensor, readable: `float32 (3, 4)`, with strides where it is not contiguous."""
    text = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    if not tensor.is_contiguous():
        text += f" strides {tensor.stride()}"
    return text if tensor.device.type == "cpu" else f"{text} on {tensor.device.type}"


def first_difference(rows: Sequence[Mapping[str, str]], what: str = "tensor") -> str | None:
    """Where the ranks' descriptions (key -> value) part, with ranks and values; None when they are the same. Pure."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    for key in keys:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, row in enumerate(rows):
            ranks_by_value.setdefault(row.get(key, "absent"), []).append(rank)
        if len(ranks_by_value) > 1:
            said = "; ".join(f"rank {_ranks(ranks)}: {value}" for value, ranks in ranks_by_value.items())
            return f"ranks disagree on {what} {key!r}: {said}"
    if len({tuple(row) for row in rows}) > 1:
        return f"ranks hold the same {what}s in another order"
    return None


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f", … ({len(ranks)} ranks)" if len(ranks) > 8 else "")


def verify_same(
    control: Transport, description: Mapping[str, str], wait: Callable[[Handle[list[bytes]], str], list[bytes]]
) -> None:
    """Raise `MismatchError` on every rank unless all hold the same `description` (key -> value, in the same order)."""
    text = json.dumps(list(description.items())).encode()
    own = hashlib.blake2b(text, digest_size=16).digest()
    if len(set(wait(control.gather(own), "the comparison of signatures"))) == 1:
        return
    packed = wait(control.gather(zlib.compress(text)), "the exchange of signatures")
    rows = [dict(json.loads(zlib.decompress(row))) for row in packed]
    raise MismatchError(first_difference(rows) or "ranks hold different signatures")


class SameSettings:
    """Descriptions that may change from step to step, compared behind the work: 16 bytes, waited for a step later."""

    def __init__(self, control: Transport) -> None:
        self._control = control
        self._pending: tuple[Handle[torch.Tensor], Mapping[str, str]] | None = None

    def compare(self, description: Mapping[str, str]) -> None:
        """Start the comparison; every rank does."""
        text = json.dumps(list(description.items())).encode()
        own = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
        handle = self._control.allreduce(torch.tensor([own, -own], dtype=torch.int64), "min")
        self._pending = handle, description

    def verify(self, wait: Callable[[Handle[Any], str], Any]) -> None:
        """Raise `MismatchError` on every rank if the last comparison, if any, found a difference."""
        if self._pending is None:
            return
        handle, description = self._pending
        self._pending = None
        least, negative = wait(handle, "the comparison of the optimizer's settings").tolist()
        if least != -negative:
            verify_same(self._control, description, wait)


def broadcast_tensors(
    data: Transport,
    tensors: Sequence[torch.Tensor],
    root: int,
    wait: Callable[[Handle[torch.Tensor], str], torch.Tensor],
) -> None:
    """Overwrite `tensors` (of verified, equal shapes and dtypes) with rank `root`'s, as bytes in chunks."""
    with torch.no_grad():
        for device in dict.fromkeys(tensor.device for tensor in tensors):
            here = [tensor for tensor in tensors if tensor.device == device and tensor.numel()]
            # Shape: (bytes of all tensors of the device,), in order.
            flat = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in here]
            for first, last in _chunks([piece.numel() for piece in flat]):
                joined = torch.cat(flat[first:last])
                wait(data.broadcast(joined, root), "the broadcast of parameters and buffers")
                offset = 0
                for tensor, piece in zip(here[first:last], flat[first:last], strict=True):
                    received = joined[offset : offset + piece.numel()].clone()  # clone: aligned for any dtype
                    _once(tensor).copy_(_once(received.view(tensor.dtype).view(tensor.shape), like=tensor))
                    offset += piece.numel()


def _once(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """The part of `tensor` that `like`, perhaps an expanded tensor, holds in memory once."""
    for dim, stride in enumerate((tensor if like is None else like).stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _chunks(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Half-open ranges of consecutive tensors, each of `_CHUNK_BYTES` or one tensor."""
    ranges: list[tuple[int, int]] = []
    room = 0
    for i, size in enumerate(sizes):
        if ranges and size <= room:
            ranges[-1] = (ranges[-1][0], i + 1)
            room -= size
        else:
            ranges.append((i, i + 1))
            room = _CHUNK_BYTES - size
    return ranges
