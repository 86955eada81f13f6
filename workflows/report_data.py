"""What a report says, gathered from a run or a data set. No drawing, no HTML: records only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["AdaptiveFacts", "Example", "Picture", "ReportData", "StudyView", "number"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One sample to be shown. Images are (H, W) in V·Å by method name; `truth` always, others where they exist."""

    formula: str
    uid: int
    split: str
    cbed_centre: Array
    cbed_mean: Array
    q_sampling_per_A: float
    pixel_A: float
    images: Mapping[str, Array]
    facts: Sequence[tuple[str, str]] = ()
    rmse_VA: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AdaptiveFacts:
    """What the rounds of an adaptive campaign did. `columns`: of `regions`, whose rows are (region, cells)."""

    sentence: str
    rounds: Sequence[tuple[str, ...]]  # number, samples, core-seconds, mean error of the judge, favoured most
    columns: Sequence[str]
    regions: Sequence[tuple[str, Sequence[str]]]
    pictures: Sequence[tuple[str, str, str]]  # caption, data URI, words


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A drawing under a heading. `src`: a data URI; `alt`: what it shows, in words; `note`: how to read it."""

    heading: str
    src: str
    alt: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class StudyView:
    """A search: its trials as a table, the best first, and its drawings. A row: (state, cells); `keys` are heads."""

    keys: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]
    pictures: Sequence[Picture]
    metric: str
    importance: Sequence[tuple[str, str, str]] = ()  # key, per cent, width of its bar in per cent


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """Everything that the page shows; what there is none of stays empty."""

    title: str
    kind: str  # "run", "dataset" or "study"
    sentence: str
    good: bool | None = None
    badge: str = ""
    figures: Sequence[tuple[str, str]] = ()  # headline figures: (value, what it is)
    metrics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    metrics_split: str = ""
    metrics_n: int = 0
    metrics_note: str = ""
    by_thickness: Sequence[Mapping[str, Any]] = ()
    by_dose: Sequence[Mapping[str, Any]] = ()
    examples: Sequence[Example] = ()
    loss: Sequence[tuple[float, float]] = ()
    validation: Sequence[tuple[float, float]] = ()
    loss_unit: str = "loss"
    structures: Sequence[Mapping[str, Any]] = ()
    rejected: Sequence[Mapping[str, str]] = ()
    failures: Sequence[Mapping[str, Any]] = ()
    splits: Sequence[tuple[str, int, int]] = ()  # name, structures, samples
    rates: Sequence[tuple[str, str, str]] = ()  # what, value, note
    stages: Sequence[tuple[str, float]] = ()  # name, seconds
    provenance: Sequence[tuple[str, str]] = ()
    configuration: str = ""
    adaptive: AdaptiveFacts | None = None
    study: StudyView | None = None


def number(value: Any, digits: int = 3) -> str:
    """A figure for a table: three significant digits, a dash where there is none."""
    if value is None or isinstance(value, bool):
        return "–"
    if not isinstance(value, int | float | np.number):
        return str(value)
    if not math.isfinite(float(value)):
        return "–"
    text = f"{float(value):.{digits}g}"
    return f"{float(value):,.0f}".replace(",", " ") if "e+" in text else text.replace("-", "−")
