"""How much a network computes and remembers, counted layer by layer without computing anything.

The network runs once over tensors without memory (torch's `meta` device), so that samples of 512³ cost nothing to
count. What is counted, by the conventions of Oyama et al. (arXiv:2007.12856), whose table for CosmoFlow the tests
reproduce:

- FLOP: two (multiply, add) for each weight that an output value meets, in convolutions and fully connected layers of
  one forward pass. The paper's figures are those of the convolutions (`ModelCount.convolution_flop`); the fully
  connected layers add 0.05 %.
- memory: every layer keeps its output and the gradient of it, 4 bytes a value each; the input is there twice, as it was
  read and as the first layer takes it. Parameters are not in it: they do not grow with the sample.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

__all__ = ["LayerCount", "ModelCount", "count"]

_GIB = 2**30
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True, kw_only=True)
class LayerCount:
    """One leaf module, as called: shapes with the batch, FLOP of the forward pass, kernel and stride over space."""

    name: str
    kind: str
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    flop: int
    parameters: int
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()

    @property
    def is_convolution(self) -> bool:
        return self.kind.startswith("Conv")


@dataclass(frozen=True, kw_only=True)
class ModelCount:
    """A whole network over one input."""

    in_shape: tuple[int, ...]
    layers: tuple[LayerCount, ...]
    parameters: int

    @property
    def flop(self) -> int:
        """Of a forward pass over the batch."""
        return sum(layer.flop for layer in self.layers)

    @property
    def convolution_flop(self) -> int:
        return sum(layer.flop for layer in self.layers if layer.is_convolution)

    @property
    def activations(self) -> int:
        """Values that the layers put out, the input twice among them."""
        return 2 * prod(self.in_shape) + sum(prod(layer.out_shape) for layer in self.layers)

    @property
    def memory_GiB(self) -> float:
        """Activations and their gradients in single precision."""
        return self.activations * 2 * 4 / _GIB


def count(model: nn.Module, in_shape: Sequence[int]) -> ModelCount:
    """Counts a network over an input of `in_shape` (B, C, …). The model itself is left as it is.

    What is done outside of modules (concatenation, interpolation by function) is not seen.
    """
    ghost = copy.deepcopy(model).to("meta").eval()
    layers: list[LayerCount] = []
    for name, module in ghost.named_modules():
        if next(module.children(), None) is None:
            module.register_forward_hook(_note(name, layers))
    with torch.no_grad():
        ghost(torch.empty(tuple(in_shape), device="meta"))
    parameters = sum(p.numel() for p in model.parameters())
    return ModelCount(in_shape=tuple(in_shape), layers=tuple(layers), parameters=parameters)


def _note(name: str, layers: list[LayerCount]) -> Any:
    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(module, nn.Flatten | nn.Identity) or not isinstance(output, torch.Tensor):
            return  # another view of the same values
        layers.append(
            LayerCount(
                name=name,
                kind=type(module).__name__,
                in_shape=tuple(inputs[0].shape),
                out_shape=tuple(output.shape),
                flop=_flop(module, inputs[0], output),
                parameters=sum(p.numel() for p in module.parameters()),
                kernel=_sides(getattr(module, "kernel_size", ()), output),
                stride=_sides(getattr(module, "stride", ()), output),
            )
        )

    return hook


def _sides(value: Any, output: torch.Tensor) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (int(value),) * (output.dim() - 2)


def _flop(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> int:
    if isinstance(module, _CONVOLUTIONS):
        # each output value meets the weights of one filter; of a transposed one, each input value does
        places = x if module.transposed else y
        return 2 * places.numel() // places.shape[1] * module.weight.numel()
    if isinstance(module, nn.Linear):
        return 2 * y.numel() * module.in_features
    return 0
