"""States are replayed from plan, manifest and events; the manifest alone says what is committed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ingest_samples import make_dataset, write_shard

from exitwave.ingest.errors import UsageError
from exitwave.ingest.manifest import ManifestWriter
from exitwave.simulate.campaign_files import differences
from exitwave.simulate.cluster_outcome import classify
from exitwave.simulate.lease import Lease
from exitwave.simulate.state import campaign_status, replay

TASKS = [{"task": f"t{k}", "shard_id": f"s{k}", "samples": 2, "structures": ["Si"]} for k in range(4)]


def states(events: list[dict[str, Any]], committed: list[str] | None = None, alive: bool = True) -> list[str]:
    return [s.state for s in replay(TASKS, committed or [], events, alive=alive)]


def failed(final: bool) -> dict[str, Any]:
    return {"kind": "task_failed", "task": "t0", "state": "killed", "why": "gone", "attempt": 2, "final": final}


SUBMIT = {"kind": "task_submitted", "task": "t0", "attempt": 1}


@pytest.mark.parametrize(
    ("events", "committed", "alive", "state"),
    [
        ([], [], True, "pending"),
        ([SUBMIT], [], True, "running"),
        ([SUBMIT], [], False, "pending"),
        ([SUBMIT, {"kind": "campaign_started"}], [], True, "pending"),
        ([SUBMIT, failed(False)], [], True, "pending"),
        ([SUBMIT, failed(True)], [], True, "failed"),
        ([SUBMIT, failed(True), SUBMIT], [], True, "running"),
        ([SUBMIT, failed(True)], ["s0"], True, "committed"),
        ([SUBMIT, {"kind": "shard_committed", "task": "t0"}], [], False, "pending"),
        ([{"kind": "task_submitted", "task": "of another plan"}], [], True, "pending"),
    ],
)
def test_the_state_of_a_task(events: list[dict[str, Any]], committed: list[str], alive: bool, state: str) -> None:
    assert states(events, committed, alive) == [state, "pending", "pending", "pending"]


def test_a_failure_keeps_its_reason_and_attempts() -> None:
    first = replay(TASKS, [], [SUBMIT, failed(True)], alive=False)[0]
    assert (first.failure, first.why, first.attempts, first.structures) == ("killed", "gone", 2, ["Si"])


def test_status_of_nothing_is_refused(tmp_path: Any) -> None:
    with pytest.raises(UsageError):
        campaign_status(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{}", '{"tasks": [{"task": 1}]}', '{"tasks": 3}', "[" * 100_000, "not JSON"])
def test_a_damaged_plan_is_named(tmp_path: Path, text: str) -> None:
    root = make_dataset(tmp_path / "d", "t")
    (root / "plan.json").write_text(text)
    with pytest.raises(UsageError, match=r"plan\.json: damaged .*writes it anew"):
        campaign_status(root)


@pytest.mark.parametrize("text", ["", '{"epoch": "abc"}', "[]", "[" * 100_000, '{"epoch": 1}'])
def test_a_damaged_lease_never_sets_the_epoch_back(tmp_path: Path, text: str) -> None:
    root = make_dataset(tmp_path / "d", "t")
    with ManifestWriter(root, epoch=7) as manifest:
        manifest.commit(write_shard(root, 5), split="train", producer={})
    (root / "lease").write_text(text)
    with Lease(root) as lease:
        assert lease.epoch == 8


def test_differences_are_told_by_key() -> None:
    old = {"seed": 1, "sampling": {"energy_keV": 100}, "name": "a"}
    new = {"seed": 1, "sampling": {"energy_keV": 200}, "name": "b", "extra": [1]}
    assert differences(old, new) == ["extra: null -> [1]", "sampling.energy_keV: 100 -> 200"]


def test_a_cause_deep_in_a_chain_decides_on_the_kind() -> None:
    try:
        try:
            raise OSError(28, "No space left on device")
        except OSError as cause:
            raise RuntimeError("could not write") from cause
    except RuntimeError as error:
        assert classify(error) == "disk-full"
