"""From predictions to tables: which pixels count, scores of all methods, and these by thickness and by space group.

`Results` holds what all methods made of the same samples. Each sample is cut by one diameter of its own probe on every
side, where that leaves at least 8 x 8 pixels of every sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from exitwave.train.classical import coarsest_step_A, probe_diameter_A, wavelength_A
from exitwave.train.intervals import FEW_GROUPS, groups_of, intervals
from exitwave.train.metrics import centred, fit_scale, score, squared_errors

__all__ = [
    "CLASSICAL",
    "METHODS",
    "Region",
    "Results",
    "by_space_group",
    "by_thickness",
    "certainty",
    "fit_scales",
    "focus_note",
    "label_std_V",
    "scored_region",
    "scores",
    "step_note",
    "targets",
]

METHODS = ("model", "idpc", "com", "mean")
CLASSICAL = ("idpc", "com")
_LEAST_PIXELS = 8
_THICKNESS_BINS = 4
_LEAST_GROUP = 4

Array = npt.NDArray[np.floating[Any]]
Chosen = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Results:
    """Predictions [V·Å] by method and the truth, all (N, H, W); params (N,); mean patterns (N, Qy, Qx) [counts]."""

    predictions: dict[str, Array]
    truth: Array
    params: np.ndarray[Any, Any]
    uids: Sequence[int]
    patterns: Array
    model_s: float

    @property
    def thickness_A(self) -> Array:
        return np.asarray(self.params["thickness_A"], dtype=np.float64)

    def scaled(self, scales: dict[str, float]) -> Results:
        """The same with each named method's images times its scale."""
        return replace(self, predictions={name: i * scales.get(name, 1.0) for name, i in self.predictions.items()})

    def only(self, rows: Sequence[int]) -> Results:
        """Some of the samples, in the order of `rows`."""
        at = np.asarray(rows, dtype=np.int64)
        return replace(
            self,
            predictions={name: images[at] for name, images in self.predictions.items()},
            truth=self.truth[at],
            params=self.params[at],
            uids=[self.uids[i] for i in rows],
            patterns=self.patterns[at],
        )


@dataclass(frozen=True, kw_only=True)
class Region:
    """Pixels cut from each side of each sample (N,), the widest such margin in Å, and why."""

    cut: npt.NDArray[np.int64]
    edge_A: float
    note: str

    def inside(self, images: Array, chosen: Chosen | None = None) -> list[Array]:
        """The pixels that count, of each chosen sample."""
        rows = np.arange(len(images)) if chosen is None else np.flatnonzero(chosen)
        height, width = images.shape[1:]
        return [images[i][c : height - c, c : width - c] for i, c in zip(rows, self.cut[rows], strict=True)]


def scored_region(params: np.ndarray[Any, Any], shape: tuple[int, int]) -> Region:
    """One probe diameter (the first dark ring, without aberrations) is cut from the sides, as the module says."""
    diameter = np.array([probe_diameter_A(float(p["energy_keV"]), float(p["semiangle_mrad"])) for p in params])
    cut = np.ceil(diameter / params["potential_sampling_A"]).astype(np.int64)
    widest = float(diameter.max())
    if min(shape) - 2 * int(cut.max()) < _LEAST_PIXELS:
        note = (
            f"nothing excluded: the pixels within one probe diameter ({widest:.2f} Å) of the edge, which the scan "
            f"hardly sees, are scored like all others, since without them fewer than {_LEAST_PIXELS} x {_LEAST_PIXELS} "
            f"of the {shape[0]} x {shape[1]} pixels would be left"
        )
        return Region(cut=np.zeros_like(cut), edge_A=0.0, note=note)
    span = f"{diameter.min():.2f}" + (f" to {widest:.2f}" if widest - diameter.min() > 0.005 else "")
    note = f"pixels within one probe diameter ({span} Å, at most {cut.max()} pixels) of the edge are not scored"
    return Region(cut=cut, edge_A=widest, note=note)


def scores(results: Results, region: Region, chosen: Chosen | None = None) -> dict[str, dict[str, float | None]]:
    """Scores of every method on the chosen samples, over the pixels that count."""
    rows = slice(None) if chosen is None else chosen
    truth, depth = region.inside(results.truth, chosen), results.thickness_A[rows]
    sampling = np.asarray(results.params["potential_sampling_A"][rows], dtype=np.float64)
    return {
        name: score(region.inside(images, chosen), truth, depth, sampling_A=sampling).to_json()
        for name, images in results.predictions.items()
    }


def fit_scales(results: Results, region: Region) -> dict[str, float]:
    """One non-negative scale for each classical method, least squares in V over the pixels that count."""
    depth = results.thickness_A[:, None, None]
    truth = region.inside(results.truth / depth)
    return {
        name: fit_scale(region.inside(images / depth), truth)
        for name, images in results.predictions.items()
        if name not in ("model", "mean")
    }


def certainty(results: Results, region: Region, split: str) -> dict[str, Any]:
    """95 % intervals of `rmse_VA` over the held-out groups, how many these are, and whether that is too few."""
    kind, group = groups_of(results.params, split)
    truth = region.inside(results.truth)
    errors = {name: squared_errors(region.inside(images), truth) for name, images in results.predictions.items()}
    count = int(group.max()) + 1
    return {
        "rmse_VA_interval_95": intervals(errors, group),
        "groups": {"by": kind, "n": count, "anecdotal": kind == "prototype" and count < FEW_GROUPS},
    }


def by_thickness(results: Results, region: Region) -> list[dict[str, Any]]:
    """Scores in bins of thickness that hold as nearly equal numbers of samples as can be."""
    thickness = results.thickness_A
    edges = np.unique(np.quantile(thickness, np.linspace(0, 1, _THICKNESS_BINS + 1)))
    if len(edges) == 1:
        edges = np.array([edges[0], edges[0]])
    rows = []
    for k, (low, high) in enumerate(pairwise(edges)):
        last = k == len(edges) - 2
        chosen = (thickness >= low) & ((thickness <= high) if last else (thickness < high))
        if chosen.any():
            rows.append({"thickness_A": [float(low), float(high)], **_part(results, region, chosen)})
    return rows


def by_space_group(results: Results, region: Region) -> list[dict[str, Any]]:
    """Scores of the samples of each space group with at least four of them, by number."""
    groups = results.params["space_group"]
    return [
        {"space_group": int(number), **_part(results, region, groups == number)}
        for number in np.unique(groups)
        if int((groups == number).sum()) >= _LEAST_GROUP
    ]


def _part(results: Results, region: Region, chosen: Chosen) -> dict[str, Any]:
    return {
        "n": int(chosen.sum()),
        "label_std_V": label_std_V(results, region, chosen),
        "metrics": scores(results, region, chosen),
    }


def label_std_V(results: Results, region: Region, chosen: Chosen | None = None) -> float:
    """Deviation of the labels from their own means [V], pooled: the error of a method that sees nothing."""
    truth = [centred(t) for t in region.inside(results.truth / results.thickness_A[:, None, None], chosen)]
    return float(np.sqrt(sum((t**2).sum() for t in truth) / sum(t.size for t in truth)))


def step_note(params: np.ndarray[Any, Any]) -> str:
    """Whether the scan is dense enough for the classical methods to have their due; empty where it is."""
    limits = [coarsest_step_A(float(p["energy_keV"]), float(p["semiangle_mrad"])) for p in params]
    steps = [max(float(p["R_sampling_y_A"]), float(p["R_sampling_x_A"])) for p in params]
    coarse = [limit for step, limit in zip(steps, limits, strict=True) if step > 1.001 * limit]
    if not coarse:
        return ""
    return (
        f"the scan step ({max(steps):.2f} Å) is above λ/(4α) (down to {min(coarse):.2f} Å) for {len(coarse)} of "
        f"{len(steps)} samples: there iDPC and centre of mass are at a disadvantage; give them a denser scan of the "
        "same dose with --dense"
    )


def focus_note(params: np.ndarray[Any, Any]) -> str:
    """Whether the probe is in focus, within half the depth of focus λ/α²; empty where it is."""
    depth = [wavelength_A(float(p["energy_keV"])) / (float(p["semiangle_mrad"]) * 1e-3) ** 2 for p in params]
    off = sum(abs(float(p["defocus_A"])) > 0.5 * d for p, d in zip(params, depth, strict=True))
    if not off:
        return ""
    return (
        f"{off} of {len(params)} samples are out of focus by more than half the depth of focus (λ/2α² = "
        f"{0.5 * min(depth):.0f} Å): there iDPC and centre of mass are at a disadvantage"
    )


def targets(
    pooled: dict[str, dict[str, float | None]], bins: Sequence[dict[str, Any]], label_std: float
) -> list[dict[str, Any]]:
    """What the network should reach beside the best classical method, with what it reached.

    Pooled: at most half its error, at most 0.35 of it where scale and offset are fitted for each sample, a higher SSIM.
    In each bin of thickness at most half, or no worse where the classical error is under 10 % of the label's deviation.
    """

    def ratio(name: str, metrics: Any, key: str, limit: float) -> dict[str, Any]:
        best = min(metrics[m][key] for m in CLASSICAL)
        value = metrics["model"][key] / best if best > 0 else float("inf")
        return {"name": name, "value": value, "target": limit, "holds": value <= limit}

    def limit_at(metrics: Any, deviation: float) -> float:
        return 0.5 if min(metrics[m]["rmse_V"] for m in CLASSICAL) > 0.1 * deviation else 1.0

    best_ssim = max(float(pooled[m]["ssim"] or 0.0) for m in CLASSICAL)
    ours = float(pooled["model"]["ssim"] or 0.0)
    return [
        ratio("rmse_V over the best classical", pooled, "rmse_V", limit_at(pooled, label_std)),
        ratio("rmse_V_fitted over the best classical", pooled, "rmse_V_fitted", 0.35),
        {"name": "ssim above the best classical", "value": ours, "target": best_ssim, "holds": ours > best_ssim},
        *(
            ratio(
                f"rmse_V over the best classical, {row['thickness_A'][0]:.0f} to {row['thickness_A'][1]:.0f} Å",
                row["metrics"],
                "rmse_V",
                limit_at(row["metrics"], row["label_std_V"]),
            )
            for row in bins
        ),
    ]
