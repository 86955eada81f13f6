"""`dask scheduler --preload exitwave.simulate.dashboard.preload`: the page from the scheduler's first moment on."""

from __future__ import annotations

from typing import Any

from exitwave.simulate.dashboard.plugin import install


async def dask_setup(scheduler: Any) -> None:
    """Called by Dask when the scheduler starts."""
    install(scheduler)
