"""What to say when a loss is not finite: which samples, and where in the network it began."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from exitwave.ingest.errors import DamagedDataError
from exitwave.train.loader import Batch
from exitwave.train.mesh import Ranks

__all__ = ["first_bad_layer", "not_finite"]

_INPUT = "(the input itself)"
_NO_LAYER = "(the loss, or the label)"


def not_finite(ranks: Ranks, module: nn.Module, batch: Batch, bad: Tensor, *, step: int) -> DamagedDataError:
    """The error that every rank raises, with the bad samples of all ranks. Every rank calls it.

    Args:
        bad: (B,) bool, this rank's samples whose loss is not finite; may be none.
    """
    uids = [uid for uid, is_bad in zip(batch.uids, bad.tolist(), strict=True) if is_bad]
    # the whole batch goes in again: the dropout keys of this step are still in place
    together = "_exitwave_space" in module.__dict__  # split over ranks: it runs on all of them or hangs
    layer = first_bad_layer(module, batch.inputs, together=together) if uids or together else ""
    found = ranks.gather((uids, layer if uids or layer != _NO_LAYER else ""))
    every = [f"{uid:016x}" for uids, _ in found for uid in uids]
    layers = sorted({layer for _, layer in found if layer})
    return DamagedDataError(
        f"step {step}: expected a finite loss, got NaN or infinity for sample(s) {', '.join(every)}; first layer with "
        f"such an output: {', '.join(layers)}. Check the data (`exitwave verify`) or lower optimizer.lr; the run "
        "resumes from its last checkpoint"
    )


def first_bad_layer(module: nn.Module, inputs: Tensor, *, together: bool = False) -> str:
    """The first layer, in the order of execution, whose output holds NaN or infinity.

    `together`: other ranks are doing the same, so the module is run whatever the input holds.
    """
    bad_input = not bool(torch.isfinite(inputs).all())
    if bad_input and not together:
        return _INPUT
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if not bool(torch.isfinite(getattr(output, "local", output)).all()):
                found.append(name)

        return hook

    leaves = [(name, m) for name, m in module.named_modules() if not list(m.children())]
    handles = [m.register_forward_hook(watch(name)) for name, m in leaves]
    try:
        with torch.no_grad():
            module(inputs)
    finally:
        for handle in handles:
            handle.remove()
    if bad_input:
        return _INPUT
    return found[0] if found else _NO_LAYER
