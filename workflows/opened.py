"""A run to look at from Python: what it made and how far it is, without importing torch until its model is asked for.

>>> run = open_run("runs/demo")                                  # doctest: +SKIP
>>> run.metrics["model"]["rmse_VA"], len(run.dataset)            # doctest: +SKIP
"""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exitwave.ingest.dataset import Dataset, open_dataset
from exitwave.ingest.errors import ExitwaveError, UsageError
from exitwave.ingest.files import read_plain_text
from exitwave.ingest.manifest import MANIFEST_NAME
from exitwave.workflows.status import status_document
from exitwave.workflows.training_seen import FollowedTraining, TrainingSeen

if TYPE_CHECKING:
    from exitwave.train.run import TrainedModel

__all__ = ["Run", "open_run"]

_METHODS = {"model": "the network", "idpc": "iDPC", "com": "centre of mass", "mean": "mean image"}


def open_run(path: str | Path) -> Run:
    """The folder of `exitwave run` or `exitwave train`. UsageError where it is neither."""
    folder = Path(path)
    if (folder / "pipeline.yaml").exists():
        return Run(folder, train=folder / "train", dataset=folder / "dataset")
    if (folder / "train.json").exists():
        return Run(folder, train=folder, dataset=None)
    if (folder / MANIFEST_NAME).exists():
        raise UsageError(f"{folder}: this is a data set: exitwave.ingest.open_dataset opens it")
    raise UsageError(f"{folder}: neither the folder of `exitwave run` (pipeline.yaml) nor of a training (train.json)")


class Run:
    """Everything is read when it is asked for, so that a run may go on meanwhile."""

    def __init__(self, path: Path, *, train: Path, dataset: Path | None) -> None:
        self.path = path
        self._train, self._dataset = train, dataset

    @property
    def dataset(self) -> Dataset:
        """What its campaign has committed by now. UsageError for a training of its own, which has none."""
        if self._dataset is None:
            raise UsageError(f"{self.path}: a training keeps no data set of its own; open that which it was given")
        return open_dataset(self._dataset)

    @property
    def training(self) -> TrainingSeen:
        """How far its training is: `.last` (step, loss), `.total_steps`, `.curve`, `.validation`."""
        return FollowedTraining(self._train).look()

    @property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """Of each method on structures never seen: `rmse_VA`, `r2`, `ssim`. Empty before `evaluate`."""
        try:
            found = json.loads(read_plain_text(self._train / "metrics.json")).get("metrics", {})
        except (OSError, ValueError, AttributeError):
            return {}
        return {name: scores for name, scores in found.items() if isinstance(scores, dict)}

    @property
    def report(self) -> Path | None:
        """Its report, where it has been written."""
        path = self.path / "report.html"
        return path if path.exists() else None

    def status(self) -> dict[str, Any]:
        """As `exitwave status --json` gives it; empty for a training of its own."""
        return {} if self._dataset is None else status_document(self.path)

    def model(self) -> TrainedModel:
        """The trained network, on the CPU. UsageError where it is not trained yet."""
        from exitwave.train.run import load_model

        return load_model(self._train)

    def __repr__(self) -> str:
        return f"<exitwave.Run {self.path}: {self._words()}>"

    def _words(self) -> str:
        if (self._train / "model.pt").exists():
            return "trained" if self.metrics else "trained, not evaluated yet"
        return f"training: {self.training.words()}"

    def _repr_html_(self) -> str:
        seen, metrics = self.training, self.metrics
        parts = [f"<p><b>{html.escape(self.path.name)}</b>: {html.escape(self._words())}"]
        try:
            samples = self.status().get("samples", {})
        except ExitwaveError as error:
            samples = {}
            parts.append(f"; {html.escape(str(error).splitlines()[0])}")
        if samples:
            parts.append(f"; {samples['committed']} of {samples['planned']} samples")
        if self.report is not None:
            parts.append(f"; report: <code>{html.escape(str(self.report))}</code>")
        parts.append("</p>")
        if metrics:
            head = "<tr><th>on structures never seen</th><th>RMSE, V·Å</th><th>R²</th><th>SSIM</th></tr>"
            rows = "".join(_row(_METHODS.get(name, name), scores) for name, scores in metrics.items())
            parts.append(f"<table>{head}{rows}</table>")
        if len(seen.curve) > 1:
            parts.append(_curve(seen))
        return "".join(parts)


def _row(name: str, scores: dict[str, Any]) -> str:
    cells = [scores.get(key) for key in ("rmse_VA", "r2", "ssim")]
    shown = "".join(f"<td>{cell:.3g}</td>" if isinstance(cell, int | float) else "<td>–</td>" for cell in cells)
    return f"<tr><td>{html.escape(name)}</td>{shown}</tr>"


def _curve(seen: TrainingSeen) -> str:
    from exitwave.workflows.figures import curve_png

    curves = [("training", *map(list, zip(*seen.curve, strict=True)), False)]
    if seen.validation:
        curves.append(("validation", *map(list, zip(*seen.validation, strict=True)), True))
    return f'<img alt="Loss by step" src="{curve_png(curves, x_label="step", y_label="loss")}">'  # type: ignore[arg-type]
