"""Drawings of a search, in the report's style: its history, learning curves, one slice a key, parallel coordinates."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from exitwave.workflows.figures import COLOURS, GREY, data_uri, new_figure, style_axes
from exitwave.workflows.tune_record import Trial, best_so_far
from exitwave.workflows.tune_spec import Range, TuneSpec

__all__ = ["curves_png", "history_png", "parallel_png", "slices_png"]

_FINISHED, _PRUNED, _BEST = COLOURS[0], COLOURS[1], COLOURS[2]
_A_ROW = 3
_MOST_CURVES = 200


def _short(key: str) -> str:
    return key.removeprefix("train.")


def _scale(axes: Any, values: Sequence[float], *, x: bool = False) -> None:
    """Logarithmic where all are positive and more than a factor of five apart."""
    good = [v for v in values if math.isfinite(v)]
    if good and min(good) > 0 and max(good) > 5 * min(good):
        (axes.set_xscale if x else axes.set_yscale)("log")


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9.5, labelcolor=GREY)


def history_png(tune: TuneSpec, trials: Sequence[Trial]) -> str:
    """Each finished trial's value by its number, the best so far as a line, trials given up as marks on the axis."""
    figure = new_figure(5.4, 2.9)
    axes = figure.add_axes((0.125, 0.185, 0.86, 0.785))
    done = [t for t in trials if t.state == "finished" and t.value is not None]
    axes.plot([t.number for t in done], [t.value for t in done], "o", ms=4.5, color=_FINISHED, label="finished")
    steps = best_so_far(trials, maximize=tune.objective.maximize)
    if steps:
        x = [n for n, _ in steps] + [max(t.number for t in trials)]
        y = [v for _, v in steps] + [steps[-1][1]]
        axes.step(x, y, where="post", lw=1.7, color=_BEST, label="best so far")
    for state, colour, mark in (("pruned", _PRUNED, "x"), ("failed", "#ef4444", "s")):
        given = [t.number for t in trials if t.state == state]
        if given:
            axes.plot(given, [0.03] * len(given), mark, ms=5, color=colour, label=state,
                      transform=axes.get_xaxis_transform())  # fmt: skip
    _scale(axes, [float(t.value or math.nan) for t in done])
    style_axes(axes, x_label="trial", y_label=tune.objective.metric)
    _legend(axes)
    return data_uri(figure)


def curves_png(tune: TuneSpec, trials: Sequence[Trial], best: Trial | None) -> str:
    """Validation loss by the part of the budget that is behind; a trial that was given up ends with a cross."""
    figure = new_figure(5.4, 2.9)
    axes = figure.add_axes((0.125, 0.185, 0.86, 0.785))
    seen: list[float] = []
    labels = {"finished": "finished", "pruned": "given up"}
    for trial in trials[-_MOST_CURVES:]:
        rungs = sorted(r for r, v in trial.reports.items() if math.isfinite(v))
        if not rungs:
            continue
        x = [100 * r / tune.budget.validations for r in rungs]
        y = [trial.reports[r] for r in rungs]
        seen += y
        ours = best is not None and trial.number == best.number
        colour = _BEST if ours else _PRUNED if trial.state == "pruned" else _FINISHED
        label = f"trial {trial.number}, the best" if ours else labels.pop(trial.state, None)
        axes.plot(x, y, lw=2.0 if ours else 0.9, color=colour, alpha=1.0 if ours else 0.55, label=label,
                  zorder=3 if ours else 2)  # fmt: skip
        if trial.state == "pruned":
            axes.plot(x[-1:], y[-1:], "x", ms=5, color=colour)
        elif len(x) == 1:
            axes.plot(x, y, "o", ms=3, color=colour)
    _scale(axes, seen)
    style_axes(axes, x_label="% of a trial's budget", y_label="validation loss")
    _legend(axes)
    return data_uri(figure)


def slices_png(tune: TuneSpec, trials: Sequence[Trial]) -> str:
    """The value of each finished trial against each of its searched values; dark: earlier, light: later."""
    done = [t for t in trials if t.state == "finished" and t.value is not None]
    keys = list(tune.space)
    rows = math.ceil(len(keys) / _A_ROW)
    columns = min(len(keys), _A_ROW)
    figure = new_figure(5.4, 2.3 * rows)
    figure.subplots_adjust(left=0.13, right=0.985, top=0.97, bottom=0.24 / rows, wspace=0.12, hspace=0.5)
    for i, key in enumerate(keys):
        axes = figure.add_subplot(rows, columns, i + 1)
        place, ticks = _axis(tune.space[key])
        x = [place(t.values[key]) for t in done]
        y = [float(t.value or 0.0) for t in done]
        axes.scatter(x, y, c=[t.number for t in done], cmap="viridis", s=16)
        _scale(axes, y)
        style_axes(axes, x_label=_short(key), y_label=tune.objective.metric if i % columns == 0 else "")
        axes.set_xlim(-0.06, 1.06)
        axes.set_xticks([at for at, _ in ticks], [name for _, name in ticks])
        axes.tick_params(labelsize=8)
        if i % columns:
            axes.tick_params(labelleft=False)
    return data_uri(figure)


def parallel_png(tune: TuneSpec, trials: Sequence[Trial]) -> str:
    """One line a finished trial through its values, coloured by how good it is; the best on top."""
    done = [t for t in trials if t.state == "finished" and t.value is not None]
    sign = 1.0 if tune.objective.maximize else -1.0
    done.sort(key=lambda t: sign * float(t.value or 0.0))
    figure = new_figure(5.4, 2.9)
    axes = figure.add_axes((0.03, 0.17, 0.94, 0.76))
    keys = list(tune.space)
    rank = np.linspace(0, 1, max(len(done), 2))
    import matplotlib

    colours = matplotlib.colormaps["viridis"]
    values = [float(t.value or 0.0) for t in done]
    low, high = min(values, default=0.0), max(values, default=1.0)
    for i, trial in enumerate(done):
        end = (float(trial.value or 0.0) - low) / ((high - low) or 1.0)
        y = [_axis(tune.space[key])[0](trial.values[key]) for key in keys] + [end]
        axes.plot(range(len(y)), y, color=colours(rank[i]), lw=2.2 if i == len(done) - 1 else 0.9, alpha=0.9)
    for i, key in enumerate(keys):
        axes.axvline(i, color=GREY, lw=0.8)
        for at, name in _axis(tune.space[key])[1]:
            axes.text(i + 0.02, at, name, color=GREY, fontsize=8, va="center")
    axes.axvline(len(keys), color=GREY, lw=0.8)
    for at, name in ((0.0, f"{low:.3g}"), (1.0, f"{high:.3g}")):
        axes.text(len(keys) - 0.02, at, name, color=GREY, fontsize=8, va="center", ha="right")
    axes.set_xticks(range(len(keys) + 1), [_short(key) for key in keys] + [tune.objective.metric])
    axes.tick_params(colors=GREY, labelsize=8.5, length=0)
    for label in axes.get_xticklabels()[::2] if len(keys) > 3 else []:
        label.set_y(-0.06)
    axes.set_yticks([])
    axes.patch.set_alpha(0)
    for side in axes.spines.values():
        side.set_visible(False)
    return data_uri(figure)


def _axis(values: Range) -> tuple[Callable[[Any], float], list[tuple[float, str]]]:
    """Where a value stands between 0 and 1, and what is written beside the axis."""
    ends = values.ends
    if values.kind == "choice":
        texts = [json.dumps(v) for v in ends]
        names = [v if isinstance(v, str) else json.dumps(v) for v in ends]
        last = len(texts) - 1
        return lambda v: texts.index(json.dumps(v)) / last, [(i / last, name) for i, name in enumerate(names)]
    shape: Callable[[float], float] = math.log if "log" in values.kind else float
    low, high = (shape(v) for v in ends)
    return lambda v: (shape(v) - low) / (high - low), [(0.0, f"{ends[0]:g}"), (1.0, f"{ends[1]:g}")]
