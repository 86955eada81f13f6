"""`exitwave predict`: a trained network on a 4D-STEM file; calibrated results and a picture."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import write_atomic
from exitwave.workflows.session import Session

__all__ = ["parse_flip", "parse_pair", "predict_file"]


def predict_file(
    session: Session,
    run: Path,
    source: Path,
    out: Path,
    *,
    scan_shape: str | None,
    scan_step_A: str | None,
    center: str | None,
    flip: str,
    transpose: bool | None,
    force: bool,
    **given: float | None,
) -> dict[str, Any]:
    """Predicts, writes OUT, OUT's uncertainty and a picture; returns what was assumed and made.

    Raises UsageError for what is missing, or lies outside of the training without `force`.
    """
    from exitwave.ingest.microscopy import open_scan
    from exitwave.ingest.microscopy_write import FORMATS, write_image
    from exitwave.train.predict import Given, complaints, predict, resolve
    from exitwave.train.run import load_model

    if out.suffix.lower() not in FORMATS:
        raise UsageError(f"--out {out}: expected a name ending in {' or '.join(FORMATS)}")
    if out.exists() and source.exists() and out.samefile(source):
        raise UsageError(f"--out {out}: this is the input")
    model = load_model(run / "train" if not (run / "model.pt").exists() and (run / "train").is_dir() else run)
    shape = None if scan_shape is None else _whole_pair(scan_shape, "--scan-shape")
    scan = open_scan(source, scan_shape=shape)
    said = Given(
        scan_step_A=None if scan_step_A is None else parse_pair(scan_step_A, "--scan-step-A", positive=True),
        center=None if center is None else parse_pair(center, "--center"),
        flip=parse_flip(flip),
        transpose=transpose,
        **given,
    )
    conditions = resolve(scan, said)
    for line in (*conditions.notes, _dose_note(model, conditions, said)):
        if line:
            session.note(f"estimated: {line}" if line in conditions.notes else line)
    for line in conditions.contradicted:
        session.note(f"note: {line}")
    wrong = complaints(model, scan, conditions)
    if wrong and not force:
        raise UsageError(
            f"{source}: outside of what the model was trained on:\n  " + "\n  ".join(wrong) + "\n--force predicts all "
            "the same; correct what the file says with the options of `exitwave predict --help`."
        )
    for line in wrong:
        session.note(f"forced: {line}")
    began = time.monotonic()
    with session.progress() as feed:
        made = predict(
            model,
            scan,
            conditions,
            progress=lambda done, total: feed(
                {"kind": "work_progress", "label": "predict", "unit": "rows", "done": done, "total": total}
            ),
        )
    seconds = time.monotonic() - began
    facts = {
        "model": str(model.spec.model.preset),
        "trained_on": model.dataset_id,
        "input": source.name,
        "label_blur_A": model.preprocessing.trained.get("label_blur_A", (0.0, 0.0))[0],
        "energy_keV": conditions.energy_keV,
        "semiangle_mrad": conditions.semiangle_mrad,
        "scan_rotation_deg": conditions.rotation_deg,
        "forced": "; ".join(wrong),
    }
    beside = out.with_name(f"{out.stem}-uncertainty{out.suffix}")
    picture = out.with_suffix(".png")
    for path, image, title, quantity in (
        (beside, made.uncertainty_VA, f"{scan.title}: uncertainty of the potential", "uncertainty (V Å)"),
        (out, made.potential_VA, f"{scan.title}: projected potential", "projected potential (V Å)"),
    ):
        write_image(path, image, sampling_A=made.sampling_A, title=title, quantity=quantity, facts=facts)
    _write_picture(picture, made.potential_VA, made.uncertainty_VA, made.sampling_A)
    return {
        "out": str(out),
        "uncertainty": str(beside),
        "picture": str(picture),
        "shape": list(made.potential_VA.shape),
        "sampling_A": made.sampling_A,
        "windows": made.windows,
        "views": made.views,
        "seconds": round(seconds, 3),
        "conditions": {
            "energy_keV": conditions.energy_keV,
            "semiangle_mrad": conditions.semiangle_mrad,
            "scan_step_A": list(conditions.scan_step_A),
            "q_sampling_per_A": list(conditions.q_sampling_per_A),
            "center": list(conditions.center),
            "rotation_deg": conditions.rotation_deg,
            "transposed": conditions.transposed,
            "origin": conditions.origin,
            "contradicted": list(conditions.contradicted),
        },
        "resampled_to_step_A": made.scan_step_A,
        "outside_training": wrong,
        "message": f"Wrote {out} ({made.potential_VA.shape[0]}x{made.potential_VA.shape[1]} pixels of "
        f"{made.sampling_A:.3g} Å), {beside.name} and {picture.name} in {seconds:.1f} s",
    }


def parse_pair(text: str, option: str, *, positive: bool = False) -> tuple[float, float]:
    """`0.3` or `0.3,0.31` (y, x) as two numbers."""
    try:
        values = [float(word) for word in re.split(r"[,x ]+", text.strip())]
    except ValueError:
        values = []
    if len(values) == 1 and positive:
        values *= 2
    if len(values) != 2 or not np.isfinite(values).all() or (positive and min(values) <= 0):
        what = "one positive number or two, y,x" if positive else "two numbers, y,x"
        raise UsageError(f"{option}: expected {what}, got {text!r}")
    return values[0], values[1]


def parse_flip(text: str) -> tuple[bool, bool]:
    """`none`, `y`, `x` or `yx`: the detector axes that point the other way."""
    if text not in ("none", "y", "x", "yx"):
        raise UsageError(f"--flip: expected none, y, x or yx, got {text!r}")
    return "y" in text, "x" in text


def _whole_pair(text: str, option: str) -> tuple[int, int]:
    y, x = parse_pair(text, option)
    if y != int(y) or x != int(x) or min(y, x) < 1:
        raise UsageError(f"{option}: expected two positive whole numbers, ROWSxCOLUMNS, got {text!r}")
    return int(y), int(x)


def _dose_note(model: Any, conditions: Any, said: Any) -> str:
    """Whether the noise is what the network knows; counts are only known where the gain is."""
    trained = model.spec.data.dose_e_per_pattern
    if trained is None or said.gain is None:
        return ""
    counts = conditions.counts_per_pattern
    if 0.3 * trained <= counts <= 3 * trained:
        return ""
    return f"{counts:.3g} electrons a pattern, the model was trained with {trained:.3g}: expect it to be less exact"


def _write_picture(path: Path, potential: Any, uncertainty: Any, sampling_A: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height, width = potential.shape
    extent = (0.0, width * sampling_A, height * sampling_A, 0.0)
    figure = Figure(figsize=(9.0, 4.6), dpi=120, layout="constrained")
    images: Sequence[tuple[str, Any, str]] = (
        ("projected potential", potential, "magma"),
        ("uncertainty", uncertainty, "viridis"),
    )
    for axes, (title, image, cmap) in zip(figure.subplots(1, 2), images, strict=True):
        low, high = np.nanpercentile(image, [0.5, 99.5])
        shown = axes.imshow(image, cmap=cmap, extent=extent, vmin=low, vmax=high if high > low else low + 1)
        axes.set_title(title)
        axes.set_xlabel("Å")
        figure.colorbar(shown, ax=axes, label="V Å", fraction=0.046)
    FigureCanvasAgg(figure)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    write_atomic(path, buffer.getvalue())
