"""Reading a training's configuration: the `train:` section of a pipeline, or a file of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from exitwave.ingest.errors import UsageError
from exitwave.train.spec import TrainSpec
from exitwave.workflows.config import Document, apply_overrides, is_pipeline, load_document, validate
from exitwave.workflows.nodes_spec import LaunchSection
from exitwave.workflows.pipeline_spec import read_sections

__all__ = ["Training", "read_training"]


@dataclass(frozen=True, kw_only=True)
class Training:
    """A checked training; `ranks` and `launch` are what the pipeline file says, if it is one."""

    spec: TrainSpec
    document: Document
    ranks: int | None
    launch: LaunchSection


def read_training(config: Path, overrides: Sequence[str] = ()) -> Training:
    """Read and check. Raises UsageError naming file, line and key."""
    document = load_document(config)
    if is_pipeline(document):
        sections = read_sections(document, overrides, "train")
        assert sections.train is not None
        return Training(spec=sections.train, document=document, ranks=sections.ranks, launch=sections.launch)
    apply_overrides(document, overrides)
    if "structures" in document.data:
        raise UsageError(
            f"{document.place(('structures',))}: this is a campaign, not a training. A pipeline file with a `train:` "
            "section, or a file with the keys of that section, is expected (`exitwave init quickstart.yaml`)."
        )
    return Training(spec=validate(document, TrainSpec), document=document, ranks=None, launch=LaunchSection())
