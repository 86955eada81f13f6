"""What a campaign refuses, and what one bad structure costs: itself."""

from __future__ import annotations

import shutil
import threading
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sim_samples import plan

from exitwave.ingest.dataset import open_dataset
from exitwave.ingest.errors import InterruptedRunError, UsageError
from exitwave.ingest.manifest import load_manifest
from exitwave.ingest.verify import verify_dataset
from exitwave.simulate import campaign_loop
from exitwave.simulate.attempts import ALLOWED_ACCIDENTS
from exitwave.simulate.campaign import Patience, disk_shortage, run_campaign
from exitwave.simulate.cluster import make_cluster
from exitwave.simulate.cluster_inline import InlineCluster
from exitwave.simulate.state import campaign_failures, campaign_status

QUICK: dict[str, Any] = {"simulator": "weak-phase"}


def run(made: Any, dataset: Path, **options: Any) -> Any:
    return run_campaign(made, dataset, InlineCluster(), **options)


def test_another_campaign_on_the_same_folder_is_refused_with_the_difference(tmp_path: Path) -> None:
    run(plan(**QUICK), tmp_path / "d")
    before = (tmp_path / "d" / "manifest.jsonl").read_bytes()
    with pytest.raises(UsageError, match=r"another campaign .*label.blur_A: 0.3 -> 0.5"):
        run(plan(**QUICK, label={"shape": [8, 8], "blur_A": 0.5}), tmp_path / "d")
    assert (tmp_path / "d" / "manifest.jsonl").read_bytes() == before


def test_a_finished_campaign_leaves_no_empty_folder_and_says_who_made_it(tmp_path: Path) -> None:
    run(plan(**QUICK), tmp_path / "d")
    assert [p for p in (tmp_path / "d").rglob("*") if p.is_dir() and not any(p.iterdir())] == []
    assert load_manifest(tmp_path / "d").header.exitwave_version == version("exitwave")


def test_a_finished_campaign_is_not_run_again(tmp_path: Path) -> None:
    first = run(plan(**QUICK), tmp_path / "d")
    told: list[dict[str, Any]] = []
    second = run(plan(**QUICK), tmp_path / "d", listeners=[told.append])
    assert (first.committed, second.committed, second.samples) == (6, 6, 12)
    assert told == []


def test_one_structure_that_fails_costs_only_its_own_shards(tmp_path: Path) -> None:
    """A shard of one structure is damaged where it lies: its worker raises each time, the others are committed."""
    made = plan(**QUICK)
    dataset = tmp_path / "d"
    bad = made.tasks[2]
    from exitwave.ingest.files import shard_path

    path = dataset / shard_path(bad.shard_id)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no HDF5")
    events: list[dict[str, Any]] = []
    result = run(made, dataset, listeners=[events.append])
    assert (result.committed, result.failed, result.failed_samples) == (5, 1, 2)
    assert bad.shard_id not in {s.shard_id for s in load_manifest(dataset).shards}
    (failure,) = campaign_failures(dataset)
    assert failure["task"] == bad.task_id and failure["state"] == "error" and failure["attempts"] == 2
    assert bad.shard_id in failure["why"] and failure["structures"] == [bad.structure.source]
    assert campaign_status(dataset)["samples"] == {"planned": 12, "committed": 10, "failed": 2, "rejected": 0}
    path.unlink()
    again = run(made, dataset)
    assert (again.committed, again.failed) == (6, 0) and campaign_failures(dataset) == []


def test_a_stop_that_was_set_before_runs_nothing(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(InterruptedRunError, match="0 of 6 shards"):
        run(plan(**QUICK), tmp_path / "d", stop=stop)
    assert run(plan(**QUICK), tmp_path / "d").committed == 6


class Silent(InlineCluster):
    """A cluster of which nothing is heard; `running` is what it claims to run."""

    def __init__(self, seconds: float | None) -> None:
        super().__init__()
        self.seconds, self.cancelled = seconds, 0

    @property
    def running(self) -> dict[str, float]:
        return {} if self.seconds is None else {key: self.seconds for key, _ in self._queue}

    def wait(self, timeout_s: float) -> list[Any]:
        return []

    def cancel(self, keys: Any = None, *, begun: bool = False) -> list[str]:
        self.cancelled += begun
        return super().cancel(keys, begun=begun)


def test_tasks_that_stall_on_their_workers_are_taken_from_them_and_time_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign_loop, "_LOOK_EVERY_S", 0.0)
    cluster = Silent(seconds=1e6)
    result = run_campaign(plan(**QUICK), tmp_path / "d", cluster)
    assert result.failed == 6 and result.committed == 0 and cluster.cancelled == 6 * ALLOWED_ACCIDENTS
    failures = campaign_failures(tmp_path / "d")
    assert {f["state"] for f in failures} == {"timeout"} and failures[0]["why"].startswith(
        "its worker has said nothing"
    )


def test_a_cluster_that_runs_nothing_is_no_fault_of_the_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign_loop, "_LOOK_EVERY_S", 0.0)
    cluster = Silent(seconds=None)
    with pytest.raises(InterruptedRunError, match="no worker has taken a task"):
        run_campaign(plan(**QUICK), tmp_path / "d", cluster, patience=Patience(silence_s=0.0))
    assert cluster.cancelled and campaign_failures(tmp_path / "d") == []
    assert run(plan(**QUICK), tmp_path / "d").committed == 6


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "d").write_text("")
    with pytest.raises(UsageError, match="a file in the way"):
        run(plan(**QUICK), tmp_path / "d")
    with pytest.raises(UsageError, match="a file in the way"):
        run(plan(**QUICK), tmp_path / "d" / "below")
    with pytest.raises(UsageError, match=r"no data set .it holds d.: give a new folder"):
        run(plan(**QUICK), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_what_does_not_fit_on_the_disk_is_told_before(tmp_path: Path) -> None:
    made = plan(**QUICK)
    assert disk_shortage(made, tmp_path / "not" / "yet") is None
    huge = type(made)(**{**made.__dict__, "bytes": 10**18})
    assert "1000 TB" in (disk_shortage(huge, tmp_path) or "") or "1e+06 TB" in (disk_shortage(huge, tmp_path) or "")


def test_a_scheduler_that_does_not_answer_leaves_no_data_set(tmp_path: Path) -> None:
    made = plan(**QUICK)
    dataset = tmp_path / "d"
    with pytest.raises(UsageError, match="no scheduler answers"):
        run_campaign(made, dataset, make_cluster("tcp://127.0.0.1:9"))
    assert [p.name for p in dataset.iterdir() if p.name not in ("lease", ".lease.lock", "wisdom")] == []
    assert run(made, dataset).committed == 6


def test_what_is_committed_needs_no_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(**QUICK)
    run(made, tmp_path / "d")
    free = 10**9
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    held = sum(shard.nbytes for shard in load_manifest(tmp_path / "d").shards)
    tight = type(made)(**{**made.__dict__, "bytes": free + held // 2})
    assert disk_shortage(tight, tmp_path / "new") is not None
    assert disk_shortage(tight, tmp_path / "d") is None


def held(dataset: Path) -> dict[str, int]:
    return {shard.shard_id: shard.seq for shard in load_manifest(dataset).shards}


def test_a_campaign_that_only_adds_extends_the_data_set(tmp_path: Path) -> None:
    """A structure more, named before the others: places and names change, what is committed does not."""
    split = {"by": "structure"}
    dataset = tmp_path / "d"
    first = plan(**QUICK, split=split, structures=[{"library": ["Si", "Al"]}])
    run(first, dataset)
    before = held(dataset)
    more = plan(**QUICK, split=split, structures=[{"library": ["Cu", "Si", "Al"]}])
    assert not {task.shard_id for task in more.tasks} & set(before)
    told: list[dict[str, Any]] = []
    result = run(more, dataset, listeners=[told.append])
    assert (result.committed, result.failed, result.samples) == (6, 0, 12)
    assert [e["kind"] for e in told].count("task_submitted") == 2
    after = held(dataset)
    assert before.items() <= after.items() and len(after) == 6
    uids = open_dataset(dataset).uids.tolist()
    assert sorted(uids) == sorted(sample.uid for sample in more.samples()) and verify_dataset(dataset).ok
    assert campaign_status(dataset)["samples"] == {"planned": 12, "committed": 12, "failed": 0, "rejected": 0}
    again: list[dict[str, Any]] = []
    assert run(more, dataset, listeners=[again.append]).committed == 6 and again == []
    with pytest.raises(UsageError, match=r"2 committed shards have no place in it"):
        run(first, dataset)


def test_samples_added_to_structures_extend_too(tmp_path: Path) -> None:
    dataset = tmp_path / "d"
    run(plan(**QUICK), dataset)
    more = plan(**QUICK, samples_per_structure=6)
    assert run(more, dataset).samples == 18
    assert sorted(open_dataset(dataset).uids.tolist()) == sorted(sample.uid for sample in more.samples())


def test_what_would_move_a_committed_shard_to_another_split_does_not_only_add(tmp_path: Path) -> None:
    dataset = tmp_path / "d"
    run(plan(**QUICK, split={"by": "structure"}), dataset)
    with pytest.raises(UsageError, match=r"split.*would change their split: 2 from train to test"):
        run(plan(**QUICK, split={"by": "structure", "test": 1}), dataset)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"simulator": "fast"}, r"simulator: \"weak-phase\" -> \"fast\".*made in another way \(simulator\)"),
        ({"storage": {"compression": "bitshuffle-lz4"}}, r"storage.compression: .*made in another way \(storage\)"),
    ],
)
def test_equal_samples_made_in_another_way_are_not_mixed(tmp_path: Path, changes: Any, words: str) -> None:
    """Which sample it is does not tell what simulated it: the same uids, and more of them, by another simulator."""
    dataset = tmp_path / "d"
    run(plan(**QUICK), dataset)
    for more in ({}, {"samples_per_structure": 6}):
        before = {path: path.read_bytes() for path in dataset.rglob("*") if path.is_file() and path.name != "lease"}
        with pytest.raises(UsageError, match=words):
            run(plan(**(QUICK | changes), **more), dataset)
        assert before == {p: p.read_bytes() for p in dataset.rglob("*") if p.is_file() and p.name != "lease"}


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_nothing_is_added_where_nobody_knows_how_the_rest_was_made(tmp_path: Path, content: bytes | None) -> None:
    dataset = tmp_path / "d"
    run(plan(**QUICK), dataset)
    (dataset / "campaign.yaml").unlink()
    if content is not None:
        (dataset / "campaign.yaml").write_bytes(content)
    with pytest.raises(UsageError, match=r"campaign.yaml cannot be read.*nobody knows"):
        run(plan(**QUICK, samples_per_structure=6), dataset)
    assert run(plan(**QUICK), dataset).committed == 6  # this very campaign needs no more than the hash
