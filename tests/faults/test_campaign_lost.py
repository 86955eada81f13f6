"""A task with which its scheduler goes down, each time: it ends, and what others share its fate do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sim_samples import plan

from exitwave.ingest.events import read_events
from exitwave.ingest.verify import verify_dataset
from exitwave.simulate.campaign import run_campaign
from exitwave.simulate.cluster_inline import InlineCluster
from exitwave.simulate.cluster_outcome import Outcome
from exitwave.simulate.state import campaign_failures
from exitwave.simulate.work import CampaignPlan

QUICK: dict[str, Any] = {"samples_per_structure": 4, "samples_per_shard": 2, "simulator": "weak-phase"}


class FallsWith(InlineCluster):
    """Loses everything that is with it when the turn of `task` comes; what ran is told from what waited."""

    def __init__(self, task: str, *, seen: bool) -> None:
        super().__init__()
        self.task, self.seen, self.falls = task, seen, 0

    def wait(self, timeout_s: float) -> list[Outcome]:
        if not self._queue or self._queue[0][0] != self.task:
            return super().wait(timeout_s)
        self.falls += 1
        lost = [key for key, _ in self._queue]
        self._queue.clear()
        seconds = {self.task: 1.5 if self.seen else 0.0}
        return [Outcome(key=k, kind="lost", error="the scheduler is gone", seconds=seconds.get(k, 0.0)) for k in lost]


@pytest.mark.parametrize(("seen", "falls"), [(True, 6), (False, 24)])
def test_a_task_that_takes_its_scheduler_along_each_time_ends(tmp_path: Path, seen: bool, falls: int) -> None:
    made: CampaignPlan = plan(**QUICK)
    bad = made.tasks[0]
    cluster = FallsWith(bad.task_id, seen=seen)
    result = run_campaign(made, tmp_path / "d", cluster)
    assert (result.committed, result.failed, cluster.falls) == (len(made.tasks) - 1, 1, falls)
    failure = campaign_failures(tmp_path / "d")[0]
    assert failure["task"] == bad.task_id and failure["state"] == "killed" and failure["attempts"] == falls
    assert "lost again and again" in failure["why"] and "the scheduler is gone" in failure["why"]
    assert verify_dataset(tmp_path / "d").ok
    dropped = [e for e in read_events(tmp_path / "d" / "events.jsonl") if e["kind"] == "task_dropped"]
    assert dropped and any(e["task"] != bad.task_id for e in dropped)  # the others shared its fate and were made
    again = run_campaign(made, tmp_path / "d", InlineCluster())  # a new round gives it a new chance
    assert (again.committed, again.failed) == (len(made.tasks), 0)
