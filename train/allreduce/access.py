"""Who reads a parameter? A call of ours before each read, so that a parameter that is on its way can be waited for.

Two places see every ordinary read in a forward pass:

- a forward pre-hook of each module that owns a parameter (also covers modules that keep references to their own
  parameters, as `nn.LSTM` does);
- the module's table of parameters, replaced by one that calls before it hands one out: `self.linear.weight` passes
  through it whoever asks (`nn.MultiheadAttention` reads its `out_proj.weight` without ever calling `out_proj`).

`state_dict()` and `load_state_dict()` have hooks of their own. Iteration (`parameters()`) does not pass: it gives the
objects, and their values are read later. Reads through a reference of one's own do not pass either; `step_mode` finds
out in the next backward pass, and says so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

__all__ = ["watch_access"]


class _Table(dict[str, Any]):
    """A module's parameters by name. `groups`: name -> number of the group that `need` is told of."""

    groups: dict[str, int]
    need: Callable[[int], None]

    def __getitem__(self, name: str) -> Any:
        group = self.groups.get(name)
        if group is not None:
            self.need(group)
        return dict.__getitem__(self, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self.items()),)  # copies and pickles are of a plain module

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self.items()), memo)


def watch_access(module: nn.Module, groups: Mapping[int, int], need: Callable[[int], None]) -> Callable[[], None]:
    """Have `need(group)` called before each read. `groups`: id of parameter -> group. Returns what undoes it."""
    hooks = []
    watched: list[nn.Module] = []
    for child in module.modules():
        own = {name: groups[id(p)] for name, p in child._parameters.items() if id(p) in groups}
        if not own:
            continue
        table = _Table(child._parameters)
        table.groups, table.need = own, need
        child.__dict__["_parameters"] = table
        watched.append(child)
        before = _Before(tuple(dict.fromkeys(own.values())), need)
        hooks.append(child.register_forward_pre_hook(before))
        hooks.append(child.register_state_dict_pre_hook(before))
        hooks.append(child.register_load_state_dict_pre_hook(before))

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        for child in watched:
            child.__dict__["_parameters"] = dict(child._parameters.items())

    return undo


class _Before:
    def __init__(self, groups: tuple[int, ...], need: Callable[[int], None]) -> None:
        self._groups, self._need = groups, need

    def __call__(self, module: nn.Module, *arguments: Any) -> None:
        for group in self._groups:
            self._need(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Nothing:
        return _Nothing()


class _Nothing:
    def __call__(self, module: nn.Module, *arguments: Any) -> None:
        return None
