"""A rank of the mesh that dies or hangs ends the others, soon, and the message names it. Real processes, real signals.

The file runs itself as rank r of a scenario. Ranks that outlive it write what they met.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from exitwave.train.spatial import LostRankError, parallelize

SIZE = 3
LIMIT_S = 6.0


def run(scenario: str, rank: int, out: Path) -> None:
    mesh = init_device_mesh("cpu", (1, SIZE), mesh_dim_names=("data", "s"))
    layers = [nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Conv2d(2, 1, 3, padding=1)]
    if scenario == "sum":
        layers = layers[1:2]
    channels = 2 if scenario == "sum" else 1
    module = parallelize(nn.Sequential(*layers), mesh, {"s": 2}, timeout_s=LIMIT_S)
    x = torch.ones(1, channels, 4, 5, requires_grad=True)
    module(x).sum().backward()
    if rank == 1:
        if scenario in ("killed", "sum"):
            module[-1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        elif scenario == "backward":
            y = module(x)
            y.register_hook(lambda g: os.kill(os.getpid(), signal.SIGKILL))
            y.sum().backward()
        elif scenario == "error":
            module[-1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError("none left here")))
        else:
            time.sleep(3 * LIMIT_S)
            return
    begun = time.monotonic()
    try:
        module(x).sum().backward()
        said = "nothing was raised"
    except LostRankError as error:
        said = str(error)
    out.write_text(json.dumps({"said": said, "seconds": time.monotonic() - begun}))


@pytest.mark.parametrize(
    "scenario", ["backward", *(pytest.param(s, marks=pytest.mark.long) for s in ("sum", "killed", "error", "hangs"))]
)
def test_the_others_end_and_name_it(scenario, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(SIZE), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, scenario, str(rank), str(tmp_path / f"{rank}.json")],
            env=os.environ | meeting | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        stderr = [process.communicate(timeout=150)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for rank in (0, 2):
        path = tmp_path / f"{rank}.json"
        assert path.exists(), stderr[rank][-2000:]
        met = json.loads(path.read_text())
        assert "rank 1" in met["said"], (rank, met, stderr[1][-500:])
        assert met["seconds"] < 3 * LIMIT_S, met


if __name__ == "__main__":
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=SIZE)
    run(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    os._exit(0)  # the group of a world that lost a rank cannot be left in order
