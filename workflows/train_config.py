"""Reading a training's configuration: the `train:` section of a pipeline, or a file of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import UsageError
from exitwave.train.spec import TrainSpec
from exitwave.workflows.config import Document, apply_overrides, is_pipeline, load_document, section_of, validate

__all__ = ["Training", "read_training"]


@dataclass(frozen=True, kw_only=True)
class Training:
    """A checked training; `ranks` is what the pipeline file says, if it is one."""

    spec: TrainSpec
    document: Document
    ranks: int | None


def read_training(config: Path, overrides: Sequence[str] = ()) -> Training:
    """Read and check. Raises UsageError naming file, line and key."""
    document = load_document(config)
    pipeline = is_pipeline(document)
    apply_overrides(document, overrides, section="train" if pipeline else None)
    if not pipeline and "structures" in document.data:
        raise UsageError(
            f"{document.place(('structures',))}: this is a campaign, not a training. A pipeline file with a `train:` "
            "section, or a file with the keys of that section, is expected (`exitwave init quickstart.yaml`)."
        )
    spec = validate(document, TrainSpec, section_of(document, "train"))
    ranks: Any = document.data.get("ranks") if pipeline else None
    if ranks is not None and (isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1):
        raise UsageError(f"{document.place(('ranks',))}: ranks: expected a whole number >= 1, got {ranks!r}")
    return Training(spec=spec, document=document, ranks=ranks)
