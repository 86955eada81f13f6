"""The drawings: each shows one part of a snapshot and is told of the next one by `update`. For the page and alone."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from bokeh.models import (
    ColorBar,
    ColumnDataSource,
    DataRange1d,
    DatetimeTickFormatter,
    HoverTool,
    LinearColorMapper,
    NumeralTickFormatter,
)
from bokeh.palettes import Inferno256, Viridis256
from bokeh.plotting import figure

__all__ = ["COLOURS", "Drawing", "Loss", "PictureOf", "Progress", "Reasons", "Shards", "Slowest"]

COLOURS = {
    "committed": "#1b7f79",
    "running": "#e9a23b",
    "pending": "#d5dbe1",
    "failed": "#c8413b",
    "rejected": "#8a6fae",
}
_INK, _QUIET, _LINE = "#22313f", "#66788a", "#e3e8ed"

Snapshot = Mapping[str, Any]


class Drawing(Protocol):
    """`root` is what Bokeh shows; `update` is given None while there is no campaign."""

    root: Any

    def update(self, snapshot: Snapshot | None) -> None: ...


def _figure(**options: Any) -> Any:
    """A plain figure that takes the room it is given."""
    made = figure(
        sizing_mode="stretch_both",
        toolbar_location=None,
        tools="",
        min_border=8,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        **options,
    )
    made.grid.grid_line_color = _LINE
    made.axis.axis_line_color = None
    made.axis.major_tick_line_color = None
    made.axis.minor_tick_line_color = None
    made.axis.major_label_text_color = _QUIET
    made.axis.axis_label_text_color = _QUIET
    made.axis.axis_label_text_font_style = "normal"
    if made.title is not None:
        made.title.text_color = _INK
    return made


class Progress:
    """Committed samples over time."""

    def __init__(self) -> None:
        self._source = ColumnDataSource({"t": [], "n": []})
        self.root = _figure(x_axis_type="datetime", y_axis_label="committed samples", title=None)
        self.root.varea("t", 0, "n", source=self._source, fill_color=COLOURS["committed"], fill_alpha=0.15)
        line = self.root.line("t", "n", source=self._source, line_color=COLOURS["committed"], line_width=2.5)
        self.root.y_range.start = 0
        self.root.yaxis.formatter = NumeralTickFormatter(format="0,0")
        self.root.xaxis.formatter = DatetimeTickFormatter(
            seconds="%H:%M:%S", minsec="%H:%M:%S", minutes="%H:%M", hourmin="%H:%M", hours="%H:%M", days="%d %b"
        )
        tips = [("samples", "@n{0,0}"), ("at", "@t{%H:%M:%S}")]
        self.root.add_tools(HoverTool(renderers=[line], tooltips=tips, formatters={"@t": "datetime"}, mode="vline"))

    def update(self, snapshot: Snapshot | None) -> None:
        points = snapshot["history"] if snapshot is not None else []
        self._source.data = {"t": [1000.0 * t for t, _ in points], "n": [n for _, n in points]}


class Loss:
    """The loss over steps, on a logarithmic axis."""

    def __init__(self) -> None:
        self._source = ColumnDataSource({"step": [], "loss": []})
        self.root = _figure(x_axis_label="step", y_axis_label="loss", y_axis_type="log", title=None)
        line = self.root.line("step", "loss", source=self._source, line_color="#3a5fa8", line_width=2)
        self.root.add_tools(
            HoverTool(renderers=[line], tooltips=[("step", "@step"), ("loss", "@loss{0.0000}")], mode="vline")
        )

    def update(self, snapshot: Snapshot | None) -> None:
        trainer = (snapshot or {}).get("trainer") or {}
        points = [(step, loss) for step, loss in trainer.get("curve", ()) if loss > 0]
        self._source.data = {"step": [p[0] for p in points], "loss": [p[1] for p in points]}


class Shards:
    """Shards by state, one bar each."""

    def __init__(self) -> None:
        states = list(COLOURS)
        self._source = ColumnDataSource({"state": states, "n": [0] * len(states), "colour": list(COLOURS.values())})
        self.root = _figure(y_range=list(reversed(states)), x_axis_label="shards", title="Shards by state")
        bars = self.root.hbar(
            y="state", right="n", height=0.7, fill_color="colour", line_color=None, source=self._source
        )
        self.root.x_range.start = 0
        self.root.ygrid.grid_line_color = None
        self.root.add_tools(HoverTool(renderers=[bars], tooltips=[("@state", "@n{0,0}")]))

    def update(self, snapshot: Snapshot | None) -> None:
        shards = snapshot["shards"] if snapshot is not None else {}
        self._source.data = {**self._source.data, "n": [shards.get(state, 0) for state in COLOURS]}


class _Bars:
    """Named bars, the longest on top."""

    def __init__(self, title: str, label: str, colour: str) -> None:
        self._source = ColumnDataSource({"name": [], "value": []})
        self.root = _figure(y_range=[""], x_axis_label=label, title=title)
        bars = self.root.hbar(
            y="name", right="value", height=0.7, fill_color=colour, line_color=None, source=self._source
        )
        self.root.x_range.start = 0
        self.root.ygrid.grid_line_color = None
        self.root.add_tools(HoverTool(renderers=[bars], tooltips=[("@name", "@value{0.[000]}")]))

    def show(self, rows: list[tuple[str, float]]) -> None:
        names = list(dict.fromkeys(name[-48:] for name, _ in rows))
        if list(self.root.y_range.factors) != list(reversed(names)):
            self.root.y_range.factors = list(reversed(names)) or [""]
        values = {name[-48:]: value for name, value in reversed(rows)}
        self._source.data = {"name": names, "value": [values[name] for name in names]}


class Slowest(_Bars):
    """Seconds a sample of the slowest structures."""

    def __init__(self) -> None:
        super().__init__("Slowest structures", "seconds a sample", "#3a5fa8")

    def update(self, snapshot: Snapshot | None) -> None:
        self.show([(r["structure"], r["seconds_per_sample"]) for r in (snapshot or {}).get("slowest", ())])


class Reasons(_Bars):
    """Why attempts failed, and how often."""

    def __init__(self) -> None:
        super().__init__("Failed attempts", "attempts", COLOURS["failed"])

    def update(self, snapshot: Snapshot | None) -> None:
        self.show([(f"{r['state']}: {r['why']}"[:48], r["count"]) for r in (snapshot or {}).get("reasons", ())])


class PictureOf:
    """Picture number `place` of the newest sample."""

    def __init__(self, place: int) -> None:
        self._place, self._shown = place, ""
        self._mapper = LinearColorMapper(palette=Inferno256 if place == 0 else Viridis256, low=0, high=255)
        self._source = ColumnDataSource({"image": [], "w": [], "h": []})
        self.root = _figure(
            match_aspect=True,
            x_range=DataRange1d(range_padding=0),
            y_range=DataRange1d(range_padding=0),
            title="waiting for a sample",
        )
        self.root.image("image", x=0, y=0, dw="w", dh="h", color_mapper=self._mapper, source=self._source)
        self.root.axis.visible = False
        self.root.grid.visible = False
        self.root.title.text_font_size = "12px"
        self._bar = ColorBar(
            color_mapper=LinearColorMapper(palette=self._mapper.palette, low=0, high=1), width=8, padding=4
        )
        self._bar.major_label_text_color = _QUIET
        self._bar.background_fill_color = None
        self._bar.title_text_font_style = "normal"
        self.root.add_layout(self._bar, "right")

    def update(self, snapshot: Snapshot | None) -> None:
        pictures = (snapshot or {}).get("pictures") or ()
        if len(pictures) <= self._place or pictures[self._place]["data"] == self._shown:
            return
        told = pictures[self._place]
        rows, columns = told["shape"]
        pixels = np.frombuffer(base64.b64decode(told["data"]), np.uint8).reshape(rows, columns)
        side = max(rows, columns)
        # Bokeh draws row 0 at the bottom.
        self._source.data = {"image": [pixels[::-1]], "w": [columns / side], "h": [rows / side]}
        self._bar.color_mapper.update(
            low=told["low"], high=told["high"] if told["high"] > told["low"] else told["low"] + 1
        )
        self._bar.title = told["unit"]
        self.root.title.text = told["title"]
        self._shown = told["data"]
