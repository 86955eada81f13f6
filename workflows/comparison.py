"""A picture of what was reconstructed: one row a sample, the mean pattern, truth, network, iDPC and the differences."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.files import write_atomic

__all__ = ["write_comparison"]

_COLUMNS = ("mean pattern", "truth", "network", "iDPC", "network - truth", "iDPC - truth")


def write_comparison(examples: Path, out: Path) -> Path:
    """Draws the examples that an evaluation kept (evaluation.npz) as a PNG; each row has one colour range, in V."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    with np.load(examples, allow_pickle=False) as file:
        kept = {name: file[name] for name in file.files}
    rows = len(kept["uid"])
    figure = Figure(figsize=(2.0 * len(_COLUMNS), 2.15 * rows + 0.2), dpi=110, layout="constrained")
    axes = figure.subplots(rows, len(_COLUMNS), squeeze=False)
    for k, row in enumerate(axes):
        depth = float(kept["thickness_A"][k])
        truth, ours, theirs = (_centred(kept[name][k]) / depth for name in ("truth", "model", "idpc"))
        low, high = float(truth.min()), float(truth.max())
        row[0].imshow(np.sqrt(np.maximum(kept["pattern"][k], 0)), cmap="inferno")
        row[0].set_ylabel(f"{depth:.0f} Å", fontsize=9)
        for cell, image in zip(row[1:4], (truth, ours, theirs), strict=True):
            shown = cell.imshow(image, cmap="magma", vmin=low, vmax=high)
        figure.colorbar(shown, ax=row[3], fraction=0.05, label="V")
        limit = max(abs(low), abs(high)) or 1.0
        for cell, image in zip(row[4:], (ours - truth, theirs - truth), strict=True):
            shown = cell.imshow(image, cmap="RdBu_r", vmin=-limit, vmax=limit)
        figure.colorbar(shown, ax=row[5], fraction=0.05, label="V")
        for cell in row:
            cell.set_xticks([])
            cell.set_yticks([])
    for cell, name in zip(axes[0], _COLUMNS, strict=True):
        cell.set_title(name, fontsize=9)
    return _written(figure, out)


def _written(figure: Any, out: Path) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    write_atomic(out, buffer.getvalue())
    return out


def _centred(image: Any) -> Any:
    image = np.asarray(image, dtype=np.float64)
    return image - image.mean()
