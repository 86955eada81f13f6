"""The files of a campaign's data set besides its shards: laid out, compared with a plan, taken back.

`campaign.yaml` is what was asked for, with every default; `plan.json` each task with its samples and structures.
A folder that holds something else, and a data set of another campaign, are refused with what is different.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import time
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import UsageError
from exitwave.ingest.events import EventLog, read_events
from exitwave.ingest.files import disk_full_means_interrupted, read_plain_text, sweep_parts, write_atomic
from exitwave.ingest.manifest import MANIFEST_NAME, create_dataset, load_manifest
from exitwave.ingest.records import Header
from exitwave.simulate.bundle import fallen_apart
from exitwave.simulate.campaign_extend import extended
from exitwave.simulate.commands import COMMANDS_NAME
from exitwave.simulate.live import STATUS_NAME
from exitwave.simulate.state import PLAN_NAME, STEERING_NAME
from exitwave.simulate.state_index import STATE_DB_NAME
from exitwave.simulate.wisdom import FOLDER as WISDOM_FOLDER
from exitwave.simulate.work import CampaignPlan

__all__ = [
    "CAMPAIGN_NAME",
    "EVENTS_NAME",
    "STEERING_NAME",
    "differences",
    "disk_shortage",
    "fit_to",
    "lay_out",
    "make_folder",
    "plan_rows",
    "size",
    "take_back",
    "with_parts",
    "write_plan",
]

CAMPAIGN_NAME = "campaign.yaml"
EVENTS_NAME = "events.jsonl"


def disk_shortage(plan: CampaignPlan, dataset: Path) -> str | None:
    """What to say where what is left of the data set does not fit on its disk, else None."""
    folder = next(p for p in (dataset, *dataset.absolute().parents) if p.exists())
    free = shutil.disk_usage(folder).free
    there = 0
    if (dataset / MANIFEST_NAME).exists():
        found = load_manifest(dataset)
        if found.header.campaign_hash == plan.campaign_hash:
            there = sum(shard.nbytes for shard in found.shards)
    needed = max(0, plan.bytes - there)
    return f"{size(needed)} needed in {folder}, the disk has {size(free)} free" if needed > free else None


def _version() -> str:
    try:
        return version("exitwave")
    except PackageNotFoundError:
        return "unknown"


def make_folder(dataset: Path) -> None:
    """The folder of the data set; a file in the way and a folder of other things are refused."""
    try:
        with disk_full_means_interrupted(dataset):
            dataset.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"{dataset}: there is a file in the way; a folder for the data set expected") from None
    if not (dataset / MANIFEST_NAME).exists():
        ours = {CAMPAIGN_NAME, EVENTS_NAME, PLAN_NAME, STATE_DB_NAME, STATUS_NAME, COMMANDS_NAME}
        ours |= {"shards", "lease", WISDOM_FOLDER, STEERING_NAME}
        foreign = sorted(p.name for p in dataset.iterdir() if p.name not in ours and not p.name.startswith("."))
        if foreign:
            raise UsageError(
                f"{dataset} is not empty and no data set (it holds {', '.join(foreign[:3])}): give a new folder"
            )


def lay_out(plan: CampaignPlan, dataset: Path) -> None:
    """The files of a data set besides its shards; a data set that exists is left as it is."""
    sweep_parts(dataset)
    if not (dataset / MANIFEST_NAME).exists():
        header = Header(
            dataset_id=f"{plan.campaign_hash[:24]}",
            campaign_hash=plan.campaign_hash,
            fields=plan.fields,
            name=plan.name,
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            exitwave_version=_version(),
        )
        # The campaign first: a data set is one as soon as it has a manifest.
        write_atomic(dataset / CAMPAIGN_NAME, _resolved(plan))
        create_dataset(dataset, header)
    elif _extends(plan, dataset):
        EventLog(dataset / EVENTS_NAME).emit("campaign_extended", shards=len(plan.tasks), samples=plan.n_samples)
        write_atomic(dataset / CAMPAIGN_NAME, _resolved(plan))
    write_plan(plan, dataset)


def write_plan(plan: CampaignPlan, dataset: Path) -> None:
    """`plan.json`: every task, and what was rejected."""
    content = {
        "name": plan.name,
        "campaign_hash": plan.campaign_hash,
        "rejected": [{"source": r.source, "why": r.why} for r in plan.rejected],
        "rejected_samples": plan.rejected_samples,
        "tasks": plan_rows(plan),
    }
    write_atomic(dataset / PLAN_NAME, json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode() + b"\n")


def _extends(plan: CampaignPlan, dataset: Path) -> bool:
    """Whether the plan is another one than that of the last run here."""
    try:
        last = json.loads(read_plain_text(dataset / PLAN_NAME))["campaign_hash"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        last = load_manifest(dataset).header.campaign_hash
    return bool(last != plan.campaign_hash)


def plan_rows(plan: CampaignPlan) -> list[dict[str, Any]]:
    """The tasks as they stand in `plan.json`."""
    return [
        {
            "task": task.task_id,
            "shard_id": task.shard_id,
            "samples": len(task.sample_indices),
            "split": task.split,
            "structures": list(task.sources),
        }
        for task in plan.tasks
    ]


def take_back(dataset: Path) -> None:
    """What `_lay_out` made of a folder that was no data set; the manifest first, so that it is none again."""
    for name in (MANIFEST_NAME, CAMPAIGN_NAME, PLAN_NAME, EVENTS_NAME, STATE_DB_NAME, STATUS_NAME):
        (dataset / name).unlink(missing_ok=True)
    shutil.rmtree(dataset / STEERING_NAME, ignore_errors=True)
    for folder in (dataset / "shards" / ".part", dataset / "shards"):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _resolved(plan: CampaignPlan) -> bytes:
    """The campaign with every default written out, as JSON, which is YAML too."""
    return json.dumps(plan.resolved(), indent=2, ensure_ascii=False).encode() + b"\n"


def _read_resolved(dataset: Path) -> dict[str, Any] | None:
    """What the data set was made of; None where its file is gone or damaged."""
    try:
        content = json.loads(read_plain_text(dataset / CAMPAIGN_NAME))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def fit_to(plan: CampaignPlan, dataset: Path) -> CampaignPlan:
    """`plan` for the data set: as it is where there is none yet, or one of this very campaign; with the names of what
    is committed where it only adds to that. The rounds by which the data set was steered are part of it. UsageError
    with the difference where it does more.
    """
    if (dataset / STEERING_NAME).is_dir():
        plan = _with_rounds(plan, dataset)
    if not (dataset / MANIFEST_NAME).exists():
        return plan
    plan = _apart(plan, dataset)
    manifest = load_manifest(dataset)
    found, planned = manifest.header.campaign_hash, {task.shard_id for task in plan.tasks}
    if found == plan.campaign_hash and all(shard.shard_id in planned for shard in manifest.shards):
        return plan
    there = _read_resolved(dataset)
    if there is None:
        rows, why = [f"its {CAMPAIGN_NAME} cannot be read"], "nobody knows how its samples were made"
    else:
        try:
            return extended(plan, dataset, there)
        except UsageError as error:
            rows, why = differences(there, json.loads(_resolved(plan))), str(error)
    told = "; ".join(rows[:8]) or "the content of a structure's file or of a simulator has changed"
    raise UsageError(
        f"{dataset} holds another campaign ({found[:12]}, this one is {plan.campaign_hash[:12]}): {told}. It does not "
        f"only add to that: {why}. Choose another folder, or give back the old configuration."
    )


def _with_rounds(plan: CampaignPlan, dataset: Path) -> CampaignPlan:
    """With the tasks of the rounds; of another campaign as it is, and what differs is told where that is refused."""
    from exitwave.simulate.steer_rounds import steered

    try:
        made: CampaignPlan = steered(plan, dataset)
    except UsageError:
        if not (dataset / MANIFEST_NAME).exists() or load_manifest(dataset).header.campaign_hash == plan.campaign_hash:
            raise
        return plan
    return made


def _apart(plan: CampaignPlan, dataset: Path) -> CampaignPlan:
    """With the parts of the tasks that have fallen apart in earlier runs."""
    if not any(hasattr(task, "parts") for task in plan.tasks):
        return plan
    split: set[str] = set()
    for event in read_events(dataset / EVENTS_NAME):
        if event["kind"] == "task_split":
            split.add(str(event.get("task")))
        elif event["kind"] == "campaign_extended":
            split.clear()
    committed = {shard.shard_id for shard in load_manifest(dataset).shards}
    for task in plan.tasks:
        if any(part.shard_id in committed for part in getattr(task, "parts", ())):
            split.add(task.task_id)
    return with_parts(plan, split)


def with_parts(plan: CampaignPlan, split: Collection[str]) -> CampaignPlan:
    """The plan with the parts of the tasks `split` in their places."""
    whole: Any = plan
    made: CampaignPlan = dataclasses.replace(whole, tasks=fallen_apart(plan.tasks, split))
    return made


def differences(there: Any, here: Any, key: str = "") -> list[str]:
    """`key: old -> new` of every place where two configurations differ."""
    if isinstance(there, dict) and isinstance(here, dict):
        rows: list[str] = []
        for name in sorted({*there, *here}):
            rows += differences(there.get(name), here.get(name), f"{key}.{name}" if key else name)
        return rows
    if there == here or key == "name":
        return []
    return [f"{key}: {_short(there)} -> {_short(here)}"]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"
