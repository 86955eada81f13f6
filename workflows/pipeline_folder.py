"""The folder of `exitwave run`: whose it is, and what of an earlier attempt stands in the way of this one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from exitwave.ingest.arrivals import ReservoirSettings
from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import FileLock, read_object, write_atomic
from exitwave.simulate.lease import kept_out
from exitwave.train.spec import TrainSpec
from exitwave.workflows.config import load_document, validate
from exitwave.workflows.nodes_spec import STATE
from exitwave.workflows.pipeline_spec import PipelineSpec
from exitwave.workflows.provenance import git_commit, versions
from exitwave.workflows.resolved import differences, dump_yaml, read_resolved, resolved_comment

__all__ = ["claim", "refuse_foreign", "refuse_the_other_way", "trained"]

_OURS = (
    "report.html",
    "events.jsonl",
    "train",
    "rounds",
    "cache",
    "dataset",
    "pipeline.yaml",
)  # the identity goes last
# where, with how many processes, another verb: may change between attempts
_WHERE_NOT_WHAT = ("cluster", "ranks", "stage", "launch", "tune", "online")


def refuse_foreign(out: Path) -> None:
    """A folder with other people's files is never written into."""
    if (out / "pipeline.yaml").exists() or not out.exists():
        return
    others = sorted(p.name for p in out.iterdir() if not p.name.startswith("."))
    if others:
        raise UsageError(
            f"{out}: this folder was not made by `exitwave run` (no pipeline.yaml in it, but "
            f"{', '.join(others[:3])}). Give "
            "another --out."
        )


def claim(out: Path, spec: PipelineSpec, *, fresh: bool) -> bool:
    """Make the folder this pipeline's; returns whether it already was. Called under the folder's lock.

    Raises UsageError with the difference when it belongs to another configuration.
    """
    path = out / "pipeline.yaml"
    now = _resolved(spec)
    if path.exists() and fresh:
        _forget(out)
    if path.exists():
        before = _read_again(path)
        changed = differences(_what(before), _what(now))
        of_training = [line for line in changed if line.startswith("train.")]
        if len(changed) > len(of_training) or (of_training and _has_trained(out)):
            lines = "\n  ".join(changed)
            raise UsageError(
                f"{out}: was made with another configuration:\n  {lines}\nGive another --out, or --fresh to "
                f"delete what is there and start again.{_how_to_train_again(out, len(changed) == len(of_training))}"
            )
        resumed = True
    else:
        resumed = False
    made = {**versions(), "commit": git_commit() or "unknown"}
    write_atomic(path, dump_yaml(now, comment=resolved_comment("A pipeline", made)).encode())
    return resumed


def _forget(out: Path) -> None:
    """All that is there. UsageError, before anything is removed, where a command works in the folder of a part."""
    for run in _folders(out):
        if FileLock(run / ".lock").is_held():
            raise UsageError(f"{run}: another exitwave command is training there; --fresh deletes nothing under it.")
    dataset = out / "dataset"
    with kept_out(dataset) if dataset.is_dir() else nullcontext():
        for name in _OURS:
            _remove(out / name)


def _folders(out: Path) -> list[Path]:
    """Of trainings: the pipeline's own, and those of the networks that judge."""
    return [out / "train", *sorted((out / "rounds").glob("round-*"))]


def _has_trained(out: Path) -> bool:
    """Whether a training has begun, or waits in a queue."""
    marks = ("train.json", f"{STATE}/job.json")
    return any((run / mark).exists() for run in _folders(out) for mark in marks)


def _how_to_train_again(out: Path, possible: bool) -> str:
    if not possible:
        return ""
    rounds = f" and {out / 'rounds'}" if (out / "rounds").exists() else ""
    return f" Or remove {out / 'train'}{rounds}, to train so on the samples that are there."


def refuse_the_other_way(run: Path, spec: TrainSpec, online: ReservoirSettings | None) -> None:
    """A training that has begun keeps its order of samples; said now, and not when the campaign is over.

    `online`: what that order would follow from now, None without --online.
    """
    before = read_object(run / "train.json")
    if not before or trained(run, spec):
        return
    then = before.get("online")
    if (then is None) != (online is None):
        began = "without" if then is None else "with"
        raise UsageError(
            f"{run.parent}: its training began {began} --online and goes on so. Give the same command {began} it, or "
            f"remove {run} to train again on the samples that are there."
        )
    now = None if online is None else online.to_json()
    if changed := differences(then or {}, now or {}):
        lines = "\n  ".join(changed)
        raise UsageError(
            f"{run.parent}: its training began with another section `online:`, from which its order of samples "
            f"follows:\n  {lines}\nGive that back, or remove {run} to train again on the samples that are there."
        )


def trained(run: Path, spec: TrainSpec) -> bool:
    return (run / "model.pt").exists() and read_object(run / "train.json").get("spec") == spec.canonical()


def _resolved(spec: PipelineSpec) -> dict[str, Any]:
    """Every default filled in; of a structure only what it says (the other kinds of source are no defaults)."""
    data: dict[str, Any] = json.loads(json.dumps(spec.model_dump(mode="json")))
    structures = data["campaign"]["structures"]
    data["campaign"]["structures"] = [{k: v for k, v in s.items() if v not in (None, [], "")} for s in structures]
    return {key: value for key, value in data.items() if value is not None}  # a section that is not there


def _read_again(path: Path) -> dict[str, Any]:
    """What an earlier attempt resolved, with the defaults of keys that came since; as it stands where it is no pipeline
    to this version."""
    try:
        return _resolved(validate(load_document(path), PipelineSpec))
    except UsageError:
        return read_resolved(path)


def _what(configuration: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in configuration.items() if key not in _WHERE_NOT_WHAT}


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
