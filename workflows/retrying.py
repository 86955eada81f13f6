"""`exitwave retry`: failed shards run again, by the controller that is at work, or here."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import read_plain_text
from exitwave.simulate.attempts import Patience
from exitwave.simulate.commands import write_command
from exitwave.simulate.lease import lease_holder
from exitwave.workflows.campaigns import Planned, read_campaign, simulate_campaign
from exitwave.workflows.session import Session
from exitwave.workflows.status import dataset_of, failures_of

__all__ = ["retry_failures"]


def retry_failures(
    session: Session,
    folder: Path,
    *,
    states: Collection[str],
    cluster: str | None,
    workers: int | None,
    patience: Patience,
) -> dict[str, Any]:
    """Ask for it, and run it if nobody is at work; what came of it. Raises UsageError where there is no data set."""
    dataset, _ = dataset_of(folder)
    rows = failures_of(folder, states=states)
    asked = {"asked": [row["task"] for row in rows], "failed": 0}
    if not rows:
        of = f" of the class {' or '.join(states)}" if states else ""
        return {**asked, "message": f"Nothing failed in {folder}{of}."}
    write_command(dataset, "retry", states=states)
    shards = f"{len(rows)} failed shard{'s' * (len(rows) != 1)}"
    if (holder := lease_holder(dataset)) is not None:
        who = f"host {holder.get('host', '?')}, pid {holder.get('pid', '?')}"
        return {**asked, "message": f"Asked the running campaign ({who}) to run {shards} again."}
    planned = _planned(dataset)
    if planned is None:
        text = f"{shards} will run again with the next `exitwave simulate CAMPAIGN.yaml --out {dataset}`: its campaign "
        return {**asked, "message": text + "names files that cannot be found from the data set alone."}
    document = simulate_campaign(session, planned, dataset, cluster=cluster, workers=workers, patience=patience)
    return {**document, "asked": asked["asked"]}


def _planned(dataset: Path) -> Planned | None:
    """The campaign as the data set's own `campaign.yaml` says it, if that still gives the same plan."""
    try:
        told = json.loads(read_plain_text(dataset / "plan.json"))["campaign_hash"]
        planned = read_campaign(dataset / "campaign.yaml")
    except (OSError, ValueError, KeyError, TypeError, UsageError):
        return None
    return planned if planned.plan.campaign_hash == told else None
