"""Checkpoints: the whole state of a training at a step, under its name only when complete.

    RUN/checkpoints/step-00000120/   .metadata, *.distcp (torch.distributed.checkpoint), progress.json

1. All ranks write their part of the model and the optimizer into `.step-00000120.part` (torch.distributed.checkpoint
   writes each replicated tensor once and syncs the files).
2. When all have, rank 0 adds progress.json: step, seconds trained, position of the sampler.
3. Rank 0 syncs and renames the folder to its final name, syncs the parent, and removes all but the last `keep`.

A kill at any point leaves either the checkpoint before or this one. Whatever ends in `.part` or `.old` is swept when
the run is opened. Nothing in a checkpoint depends on the number of ranks, so another number may resume it.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts

from exitwave.ingest.errors import DamagedDataError, ExitwaveError, InterruptedRunError, UsageError
from exitwave.ingest.files import disk_full_means_interrupted, read_plain_text
from exitwave.train.checkpoints import checkpoint_name, whole_checkpoints
from exitwave.train.mesh import Ranks

__all__ = ["Progress", "latest_checkpoint", "load_checkpoint", "save_checkpoint", "sweep_checkpoints"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a training is. `sampler` is the state of the global sampler, `elapsed_s` the time spent in steps.

    `scaler`: the state of fp16's loss scale; `skipped`: updates left out because of an overflow.
    """

    step: int
    elapsed_s: float
    sampler: dict[str, Any]
    scaler: dict[str, Any] | None = None
    skipped: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def save_checkpoint(
    folder: Path,
    ranks: Ranks,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    *,
    keep: int,
    means: dict[str, torch.Tensor] | None = None,
) -> Path:
    """Writes the checkpoint of `progress.step` below `folder`; every rank calls it. See the module's docstring.

    `means`: the running mean of the weights, where there is one.

    An error on any rank is raised by all, and the half-written folder is gone; a full disk is InterruptedRunError.
    """
    final = folder / checkpoint_name(progress.step)
    part = folder / f".{final.name}.part"
    state = _state(module, optimizer, means)
    ranks.from_first(lambda: _or_clear(part, lambda: _make_clean(part)))
    error: Exception | None = None
    try:
        with _quiet():
            save_parts(state, checkpoint_id=part, process_group=ranks.process_group)
    except (OSError, CheckpointException) as caught:
        error = _explained(caught, part)
        shutil.rmtree(part, ignore_errors=True)
    ranks.agree(error=error)
    ranks.from_first(lambda: _or_clear(part, lambda: _finish(part, final, progress, keep)))
    return final


def load_checkpoint(
    path: Path,
    ranks: Ranks,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    means: dict[str, torch.Tensor] | None = None,
) -> Progress:
    """Loads model and optimizer, and the `means` of the weights, in place; every rank calls it.

    Raises:
        DamagedDataError: the folder does not hold a whole checkpoint.
        UsageError: it holds that of another model.
    """
    state = _state(module, optimizer, means)
    try:
        with _quiet():
            _refuse_another_model(path, state["model"])
            load_parts(state, checkpoint_id=path, process_group=ranks.process_group)
        set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return Progress(**json.loads(read_plain_text(path / "progress.json")))
    except (CheckpointException, OSError, KeyError, ValueError, TypeError, EOFError, UnpicklingError) as error:
        raise DamagedDataError(
            f"{path}: expected a whole checkpoint of this model, could not load it ({error}); remove that folder to "
            "resume from the checkpoint before, or train with --fresh"
        ) from error


def _refuse_another_model(path: Path, expected: dict[str, Any]) -> None:
    """Names and shapes of the checkpoint's tensors against those of the model."""
    held = {
        name.removeprefix("model."): tuple(entry.size)
        for name, entry in FileSystemReader(path).read_metadata().state_dict_metadata.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    wanted = {name: tuple(value.shape) for name, value in expected.items()}
    wrong = [
        f"{name} {_shape(held.get(name))} there, {_shape(wanted.get(name))} here"
        for name in sorted(held.keys() | wanted.keys())
        if held.get(name) != wanted.get(name)
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UsageError(
            f"{path}: expected a checkpoint of this model, it is of another: {'; '.join(wrong[:3])}{more}. Train with "
            "the model that it was made with, or with --fresh"
        )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else "x".join(map(str, shape)) or "scalar"


def latest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step, or None."""
    found = whole_checkpoints(folder)
    return found[-1][1] if found else None


def sweep_checkpoints(folder: Path) -> None:
    """Removes what a killed run left half-written or half-removed."""
    for path in (*folder.glob(".step-*.part"), *folder.glob(".step-*.old")):
        shutil.rmtree(path, ignore_errors=True)


def _state(
    module: nn.Module, optimizer: torch.optim.Optimizer, means: dict[str, torch.Tensor] | None
) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(module, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    return state if means is None else {**state, "means": means}


def _or_clear(part: Path, work: Callable[[], None]) -> None:
    """Does `work`; where that fails, `part` does not stay behind to hold the space that lacks."""
    try:
        with disk_full_means_interrupted(part.parent):
            work()
    except Exception:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _explained(error: BaseException, part: Path) -> Exception:
    """What stopped the writing. torch wraps a full disk in errors of its own, some without its number."""
    written = sum(path.stat().st_size for path in part.glob("*"))
    # what is written is thrown away: a disk with less than that left had no room for the rest
    if "No space left" in str(error) or shutil.disk_usage(part.parent).free <= max(written, 1 << 20):
        return InterruptedRunError(
            f"{part.parent}: no space left on the device for a checkpoint. Free some space, then run the same command "
            "again: it continues from the last checkpoint."
        )
    return ExitwaveError(f"{part.parent}: a checkpoint could not be written: {error}")


def _make_clean(part: Path) -> None:
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)


def _finish(part: Path, final: Path, progress: Progress, keep: int) -> None:
    path = part / "progress.json"
    with path.open("w") as stream:
        json.dump(progress.to_json(), stream)
        stream.flush()
        os.fsync(stream.fileno())
    _sync_folder(part)
    if final.exists():
        _remove(final)
    part.rename(final)
    _sync_folder(final.parent)
    for _, old in whole_checkpoints(final.parent)[:-keep]:
        _remove(old)


def _remove(checkpoint: Path) -> None:
    # Out of sight first: a folder that is half removed must not carry a checkpoint's name.
    doomed = checkpoint.with_name(f".{checkpoint.name}.old")
    checkpoint.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _quiet(warnings.catch_warnings):
    """Silences torch's own deprecation notices inside torch.distributed.checkpoint."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", UserWarning)
