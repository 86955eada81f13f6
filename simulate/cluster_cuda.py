"""One worker process for each GPU of this machine, by dask-cuda: imported only where it is asked for."""

from __future__ import annotations

from typing import Any

from exitwave.ingest.errors import UsageError
from exitwave.simulate.cluster_local import LocalCluster, scheduler_habits, scratch_folder
from exitwave.simulate.cluster_outcome import describe

__all__ = ["CudaCluster", "cuda_options"]


def cuda_options(workers: int | None) -> dict[str, Any]:
    """What `dask_cuda.LocalCUDACluster` is given. It sets CUDA_VISIBLE_DEVICES of each worker, its own GPU first."""
    options: dict[str, Any] = {
        "threads_per_worker": 1,
        "host": "127.0.0.1",
        "dashboard_address": "127.0.0.1:0",
        "local_directory": scratch_folder(),
        "silence_logs": "CRITICAL",
    }
    return options if workers is None else {**options, "n_workers": workers}


class CudaCluster(LocalCluster):
    """`workers`: so many GPUs, the first ones; by default all that CUDA_VISIBLE_DEVICES shows."""

    name = "cuda"

    def __init__(self, workers: int | None) -> None:
        super().__init__(workers or 1)
        self._gpus = workers

    def _launch(self) -> None:
        try:
            from dask_cuda import LocalCUDACluster
        except ImportError:
            raise UsageError(
                "--cluster cuda needs dask-cuda, which is not installed: pip install dask-cuda (NVIDIA's driver and a "
                "GPU are needed, too). Without a GPU: --cluster local"
            ) from None
        scheduler_habits()
        try:
            self._cluster = LocalCUDACluster(**cuda_options(self._gpus))
        except Exception as error:  # of NVML, of the driver, of a number of GPUs that are not there
            raise UsageError(f"--cluster cuda: no GPU can be used here ({describe(error)})") from None
        self._asked = max(1, len(self._cluster.workers))
