"""Sparse gradients (`nn.Embedding(sparse=True)`): averaged over ranks as rows, not as whole tables.

Which parameters have them is known from the module, as in DDP, so all ranks agree: they are left out of the tensor
groups, and gathered one after the other when backward is over. Each rank sends the rows that it has, scaled by its
weight; a rank without a gradient sends none. Rows of the same index are added in the order of ranks.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from exitwave.train.transport import Handle, Transport

__all__ = ["reduce_sparse", "sparse_parameters"]


def sparse_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """name -> parameter of those whose gradient is sparse."""
    tables = {
        id(child.weight)
        for child in module.modules()
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse
    }
    return {name: p for name, p in module.named_parameters() if id(p) in tables and p.requires_grad}


def reduce_sparse(
    parameters: Mapping[str, nn.Parameter],
    weight: float,
    data: Transport,
    wait: Callable[[Handle[Any], str], Any],
) -> None:
    """Replace each `.grad` by the weighted sum over ranks; None where no rank had one. Every rank calls it."""
    for name, parameter in parameters.items():
        gradient = parameter.grad
        packed = b""
        if gradient is not None:
            rows = gradient.to_sparse(1) if not gradient.is_sparse else gradient.coalesce()
            buffer = io.BytesIO()
            kept = slice(None) if weight != 0.0 else slice(0)  # not 0·x: a rank without samples may hold NaN
            torch.save((rows.indices()[:, kept].cpu(), (rows.values()[kept] * weight).cpu()), buffer)
            packed = buffer.getvalue()
        received = [one for one in wait(data.gather(packed), f"the sparse gradient of {name}") if one]
        if not received:
            continue
        parts = [torch.load(io.BytesIO(one), weights_only=True) for one in received]
        indices, values = (torch.cat([part[i] for part in parts], dim=1 - i) for i in (0, 1))
        parameter.grad = torch.sparse_coo_tensor(
            indices.to(parameter.device), values.to(parameter.device), parameter.shape, check_invariants=False
        ).coalesce()
