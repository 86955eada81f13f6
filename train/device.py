"""Where a rank computes."""

from __future__ import annotations

import torch

from exitwave.ingest.errors import UsageError
from exitwave.train.mesh import Ranks
from exitwave.train.spec import TrainSpec

__all__ = ["device_of"]


def device_of(spec: TrainSpec, ranks: Ranks) -> torch.device:
    """The processor, or this rank's GPU: that of its number on its node. Every rank calls it.

    Raises:
        UsageError: a GPU was asked for and is not there (raised on all ranks, naming the rank).
    """
    error: UsageError | None = None
    if spec.device == "cuda":
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        local = ranks.info.local_rank
        if there == 0:
            why = "this PyTorch is built without CUDA" if torch.version.cuda is None else "no GPU is visible"
            error = UsageError(f"device: cuda was asked for, but {why} ({torch.__version__}); use device: cpu")
        elif local >= there:
            error = UsageError(
                f"device: rank {local} of this node needs a GPU of its own, it has {there}; start at most {there} ranks"
            )
    ranks.agree(error=error)
    return torch.device("cuda", ranks.info.local_rank) if spec.device == "cuda" else torch.device("cpu")
