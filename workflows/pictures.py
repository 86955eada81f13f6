"""One sample as pictures: patterns, label, slabs of a volume, a through-focal series, and any other field.

`exitwave show` writes them as a PNG, or as one self-contained HTML page with the parameters beside them.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import write_atomic

__all__ = ["reciprocal_extent", "save_sample"]

_Extent = tuple[float, float, float, float]  # left, right, bottom, top, as matplotlib has it
_SUFFIXES = (".png", ".pdf", ".svg", ".html")
_COLUMNS = 4


@dataclass(frozen=True, kw_only=True)
class _Panel:
    title: str
    image: Any
    cmap: str
    extent: _Extent | None
    unit: str


def _extent(shape: tuple[int, ...], pixel_yx: tuple[float, float]) -> _Extent:
    return (0.0, shape[1] * pixel_yx[1], shape[0] * pixel_yx[0], 0.0)


def reciprocal_extent(shape: tuple[int, ...], sampling_yx: tuple[float, float]) -> _Extent:
    """Edges of a pattern in 1/Å: the middle of pixel [Qy//2, Qx//2] is the zero frequency."""
    (rows, columns), (dy, dx) = shape, sampling_yx
    left, top = -(columns // 2 + 0.5) * dx, -(rows // 2 + 0.5) * dy
    return (left, left + columns * dx, top + rows * dy, top)


def _panels(sample: Mapping[str, Any]) -> list[_Panel]:
    params = sample["params"]
    names = params.dtype.names or ()

    def value(name: str) -> float:
        found = float(params[name]) if name in names else 0.0
        return found if found > 0 else 1.0

    def real(shape: tuple[int, ...], column: str) -> tuple[_Extent, str]:
        return _extent(shape, (value(column),) * 2), "Å" if column in names and float(params[column]) > 0 else "pixels"

    panels: list[_Panel] = []
    for name, array in sample.items():
        if name in ("uid", "params") or not isinstance(array, np.ndarray) or array.size == 0:
            continue
        if name == "cbed" and array.ndim == 4:
            panels += _patterns(array, value)
        elif name == "potential" and array.ndim == 2:
            extent, unit = real(array.shape, "potential_sampling_A")
            panels.append(
                _Panel(title="projected potential, V·Å", image=array, cmap="viridis", extent=extent, unit=unit)
            )
        elif name == "volume" and array.ndim == 3:
            extent, unit = real(array.shape[1:], "potential_sampling_A")
            for z in _few(array.shape[0]):
                title = f"potential of slab {z + 1} of {array.shape[0]}, V·Å"
                panels.append(_Panel(title=title, image=array[z], cmap="viridis", extent=extent, unit=unit))
        elif name == "images" and array.ndim == 3:
            extent, unit = real(array.shape[1:], "images_sampling_A")
            focus = np.asarray(sample.get("focus_A", np.full(array.shape[0], np.nan)))
            for f in _few(array.shape[0]):
                told = f", focus {focus[f]:.0f} Å" if np.isfinite(focus[f]) else ""
                title = f"image {f + 1} of {array.shape[0]}{told}"
                panels.append(_Panel(title=title, image=array[f], cmap="gray", extent=extent, unit=unit))
        elif array.ndim >= 2:
            plane = array[tuple(n // 2 for n in array.shape[:-2])]
            panels.append(_Panel(title=name, image=plane, cmap="viridis", extent=None, unit="pixels"))
    return panels


def _few(count: int) -> list[int]:
    """The first, the middle and the last."""
    return sorted({0, count // 2, count - 1})


def _patterns(cbed: Any, value: Any) -> list[_Panel]:
    q = reciprocal_extent(cbed.shape[2:], (value("Q_sampling_y_per_A"), value("Q_sampling_x_per_A")))
    steps = (value("R_sampling_y_A"), value("R_sampling_x_A"))
    centre = np.sqrt(np.maximum(cbed[cbed.shape[0] // 2, cbed.shape[1] // 2], 0))
    mean = np.sqrt(np.maximum(cbed.mean(axis=(0, 1)), 0))
    detected = cbed.sum(axis=(2, 3))
    return [
        _Panel(title="pattern at the centre, √", image=centre, cmap="inferno", extent=q, unit="1/Å"),
        _Panel(title="mean pattern, √", image=mean, cmap="inferno", extent=q, unit="1/Å"),
        _Panel(title="detected fraction", image=detected, cmap="gray", extent=_extent(cbed.shape[:2], steps), unit="Å"),
    ]


def save_sample(sample: Mapping[str, Any], heading: str, rows: Mapping[str, Any], path: Path) -> None:
    """Draws the fields of `sample` into `path`: .png, .pdf, .svg, or .html with `rows` (name -> value) as a table.

    UsageError for another ending; a file that is there is replaced, whole.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"{path}: expected a name that ends in {', '.join(_SUFFIXES)}.")
    if path.is_dir():
        raise UsageError(f"{path}: is a folder, expected the name of a picture.")
    kind = path.suffix.lower()[1:]
    picture = _draw(_panels(sample), heading, "png" if kind == "html" else kind)
    data = picture if kind != "html" else _page(heading, picture, rows).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, data)


def _draw(panels: list[_Panel], heading: str, kind: str) -> bytes:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = max(1, min(_COLUMNS, len(panels)))
    lines = max(1, -(-len(panels) // columns))
    figure = Figure(figsize=(3.4 * columns, 3.3 * lines + 0.3), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(heading)
    for i, panel in enumerate(panels):
        axes = figure.add_subplot(lines, columns, i + 1)
        shown = axes.imshow(panel.image, cmap=panel.cmap, extent=panel.extent)
        axes.set_title(panel.title, fontsize=9)
        axes.set_xlabel(panel.unit, fontsize=8)
        axes.tick_params(labelsize=7)
        figure.colorbar(shown, ax=axes, shrink=0.8).ax.tick_params(labelsize=7)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind)
    return buffer.getvalue()


def _page(heading: str, picture: bytes, rows: Mapping[str, Any]) -> str:
    cells = "".join(
        f"<tr><th>{html.escape(str(name))}</th><td>{html.escape(str(value))}</td></tr>" for name, value in rows.items()
    )
    image = base64.b64encode(picture).decode()
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(heading)}</title>'
        "<style>body{font:14px sans-serif;margin:2em}img{max-width:100%}th{text-align:left;padding-right:1em;"
        "font-weight:normal;color:#555}td{font-variant-numeric:tabular-nums}</style>"
        f'<h1>{html.escape(heading)}</h1><img alt="{html.escape(heading)}" src="data:image/png;base64,{image}">'
        f"<table>{cells}</table></html>\n"
    )
