"""`exitwave report`: one HTML file that says what was done, whether it worked, and where it comes from.

The page carries its pictures, loads nothing and runs no script. `gather` (in `report_gather`) reads the facts, `render`
turns them into HTML (pure but for drawing), `write_report` puts the file in place whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.files import write_atomic
from exitwave.workflows.figures import curve_png, image_png, shared_limits
from exitwave.workflows.progress import human_seconds
from exitwave.workflows.provenance import exitwave_version
from exitwave.workflows.rejections import grouped
from exitwave.workflows.report_data import Example, ReportData, number
from exitwave.workflows.report_scores import METHODS, columns

__all__ = ["render", "write_report"]

_HEADS = {"thickness_A": "Thickness, Å", "dose_e_per_pattern": "Electrons in a pattern", "n": "Samples"}


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Report on a run or a data set; returns the file's path. UsageError when `folder` is neither."""
    from exitwave.workflows.report_gather import gather

    path = out if out is not None else folder / "report.html"
    html = render(gather(folder))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, html.encode())
    return path


def render(data: ReportData) -> str:
    """The page."""
    from jinja2 import Environment, StrictUndefined

    source = (resources.files("exitwave.workflows") / "templates" / "report.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source).render(
        d=data,
        version=exitwave_version(),
        columns=columns(data.metrics),
        metric_rows=_metric_rows(data.metrics),
        breakdowns=_breakdowns(data),
        rejected=grouped(data.rejected),
        pictures=[_picture(e) for e in data.examples],
        loss_png=_loss(data),
        loss_alt=_loss_words(data),
        stage_bars=_stage_bars(data.stages),
    )


def _metric_rows(metrics: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    order = [*METHODS, *(k for k in metrics if k not in METHODS)]
    rows = []
    for key in order:
        if key in metrics:
            name, what = METHODS.get(key, (key, ""))
            cells = [number(metrics[key].get(column)) for column, _, _ in columns(metrics)]
            rows.append({"key": key, "name": name, "what": what, "cells": cells})
    return rows


def _breakdowns(data: ReportData) -> list[tuple[str, list[list[str]], list[str]]]:
    tables = []
    for name, rows in (("By thickness", data.by_thickness), ("By dose", data.by_dose)):
        if len(rows) > 1:
            flat = [_flatten(row) for row in rows]
            keys = list(dict.fromkeys(k for row in flat for k in row))
            heads = [_HEADS.get(k, k) for k in keys]
            tables.append((name, [[number(row.get(k)) for k in keys] for row in flat], heads))
    return tables


def _flatten(row: Mapping[str, Any]) -> dict[str, Any]:
    """Nested metrics become columns `model RMSE V·Å`; only that figure of each method is shown."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            inner = value if "rmse_VA" not in value else {key: value}
            for method, figures in inner.items():
                if isinstance(figures, Mapping) and "rmse_VA" in figures:
                    flat[f"{METHODS.get(method, (method,))[0]}: RMSE V·Å"] = figures["rmse_VA"]
        elif isinstance(value, list | tuple):
            flat[key] = " … ".join(number(v) for v in value)
        else:
            flat[key] = value
    return flat


def _picture(example: Example) -> dict[str, Any]:
    panels: list[tuple[str, str, str, str]] = []

    def pattern(image: Any, caption: str) -> None:
        root = np.sqrt(np.maximum(image, 0))
        src = image_png(
            root,
            pixel=example.q_sampling_per_A,
            unit="Å⁻¹",
            limits=(0.0, float(root.max()) or 1.0),
            cmap="inferno",
            bar_label="√I",
        )
        panels.append((caption, "", src, f"Diffraction pattern of {example.formula}, {caption}"))

    pattern(example.cbed_centre, "Pattern at the centre")
    pattern(example.cbed_mean, "Mean pattern")
    images = example.images
    limits = shared_limits(list(images.values()))
    for key in ("truth", *METHODS):
        if key not in images or key == "mean":  # one and the same picture for all: its figure says enough
            continue
        name = "Truth" if key == "truth" else METHODS[key][0].removeprefix("the ").capitalize()
        name = "iDPC" if key == "idpc" else name
        note = f"RMSE {number(example.rmse_VA[key])} V·Å" if key in example.rmse_VA else ""
        src = image_png(images[key], pixel=example.pixel_A, unit="Å", limits=limits, cmap="viridis", bar_label="V·Å")
        panels.append((name, note, src, f"Projected potential of {example.formula}: {name}"))
    if "model" in images and "truth" in images:
        difference = np.asarray(images["model"], dtype=float) - np.asarray(images["truth"], dtype=float)
        half = (limits[1] - limits[0]) / 2
        src = image_png(
            difference, pixel=example.pixel_A, unit="Å", limits=(-half, half), cmap="RdBu_r", centre_zero=True,
            bar_label="V·Å",
        )  # fmt: skip
        panels.append(("Network − truth", "", src, f"{example.formula}: network minus truth"))
    return {
        "formula": example.formula,
        "uid": f"{example.uid:016x}",
        "split": example.split,
        "facts": example.facts,
        "panels": panels,
    }


def _loss(data: ReportData) -> str:
    if len(data.loss) < 2:
        return ""
    curves = [("training loss", [s for s, _ in data.loss], [v for _, v in data.loss], False)]
    if data.validation:
        curves.append(("validation", [s for s, _ in data.validation], [v for _, v in data.validation], True))
    return curve_png(curves, x_label="optimizer step", y_label=data.loss_unit)


def _loss_words(data: ReportData) -> str:
    if len(data.loss) < 2:
        return ""
    return f"Training loss from {number(data.loss[0][1])} at the first step to {number(data.loss[-1][1])} at the last."


def _stage_bars(stages: Sequence[tuple[str, float]]) -> list[tuple[str, str, str]]:
    longest = max((s for _, s in stages), default=0.0) or 1.0
    return [(name, human_seconds(seconds), f"{max(100 * seconds / longest, 0.4):.1f}") for name, seconds in stages]
