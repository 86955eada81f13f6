"""`exitwave run`: simulate -> stage -> train -> evaluate -> report, in one folder, resumable at any point.

    RUN/pipeline.yaml   the resolved configuration: the folder's identity
        dataset/        the data set            cache/      its staged shards
        train/          the training's folder   report.html
        rounds/         who judged the rounds of an adaptive campaign (adaptive.py)
        events.jsonl    which part began and ended when

No state of our own says what is done: each part's completion is read from its own truth. The manifest lists the plan's
shards; staging knows what is ready; model.pt is there only after the last step; metrics.json only after an evaluation.
So whatever killed a run, and wherever, the same command finds what is left to do.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exitwave.ingest.arrivals import ReservoirSettings
from exitwave.ingest.errors import UsageError
from exitwave.ingest.events import EventLog
from exitwave.simulate.live import LiveStatus
from exitwave.workflows.campaigns import Planned, plan_campaign
from exitwave.workflows.config import Document, apply_overrides, is_pipeline, load_document, validate
from exitwave.workflows.launch import locked
from exitwave.workflows.online_fit import refuse_unfit_online
from exitwave.workflows.pipeline_fit import misfit
from exitwave.workflows.pipeline_folder import claim, refuse_foreign, refuse_the_other_way, trained
from exitwave.workflows.pipeline_line import Line
from exitwave.workflows.pipeline_spec import PipelineSpec
from exitwave.workflows.progress import human_seconds
from exitwave.workflows.session import Session

__all__ = ["read_pipeline", "run_pipeline"]


def read_pipeline(path: Path, overrides: Sequence[str] = ()) -> tuple[Document, PipelineSpec]:
    """Read and check a pipeline. Raises UsageError naming file, line and key of every fault."""
    document = load_document(path)
    if not is_pipeline(document):
        raise UsageError(
            f"{path}: a pipeline is expected, with `campaign:` and `train:` sections; `exitwave init "
            "quickstart.yaml` writes "
            "one. (A campaign alone is run by `exitwave simulate`.)"
        )
    apply_overrides(document, overrides)
    return document, validate(document, PipelineSpec)


def run_pipeline(
    session: Session,
    path: Path,
    out: Path,
    *,
    cluster: str | None,
    workers: int | None,
    ranks: int | None,
    nodes: int | None = None,
    fresh: bool,
    overrides: Sequence[str],
    online: bool = False,
) -> dict[str, Any]:
    """Do what is left to do; returns what came of it. `online`: train while the campaign runs."""
    document, spec = read_pipeline(path, overrides)
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out}: this is a file; --out names a folder.")
    nodes = nodes or spec.launch.nodes
    if online:
        refuse_unfit_online(spec, ranks=ranks or spec.ranks, nodes=nodes)
    if nodes is not None and not trained(out / "train", spec.train):
        from exitwave.workflows.nodes_submit import require_job

        require_job(spec.launch, nodes=nodes, ranks=max(ranks or spec.ranks, nodes))
    began = time.monotonic()
    planned = plan_campaign(document, spec.campaign, ("campaign",), session=session)
    planned = dataclasses.replace(planned, section=spec.cluster)
    if (lacks := misfit(spec, planned.plan)) is not None:
        raise UsageError(f"{path}: {lacks}.")
    settings = _online_settings(spec, planned) if online else None
    refuse_foreign(out)
    with locked(out):
        if fresh:
            from exitwave.workflows.nodes_submit import refuse_while_job

            refuse_while_job(out)
        resumed = claim(out, spec, fresh=fresh)
        refuse_the_other_way(out / "train", spec.train, settings)
        log = EventLog(out / "events.jsonl")
        log.emit("pipeline_started", name=spec.name, resumed=resumed)
        if resumed:
            session.note(f"Going on with {out}: what is done already is not done again.")
        with LiveStatus(out / "dataset") as live, session.progress() as feed:
            line = Line(
                session=session, log=log, feed=feed, live=live, out=out, spec=spec, planned=planned, online=online,
                nodes=nodes,
            )  # fmt: skip
            where = cluster or spec.cluster.kind, planned.workers_on(cluster or spec.cluster.kind, workers)
            if online:
                failed = line.side_by_side(*where, ranks or spec.ranks)
            else:
                failed = line.simulate(*where) if spec.adaptive is None else line.rounds(*where, ranks or spec.ranks)
                line.stage()
                line.train(ranks or spec.ranks)
            line.judge()
            metrics = line.evaluate()
        report = line.report()
        seconds = time.monotonic() - began
        log.emit("pipeline_finished", seconds=round(seconds, 3), failed=failed)
    return _document(out, report, metrics, failed=failed, seconds=seconds)


def _online_settings(spec: PipelineSpec, planned: Planned) -> ReservoirSettings:
    """What the order of samples follows from. UsageError where the section does not fit the campaign."""
    from exitwave.workflows.online_spec import OnlineSection, settings_of

    return settings_of(spec.online or OnlineSection(), planned.plan, spec.train)


def _document(out: Path, report: Path, metrics: Mapping[str, Any], *, failed: int, seconds: float) -> dict[str, Any]:
    figures = metrics.get("metrics", {})
    words = ""
    if metrics.get("task") == "classify":
        words = ", ".join(f"{name} {value['top1']:.3g}" for name, value in figures.items())
        words = f"Top-1 on split {metrics.get('split')}: {words}.\n"
    elif figures.get("model") and figures.get("mean"):
        others = ", ".join(
            f"{name} {figures[key]['rmse_VA']:.3g}"
            for key, name in (("idpc", "iDPC"), ("mean", "mean image"))
            if key in figures
        )
        words = f"RMSE on split {metrics.get('split')}: network {figures['model']['rmse_VA']:.3g} V·Å ({others}).\n"
    lost = f"{failed} shards failed: `exitwave failures {out / 'dataset'}`.\n" if failed else ""
    return {
        "run": str(out),
        "report": str(report),
        "seconds": round(seconds, 3),
        "failed": failed,
        "exit_code": 3 if failed else 0,
        "evaluate": dict(metrics),
        "message": f"{words}{lost}Done in {human_seconds(seconds)}. Open {report}",
    }
