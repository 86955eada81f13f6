"""How much of the machine a training uses: floating-point operations a sample, and what the processor can do.

MFU, "model FLOP utilisation" (Chowdhery et al., arXiv:2204.02311), is the model's own operations (forward and backward,
nothing that is computed again) over those that the hardware could have done meanwhile. What it could do is measured: a
large matrix product in float32 (float64 where that is trained) on as many threads as a rank has, just before the first
step; on a GPU in the training's own precision. Processors multiply matrices of 16 bits slowly, if at all.
"""

from __future__ import annotations

import copy
import time

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from exitwave.train.loader import Batch

__all__ = ["flops_of_a_sample", "peak_flops_per_s"]

_SIDE = 512
_REPEATS = 8


def flops_of_a_sample(module: nn.Module, batch: Batch) -> float | None:
    """Operations of one training sample, counted on shapes alone; None for a network that needs more than these.

    `module` is that before it is wrapped or cut for several ranks; `batch` may hold any number of samples.
    """
    try:
        twin = copy.deepcopy(module).to("meta").eval()
        inputs = torch.empty_like(batch.inputs, device="meta", dtype=next(twin.parameters()).dtype)
        with FlopCounterMode(display=False) as counter:
            twin(inputs).sum().backward()
        return float(counter.get_total_flops()) / len(batch.uids)
    except Exception:  # a figure for people: no training fails for want of it
        return None


def peak_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """What a matrix product of 512 x 512 reaches, at best of eight."""
    a = torch.ones(_SIDE, _SIDE, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(_REPEATS):
        began = time.perf_counter()
        (a @ a)[0, 0].item()
        best = min(best, time.perf_counter() - began)
    return 2.0 * _SIDE**3 / best
