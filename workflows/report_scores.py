"""Scores in words: was it worth it, in one sentence with the figures, for each thing a network is trained for.

- Images of the potential (`rmse_VA`): against the training set's mean image, iDPC, centre of mass, ptychography.
- Space groups (`top1`): against template matching and the most frequent class.
- Numbers, such as thickness and tilts (`mse`, in standard deviations of the training set): against their mean.

Pure. `metrics`: method -> name of a score -> value, as `exitwave evaluate` writes them; `model` is the network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["METHODS", "columns", "headline", "key_figures", "verdict"]

Metrics = Mapping[str, Mapping[str, Any]]

METHODS = {
    "model": ("the network", "what this run trained"),
    "idpc": ("iDPC", "integrated quadrant signal, scale fitted on the validation set"),
    "com": ("centre of mass", "integrated centre of mass, scale fitted on the validation set"),
    "ptycho": ("ptychography", "iterative reconstruction"),
    "template": ("template matching", "the most alike of the mean patterns of the training set"),
    "majority": ("most frequent class", "the same answer for every sample"),
    "mean": ("training set's mean", "the same for every sample"),
}
_COLUMNS = (
    ("rmse_VA", "RMSE", "V·Å"),
    ("rmse_V", "RMSE / thickness", "V"),
    ("rmse_V_fitted", "after rescaling", "V"),
    ("top1", "Right", ""),
    ("f1", "F1", ""),
    ("mse", "Mean squared error", "σ²"),
    ("r2", "R²", ""),
    ("psnr", "PSNR", "dB"),
    ("ssim", "SSIM", ""),
)
_UNITS = (("_deg", "°"), ("_mrad", "mrad"), ("_keV", "keV"), ("_A", "Å"))  # ends of names


def columns(metrics: Metrics) -> list[tuple[str, str, str]]:
    """(score, heading, unit) of those that any method has; of the standard ones alone where nothing was evaluated."""
    there = {name for scores in metrics.values() for name in scores}
    found = [column for column in _COLUMNS if column[0] in there]
    for name in sorted(there):
        if name.startswith("r2_"):
            found.append((name, f"R² of {name.removeprefix('r2_')}", ""))
        elif name.startswith("rmse_") and name not in {column[0] for column in _COLUMNS}:
            unit = next((unit for end, unit in _UNITS if name.endswith(end)), "")
            found.append((name, f"RMSE of {name.removeprefix('rmse_')}", unit))
    return found


def _of(metrics: Metrics, score: str) -> dict[str, float]:
    """Method -> score, of those that have one."""
    found = {name: float(m[score]) for name, m in metrics.items() if m.get(score) is not None}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def verdict(metrics: Metrics) -> tuple[bool | None, str, str]:
    """Whether the network did better than who knows only the training set's mean (or most frequent class): yes or no,
    a badge, in words; None and nothing where that cannot be said."""
    right = _of(metrics, "top1")
    if "model" in right and "majority" in right:
        return _of_classes(right)
    errors = _of(metrics, "rmse_VA")
    mean, power = "the error of the training set's mean image", 1.0
    if "model" not in errors:
        errors, mean, power = _of(metrics, "mse"), "the error of the training set's mean", 0.5
    if not errors.get("model") or not errors.get("mean"):
        return None, "", ""
    ratio = (errors["model"] / errors["mean"]) ** power
    if ratio < 0.8:
        classical = [errors[name] for name in ("idpc", "com", "ptycho") if name in errors]
        badge = "It worked" if all(errors["model"] < error for error in classical) else "It learned"
        return True, badge, f"{100 * (1 - ratio):.0f} % below {mean}"
    if ratio < 1:
        return False, "Hardly learned", f"only {100 * (1 - ratio):.0f} % below {mean}"
    return False, "Not learned", f"no better than {mean.removeprefix('the error of ')}"


def _of_classes(right: Mapping[str, float]) -> tuple[bool, str, str]:
    if right["model"] <= right["majority"]:
        return False, "Not learned", "no better than the most frequent class"
    best = max(value for name, value in right.items() if name != "model")
    return True, "It worked" if right["model"] > best else "It learned", "more than the most frequent class"


def headline(metrics: Metrics, *, n: int, structures: int, split: str) -> str:
    """What was done and whether it worked, in one sentence with the figures; nothing where nothing was evaluated."""
    model = metrics.get("model")
    if not model:
        return ""
    where = f"{n} samples" + (f" of {structures} material{'s' * (structures != 1)}" if structures else "")
    where += " that it never saw" if split != "train" else " that it was trained on"
    right, errors = _of(metrics, "top1"), _of(metrics, "rmse_VA")
    if "model" in right:
        others = [f"{METHODS[m][0]} {100 * right[m]:.0f} %" for m in ("template", "majority") if m in right]
        sentence = f"On {where}, the network names the right class of {100 * right['model']:.0f} %"
        return sentence + (f"; {', '.join(others)}." if others else ".")
    words = verdict(metrics)[2]
    if "model" not in errors:
        explained = _of(metrics, "r2").get("model")
        sentence = f"On {where}, the network"
        sentence += f" explains {explained:.2f} of the variance" if explained is not None else " was evaluated"
        return sentence + (f", its error is {words}." if words else ".")
    sentence = f"On {where}, the network reconstructs the projected potential with an error of "
    sentence += f"{errors['model']:.3g} V·Å (RMSE)"
    if words:
        sentence += f", {words} ({errors['mean']:.3g} V·Å)"
    others = [f"{METHODS[m][0]} reaches {errors[m]:.3g} V·Å" for m in ("idpc", "com", "ptycho") if m in errors]
    return sentence + (f"; from the same patterns {' and '.join(others)}." if others else ".")


def key_figures(metrics: Metrics) -> list[tuple[str, str]]:
    """(figure, what it is) of the network, for the top of the page."""
    model = {name: float(value) for name, value in metrics.get("model", {}).items() if isinstance(value, int | float)}
    shown = (
        ("rmse_VA", "{:.3g} V·Å", "RMSE of the network on unseen materials"),
        ("top1", "{:.1%}", "of samples in the right class"),
        ("f1", "{:.2f}", "F1, averaged over classes (1 is perfect)"),
        ("ssim", "{:.2f}", "structural similarity (1 is perfect)"),
    )
    found = [(how.format(model[name]), what) for name, how, what in shown if name in model]
    if not found and "r2" in model:
        found.append((f"{model['r2']:.2f}", "of the variance explained (R²)"))
    return found
