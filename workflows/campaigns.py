"""Campaigns as the verbs see them: read and planned, described, run."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from exitwave.ingest.errors import UsageError
from exitwave.simulate.attempts import Patience
from exitwave.simulate.live import LiveStatus
from exitwave.simulate.parametric import ParametricPlan, ParametricSpec, make_parametric_plan
from exitwave.simulate.plan import Plan, make_plan
from exitwave.simulate.spec import CampaignSpec
from exitwave.workflows.adaptive_spec import cost_of
from exitwave.workflows.config import (
    Document,
    apply_overrides,
    dotted,
    is_pipeline,
    load_document,
    parse_bytes,
    validate,
)
from exitwave.workflows.pipeline_spec import ClusterSection, read_sections
from exitwave.workflows.progress import human_bytes, human_seconds
from exitwave.workflows.rejections import rejected_structures
from exitwave.workflows.session import Session
from exitwave.workflows.slurm import slurm_script

__all__ = [
    "Planned",
    "as_document",
    "crystal_plan",
    "default_workers",
    "estimated_document",
    "exit_code_of",
    "patience_of",
    "plan_campaign",
    "plan_document",
    "read_campaign",
    "resume_document",
    "run_planned",
    "simulate_campaign",
    "tell_warnings",
]

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A campaign that was read, checked and planned. `section` is what a pipeline file says of the cluster."""

    spec: CampaignSpec | ParametricSpec
    plan: Plan | ParametricPlan
    section: ClusterSection = field(default_factory=ClusterSection)
    trains: bool = False  # whether the file says how to train on it, too

    @property
    def cluster(self) -> str:
        return self.section.kind

    @property
    def workers(self) -> int | None:
        return self.section.workers

    def workers_on(self, cluster: str, asked: int | None) -> int | None:
        """What was asked for; the file's number only on the kind of cluster that it was written for."""
        return asked or (self.workers if cluster == self.cluster else None)


def read_campaign(path: Path, overrides: Sequence[str] = (), *, session: Session | None = None) -> Planned:
    """Read a campaign (or a pipeline's `campaign:` section) and plan it. UsageError names file, line and key.

    A `session` shows how far it is where that takes a while.
    """
    document = load_document(path)
    if not is_pipeline(document):
        apply_overrides(document, overrides)
        if is_parametric(document.data):
            return _plan_parametric(document)
        return plan_campaign(document, validate(document, CampaignSpec), (), session=session)
    if is_parametric(document.data.get("campaign")):
        raise UsageError(
            f"{document.place(('campaign',))}: campaign: the campaign of an own simulator stands in a file of its own, "
            "for `exitwave plan` and `exitwave simulate`: `exitwave train` knows no network for it"
        )
    sections = read_sections(document, overrides, "campaign")
    assert sections.campaign is not None
    planned = plan_campaign(document, sections.campaign, ("campaign",), session=session)
    if sections.adaptive is not None:
        plan = crystal_plan(planned, "adaptive")
        more = f"adaptive: {cost_of(sections.adaptive, plan)}, by `exitwave run` alone"
        planned = dataclasses.replace(planned, plan=dataclasses.replace(plan, warnings=(*plan.warnings, more)))
    return dataclasses.replace(planned, section=sections.cluster, trains=sections.train is not None)


def estimated_document(
    path: Path, overrides: Sequence[str], *, out: Path | None, workers: int | None
) -> dict[str, Any] | None:
    """The `plan` document of a campaign that says its cost and takes its structures from an index, made without drawing
    every sample; None for any other campaign. UsageError where `out` is given and has no room.
    """
    from exitwave.simulate.estimate import can_estimate, estimate_campaign

    document = load_document(path)
    piped = is_pipeline(document)
    if is_parametric(document.data.get("campaign") if piped else document.data):
        return None
    section = ClusterSection()
    if piped:
        sections = read_sections(document, overrides, "campaign")
        assert sections.campaign is not None
        spec, section = sections.campaign, sections.cluster
    else:
        apply_overrides(document, overrides)
        spec = validate(document, CampaignSpec)
    if not can_estimate(spec):
        return None
    try:
        n = workers or section.workers or default_workers()
        found = estimate_campaign(spec, base_dir=document.folder, workers=n)
    except UsageError as error:
        raise UsageError(_placed(document, ("campaign",) if piped else (), str(error))) from None
    free = shutil.disk_usage(_existing(out or Path())).free
    if found["bytes"] > free:
        short = f"{human_bytes(found['bytes'])} needed, {human_bytes(free)} free in {_existing(out or Path())}"
        if out is not None:
            raise UsageError(f"{out}: no room for the data set: {short}.")
        found["warnings"].append(f"no room here: {short}; --out DATASET names the disk that it is for")
    script = slurm_script(section, name=spec.name, out=out or Path(spec.name), workers=workers)
    return {
        **found,
        **_duration(found, section.kind, n),
        "free_bytes": free,
        **({"slurm_script": script} if script is not None else {}),
    }


def is_parametric(data: Any) -> bool:
    """Whether a campaign is one of an own simulator."""
    return isinstance(data, dict) and (isinstance(data.get("simulator"), dict) or "parameters" in data)


def _plan_parametric(document: Document) -> Planned:
    spec = validate(document, ParametricSpec)
    try:
        return Planned(spec=spec, plan=make_parametric_plan(spec, base_dir=document.folder))
    except UsageError as error:
        raise UsageError(_placed(document, (), str(error))) from error


def crystal_plan(planned: Planned, option: str) -> Plan:
    """The plan, for what shows crystals under a beam. UsageError naming the option for any other."""
    if not isinstance(planned.plan, Plan):
        raise UsageError(f"{option}: pictures are made of crystals under a beam; look at one sample by `exitwave show`")
    return planned.plan


def plan_campaign(
    document: Document, spec: CampaignSpec, section: KeyPath, *, session: Session | None = None
) -> Planned:
    """Plan; what planning refuses is shown at its place in the file."""
    try:
        with session.progress() if session is not None else nullcontext(_tell_nobody) as feed:
            plan = make_plan(spec, base_dir=document.folder, feed=_after(PATIENCE_S, feed))
    except UsageError as error:
        raise UsageError(_placed(document, section, str(error))) from None
    return Planned(spec=spec, plan=plan)


# Most plans are made before anybody wonders; a folder of thousands of crystals takes minutes.
PATIENCE_S = 1.5


def _tell_nobody(event: Mapping[str, Any]) -> None: ...


def _after(seconds: float, feed: Callable[[Mapping[str, Any]], None]) -> Callable[[Mapping[str, Any]], None]:
    """`feed` from some time on, and then a few times a second."""
    told = time.monotonic() + seconds - _TELL_EVERY_S

    def throttled(event: Mapping[str, Any]) -> None:
        nonlocal told
        if time.monotonic() - told >= _TELL_EVERY_S:
            told = time.monotonic()
            feed(event)

    return throttled


_TELL_EVERY_S = 0.2


def _placed(document: Document, section: KeyPath, message: str) -> str:
    """`structures[1].cif: missing` with the file, line and column of that key before it."""
    found = re.match(r"([A-Za-z_]\w*(?:\[\d+\]|\.\w+)*): ", message)
    if found is None:
        return f"{document.place(section)}: {message}"
    path: KeyPath = (*section, *(int(p) if p.isdigit() else p for p in re.findall(r"\w+", found[1])))
    if path[: len(section) + 1] not in document.places:
        return f"{document.place(section)}: {message}"
    return f"{document.place(path)}: {dotted(path)}: {message[found.end() :]}"


def tell_warnings(session: Session, planned: Planned) -> None:
    """What works but should be known, as notes; with `--json` they stand in the document."""
    if not session.json:
        for text in planned.plan.warnings:
            session.note(f"note: {text}")


def default_workers() -> int:
    """One for each core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _duration(document: Mapping[str, Any], cluster: str, workers: int) -> dict[str, float]:
    from exitwave.simulate.cost import duration

    cores = default_workers() if cluster == "local" else None
    return duration(document["core_hours"], workers=workers, shards=document["shards"], cores=cores)


def plan_document(planned: Planned, *, out: Path, workers: int | None) -> dict[str, Any]:
    """The contract's `plan` document. Raises UsageError when it cannot run here (no room, too little memory)."""
    from exitwave.simulate.campaign import disk_shortage
    from exitwave.simulate.cost import calibrate

    n = workers or planned.workers or default_workers()
    plan = planned.plan
    free = shutil.disk_usage(_existing(out)).free
    if (short := disk_shortage(plan, out)) is not None:
        raise UsageError(
            f"{out}: no room for the data set: {short}. Choose another disk with --out, or ask for fewer samples "
            "(samples_per_structure) or smaller ones (scan.shape, detector.shape)."
        )
    memory = psutil.virtual_memory().total
    if plan.memory_per_worker_bytes > memory:
        raise UsageError(
            f"one sample needs about {human_bytes(plan.memory_per_worker_bytes)} of memory, this machine has "
            f"{human_bytes(memory)}. Use a coarser grid.sampling_A or a smaller cell.min_extent_A."
        )
    calibration = calibrate(plan) if isinstance(plan, Plan) else plan.calibration
    document: dict[str, Any] = plan.summary(workers=n, calibration=calibration)
    if planned.cluster == "local" and n * plan.memory_per_worker_bytes > memory:
        fit = memory // plan.memory_per_worker_bytes
        document["warnings"].append(
            f"{n} workers need about {human_bytes(n * plan.memory_per_worker_bytes)} of memory, this machine has "
            f"{human_bytes(memory)}: --workers {fit}, a coarser grid.sampling_A or a smaller cell.min_extent_A"
        )
    if (script := slurm_script(planned.section, name=planned.plan.name, out=out, workers=workers)) is not None:
        document["slurm_script"] = script
    return {**document, **_duration(document, planned.cluster, n), "free_bytes": free}


def resume_document(planned: Planned, out: Path) -> dict[str, Any] | None:
    """What is left on a data set that exists, and why anything would run again; UsageError where it is another's."""
    from exitwave.simulate.campaign_files import fit_to
    from exitwave.simulate.campaign_resume import what_is_left

    return what_is_left(fit_to(planned.plan, out), out)


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def patience_of(task_timeout: float | None, task_memory: str | None) -> Patience:
    """What --task-timeout and --task-memory say."""
    memory = 0 if task_memory is None else parse_bytes(task_memory, "--task-memory")
    return Patience(task_s=task_timeout, task_memory_bytes=memory)


def simulate_campaign(
    session: Session,
    planned: Planned,
    out: Path,
    *,
    cluster: str | None,
    workers: int | None,
    patience: Patience | None = None,
) -> dict[str, Any]:
    """Run it into `out`; returns what came of it."""
    from exitwave.workflows.launch import make_folder

    make_folder(out)
    tell_warnings(session, planned)
    with session.progress() as feed:
        result = run_planned(
            session,
            planned,
            out,
            cluster=cluster or planned.cluster,
            workers=planned.workers_on(cluster or planned.cluster, workers),
            feed=feed,
            patience=patience,
        )
    document = as_document(result)
    document["dataset"] = str(out)
    document["warnings"] = list(planned.plan.warnings)
    words = [f"{planned.plan.n_samples if not document['failed'] else document['samples']} samples in {out}"]
    whole = rejected_structures([{"source": r.source, "why": r.why} for r in planned.plan.rejected])
    if whole:
        words.append(f"{whole} structure{'s' * (whole != 1)} rejected (`exitwave plan` says why)")
    if planned.plan.rejected_samples:
        words.append(f"{planned.plan.rejected_samples} samples rejected (`exitwave plan` says why)")
    if document["failed"]:
        words.append(f"{document['failed']} shards failed (`exitwave failures {out}` says why)")
    document["message"] = "; ".join(words) + f". {human_seconds(document.get('seconds'))}."
    return document


def run_planned(
    session: Session,
    planned: Planned,
    dataset: Path,
    *,
    cluster: str,
    workers: int | None,
    feed: Callable[[Mapping[str, Any]], None],
    patience: Patience | None = None,
    live: LiveStatus | None = None,
    order: Callable[[Any], Any] | None = None,
) -> Any:
    """Run the campaign on a cluster made for it; a CampaignResult. `live`: of a pipeline, which shows what follows.
    `order`: what its tasks are sorted by.
    """
    from exitwave.simulate.campaign import run_campaign
    from exitwave.simulate.cluster import make_cluster

    n = workers or default_workers() if cluster == "local" else workers
    if cluster not in ("local", "inline", "slurm", "cuda"):
        n = None
    made = make_cluster(
        cluster, workers=n, slurm=planned.section.slurm, tls=planned.section.tls, log_folder=dataset / ".slurm"
    )
    before = _committed_samples(planned.plan, dataset)
    if cluster == "local" and before < planned.plan.n_samples:
        session.note(f"starting {n} worker{'s' * (n != 1)} …")
    elif cluster == "slurm" and before < planned.plan.n_samples:
        session.note(f"asking Slurm for {made.n_workers} worker{'s' * (made.n_workers != 1)} …")
    elif cluster != "inline" and before < planned.plan.n_samples:
        session.note(f"connecting to {cluster} …")

    def listen(event: Mapping[str, Any]) -> None:
        if event["kind"] == "campaign_started":
            session.note(_workers_line(event))
        feed({**event, "committed_samples": before} if event["kind"] == "campaign_started" else event)

    with session.finishing("the shards in hand"):
        return run_campaign(
            planned.plan,
            dataset,
            made,
            listeners=[listen],
            stop=session.stop,
            patience=patience,
            live=live,
            order=order,
        )


def _workers_line(event: Mapping[str, Any]) -> str:
    """`2 workers (local); dashboard: http://…`"""
    n = int(event["workers"])
    text = f"{n} worker{'s' * (n != 1)} ({event['cluster']})"
    return f"{text}; dashboard: {event['dashboard']}" if event.get("dashboard") else text


def _committed_samples(plan: Plan | ParametricPlan, dataset: Path) -> int:
    from exitwave.ingest.manifest import MANIFEST_NAME, load_manifest

    if not (dataset / MANIFEST_NAME).exists():
        return 0
    wanted = {task.shard_id for task in plan.tasks}
    return sum(shard.n for shard in load_manifest(dataset).shards if shard.shard_id in wanted)


def as_document(record: Any) -> dict[str, Any]:
    """A frozen record as plain values."""
    if hasattr(record, "to_json"):
        return dict(record.to_json())
    return {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}


def exit_code_of(document: Mapping[str, Any]) -> int:
    """3 when parts failed."""
    return 3 if document.get("failed") else 0
