"""One rank of a training under `ulimit -v`: limited_rank.py MIB, the address space that a step may add.

Everything that does not depend on the sample (Python, torch, connections, a step of a tiny sample) is there before the
limit is set, so that it bounds what the sample needs and nothing else.
"""

from __future__ import annotations

import copy
import json
import os
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from exitwave.train.models.unet3d import UNet3D
from exitwave.train.spatial import mean, own_slices, parallelize

SHAPE = (2, 1, 16, 128, 128)


def mapped(which: str) -> int:
    """Bytes of address space of this process: VmSize now, or VmPeak, the most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(which))) << 10


def main() -> None:
    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    mesh, dims = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("data", "spatial")), {"spatial": 3}
    torch.manual_seed(0)
    module = UNet3D(width=8, levels=1)

    def step(network: torch.nn.Module, tile: torch.Tensor) -> float:
        loss = mean((network(tile) - tile.roll(1, 4)).square(), mesh, dims)
        network.zero_grad(set_to_none=True)
        loss.backward()
        return float(loss.detach())

    warm = parallelize(copy.deepcopy(module), mesh, dims)
    step(warm, torch.randn(1, 1, 2, 8, 8)[:, :, :, : 8 // ranks].contiguous())
    network = parallelize(module, mesh, dims)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    rows = own_slices(SHAPE, mesh, dims, multiple_of=2)[3]
    shape = (*SHAPE[:3], rows.stop - rows.start, SHAPE[4])
    tile = torch.randn(shape, generator=torch.Generator().manual_seed(rows.start))
    before = mapped("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (before + (int(sys.argv[1]) << 20), resource.RLIM_INFINITY))
    said: dict[str, object] = {"ok": True, "why": ""}
    losses = []
    try:
        for _ in range(3):
            losses.append(step(network, tile))
            optimizer.step()
    except (RuntimeError, MemoryError) as error:
        said = {"ok": False, "why": str(error)[:300]}
    print(json.dumps({**said, "losses": losses, "added_mib": (mapped("VmPeak") - before) >> 20}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
