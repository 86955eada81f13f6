"""Pictures for the report: small PNGs, drawn so that they read on a light and on a dark page.

Backgrounds are transparent and lettering is a grey of enough contrast on both. Every picture of a potential carries a
scale bar and a colour bar in V·Å; pictures that are to be compared share one scale. Axes are (y, x), as in the data.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "COLOURS",
    "GREY",
    "curve_png",
    "data_uri",
    "heat_png",
    "image_png",
    "new_figure",
    "nice_length",
    "shared_limits",
    "style_axes",
]

Array = npt.NDArray[Any]
GREY = "#7a828e"
_WIDTH = 1.5  # inches of a picture: a phone shows two beside each other, and lettering scales with the picture
_FONT = 9.5
COLOURS = ("#3b82f6", "#f97316", "#10b981", "#a855f7")


def new_figure(width: float, height: float) -> Any:
    """An empty figure, in inches, for `data_uri`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=200)
    figure.patch.set_alpha(0.0)
    return figure


def data_uri(figure: Any) -> str:
    """The figure as a PNG in a data URI."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    out = BytesIO()
    figure.savefig(out, format="png", transparent=True, metadata={"Software": None})
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def nice_length(extent: float) -> float:
    """A round length (1, 2 or 5 times a power of ten) near a third of `extent`, for a scale bar."""
    if not extent > 0:
        return 1.0
    target = extent / 3
    base = 10.0 ** math.floor(math.log10(target))
    return max((m * base for m in (1, 2, 5) if m * base <= target * 1.001), default=base)


def shared_limits(images: Sequence[Array], percentile: float = 0.5) -> tuple[float, float]:
    """One colour range for several images, a few outliers left out."""
    values = np.concatenate([np.empty(0), *(np.asarray(i, dtype=float)[np.isfinite(i)].ravel() for i in images)])
    if values.size == 0:
        return 0.0, 1.0
    low, high = np.percentile(values, [percentile, 100 - percentile])
    return (float(low), float(high)) if high > low else (float(low) - 0.5, float(low) + 0.5)


def image_png(
    image: Array,
    *,
    pixel: float,
    unit: str,
    limits: tuple[float, float] | None = None,
    cmap: str = "magma",
    bar_label: str = "",
    centre_zero: bool = False,
) -> str:
    """A picture with a scale bar (`pixel` wide in `unit`) and a colour bar, as a data URI.

    `centre_zero` makes the range symmetric about zero (for differences).
    """
    image = np.asarray(image, dtype=float)
    low, high = limits or shared_limits([image])
    if centre_zero:
        high = max(abs(low), abs(high)) or 1.0
        low = -high
    height = _WIDTH + 0.3
    figure = new_figure(_WIDTH, height)
    axes = figure.add_axes((0.0, 0.3 / height, 1.0, _WIDTH / height))
    shown = axes.imshow(image, cmap=cmap, vmin=low, vmax=high, interpolation="nearest")
    axes.set_axis_off()
    _scale_bar(axes, image.shape, pixel, unit)
    bar_axes = figure.add_axes((0.0, 0.2 / height, 1.0, 0.06 / height))
    bar = figure.colorbar(shown, cax=bar_axes, orientation="horizontal")
    bar.set_ticks([])
    bar.outline.set_visible(False)
    for x, text, align in ((0.0, _number(low), "left"), (0.5, bar_label, "center"), (1.0, _number(high), "right")):
        figure.text(x, 0.03 / height, text, ha=align, va="bottom", fontsize=_FONT, color=GREY)
    return data_uri(figure)


def _number(value: float) -> str:
    if abs(value) < 1e-12:
        return "0"
    text = f"{value:,.0f}".replace(",", " ") if abs(value) >= 100 else f"{value:.3g}"
    return text.replace("-", "−")


def _scale_bar(axes: Any, shape: tuple[int, ...], pixel: float, unit: str) -> None:
    rows, columns = shape
    if not pixel > 0:  # nobody told: ingested data without a calibration
        pixel, unit = 1.0, "pixels"
    length = nice_length(columns * pixel)
    width, thick = length / pixel, 0.025 * rows
    x, y = 0.06 * columns - 0.5, 0.92 * rows - 0.5
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    outline = [withStroke(linewidth=1.6, foreground="black")]
    bar = axes.add_patch(Rectangle((x, y), width, thick, facecolor="white", edgecolor="none"))
    bar.set_path_effects(outline)
    text = axes.text(x, y - 0.03 * rows, f"{length:g} {unit}", color="white", fontsize=_FONT, va="bottom")
    text.set_path_effects(outline)


def curve_png(
    curves: Sequence[tuple[str, Sequence[float], Sequence[float], bool]],
    *,
    x_label: str,
    y_label: str,
    log: bool = True,
) -> str:
    """Curves (name, x, y, whether to draw marks instead of a line) on one pair of axes, as a data URI."""
    figure = new_figure(5.4, 2.9)
    axes = figure.add_axes((0.125, 0.185, 0.86, 0.785))
    for colour, (name, x, y, marks) in zip(COLOURS, curves, strict=False):
        if marks:
            axes.plot(x, y, "o", ms=4.5, color=colour, label=name)
        else:
            axes.plot(x, y, lw=0.8, color=colour, alpha=0.35)
            axes.plot(x, _smooth(y), lw=1.7, color=colour, label=name)
    positive = all(v > 0 for _, _, y, _ in curves for v in y)
    if log and positive:
        axes.set_yscale("log")
    style_axes(axes, x_label=x_label, y_label=y_label)
    axes.legend(frameon=False, fontsize=9.5, labelcolor=GREY)
    return data_uri(figure)


def style_axes(axes: Any, *, x_label: str, y_label: str) -> None:
    """Axes that read on a light and on a dark page."""
    axes.set_xlabel(x_label, color=GREY, fontsize=10)
    axes.set_ylabel(y_label, color=GREY, fontsize=10)
    axes.tick_params(which="both", colors=GREY, labelsize=9.5)
    axes.grid(True, which="major", color=GREY, alpha=0.25, lw=0.6)
    axes.patch.set_alpha(0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GREY)


def heat_png(
    values: Array, *, rows: Sequence[str], columns: Sequence[str], limits: tuple[float, float], log: bool = False
) -> str:
    """A table (rows, columns) as colours with its numbers written in, as a data URI; NaN stays empty.

    `log`: colours by the logarithm, so that twice and half are equally far from one; blue is less, red is more.
    """
    from matplotlib.colors import LogNorm, Normalize

    values = np.asarray(values, dtype=float)
    width = 1.9 + 0.75 * len(columns)
    figure = new_figure(width, 0.5 + 0.24 * len(rows))
    low, high = limits
    axes = figure.add_axes((1.8 / width, 0.02, 1 - 1.85 / width, 1 - 0.45 / (0.5 + 0.24 * len(rows))))
    norm = LogNorm(low, high) if log else Normalize(low, high)
    axes.imshow(values, cmap="RdBu_r" if log else "viridis", norm=norm, aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            part = float(norm(value))
            dark = part < 0.15 or part > 0.85 if log else part < 0.55
            axes.text(
                column, row, f"{value:.2g}", ha="center", va="center", fontsize=8, color="white" if dark else "black"
            )
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.xaxis.tick_top()
    axes.tick_params(colors=GREY, labelsize=8, length=0)
    axes.patch.set_alpha(0)
    for side in axes.spines.values():
        side.set_visible(False)
    return data_uri(figure)


def _smooth(y: Sequence[float]) -> Array:
    """A running mean over 5 % of the steps, so that the trend is seen through the noise of batches."""
    values = np.asarray(y, dtype=float)
    width = max(1, len(values) // 20) | 1
    if width == 1:
        return values
    padded = np.pad(values, width // 2, mode="edge")
    smooth: Array = np.convolve(padded, np.ones(width) / width, mode="valid")
    return smooth
