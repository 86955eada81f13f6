"""Several structures in one shard: the same samples, and when one of them fails, it fails alone."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from sim_samples import plan

from exitwave.ingest.dataset import open_dataset
from exitwave.ingest.errors import InterruptedRunError, UsageError
from exitwave.ingest.files import shard_path
from exitwave.ingest.manifest import load_manifest
from exitwave.ingest.verify import verify_dataset
from exitwave.simulate.bundle import BundleTask
from exitwave.simulate.campaign import run_campaign
from exitwave.simulate.cluster_inline import InlineCluster
from exitwave.simulate.state import campaign_failures, campaign_status

SPEC: dict[str, Any] = {
    "simulator": "weak-phase", "split": {"by": "structure"}, "structures": [{"library": ["Si", "Al", "Cu"]}],
    "samples_per_structure": 2, "samples_per_shard": 8,
}  # fmt: skip


def test_structures_share_a_shard_within_its_samples_and_its_split() -> None:
    alone = plan(**SPEC)
    two, all_three = (plan(**SPEC, structures_per_shard=n) for n in (2, 3))
    assert [len(t.sample_indices) for t in alone.tasks] == [2, 2, 2]
    assert [len(t.sample_indices) for t in two.tasks] == [4, 2]
    assert [len(t.sample_indices) for t in all_three.tasks] == [6]
    for made in (two, all_three):
        assert [s.uid for s in made.samples()] == [s.uid for s in alone.samples()]
        ids = [t.task_id for t in made.tasks] + [p.task_id for t in made.tasks for p in getattr(t, "parts", ())]
        assert len(set(ids)) == len(ids) and made.campaign_hash != alone.campaign_hash
    assert [len(t.sample_indices) for t in plan(**SPEC | {"samples_per_shard": 5}, structures_per_shard=3).tasks] == [
        4,
        2,
    ]
    split = {"by": "structure", "test": 1}
    assert {t.split: len(t.sources) for t in plan(**SPEC | {"split": split}, structures_per_shard=3).tasks} == {
        "train": 2,
        "test": 1,
    }


def test_a_shard_of_three_holds_what_three_shards_hold(tmp_path: Path) -> None:
    run_campaign(plan(**SPEC), tmp_path / "one", InlineCluster())
    assert run_campaign(plan(**SPEC, structures_per_shard=3), tmp_path / "three", InlineCluster()).committed == 1
    one, three = open_dataset(tmp_path / "one"), open_dataset(tmp_path / "three")
    assert one.uids.tolist() == three.uids.tolist() and verify_dataset(tmp_path / "three").ok
    for k in range(6):
        assert (one[k]["cbed"] == three[k]["cbed"]).all()
        assert one.structure(one.params["structure"][k]).info == three.structure(three.params["structure"][k]).info


@pytest.fixture
def bad(tmp_path: Path) -> tuple[Any, Path]:
    """Where the shard of all three and that of the second alone would be, files without sense lie."""
    made = plan(**SPEC, structures_per_shard=3)
    (task,) = made.tasks
    assert isinstance(task, BundleTask)
    dataset = tmp_path / "d"
    for shard_id in (task.shard_id, task.parts[1].shard_id):
        path = dataset / shard_path(shard_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"no HDF5")
    return made, dataset


def check(made: Any, dataset: Path) -> None:
    parts = made.tasks[0].parts
    (failure,) = campaign_failures(dataset)
    assert failure["task"] == parts[1].task_id and failure["structures"] == list(parts[1].sources)
    assert {s.shard_id for s in load_manifest(dataset).shards} == {parts[0].shard_id, parts[2].shard_id}
    status = campaign_status(dataset)
    assert status["samples"]["committed"] == 4 and status["samples"]["failed"] == 2
    assert (status["shards"]["committed"], status["shards"]["failed"], status["shards"]["pending"]) == (2, 1, 0)


def test_one_of_three_fails_alone(bad: tuple[Any, Path]) -> None:
    made, dataset = bad
    result = run_campaign(made, dataset, InlineCluster())
    assert (result.committed, result.failed, result.samples, result.failed_samples) == (2, 1, 4, 2)
    check(made, dataset)
    (dataset / "status.json").unlink()
    (dataset / "state.db").unlink()
    check(made, dataset)
    (dataset / shard_path(made.tasks[0].parts[1].shard_id)).unlink()
    assert run_campaign(made, dataset, InlineCluster()).committed == 3
    assert open_dataset(dataset).uids.tolist() == [sample.uid for sample in made.samples()]


def test_what_fell_apart_stays_apart_over_an_interruption(bad: tuple[Any, Path]) -> None:
    made, dataset = bad
    stop = threading.Event()

    def once_split(event: dict[str, Any]) -> None:
        if event["kind"] == "task_split":
            stop.set()

    with pytest.raises(InterruptedRunError, match="of 3 shards are committed"):
        run_campaign(made, dataset, InlineCluster(), stop=stop, listeners=[once_split])
    assert run_campaign(made, dataset, InlineCluster()).failed == 1
    check(made, dataset)


def test_what_fell_apart_can_be_extended(bad: tuple[Any, Path]) -> None:
    """What is committed keeps its place, be it part of a shard of three or a whole one; the rest is made."""
    made, dataset = bad
    assert run_campaign(made, dataset, InlineCluster()).failed == 1
    before = {shard.shard_id for shard in load_manifest(dataset).shards}
    more = plan(**SPEC | {"structures": [{"library": ["Si", "Al", "Cu", "Au"]}]}, structures_per_shard=3)
    assert run_campaign(more, dataset, InlineCluster()).committed == 4
    assert before < {shard.shard_id for shard in load_manifest(dataset).shards}
    assert sorted(open_dataset(dataset).uids.tolist()) == sorted(sample.uid for sample in more.samples())
    assert run_campaign(more, dataset, InlineCluster()).seconds < 1.0  # nothing is left


def test_a_shard_that_would_be_filled_up_is_refused_with_the_way_out(tmp_path: Path) -> None:
    two = SPEC | {"structures": [{"library": ["Si", "Al"]}]}
    run_campaign(plan(**two, structures_per_shard=3), tmp_path / "d", InlineCluster())
    with pytest.raises(UsageError, match=r"a shard that was not full would be filled up.*exitwave merge"):
        run_campaign(plan(**SPEC, structures_per_shard=3), tmp_path / "d", InlineCluster())
