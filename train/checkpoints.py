"""What checkpoints a training's folder has, told by their names alone: for those who need no torch to ask.

RUN/checkpoints/step-00000120/    whole; whatever else lies there is none
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["checkpoint_name", "last_step", "whole_checkpoints"]

_STEP = "step-"


def checkpoint_name(step: int) -> str:
    return f"{_STEP}{step:08d}"


def whole_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Steps and folders of the checkpoints in RUN/checkpoints, the newest last."""
    named = ((path.name.removeprefix(_STEP), path) for path in folder.glob(f"{_STEP}*"))
    return sorted((int(step), path) for step, path in named if step.isascii() and step.isdigit() and path.is_dir())


def last_step(run: Path) -> int:
    """The step of the newest checkpoint of a training; 0 where there is none."""
    return max((step for step, _ in whole_checkpoints(run / "checkpoints")), default=0)
