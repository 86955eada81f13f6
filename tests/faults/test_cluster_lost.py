"""Schedulers that die and come back, workers of another make, workers that take too much memory: real processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dask_processes import DaskProcesses, end_tree

from exitwave.ingest.errors import InterruptedRunError, UsageError
from exitwave.simulate import cluster_dask
from exitwave.simulate.cluster import Cluster, Outcome, make_cluster

sys.path.insert(0, str(Path(__file__).parent))  # workers import the functions below by the name of this module


@pytest.fixture
def others(tmp_path: Path) -> Iterator[DaskProcesses]:
    made = DaskProcesses(tmp_path / "dask")
    made.start_scheduler()
    yield made
    made.close()


def linger(path: str, seconds: float) -> int:
    Path(path).touch()
    time.sleep(seconds)
    return os.getpid()


def devour(nbytes: int) -> int:
    kept = []
    while sum(map(len, kept)) < nbytes:
        kept.append(b"x" * (8 << 20))
        time.sleep(0.02)
    time.sleep(30)
    return len(kept)


def until(cluster: Cluster, done: Callable[[list[Outcome]], bool], seconds: float = 60.0) -> list[Outcome]:
    outcomes: list[Outcome] = []
    end = time.monotonic() + seconds
    while not done(outcomes):
        assert time.monotonic() < end, outcomes
        outcomes += cluster.wait(0.1)
    return outcomes


def test_a_scheduler_that_dies_and_comes_back(others: DaskProcesses, tmp_path: Path) -> None:
    """What was with it is lost, once; what is submitted while it is away runs when it is back."""
    others.start_worker()
    others.wait_for_workers(1)
    cluster = make_cluster(others.address)
    cluster.start("weak-phase")
    try:
        for k in range(3):
            cluster.submit(f"old{k}", linger, str(tmp_path / f"old{k}"), 60.0)
        until(cluster, lambda _: bool(cluster.running))
        others.close()
        lost = until(cluster, lambda found: len(found) == 3)
        assert {o.kind for o in lost} == {"lost"} and {o.key for o in lost} == {"old0", "old1", "old2"}
        began = time.monotonic()
        cluster.submit("new", linger, str(tmp_path / "new"), 0.0)
        cluster.submit("unwanted", linger, str(tmp_path / "unwanted"), 0.0)
        cluster.publish({"nobody": "sees this"})
        assert time.monotonic() - began < 1  # submitting never blocks
        assert cluster.cancel(["unwanted"]) == ["unwanted"]
        assert cluster.wait(0.1) == [] and dict(cluster.running) == {}
        others.start_scheduler()
        others.start_worker()
        found = until(cluster, lambda found: len(found) == 1)
        assert (found[0].key, found[0].kind) == ("new", "ok")
        assert not (tmp_path / "unwanted").exists() and cluster.n_workers == 1
    finally:
        cluster.close()


@pytest.mark.long
def test_a_scheduler_that_stays_away_interrupts(others: DaskProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    others.start_worker()
    others.wait_for_workers(1)
    monkeypatch.setattr(cluster_dask.DaskCluster, "patience_s", 1.0)
    cluster = make_cluster(others.address)
    cluster.start("weak-phase")
    try:
        assert others.scheduler is not None
        end_tree(others.scheduler, signal.SIGKILL)
        with pytest.raises(InterruptedRunError, match=r"has not answered for 1 s.*resumes"):
            until(cluster, lambda _: False)
    finally:
        cluster.close()


@pytest.mark.long
def test_a_scheduler_that_is_lost_again_and_again_stops_it(others: DaskProcesses, tmp_path: Path) -> None:
    """Twelve losses in a row, with no task that ended in between; one that does end begins the count anew."""
    others.start_worker()
    others.wait_for_workers(1)
    cluster = make_cluster(others.address)
    assert isinstance(cluster, cluster_dask.DaskCluster) and cluster.losses_in_a_row == 12
    cluster.start("weak-phase")

    def lose_it() -> None:
        assert others.scheduler is not None
        end_tree(others.scheduler, signal.SIGKILL)
        until(cluster, lambda _: cluster._client is None)
        others.start_scheduler()

    def find_it() -> None:
        until(cluster, lambda _: cluster._client is not None)

    try:
        for _ in range(2):
            lose_it()
            find_it()
        assert cluster._losses_so_far == 2
        others.start_worker()
        cluster.submit("a", linger, str(tmp_path / "a"), 0.0)
        until(cluster, lambda found: [o.kind for o in found] == ["ok"])
        assert cluster._losses_so_far == 0
        for _ in range(11):
            lose_it()
            find_it()
        lose_it()
        told = r"lost 12 times in a row, and no task ended in between. See its log .* it resumes"
        with pytest.raises(InterruptedRunError, match=told):
            until(cluster, lambda _: False)
    finally:
        cluster.close()


def another_abtem(folder: Path) -> dict[str, str]:
    """An environment in which abTEM says that it is of version 0.0.1."""
    info = folder / "abtem-0.0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: abtem\nVersion: 0.0.1\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}


@pytest.mark.long
def test_workers_of_other_versions_are_refused(others: DaskProcesses, tmp_path: Path) -> None:
    """At the start by name; and one that joins later takes no task and leaves."""
    environment = another_abtem(tmp_path / "other")
    wrong = others.start_worker(environment=environment)
    others.wait_for_workers(1)
    with pytest.raises(UsageError, match=r"worker tcp://.*abtem [0-9.]+ here, 0.0.1 there.*from the environment"):
        make_cluster(others.address).start("weak-phase")
    end_tree(wrong, signal.SIGTERM)
    right = others.start_worker()
    others.wait_for_workers(1)
    cluster = make_cluster(others.address)
    cluster.start("weak-phase")
    try:
        late = others.start_worker(environment=environment)
        pids: set[Any] = set()
        for k in range(40):
            cluster.submit(f"k{k}", linger, str(tmp_path / "f"), 0.1)
        outcomes = until(cluster, lambda found: len(found) == 40 and late.poll() is not None)
        assert {o.kind for o in outcomes} <= {"ok", "lost"}
        pids = {o.result for o in outcomes if o.kind == "ok"}
        assert len(pids) == 1 and right.poll() is None
        log = (others.folder / "log.txt").read_text()
        assert "is of other versions than the controller" in log and "0.0.1 there" in log
    finally:
        cluster.close()


def test_workers_of_several_threads_are_refused(others: DaskProcesses) -> None:
    with pytest.raises(UsageError, match="has no workers; start some"):
        make_cluster(others.address).start("weak-phase")
    others.start_worker("--nthreads", "2")
    others.wait_for_workers(1)
    with pytest.raises(UsageError, match=r"one thread each expected.*\(2 threads\)"):
        make_cluster(others.address).start("weak-phase")


@pytest.mark.long  # tasks of campaigns are watched by their worker itself; this is what holds if that fails
def test_a_worker_that_takes_too_much_memory_is_told_from_one_that_was_killed(others: DaskProcesses) -> None:
    others.start_worker("--memory-limit", "600MB")
    others.wait_for_workers(1)
    cluster = make_cluster(others.address)
    cluster.start("weak-phase")
    try:
        cluster.submit("fat", devour, 2 << 30)
        outcome = until(cluster, lambda found: len(found) == 1)[0]
        assert outcome.kind == "memory" and "of 0.6 GB" in outcome.error and outcome.host
    finally:
        cluster.close()
