"""What a step takes on a mesh of D x S ranks, and which mesh is the fastest for a world size. Pure.

The model of Oyama et al. (arXiv:2007.12856, section III-C). For each layer l, with n samples a data rank, and the rows
of a sample split over S ranks:

    C_l  = n (a_l + f_l / S · b)          computation; b seconds a FLOP, a seconds a layer call
    H_l  = alpha + beta · (halo bytes of l)   both neighbours share a rank's link
    FP_l = C_l + H_l,  or  max(C_l, H_l)  where halos travel behind the tile's interior (`overlap`)
    BP_l = the same with twice the FLOP: gradients of inputs, whose halos travel back, and of weights
    AR   = allreduce of all gradients over D·S ranks, a ring: 2 (p-1) (alpha + bytes / p · beta)

    step = sum FP_l + max(sum BP_l, AR) + rest,     or + sum BP_l + AR without overlap

Computation of more ranks than a machine has cores takes turns: it is longer by ranks a core. Activations must fit:
meshes that need more memory a rank than there is are left out, however fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from exitwave.ingest.errors import UsageError
from exitwave.train.allreduce.cost import LinkCost
from exitwave.train.models.counting import LayerCount, ModelCount

__all__ = ["Machine", "MeshEstimate", "estimate", "fastest", "fit_computation", "halo_bytes", "meshes"]

_VALUE = 4  # bytes, single precision


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What was measured: seconds a FLOP and a layer call on one core, the links, how many ranks have a core.

    halos: one message between neighbours. gradients: one message of a collective. rest_s: of a step, beside layers.
    cores: of a node, or None where every rank has its own. memory_bytes: for activations, a rank; None: enough.
    """

    s_per_flop: float
    s_per_layer: float
    halos: LinkCost
    gradients: LinkCost
    rest_s: float = 0.0
    cores: int | None = None
    memory_bytes: float | None = None
    overlap: bool = True


@dataclass(frozen=True, kw_only=True)
class MeshEstimate:
    """One mesh, D data x S spatial ranks: seconds of a step, of which computation, halos and allreduce; bytes."""

    data: int
    spatial: int
    step_s: float
    compute_s: float
    halos_s: float
    allreduce_s: float
    memory_bytes: float
    fits: bool

    @property
    def name(self) -> str:
        return f"{self.data}x{self.spatial}"


def halo_bytes(layer: LayerCount, *, samples: int, neighbours: int) -> int:
    """Bytes that a rank in the middle sends for a layer: the rows that its neighbours' kernels reach into, along H.

    Rows of a layer of kernel k and stride s: k - s where that is positive, half of them from each side.
    """
    if neighbours == 0 or len(layer.kernel) != 3 or layer.kind.startswith("ConvTranspose"):
        return 0
    rows = max(layer.kernel[1] - layer.stride[1], 0)
    _, channels, depth, _, width = layer.in_shape
    return -(-rows // 2) * neighbours * samples * channels * depth * width * _VALUE


def estimate(counted: ModelCount, data: int, spatial: int, *, batch: int, machine: Machine) -> MeshEstimate:
    """One mesh. `counted`: the network over one sample; `batch`: samples of a step over all ranks."""
    world, samples = data * spatial, ceil(batch / data)
    turns = 1.0 if machine.cores is None else max(1.0, world / machine.cores)
    neighbours = min(spatial - 1, 2)
    forward = backward = compute = halos = 0.0
    for layer in counted.layers:
        share = samples * layer.flop / spatial * machine.s_per_flop
        ahead, back = (turns * (machine.s_per_layer + times * share) for times in (1, 2))
        nbytes = halo_bytes(layer, samples=samples, neighbours=neighbours)
        travel = machine.halos.time_s(nbytes) if nbytes else 0.0
        forward += max(ahead, travel) if machine.overlap else ahead + travel
        backward += max(back, travel) if machine.overlap else back + travel
        compute, halos = compute + ahead + back, halos + 2 * travel
    gradient = counted.parameters * _VALUE
    allreduce = 0.0 if world == 1 else 2 * (world - 1) * machine.gradients.time_s(gradient / world)
    after = max(backward, allreduce) if machine.overlap else backward + allreduce
    memory = counted.activations * 2 * _VALUE * samples / spatial
    return MeshEstimate(
        data=data,
        spatial=spatial,
        step_s=forward + after + machine.rest_s,
        compute_s=compute,
        halos_s=halos,
        allreduce_s=allreduce,
        memory_bytes=memory,
        fits=machine.memory_bytes is None or memory <= machine.memory_bytes,
    )


def meshes(world: int, *, batch: int, rows: int) -> list[tuple[int, int]]:
    """All (D, S) of a world size with a sample for each data rank and rows for each spatial rank."""
    every = [(d, world // d) for d in range(world, 0, -1) if world % d == 0]
    return [(d, s) for d, s in every if d <= batch and s <= rows]


def fastest(counted: ModelCount, world: int, *, batch: int, rows: int, machine: Machine) -> list[MeshEstimate]:
    """Every mesh that is possible, the fastest first, those that do not fit last.

    Raises:
        UsageError: none is possible, or none fits.
    """
    shapes = meshes(world, batch=batch, rows=rows)
    if not shapes:
        raise UsageError(
            f"--mesh auto: {world} ranks cannot share {batch} samples of {rows} rows: each needs a sample, or rows "
            "of one"
        )
    found = [estimate(counted, d, s, batch=batch, machine=machine) for d, s in shapes]
    found.sort(key=lambda one: (not one.fits, one.step_s))
    if not found[0].fits:
        least = min(found, key=lambda one: one.memory_bytes)
        assert machine.memory_bytes is not None
        raise UsageError(
            f"--mesh auto: activations need {least.memory_bytes / 2**30:.2f} GiB a rank at {least.name}, the best of "
            f"{world} ranks, and there are {machine.memory_bytes / 2**30:.2f}; use more ranks or a smaller batch"
        )
    return found


def fit_computation(machine: Machine, counted: ModelCount, measured: Sequence[tuple[float, float]]) -> Machine:
    """The machine with seconds a FLOP and a layer call from steps of one rank: (part of the sample's rows, seconds).

    A line through the points by least squares: the slope is three times the FLOP of a pass, the intercept two calls a
    layer; where that would be negative, a line through the origin.
    """
    xs = [part * 3 * counted.flop for part, _ in measured]
    ys = [seconds for _, seconds in measured]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0
    offset = mean_y - slope * mean_x
    if slope <= 0 or offset < 0:  # one point, noise, or caches that hold smaller parts better: all is computation
        slope, offset = sum(x * y for x, y in zip(xs, ys, strict=True)) / sum(x * x for x in xs), 0.0
    return replace(machine, s_per_flop=slope, s_per_layer=offset / (2 * len(counted.layers)))
