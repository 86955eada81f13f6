"""Is the module still the one that was wrapped? Else some parameter would be trained by each rank on its own, silently.

What people do after wrapping, and what plain torch allows: replace a layer or a parameter, unfreeze one, put other
memory under a parameter (`p.data = …`, `module.double()`). The first two leave a parameter without the engine's hook;
the last, with overlap "step", a parameter that gathers do not reach.

The check before each forward pass compares identities only. When something differs, `_difference` looks at what it
means: layers without parameters come and go freely, and freezing is no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from torch import nn

__all__ = ["Unchanged", "refuse_shared_memory"]


class Unchanged:
    """Remembers a module's parts. `trained`: name -> parameter that is reduced; `pinned`: their memory stays, too."""

    def __init__(self, module: nn.Module, trained: Mapping[str, nn.Parameter], *, pinned: bool = False) -> None:
        self._module = module
        self._trained = dict(trained)
        self._known = {id(p) for p in trained.values()}
        self._names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        self._pinned = [(p, p.data_ptr()) for p in trained.values()] if pinned else []
        self._record()

    def _record(self) -> None:
        parts = list(self._module.modules())
        self._children = [(part._modules, name, child) for part in parts for name, child in part._modules.items()]
        self._counts = [(part, len(part._modules), len(part._parameters)) for part in parts]
        # dict.get: a table that tells of reads (see `access`) is not asked
        self._parameters = [
            (part, name, p, p is not None and id(p) not in self._known and not p.requires_grad)
            for part in parts
            for name, p in part._parameters.items()
        ]

    def problem(self) -> str | None:
        """What has changed so that training would go wrong, or None."""
        if not self._same():
            found = self._difference()
            if found is not None:
                return found
            self._record()
        for parameter, address in self._pinned:
            if parameter.data_ptr() != address:
                name = next(name for name, p in self._trained.items() if p is parameter)
                return (
                    f"{name} has other memory than when the optimizer was wrapped (p.data = …, module.to(dtype)): "
                    "change values in place within engine.full_parameters()"
                )
        return None

    def _same(self) -> bool:
        return (
            all(held.get(name) is child for held, name, child in self._children)
            and all(len(p._modules) == m and len(p._parameters) == n for p, m, n in self._counts)
            and all(
                part._parameters.get(name) is p and not (frozen and p is not None and p.requires_grad)
                for part, name, p, frozen in self._parameters
            )
        )

    def _difference(self) -> str | None:
        for name, parameter in self._module.named_parameters():
            if not parameter.requires_grad or id(parameter) in self._known:
                continue
            if name in self._trained:
                happened = "was replaced by another parameter"
            elif name in self._names:
                happened = "was frozen or of another kind when the module was wrapped, and requires a gradient now"
            else:
                happened = "came into the module after it was wrapped"
            return f"{name} {happened}: the engine does not reduce it. Close the engine and wrap the module again"
        return None


def refuse_shared_memory(module: nn.Module, trained: Mapping[str, nn.Parameter]) -> str | None:
    """Two tensors of the module in one memory, one of them trained: moving it would part them. What to say, or None.

    One parameter under several names is no such case.
    """
    spans = []
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.numel():
            storage = tensor.untyped_storage().data_ptr()
            begin = tensor.storage_offset() * tensor.element_size()
            extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            spans.append((storage, begin, begin + extent * tensor.element_size(), name))
    spans.sort()
    for before, after in pairwise(spans):
        if before[0] == after[0] and after[1] < before[2] and {before[3], after[3]} & set(trained):
            return (
                f"{before[3]} and {after[3]} lie in the same memory; overlap='step' moves parameters and would part "
                "them. Share the parameter itself (b.weight = a.weight), or use overlap='backward'"
            )
    return None
