"""`exitwave status` and `failures`: read from disk alone, so they work while a campaign runs and after it died."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import UsageError
from exitwave.ingest.events import read_events
from exitwave.ingest.manifest import MANIFEST_NAME, load_manifest
from exitwave.workflows.progress import human_seconds
from exitwave.workflows.session import Session
from exitwave.workflows.tables import status_table
from exitwave.workflows.training_seen import FollowedTraining, TrainingSeen
from exitwave.workflows.tune_status import failed_trials, is_study, study_progress, study_table

__all__ = ["dataset_of", "failures_of", "show_status", "status_document"]

_STAGED = {"finished": "done", "skipped": "not needed"}  # online, shards are read where they are written


def dataset_of(folder: Path) -> tuple[Path, Path | None]:
    """The data set, and the pipeline's RUN if `folder` is one. UsageError when it is neither."""
    if (folder / "pipeline.yaml").exists():
        return folder / "dataset", folder
    if (folder / MANIFEST_NAME).exists():
        return folder, None
    if not folder.exists():
        raise UsageError(f"{folder}: no such folder.")
    if (folder / "train.json").exists():
        raise UsageError(
            f"{folder}: this is the folder of a training; `exitwave report {folder}` shows how far it is. `status` is "
            "for a data set or the folder of an `exitwave run`."
        )
    if is_study(folder):
        raise UsageError(
            f"{folder}: this is the folder of a search; its trials are not tried again. Its data set, where it has one "
            f"of its own, is {folder / 'dataset'}."
        )
    raise UsageError(f"{folder}: neither a data set (no {MANIFEST_NAME}) nor the folder of an `exitwave run`.")


def failures_of(folder: Path, *, states: Collection[str] = ()) -> list[dict[str, Any]]:
    """The contract's `failures`, of the classes `states` or of all."""
    from exitwave.simulate.attempts import CLASSES
    from exitwave.simulate.state import campaign_failures

    if unknown := set(states) - set(CLASSES):
        raise UsageError(f"--state {', '.join(sorted(unknown))}: one of {', '.join(CLASSES)} expected")

    if is_study(folder):
        own = failures_of(folder / "dataset", states=states) if (folder / "dataset" / MANIFEST_NAME).exists() else []
        return [*own, *(row for row in failed_trials(folder) if not states or row["state"] in states)]
    dataset, run = dataset_of(folder)
    if run is None and not (dataset / "plan.json").exists():
        return []  # made of other data sets or files: no task that could have failed
    return campaign_failures(dataset, states=states)


def status_document(folder: Path, *, training: TrainingSeen | None = None) -> dict[str, Any]:
    """The contract's `status`, a sentence on who is at work (`state`), for a RUN the parts of the line, for a STUDY
    its trials.

    `training`: what a caller who comes again and again has seen of it already; else its log is read.
    """
    from exitwave.simulate.state import STEERING_NAME, campaign_status

    if is_study(folder):
        own = folder / "dataset"
        return {**(status_document(own) if (own / MANIFEST_NAME).exists() else _nothing()), **study_progress(folder)}
    dataset, run = dataset_of(folder)
    if not (dataset / MANIFEST_NAME).exists():
        assert run is not None
        return {**_nothing(), "stages": _stages(run, training, whole=False)}
    if not (dataset / "plan.json").exists():
        return _made_of_others(dataset)
    document: dict[str, Any] = campaign_status(dataset)
    document["state"] = _state(document)
    whole = document["samples"]["committed"] == document["samples"]["planned"]
    if (dataset / STEERING_NAME).exists():
        from exitwave.workflows import adaptive_facts  # with the planner, which takes a second to import

        if (steered := adaptive_facts.adaptive_status(dataset)) is not None:
            document["adaptive"] = steered
            whole = whole and steered["decided"] >= steered["rounds"]
    if run is not None:
        document["stages"] = _stages(run, training, whole=whole)
    return document


def _nothing() -> dict[str, Any]:
    """A campaign that has committed nothing, or is not here."""
    return {
        "samples": {"planned": 0, "committed": 0, "failed": 0, "rejected": 0},
        "shards": {"pending": 0, "running": 0, "committed": 0, "failed": 0},
        "rate_samples_per_s": None,
        "eta_s": None,
        "attempts": 0,
        "cluster": None,
        "dashboard": None,
        "state": "nothing is committed yet",
    }


def _made_of_others(dataset: Path) -> dict[str, Any]:
    """A data set without a plan, as ingest, subset and merge make it: what is committed is all there is."""
    manifest = load_manifest(dataset)
    steps = manifest.header.provenance
    return {
        "samples": {"planned": manifest.n_samples, "committed": manifest.n_samples, "failed": 0, "rejected": 0},
        "shards": {"pending": 0, "running": 0, "committed": len(manifest.shards), "failed": 0},
        "rate_samples_per_s": None,
        "eta_s": 0.0,
        "attempts": 0,
        "cluster": None,
        "dashboard": None,
        "running": False,
        "state": f"complete; made by `exitwave {steps[-1]['verb']}`" if steps else "complete, as far as anyone knows",
    }


def _state(document: dict[str, Any]) -> str:
    """Who is at work, or how it ended."""
    samples, shards = document["samples"], document["shards"]
    if document["running"]:
        who = document.get("controller") or {}
        since = f" for {human_seconds(time.time() - float(who['since']))}" if who.get("since") else ""
        return f"running{since} (host {who.get('host', '?')}, pid {who.get('pid', '?')})"
    if samples["committed"] == samples["planned"]:
        return "complete"
    if shards["failed"] and samples["committed"] + samples["failed"] == samples["planned"]:
        return "finished with failures: `exitwave failures` says why, `exitwave simulate` tries them again"
    return "stopped: no controller holds the lease; the same `exitwave simulate` (or `run`) goes on"


def _stages(run: Path, training: TrainingSeen | None, *, whole: bool) -> dict[str, str]:
    """What is done of a pipeline, each part from its own truth."""
    train = run / "train"
    stages = {"simulate": "done" if whole else "not finished"}
    parts = [e for e in read_events(run / "events.jsonl") if e["kind"].startswith("part_")]
    last = {str(e.get("part")): e["kind"].removeprefix("part_") for e in parts}
    stages["stage"] = _STAGED.get(last.get("stage", ""), "not finished")
    done = (train / "model.pt").exists()
    stages["train"] = "done" if done else (training or FollowedTraining(train).look()).words()
    stages["evaluate"] = "done" if (train / "metrics.json").exists() else "not yet"
    stages["report"] = str(run / "report.html") if (run / "report.html").exists() else "not yet"
    return stages


def show_status(session: Session, folder: Path) -> None:
    """Once."""
    document = status_document(folder)
    session.result(document, lambda: study_table(document) if "trials" in document else status_table(document))
