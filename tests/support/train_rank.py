"""One rank of a training under torchrun, for tests: python -m torch.distributed.run … train_rank.py '{json}'.

Keys: spec, data, out; optional: mesh [D, S]; online (a file of settings); kill {rank, step} (SIGKILL to itself when
that step is recorded… by its own counting), stop {rank, step} (asks to stop then). The exit code is that of the
error's class, as the command line does it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from exitwave.ingest.errors import ExitwaveError
from exitwave.train.mesh import RankInfo
from exitwave.train.online import read_online
from exitwave.train.spatial_mesh import SpatialMesh
from exitwave.train.spec import TrainSpec
from exitwave.train.trainer import train


def main() -> int:
    job = json.loads(sys.argv[1])
    rank = int(os.environ["RANK"])
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    info = RankInfo(
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        attempt=attempt,
    )
    asked = 0
    stopping = False

    def before_each_step() -> bool:
        nonlocal asked, stopping
        asked += 1
        for deed in ("kill", "stop"):
            wanted = job.get(deed)
            if wanted and not attempt and wanted["rank"] == rank and asked == wanted["step"]:
                if deed == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                stopping = True
        return stopping

    if job.get("sigterm"):

        def on_sigterm(_number: int, _frame: object) -> None:
            nonlocal stopping
            stopping = True

        signal.signal(signal.SIGTERM, on_sigterm)
    print(f"pid {rank} {os.getpid()}", flush=True)
    spec = TrainSpec.model_validate(job["spec"])
    try:
        train(
            spec,
            data=Path(job["data"]),
            out=Path(job["out"]),
            rank_info=info,
            parallel=SpatialMesh(spec, tuple(job["mesh"])) if "mesh" in job else None,
            stop=before_each_step,
            threads=1,
            online=read_online(Path(job["online"]), None) if "online" in job else None,
        )
    except ExitwaveError as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
