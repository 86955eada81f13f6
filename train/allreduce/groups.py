"""Which gradients travel together: the planner of tensor groups. Pure: data in, data out.

A *tensor group* is a list of gradient tensors reduced by one collective. A plan partitions all tensors of one module
into groups, the same way on every rank; `GroupPlan` refuses anything that is not a partition. Tensors are given in the
order in which their gradients are expected to become ready. Groups hold one dtype on one device and never reorder
tensors within such a chain, so a group is complete soon after its last tensor.

How to cut the chains:

- `ByBytes`: a cap on the bytes of a group, as DDP does.
- `ByCount`: a number of groups, each with as nearly the same number of tensors as can be.
- `ByLayerBlocks`: a group for each block of the network (the way of the seed paper, arXiv 1909.11150, section on
  computational-graph-aware grouping). A tensor belongs to the block that its module path names, component by
  component: `layer1` never swallows `layer10`.
- `Optimal`: whatever ends soonest, from measured times (`exitwave.train.allreduce.optimal`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from typing import Any, Protocol

from exitwave.ingest.errors import UsageError

__all__ = [
    "ByBytes",
    "ByCount",
    "ByLayerBlocks",
    "GroupPlan",
    "Grouping",
    "Optimal",
    "TensorGroup",
    "TensorInfo",
    "assign_blocks",
    "parse_grouping",
    "plan_groups",
]


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One gradient tensor, by the full name of its parameter."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str  # "float32"
    device: str  # "cpu", "cuda"
    numel: int
    nbytes: int
    block: str  # the network block that it belongs to, a module path; "" for the module itself


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """Tensors reduced together; `index` is also the place in the order of reduction."""

    index: int
    names: tuple[str, ...]
    dtype: str
    device: str
    nbytes: int

    def __str__(self) -> str:
        shown = ", ".join(self.names[:4]) + (f", … {self.names[-1]}" if len(self.names) > 4 else "")
        return (
            f"tensor group {self.index}: {len(self.names)} tensors, {self.nbytes / 1e6:.3f} MB "
            f"{self.dtype} on {self.device}: {shown}"
        )


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """All tensor groups, in the order of reduction. Prints as a table; `to_json` and `from_json` keep it."""

    grouping: str
    groups: tuple[TensorGroup, ...]

    def __post_init__(self) -> None:
        seen: dict[str, int] = {}
        for expected, group in enumerate(self.groups):
            if group.index != expected:
                raise UsageError(f"group plan: group at place {expected} says index {group.index}")
            if not group.names:
                raise UsageError(f"group plan: tensor group {group.index} is empty")
            for name in group.names:
                if name in seen:
                    raise UsageError(f"group plan: {name} is in tensor groups {seen[name]} and {group.index}")
                seen[name] = group.index

    def __len__(self) -> int:
        return len(self.groups)

    def __str__(self) -> str:
        head = (
            f"{len(self.groups)} tensor groups by {self.grouping}, {sum(len(g.names) for g in self.groups)} tensors, "
            f"{sum(g.nbytes for g in self.groups) / 1e6:.3f} MB"
        )
        return "\n".join([head, *(f"  {group}" for group in self.groups)])

    def to_json(self) -> str:
        """The plan as one JSON document."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> GroupPlan:
        """The plan that `to_json` wrote. Raises `UsageError` for anything else."""
        try:
            raw: dict[str, Any] = json.loads(text)
            groups = tuple(TensorGroup(**{**g, "names": tuple(g["names"])}) for g in raw["groups"])
            return cls(grouping=raw["grouping"], groups=groups)
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"group plan: not a plan written by to_json ({error})") from error


class Grouping(Protocol):
    """A way to cut one chain (one dtype, one device, in ready order) into groups."""

    def cut(self, chain: Sequence[TensorInfo], *, whole: int) -> list[list[TensorInfo]]:
        """The pieces of `chain`, in order; `whole` is the number of tensors over all chains."""

    def __str__(self) -> str:
        """As `parse_grouping` reads it."""


@dataclass(frozen=True)
class ByBytes:
    """A group closes when the next tensor would exceed the cap; a tensor above the cap travels alone."""

    cap_mb: float = 25.0  # MB of 2**20 bytes, DDP's unit and default

    def __post_init__(self) -> None:
        if not self.cap_mb > 0:
            raise UsageError(f"grouping bytes: the cap must be positive, got {self.cap_mb} MB")

    def cut(self, chain: Sequence[TensorInfo], *, whole: int) -> list[list[TensorInfo]]:
        pieces: list[list[TensorInfo]] = []
        room = 0.0
        for tensor in chain:
            if not pieces or tensor.nbytes > room:
                pieces.append([])
                room = self.cap_mb * 2**20
            pieces[-1].append(tensor)
            room -= tensor.nbytes
        return pieces

    def __str__(self) -> str:
        return f"bytes:{self.cap_mb:g}"


@dataclass(frozen=True)
class ByCount:
    """`groups` groups in all, shared among chains by their number of tensors, each chain cut evenly by count."""

    groups: int = 8

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise UsageError(f"grouping count: the number of groups must be at least 1, got {self.groups}")

    def cut(self, chain: Sequence[TensorInfo], *, whole: int) -> list[list[TensorInfo]]:
        pieces = min(max(1, round(self.groups * len(chain) / whole)), len(chain))
        bounds = [len(chain) * i // pieces for i in range(pieces + 1)]
        return [list(chain[a:b]) for a, b in pairwise(bounds)]

    def __str__(self) -> str:
        return f"count:{self.groups}"


@dataclass(frozen=True)
class ByLayerBlocks:
    """A group closes where the block changes."""

    def cut(self, chain: Sequence[TensorInfo], *, whole: int) -> list[list[TensorInfo]]:
        return [list(piece) for _, piece in groupby(chain, key=lambda tensor: tensor.block)]

    def __str__(self) -> str:
        return "layer-blocks"


@dataclass(frozen=True)
class Optimal:
    """Start as `bytes`; once a few steps are measured, the plan that ends soonest (`optimal` makes it)."""

    max_mb: float = 50.0  # MB of 2**20 bytes that one group may hold; a larger tensor travels alone
    tolerance: float = 0.002  # of the predicted end; within it, fewer groups are better
    recheck: int = 200  # reductions from one look at the measurements to the next; 0: plan once

    def __post_init__(self) -> None:
        if not self.max_mb > 0:
            raise UsageError(f"grouping optimal: the maximum size must be positive, got {self.max_mb} MB")

    def cut(self, chain: Sequence[TensorInfo], *, whole: int) -> list[list[TensorInfo]]:
        return ByBytes(min(ByBytes().cap_mb, self.max_mb)).cut(chain, whole=whole)

    def __str__(self) -> str:
        return f"optimal:{self.max_mb:g}"


def parse_grouping(text: str) -> Grouping:
    """`bytes`, `bytes:25` (cap in MB), `count:8`, `layer-blocks`, `optimal`, `optimal:50` (maximum size in MB).

    Raises `UsageError` for others.
    """
    kind, _, detail = text.partition(":")
    try:
        if kind == "bytes":
            return ByBytes(float(detail)) if detail else ByBytes()
        if kind == "count":
            return ByCount(int(detail)) if detail else ByCount()
        if kind == "optimal":
            return Optimal(float(detail)) if detail else Optimal()
        if text == "layer-blocks":
            return ByLayerBlocks()
    except ValueError:
        raise UsageError(f"grouping {text!r}: {detail!r} is not a number; for example bytes:25 or count:8") from None
    raise UsageError(f"grouping {text!r} does not exist: choose optimal, bytes, bytes:CAP_MB, layer-blocks or count:N")


def plan_groups(tensors: Sequence[TensorInfo], grouping: Grouping) -> GroupPlan:
    """Partition `tensors` (in ready order) into groups; groups are ordered by when their last tensor is ready."""
    place = {tensor.name: i for i, tensor in enumerate(tensors)}
    if len(place) != len(tensors):
        raise UsageError("two tensors of the module have one name")
    chains: dict[tuple[str, str], list[TensorInfo]] = {}
    for tensor in tensors:
        chains.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    pieces = [piece for chain in chains.values() for piece in grouping.cut(chain, whole=len(tensors))]
    pieces.sort(key=lambda piece: place[piece[-1].name])
    groups = tuple(
        TensorGroup(
            index=i,
            names=tuple(t.name for t in piece),
            dtype=piece[0].dtype,
            device=piece[0].device,
            nbytes=sum(t.nbytes for t in piece),
        )
        for i, piece in enumerate(pieces)
    )
    return GroupPlan(grouping=str(grouping), groups=groups)


def assign_blocks(parameter_names: Sequence[str], containers: frozenset[str] = frozenset()) -> dict[str, str]:
    """The block of each parameter: the path of the child of the root module that holds it.

    A child that only holds others (`containers`: the paths of ModuleList, ModuleDict, Sequential) is looked through,
    and so is a single child that holds everything.

    >>> assign_blocks(["stem.weight", "blocks.1.a.weight", "blocks.10.a.weight", "scale"], frozenset({"blocks"}))
    {'stem.weight': 'stem', 'blocks.1.a.weight': 'blocks.1', 'blocks.10.a.weight': 'blocks.10', 'scale': ''}
    """
    paths = {name: tuple(name.split(".")[:-1]) for name in parameter_names}
    common = 0  # leading components that all parameters share: wrappers to look through
    while len({path[: common + 1] for path in paths.values()}) == 1 and any(
        len(path) > common + 1 for path in paths.values()
    ):
        common += 1
    blocks = {}
    for name, path in paths.items():
        depth = min(common + 1, len(path))
        while depth < len(path) and ".".join(path[:depth]) in containers:
            depth += 1
        blocks[name] = ".".join(path[:depth])
    return blocks
