"""Puts the page, its plots, its JSON and its metrics onto a scheduler that runs already.

Dask has a place for each of these but no public way in for the tab and the plots, so distributed is pinned, and a test
drives all of the addresses in a real browser. What is used: `scheduler.http_application` and `scheduler.task_metadata`;
`distributed.dashboard.core.BokehApplication`; and the lists of pages and plots that all pages of one scheduler share
(`distributed.dashboard.scheduler.template_variables`), to which the tab and the plots are added.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from bokeh.server.server import BokehTornado
from distributed import SchedulerPlugin
from distributed.dashboard.core import BokehApplication
from distributed.dashboard.scheduler import template_variables
from distributed.http.utils import RequestHandler
from tornado.ioloop import IOLoop

from exitwave.simulate.dashboard.board import campaigns, chosen, without_pictures
from exitwave.simulate.dashboard.documents import DOCUMENTS, PAGE

__all__ = ["ExitwavePage", "install"]

_log = logging.getLogger("distributed.scheduler")


class ExitwavePage(SchedulerPlugin):
    """Register it by `client.register_plugin`."""

    name = "exitwave-page"
    idempotent = True

    async def start(self, scheduler: Any) -> None:
        """Called by the scheduler, on its own event loop."""
        install(scheduler)


def install(scheduler: Any) -> None:
    """Add everything to `scheduler`, on its event loop. A second call does nothing."""
    application = scheduler.http_application
    if getattr(application, "exitwave_page", False):
        return
    application.exitwave_page = True
    dashboard = next((app for app in application.applications if isinstance(app, BokehTornado)), None)
    prefix = dashboard.prefix if dashboard is not None else ""
    application.add_handlers(r".*$", [(f"{prefix}/exitwave/status", StatusHandler, {"dask_server": scheduler})])
    try:
        from exitwave.simulate.dashboard.metrics import collect_from

        collect_from(scheduler)
    except ImportError:
        _log.info("exitwave: no metrics, prometheus_client is not installed")
    if dashboard is not None:
        _add_pages(scheduler, dashboard, prefix)


def _add_pages(scheduler: Any, dashboard: BokehTornado, prefix: str) -> None:
    shared = template_variables(scheduler)
    if PAGE not in shared["pages"]:
        shared["pages"].insert(1, PAGE)
    plots = [name.strip("/") for name in DOCUMENTS if name.startswith("/individual-")]
    shared["plots"] += [
        {"url": url, "name": url.removeprefix("individual-").replace("-", " ").title()} for url in plots
    ]
    shared["plots"].sort(key=lambda plot: plot["name"])
    ours = BokehApplication(DOCUMENTS, scheduler, prefix=prefix, template_variables=shared)
    scheduler.http_application.add_application(ours)
    ours.initialize(IOLoop.current())
    ours.start()
    # `/individual-plots.json`, which JupyterLab's extension reads, lists those of the first application alone.
    for path in plots:
        dashboard._applications.setdefault(f"/{path}", ours._applications[f"/{path}"])


class StatusHandler(RequestHandler):
    """`/exitwave/status`: the snapshot of the newest campaign that runs, or of `?dataset=`; 404 where there is none."""

    def get(self) -> None:
        metadata = self.server.task_metadata
        asked = self.get_query_argument("dataset", None)
        found = chosen(metadata, asked)
        self.set_header("Content-Type", "application/json; charset=utf-8")
        self.set_header("Cache-Control", "no-store")
        if found is None:
            self.set_status(404 if asked else 200)
            self.write(json.dumps({"campaigns": [], "activity": "none", "workers": len(self.server.workers)}))
            return
        others = [
            {"name": s.get("name"), "dataset": s.get("dataset"), "activity": s.get("activity")}
            for s in campaigns(metadata)
        ]
        self.write(json.dumps({**without_pictures(found), "campaigns": others}, ensure_ascii=False))
