"""A training's folder: what belongs to it, and what another training may not overwrite.

    RUN/train.json          the resolved spec and the data set's id; the folder's identity
    RUN/preprocessing.json  what was measured on the training set before the first step
    RUN/arrivals.jsonl      of a training while the data set grew: what it knew at which step
    RUN/events.jsonl        train_started, train_resumed, train_step, train_eval, train_checkpoint, train_finished, …
    RUN/checkpoints/        see state.py
    RUN/model.pt            the trained model: weights, spec, preprocessing (loads with weights_only=True)

A step after the last checkpoint is trained again after a kill, and then stands twice in events.jsonl; `read_curve`
keeps the last.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from exitwave.ingest.arrivals import ARRIVALS_NAME
from exitwave.ingest.errors import DamagedDataError, UsageError
from exitwave.ingest.events import read_events
from exitwave.ingest.files import open_to_read, read_plain_text, write_atomic
from exitwave.train.loader import Measured
from exitwave.train.models import FCDenseNet, build_model
from exitwave.train.preprocess import Preprocessing, input_channels
from exitwave.train.spec import TrainSpec, spec_difference, with_defaults
from exitwave.train.state import sweep_checkpoints

__all__ = [
    "MODEL_FORMAT",
    "MODEL_VERSION",
    "SavedFacts",
    "TrainedModel",
    "claim_run",
    "load_model",
    "make_model",
    "read_curve",
    "read_saved",
    "save_model",
    "saved_facts",
    "saved_task",
]

MODEL_FORMAT = "exitwave-model"
MODEL_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """What `model.pt` holds. `mean_image_V`: the training set's mean of label over thickness, (H, W)."""

    module: FCDenseNet
    spec: TrainSpec
    preprocessing: Preprocessing
    mean_image_V: torch.Tensor
    dataset_id: str
    step: int


@dataclass(frozen=True, kw_only=True)
class SavedFacts:
    """What any trained model's file says of itself, whatever its task."""

    step: int
    parameters: int


def claim_run(
    out: Path, spec: TrainSpec, *, dataset_id: str, fresh: bool, online: dict[str, Any] | None = None
) -> None:
    """Makes the folder this training's, or finds that it already is. Called by one rank.

    `online`: how it met its data, where that came while it trained; it is part of the folder's identity.

    Raises:
        UsageError: the folder belongs to another training; the message says where they differ.
    """
    out.mkdir(parents=True, exist_ok=True)
    identity = {"format": "exitwave-train", "version": 1, "dataset_id": dataset_id, "spec": spec.canonical()}
    if online is not None:
        identity["online"] = online
    path = out / "train.json"
    if fresh:
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
        # the identity goes last: a kill in between leaves a folder that still knows what it was
        for name in (
            "model.pt", "metrics.json", "evaluation.npz", "preprocessing.json", "events.jsonl", ARRIVALS_NAME,
            "train.json",
        ):  # fmt: skip
            (out / name).unlink(missing_ok=True)
    elif path.exists():
        before = json.loads(read_plain_text(path))
        difference = spec_difference({**before, "spec": with_defaults(before.get("spec", {}))}, identity)
        if difference:
            raise UsageError(
                f"{out}: belongs to another training (old -> new): {'; '.join(difference)}. Give another --out, or "
                "--fresh to start again"
            )
    if not path.exists():
        write_atomic(path, (json.dumps(identity, indent=1) + "\n").encode())
    (out / "checkpoints").mkdir(exist_ok=True)
    sweep_checkpoints(out / "checkpoints")


def make_model(spec: TrainSpec, preprocessing: Preprocessing) -> FCDenseNet:
    """The network, initialised from the spec's seed alone (the caller's random state is left as it was)."""
    scan, detector = preprocessing.scan_shape, preprocessing.detector_shape
    if spec.model.layout == "probes-as-channels":
        bins = spec.data.detector_bin
        plane = detector if bins is None else (min(bins, detector[0]), min(bins, detector[1]))
    else:
        plane = scan
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        return build_model(
            preset=spec.model.preset,
            layout=spec.model.layout,
            in_channels=input_channels(spec.data, spec.model.layout, scan, detector),
            in_shape=plane,
            out_shape=preprocessing.label_shape,
            overrides=spec.model.overrides(),
        )


def save_model(
    path: Path, module: nn.Module, spec: TrainSpec, measured: Measured, *, dataset_id: str, step: int
) -> None:
    """Writes model.pt, whole or not at all. Called by one rank."""
    buffer = io.BytesIO()
    torch.save(
        {
            "format": MODEL_FORMAT,
            "version": MODEL_VERSION,
            "spec": json.dumps(spec.canonical()),
            "preprocessing": json.dumps(measured.preprocessing.to_json()),
            "mean_image_V": torch.from_numpy(measured.mean_image_V),
            "dataset_id": dataset_id,
            "step": step,
            "state_dict": {name: value.detach().cpu() for name, value in module.state_dict().items()},
        },
        buffer,
    )
    write_atomic(path, buffer.getvalue())


def read_saved(run: Path) -> dict[str, Any]:
    """The content of a run's model.pt.

    Raises:
        UsageError: there is none (yet), or it is of another version.
        DamagedDataError: it cannot be read.
    """
    path = run / "model.pt"
    if not path.exists():
        raise UsageError(f"{path}: expected the trained model, found none; `exitwave train` has to finish first")
    try:
        with os.fdopen(open_to_read(path), "rb") as file:
            content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DamagedDataError(f"{path}: expected a trained model, could not read it ({error})") from error
    if (content.get("format"), content.get("version")) != (MODEL_FORMAT, MODEL_VERSION):
        raise UsageError(
            f"{path}: expected {MODEL_FORMAT} version {MODEL_VERSION}, got {content.get('format')} version "
            f"{content.get('version')}"
        )
    return content


def saved_facts(run: Path) -> SavedFacts:
    """Step and number of parameters of a run's trained model."""
    content = read_saved(run)
    return SavedFacts(
        step=int(content["step"]), parameters=sum(value.numel() for value in content["state_dict"].values())
    )


def saved_task(run: Path) -> str:
    """What the trained model of a run was trained to do."""
    return str(json.loads(read_saved(run)["spec"]).get("task", "reconstruct"))


def load_model(run: Path) -> TrainedModel:
    """The trained model of a run, in evaluation mode. Raises what `read_saved` raises."""
    content = read_saved(run)
    if "mean_image_V" not in content:
        raise UsageError(
            f"{run}: expected a model from patterns to potentials, this one is of task {content.get('task', 'unknown')}"
        )
    spec = TrainSpec.model_validate_json(content["spec"])
    if spec.task != "reconstruct":
        raise UsageError(
            f"{run}: a model that reconstructs potentials is expected, this one was trained to {spec.task}"
        )
    preprocessing = Preprocessing.from_json(json.loads(content["preprocessing"]))
    module = make_model(spec, preprocessing)
    module.load_state_dict(content["state_dict"])
    return TrainedModel(
        module=module.eval(),
        spec=spec,
        preprocessing=preprocessing,
        mean_image_V=content["mean_image_V"],
        dataset_id=content["dataset_id"],
        step=content["step"],
    )


def read_curve(run: Path) -> list[dict[str, Any]]:
    """The `train_step` events of a run in the order of steps, each step once.

    Steps that were trained again after a kill count as trained the last time; steps after the checkpoint at which a
    run was resumed, and not (yet) trained again, are left out.
    """
    steps: dict[int, dict[str, Any]] = {}
    for event in read_events(run / "events.jsonl"):
        if event["kind"] == "train_step":
            steps[event["step"]] = event
        elif event["kind"] in ("train_started", "train_resumed"):
            steps = {step: kept for step, kept in steps.items() if step <= event["step"]}
    return [steps[step] for step in sorted(steps)]
