"""The campaign's page on the scheduler's own dashboard: `/exitwave`, a tab like Status and Workers.

A controller publishes snapshots (`simulate/counters.py`); the scheduler keeps the last one of each campaign in its
metadata, and the page, `/exitwave/status`, the `/individual-exitwave-*` plots and the metrics read it there. So the
scheduler needs to see no data set, and a page costs it nothing while nobody looks.

Two ways lead to the page: `add_page(client)` for any scheduler that a client reaches, and for one that is started by
hand `dask scheduler --preload exitwave.simulate.dashboard.preload`, which shows it before the first campaign too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["add_page", "publish"]


def add_page(client: Any) -> None:
    """Put the page onto the dashboard of the scheduler that `client` is connected to; once is enough, twice is no harm.

    Raises whatever the scheduler raises, for instance ModuleNotFoundError where exitwave is not installed there: a
    campaign goes on without the page.
    """
    from exitwave.simulate.dashboard.plugin import ExitwavePage

    client.register_plugin(ExitwavePage())


def publish(client: Any, snapshot: Mapping[str, Any]) -> None:
    """Show a snapshot (plain JSON values, under 64 kB), in the place of the last one of the same data set."""
    from exitwave.simulate.dashboard.board import METADATA_KEY

    client.set_metadata([METADATA_KEY, str(snapshot.get("dataset", ""))], dict(snapshot))
