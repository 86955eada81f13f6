"""The Bokeh documents: the page with its frame, and each drawing alone for JupyterLab's Dask extension."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bokeh.layouts import row
from distributed.dashboard.components.scheduler import env as dask_templates
from jinja2 import ChoiceLoader, Environment, FileSystemLoader

from exitwave.simulate.dashboard.board import chosen
from exitwave.simulate.dashboard.figures import Drawing, Loss, PictureOf, Progress, Reasons, Shards, Slowest

__all__ = ["DOCUMENTS", "PAGE"]

PAGE = "exitwave"  # the tab's label is made of it
_EVERY_MS = 1000


def _templates() -> Environment:
    """Ours, which extend Dask's frame."""
    ours = FileSystemLoader(Path(__file__).parent / "templates")
    return Environment(loader=ChoiceLoader([ours, dask_templates.loader]), autoescape=False)


def _keep_up(doc: Any, scheduler: Any, drawings: Sequence[Drawing]) -> None:
    """The drawings follow the newest snapshot as long as somebody looks."""
    seen: list[Any] = [None]
    asked = _asked(doc)

    def update() -> None:
        snapshot = chosen(scheduler.task_metadata, asked)
        if snapshot is not seen[0]:
            seen[0] = snapshot
            for drawing in drawings:
                drawing.update(snapshot)

    update()
    doc.add_periodic_callback(update, _EVERY_MS)


def _asked(doc: Any) -> str | None:
    """The data set that the address asks for by `?dataset=`."""
    request = doc.session_context.request if doc.session_context is not None else None
    values = request.arguments.get("dataset", []) if request is not None else []
    return values[0].decode(errors="replace") if values else None


def _page(scheduler: Any, extra: dict[str, Any], doc: Any) -> None:
    drawings: dict[str, Drawing] = {
        "progress": Progress(),
        "diffraction": PictureOf(0),
        "potential": PictureOf(1),
        "loss": Loss(),
    }
    for name, drawing in drawings.items():
        drawing.root.name = name
        doc.add_root(drawing.root)
    _keep_up(doc, scheduler, list(drawings.values()))
    doc.title = "exitwave"
    doc.template = _templates().get_template("exitwave.html")
    doc.template_variables.update(extra)


def _alone(make: Callable[[], list[Drawing]], scheduler: Any, extra: dict[str, Any], doc: Any) -> None:
    drawings = make()
    roots = [drawing.root for drawing in drawings]
    doc.add_root(roots[0] if len(roots) == 1 else row(roots, sizing_mode="stretch_both"))
    _keep_up(doc, scheduler, drawings)
    doc.title = "exitwave"


_ALONE: dict[str, Callable[[], list[Drawing]]] = {
    "shards": lambda: [Shards()],
    "progress": lambda: [Progress()],
    "pictures": lambda: [PictureOf(0), PictureOf(1)],
    "slowest": lambda: [Slowest()],
    "failures": lambda: [Reasons()],
    "training": lambda: [Loss()],
}

DOCUMENTS: dict[str, Callable[..., None]] = {
    f"/{PAGE}": _page,
    **{f"/individual-exitwave-{name}": functools.partial(_alone, make) for name, make in _ALONE.items()},
}
