"""A training on a mesh of D x S ranks: D hold different samples, S hold tiles of the same ones.

Rank r is data rank r // S and spatial rank r mod S, so that the ranks that exchange halos are neighbours and stay
inside a node where they can. Halos travel inside the module (`train.spatial`); its gradients, each rank's part of
them, are summed over the S ranks and averaged over the D by one reduction of the grouped-allreduce engine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from exitwave.ingest import ShardDataset
from exitwave.ingest.errors import UsageError
from exitwave.train.mesh import Ranks
from exitwave.train.mesh_choice import choose_mesh
from exitwave.train.parallel import DataPlan, Parallel
from exitwave.train.spec import TrainSpec
from exitwave.train.tile_store import TileStore
from exitwave.train.tiled_data import TileReader, TileView

__all__ = ["SPLIT_TASKS", "SpatialMesh", "TilePlan", "mesh_of"]

_MEMORY_SHARE = 0.5  # of what is free when the first tile is read


@dataclass(kw_only=True)
class _Columns:
    """The process groups of this rank, and the views made so far (data set's split -> view)."""

    data_group: Any = None
    data_peers: tuple[int, ...] = ()
    views: dict[str | None, TileView] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TilePlan(DataPlan):
    """Rank `rank` of `size` along the data axis; reads tile `spatial_rank` of `spatial_size` of each sample."""

    spatial_rank: int
    spatial_size: int
    halvings: int
    crop: int | None
    keep: bool
    columns: _Columns

    @property
    def reads_alone(self) -> bool:
        """Tiles that other ranks keep come by collectives, which must not meet those of another thread."""
        return not self.keep

    def view(self, dataset: ShardDataset) -> TileView:
        """One for each split, the same each time; asking for it again says that an epoch has ended."""
        views = self.columns.views
        known = views.get(dataset.split_name)
        if known is not None:
            if known.store is not None:
                known.store.first_epoch_ended()
            return known
        reader = TileReader(
            dataset,
            crop=self.crop,
            spatial_rank=self.spatial_rank,
            spatial_size=self.spatial_size,
            halvings=self.halvings,
        )
        store = None
        if self.keep:
            store = TileStore(
                reader.__getitem__,
                n_samples=len(dataset),
                rank=self.rank,
                size=self.size,
                group=self.columns.data_group,
                peers=self.columns.data_peers,
                limit_bytes=int(_MEMORY_SHARE * _free_bytes()),
            )
        views[dataset.split_name] = TileView(reader, store)
        return views[dataset.split_name]


class SpatialMesh(Parallel):
    """How the ranks of a training on through-focal series share a step; D·S is the world size.

    Args:
        shape: (D, S); None: the fastest by the performance model (`mesh_choice`) of the samples in `data`, or D x 1
            where no `data` is given.
    """

    def __init__(self, spec: TrainSpec, shape: tuple[int, int] | None, *, data: Path | None = None) -> None:
        self._spec = spec
        self._shape = shape
        self._data = data
        self._mesh: Any = None

    def data_plan(self, ranks: Ranks) -> TilePlan:
        """Makes the process groups; every rank calls it."""
        spec, world = self._spec.series, ranks.info.world_size
        shape = self._shape
        if shape is None:
            shape = (world, 1)
            if self._data is not None and world > 1:
                best = choose_mesh(self._spec, self._data, ranks)[0]
                shape = best.data, best.spatial
        d, s = shape
        if spec.store == "memory" and self._spec.data.workers:
            raise UsageError(
                "data.workers: loader processes cannot take part in the exchange of tiles; expected 0, or "
                "series.store: none"
            )
        columns = _Columns()
        rows = torch.arange(world).reshape(d, s)
        timeout = timedelta(seconds=self._spec.engine.timeout_s)
        mine = divmod(ranks.info.rank, s)
        for column in range(s):  # every rank takes part in making every group
            members = rows[:, column].tolist()
            group = dist.new_group(members, timeout=timeout) if d > 1 else None
            if column == mine[1]:
                columns.data_group, columns.data_peers = group, tuple(members)
        self._shape = shape
        return TilePlan(
            rank=mine[0],
            size=d,
            spatial_rank=mine[1],
            spatial_size=s,
            halvings=spec.levels if self._spec.task == "volume" else 3,
            crop=spec.crop,
            keep=spec.store == "memory",
            columns=columns,
        )

    def parallelize(self, module: nn.Module, ranks: Ranks) -> nn.Module:
        """Splits the module over the spatial ranks: dim 3 of (B, C, D, H, W) is H."""
        assert self._shape is not None
        alone = ranks.info.world_size == 1
        if alone or (self._shape[1] == 1 and self._spec.series.norm != "batch"):  # batch norm spans the whole batch
            return module
        from torch.distributed.device_mesh import init_device_mesh

        from exitwave.train.spatial import parallelize

        mesh = init_device_mesh("cpu", self._shape, mesh_dim_names=("data", "spatial"))
        return parallelize(
            module,
            mesh,
            {"spatial": 3},
            overlap=self._spec.series.overlap,
            weight_gradients="partial",
            timeout_s=self._spec.engine.timeout_s,
        )


# whose samples may be split over ranks, and are read by tiles
SPLIT_TASKS = ("volume", "regress")


def mesh_of(spec: TrainSpec, shape: tuple[int, int] | None, data: Path) -> Parallel:
    """How ranks share a training of `spec`; `shape`: (D, S), None to pick.

    Raises:
        UsageError: a task whose samples cannot be split.
    """
    if spec.task in SPLIT_TASKS:
        return SpatialMesh(spec, shape, data=data)
    if shape is not None and shape[1] > 1:
        raise UsageError(
            f"--mesh {shape[0]}x{shape[1]}: the task {spec.task} looks at whole samples, which are not split; "
            f"expected {shape[0] * shape[1]}x1, or the tasks {' or '.join(SPLIT_TASKS)}"
        )
    return Parallel()


def _free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
