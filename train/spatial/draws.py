"""Random numbers inside of a parallelized module are refused where each rank would draw its own.

On tiles the handlers refuse them. Behind a flatten, a gather or a global pooling every rank computes the same from the
same tensor, and a mask from each process's generator would make ranks differ without a word: `Draws` sees every torch
function of a call. What draws from a generator of one's own is let through (`exitwave.train.dropout.KeyedDropout`).
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from exitwave.train.spatial.tile import Space

__all__ = ["HOW_TO_DRAW", "Draws"]

HOW_TO_DRAW = (
    "draws from each process's generator, so ranks would differ from one another and from the serial run; use "
    "exitwave.train.dropout.KeyedDropout"
)
_SWITCHED = {  # random where their argument `training` says so
    "dropout", "dropout_", "alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_",
    "feature_dropout", "feature_dropout_", "dropout1d", "dropout2d", "dropout3d", "rrelu", "rrelu_",
}  # fmt: skip
_RANDOM = {
    "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "gumbel_softmax", "log_normal_", "multinomial",
    "native_dropout", "normal", "normal_", "poisson", "rand", "rand_like", "randint", "randint_like", "randn",
    "randn_like", "random_", "randperm", "uniform_",
}  # fmt: skip


class Draws(TorchFunctionMode):
    """While `module` is called, a function that draws from torch's own generator raises UnsupportedLayerError."""

    def __init__(self, module: nn.Module, space: Space) -> None:
        super().__init__()
        self._module, self._space = module, space

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        named = name in _SWITCHED or name in _RANDOM or "dropout_p" in kwargs
        # An interrupt may have left the mode behind: then nobody calls the module.
        if named and _is_random(name, args, kwargs) and _is_called(self._module):
            raise self._space.refuse(name, HOW_TO_DRAW)
        return function(*args, **kwargs)


def _is_random(name: str, args: Any, kwargs: Any) -> bool:
    if name in _RANDOM:
        return kwargs.get("generator") is None
    if name not in _SWITCHED:
        return bool(kwargs["dropout_p"])
    if name.startswith("rrelu"):
        return bool(kwargs.get("training", args[3] if len(args) > 3 else False))
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    by_default = name.startswith("dropout")
    return p > 0 and bool(kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else by_default)))


def _is_called(module: nn.Module) -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL and frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back
    return False


_CALL = nn.Module._call_impl.__code__
