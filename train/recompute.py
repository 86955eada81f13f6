"""Gradient checkpointing by block: a block's activations are computed again in the backward pass instead of kept.

Chen et al., "Training deep nets with sublinear memory cost" (arXiv:1604.06174). Dropout is keyed by step and sample
(dropout.py), so that the second forward pass is the first one to the bit; no generator's state needs to be kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["recompute_blocks"]


def recompute_blocks(module: nn.Module) -> nn.Module:
    """Every direct child of `module` that has parameters is one block; names and values stay what they are."""
    for child in module.children():
        if any(True for _ in child.parameters()):
            child.forward = _again(child.forward)
    return module


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run
