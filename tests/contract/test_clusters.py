"""One suite for every cluster: results come back by key, failures are told apart, nothing is lost or given twice."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import psutil
import pytest
from dask_processes import DaskProcesses
from sim_samples import plan

from exitwave.ingest.dataset import open_dataset
from exitwave.ingest.errors import InterruptedRunError, UsageError
from exitwave.simulate.campaign import run_campaign
from exitwave.simulate.cluster import Cluster, Outcome, make_cluster


@pytest.fixture(scope="module", params=["inline", "local", "tcp"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    others = DaskProcesses(tmp_path_factory.mktemp("dask"))
    if request.param == "tcp":
        others.start_scheduler()
        for _ in range(2):
            others.start_worker()
        others.wait_for_workers(2)
        made = make_cluster(others.address)
    else:
        made = make_cluster(request.param, workers=1 if request.param == "inline" else 2)
    made.start("weak-phase")
    yield made
    made.close(page=True)  # the workers are gone, the page is there
    made.publish({"dataset": "x", "samples": {}, "shards": {}})
    if request.param == "local":
        assert [p.pid for p in psutil.Process().children(recursive=True) if "spawn_main" in " ".join(p.cmdline())] == []
        with urllib.request.urlopen(f"{str(made.dashboard_link).removesuffix('/status')}/exitwave/status") as answer:
            assert json.load(answer)["dataset"] == "x"
    made.close()
    others.close()


# Workers import these by the name of this module, which pytest knows under another one.
sys.path.insert(0, str(Path(__file__).parent))


def double(value: Any) -> Any:
    return value * 2


def fail(kind: str) -> None:
    if kind == "memory":
        raise MemoryError("no room for 3 GB")
    if kind == "disk":
        raise OSError(errno.ENOSPC, "No space left on device")
    if kind == "interrupted":
        raise InterruptedRunError("the disk is full")
    raise ValueError(f"cannot: {kind}")


def unpicklable() -> Any:
    return threading.Lock()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def linger(path: str, seconds: float) -> str:
    Path(path).touch()
    time.sleep(seconds)
    return path


def collect(cluster: Cluster, count: int, seconds: float = 60.0) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    until = time.monotonic() + seconds
    while len(outcomes) < count and time.monotonic() < until:
        for outcome in cluster.wait(0.2):
            assert outcome.key not in outcomes
            outcomes[outcome.key] = outcome
    assert len(outcomes) == count
    return outcomes


def test_every_key_comes_back_once_with_its_result(cluster: Cluster) -> None:
    for k in range(20):
        cluster.submit(f"k{k}", double, k)
    outcomes = collect(cluster, 20)
    assert {key: o.result for key, o in outcomes.items()} == {f"k{k}": 2 * k for k in range(20)}
    assert {o.kind for o in outcomes.values()} == {"ok"}
    assert cluster.wait(0.01) == []


def test_a_key_may_be_submitted_again(cluster: Cluster) -> None:
    for value in (1, 5):
        cluster.submit("again", double, value)
        assert collect(cluster, 1)["again"].result == 2 * value


@pytest.mark.parametrize(
    ("raised", "kind"), [("other", "error"), ("memory", "memory"), ("disk", "disk-full"), ("interrupted", "disk-full")]
)
def test_failures_are_told_apart(cluster: Cluster, raised: str, kind: str) -> None:
    cluster.submit("bad", fail, raised)
    cluster.submit("good", double, 1)
    outcomes = collect(cluster, 2)
    assert outcomes["good"].result == 2
    assert outcomes["bad"].kind == kind and outcomes["bad"].error
    if raised == "other":
        assert outcomes["bad"].error == "ValueError: cannot: other"


def test_a_result_that_cannot_travel_is_an_error(cluster: Cluster) -> None:
    cluster.submit("lock", unpicklable)
    assert collect(cluster, 1)["lock"].kind == "error"


def test_waiting_tasks_can_be_dropped(cluster: Cluster, tmp_path: Path) -> None:
    for k in range(8):
        cluster.submit(f"w{k}", linger, str(tmp_path / f"{k}"), 0.3)
    dropped = cluster.cancel()
    rest = {f"w{k}" for k in range(8)} - set(dropped)
    assert dropped
    outcomes = collect(cluster, len(rest)) if rest else {}
    assert set(outcomes) == rest
    # A task that was handed out in that very moment may still run, but its outcome is never given.
    begun = {p.name for p in tmp_path.iterdir()}
    assert {key[1:] for key in rest} <= begun and len(begun) <= len(rest) + cluster.n_workers


def test_one_task_that_hangs_is_ended_and_the_rest_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    if cluster.name == "inline":
        cluster.submit("hangs", linger, str(tmp_path / "x"), 0.0)
        assert cluster.cancel(["hangs"], begun=True) == ["hangs"] and cluster.wait(0.01) == []
        return
    cluster.submit("hangs", linger, str(tmp_path / "x"), 120.0)
    cluster.submit("works", linger, str(tmp_path / "y"), 1.5)
    while not {"hangs", "works"} <= set(cluster.running):
        assert cluster.wait(0.1) == []
    assert 0 <= cluster.running["hangs"] < 30
    assert cluster.cancel(["hangs"]) == []  # it has begun
    assert cluster.cancel(["hangs"], begun=True) == ["hangs"]
    outcomes = collect(cluster, 1)
    assert outcomes["works"].kind == "ok"
    cluster.submit("new", double, 4)
    assert collect(cluster, 1)["new"].result == 8


def test_an_outcome_says_where_and_how_long(cluster: Cluster, tmp_path: Path) -> None:
    cluster.submit("slow", linger, str(tmp_path / "z"), 0.3)
    outcome = collect(cluster, 1)["slow"]
    assert outcome.host == socket.gethostname() and 0.3 <= outcome.seconds < 5


def test_a_task_that_cannot_travel_is_an_error(cluster: Cluster) -> None:
    if cluster.name != "inline":
        cluster.submit("lock", double, threading.Lock())
        outcome = collect(cluster, 1)["lock"]
        assert outcome.kind == "error" and "cannot travel" in outcome.error and "lock" in outcome.error


def test_a_snapshot_can_be_published(cluster: Cluster) -> None:
    cluster.publish({"shards": {"committed": 3}})
    cluster.publish({"shards": {"committed": 4}})


def test_a_killed_worker_takes_no_queue_along(cluster: Cluster) -> None:
    if cluster.name == "inline":
        return  # its worker is this process
    cluster.submit("dies", die)
    for k in range(20):
        cluster.submit(f"ok{k}", double, k)
    outcomes = collect(cluster, 21)
    assert outcomes["dies"].kind == "killed"
    # Before the scheduler sees that they are many, it hands out the first few: those may share their neighbour's fate.
    taken_along = [key for key, o in outcomes.items() if key != "dies" and o.kind != "ok"]
    assert len(taken_along) <= 4  # of two workers


def test_the_dashboard_listens_on_this_machine_only(cluster: Cluster) -> None:
    if cluster.name == "inline":
        assert cluster.dashboard_link is None
        return
    assert cluster.dashboard_link is not None and cluster.dashboard_link.startswith("http://127.0.0.1:")
    if cluster.name != "local":
        return
    listening = [c for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    assert listening and {c.laddr.ip for c in listening} <= {"127.0.0.1"}


def test_wrong_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, workers, told in [
        ("slurmy", None, "inline, local, slurm, cuda, or the address"),
        ("tcp://", None, "inline, local, slurm, cuda, or the address"),
        ("inline", 2, "one worker"),
        ("local", 0, "at least 1"),
    ]:
        with pytest.raises(UsageError, match=told):
            make_cluster(name, workers=workers)
    monkeypatch.setattr("exitwave.simulate.cluster_address._FIRST_TRY_S", 1.0)
    with pytest.raises(UsageError, match="no scheduler answers"):
        make_cluster("tcp://127.0.0.1:9").start("weak-phase")


def test_a_worker_that_dies_while_it_starts_is_an_interruption() -> None:
    cluster = make_cluster("local", workers=1)
    try:
        with (
            dask.config.set({"distributed.worker.preload": ["import os; os._exit(9)"]}),
            pytest.raises(InterruptedRunError, match=r"1 worker\(s\) could not be started"),
        ):
            cluster.start("weak-phase")
    finally:
        cluster.close()


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_campaign_makes_the_same_bits_on_any_cluster(tmp_path: Path, workers: int) -> None:
    """Multislice on inline and on local workers: the same files, byte for byte, in the same order."""
    small = plan(samples_per_structure=1, samples_per_shard=1)
    found = []
    for name, count in (("inline", 1), ("local", workers)):
        root = tmp_path / name
        result = run_campaign(small, root, make_cluster(name, workers=count))
        assert (result.committed, result.failed, result.samples) == (3, 0, 3)
        dataset = open_dataset(root)
        assert dataset.uids.tolist() == [sample.uid for sample in small.samples()]
        found.append({shard.shard_id: shard.xxh3_128 for shard in dataset.manifest.shards})
    assert found[0] == found[1]
