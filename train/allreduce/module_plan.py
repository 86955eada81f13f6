"""From a module to a plan of tensor groups: names, blocks, dtypes and devices of the parameters that are trained."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from exitwave.ingest.errors import UsageError
from exitwave.train.allreduce import groups
from exitwave.train.allreduce.agreement import describe
from exitwave.train.allreduce.groups import GroupPlan

__all__ = ["plan_module", "tensor_infos"]

_SUMMABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def plan_module(
    module: nn.Module,
    trainable: Mapping[str, torch.Tensor],
    grouping: str | groups.Grouping | GroupPlan,
    *,
    sparse: bool = False,
) -> GroupPlan:
    """The tensor groups of a module's `trainable` parameters (name -> parameter, in the order they become ready).

    `sparse`: there are parameters with sparse gradients beside them, so that `trainable` may be empty.
    A `GroupPlan` is taken as it is, if it fits. Raises `UsageError` for parameters whose gradients cannot be averaged.
    """
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise UsageError(f"{name} has no shape yet: run the lazy module once before wrapping it")
        if name in trainable and parameter.dtype not in _SUMMABLE:
            raise UsageError(f"{name} is {describe(parameter)}: gradients of this dtype cannot be averaged")
    if not trainable and not sparse:
        raise UsageError("the module has no parameter that requires a gradient: nothing to reduce")
    infos = tensor_infos(module, trainable)
    if not isinstance(grouping, GroupPlan):
        if not isinstance(grouping, str) and not hasattr(grouping, "cut"):
            raise UsageError(f"grouping: expected a name, an object of `groups` or a GroupPlan, got {grouping!r}")
        return groups.plan_groups(infos, groups.parse_grouping(grouping) if isinstance(grouping, str) else grouping)
    planned = {name: (group.dtype, group.device) for group in grouping.groups for name in group.names}
    actual = {info.name: (info.dtype, info.device) for info in infos}
    if planned != actual:
        odd = next(name for name in [*planned, *actual] if planned.get(name) != actual.get(name))
        raise UsageError(
            f"the saved plan does not fit: {odd} is {planned.get(odd)} in it, {actual.get(odd)} in the module"
        )
    return grouping


def tensor_infos(module: nn.Module, trainable: Mapping[str, torch.Tensor]) -> list[groups.TensorInfo]:
    """What the planner has to know of the `trainable` parameters, in their order."""
    holders = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    containers = frozenset(path for path, child in module.named_modules() if path and type(child) in holders)
    blocks = groups.assign_blocks(list(trainable), containers)
    devices: dict[str, list[torch.device]] = {}  # cuda:0 on one rank is cuda:1 on another: number them as they come
    for parameter in trainable.values():
        seen = devices.setdefault(parameter.device.type, [])
        if parameter.device not in seen:
            seen.append(parameter.device)
    return [
        groups.TensorInfo(
            name=name,
            shape=tuple(parameter.shape),
            stride=tuple(parameter.stride()),
            dtype=str(parameter.dtype).removeprefix("torch."),
            device=_device_label(parameter.device, devices[parameter.device.type]),
            numel=parameter.numel(),
            nbytes=parameter.numel() * parameter.element_size(),
            block=blocks[name],
        )
        for name, parameter in trainable.items()
    ]


def _device_label(device: torch.device, seen: list[torch.device]) -> str:
    place = seen.index(device)
    return device.type if place == 0 else f"{device.type}#{place}"
