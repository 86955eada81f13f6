"""Spatial parallelism: samples larger than one device, each split over ranks, with the results of one process.

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "spatial"))
    dims = {"spatial": 2}
    parallelize(model, mesh, dims)
    loss = mean((model(scatter(x, mesh, dims)) - scatter(y, mesh, dims)).square(), mesh, dims)
    loss.backward()

After Oyama et al., "The case for strong scaling in deep learning: training large 3D CNNs with hybrid parallelism"
(arXiv:2007.12856). `tiles`: the arithmetic. `halo`: strips that travel. `tile`: how a module meets tiles.
"""

from exitwave.train.spatial.links import LostRankError
from exitwave.train.spatial.parallelize import parallelize
from exitwave.train.spatial.scatter import gather, mean, own_slices, scatter, total
from exitwave.train.spatial.tile import UnsupportedLayerError
from exitwave.train.spatial.tiles import even_bounds

__all__ = [
    "LostRankError",
    "UnsupportedLayerError",
    "even_bounds",
    "gather",
    "mean",
    "own_slices",
    "parallelize",
    "scatter",
    "total",
]
