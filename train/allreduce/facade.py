"""A wrapper that shows the module it wraps under its own names, so that checkpoints know nothing of the wrapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from exitwave.ingest.errors import UsageError

__all__ = ["ModuleFacade"]


class ModuleFacade(nn.Module):
    """Holds `module`; whoever inherits says what `forward` does."""

    module: nn.Module
    _data: Any  # the connections to other ranks; None on one rank

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._data is None:
            return super().__reduce_ex__(protocol)
        raise UsageError(
            "an engine holds connections to other ranks and cannot be copied or pickled: copy engine.module "
            "(within engine.full_parameters()), or save engine.state_dict()"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's own, without a prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Into the wrapped module; on every rank the same. `assign` would swap the parameters that are hooked."""
        if assign:
            raise UsageError("load_state_dict(assign=True) replaces parameters: load before wrapping the module")
        return self.module.load_state_dict(state_dict, strict=strict)

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        """The wrapped module's, under their real names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        """The wrapped module's, under their real names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)
