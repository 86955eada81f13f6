"""The benchmark of the engine: its arithmetic, a short real run, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from exitwave.ingest.errors import ExitwaveError, InterruptedRunError, UsageError
from exitwave.train.allreduce.bench import METHODS, rows_and_targets, run_bench, table
from exitwave.train.allreduce.bench_links import open_link
from exitwave.train.allreduce.bench_rank import ends_to_limits
from exitwave.train.allreduce.cost import LinkCost
from exitwave.train.allreduce.reducer import Moments


def measured(ours_s: float, communication_s: float, step_s: float = 0.7) -> dict:
    # The second round is twice as slow for all: the ratio within a round does not mind.
    steps = {name: [[1.0, 1.1, 1.2], [2.0, 2.2, 2.4]] for name in METHODS}
    steps["static/optimal"] = [[ours_s] * 3, [2 * ours_s] * 3]
    steps["ddp/10MB"] = [[0.9, 1.0, 1.1], [1.8, 2.0, 2.2]]
    steps["step/optimal"] = [[step_s] * 3, [2 * step_s] * 3]
    steps["compute"] = steps["compute+traffic"] = [[0.6] * 3, [0.6] * 3]
    return {
        "steps_s": steps,
        "exposed_s": {"static/optimal": 0.1},
        "communication_s": communication_s,
        "reduction_s": 0.51,
        "reduction_to_limit": 1.02,
        "refused": {},
        "batch": 2,
        "tensors": 3,
        "nbytes": 12,
        "planning": {"groups": 2, "predicted_s": 0.5, "predicted_before_s": 0.6},
    }


@pytest.mark.parametrize(
    ("ours_s", "communication_s", "target", "holds"),
    [(0.99, 1.0, 1.00, True), (1.01, 1.0, 1.00, False), (1.01, 0.01, 1.02, True)],
)
def test_the_best_ddp_is_the_measure_and_a_slow_link_asks_for_more(ours_s, communication_s, target, holds):
    rows, targets = rows_and_targets("400mbit", "m", measured(ours_s, communication_s))
    assert [row["method"] for row in rows] == list(METHODS)
    ours = next(row for row in rows if row["method"] == "static/optimal")
    assert ours["to_best_ddp"] == pytest.approx(ours_s)
    assert ours["planning"]["groups"] == 2 and ours["exposed_s"] == 0.1
    assert ours["spread_s"] == [ours_s, 2 * ours_s]
    assert ours["grouping_gain"]["predicted"] == pytest.approx(1 / 6)
    assert "ddp/10MB" in targets[0]["name"]
    assert (targets[0]["target"], targets[0]["holds"]) == (target, holds)


@pytest.mark.parametrize(
    ("communication_s", "target"), [(0.01, 1.02), (0.3, 0.95), (0.6, 0.80), (1.2, 0.90), (0.42, None)]
)
def test_the_target_of_the_whole_step_goes_by_the_measured_ratio(communication_s, target):
    _, targets = rows_and_targets("l", "m", measured(1.0, communication_s, step_s=0.75))
    of_peers = [t for t in targets if "best of DDP and FSDP2" in t["name"]]
    assert [t["target"] for t in of_peers] == ([] if target is None else [target])
    assert all(t["value"] == pytest.approx(0.75) and t["holds"] for t in of_peers)
    (bound,) = [t for t in targets if "under traffic" in t["name"]]
    assert bound["target"] == 1.20
    assert bound["value"] == pytest.approx(0.75 * 1.5 / max(0.6, communication_s))
    end = [t for t in targets if "F(n)" in t["name"]]
    assert [t["value"] for t in end] == ([] if communication_s == 0.01 else [pytest.approx(1.02)])


def test_the_end_of_a_reduction_is_compared_with_what_the_slowest_rank_allows():
    link = LinkCost(alpha_s=1.0, beta_s_per_byte=0.5)
    first = Moments(begun=100.0, started=((102.0, 4), (103.0, 2)), ended=110.0)
    second = Moments(begun=101.0, started=((104.0, 4), (109.0, 2)), ended=112.0)
    # F = max(max(0, 4) + 3, 9) + 2 = 11 after the first gradient of any rank; the reduction ended after 12
    assert ends_to_limits([[first], [second]], link) == [pytest.approx(12 / 11)]


@pytest.mark.long
def test_a_short_run_measures_methods_on_two_ranks():
    methods = ["compute", "compute+traffic", "ddp/1MB", "fsdp2", "static/optimal", "coordinator/bytes", "step/optimal"]
    document = run_bench(links=["loopback"], models=["fc-densenet-tiny"], methods=methods, seconds=0.1)
    assert document["bench"] == "allreduce"
    assert [row["method"] for row in document["rows"]] == methods
    assert all(row["step_s"] > 0 and row["steps"] >= 9 for row in document["rows"])
    assert len(document["targets"]) >= 2 and not document["skipped"]
    planning = next(row["planning"] for row in document["rows"] if "planning" in row)
    assert planning["predicted_s"] <= planning["predicted_before_s"] * 1.002
    for word in ("static/optimal", "ddp/1MB", "target"):
        assert word in table(document)
    with pytest.raises(UsageError, match=r"link 'x' does not exist: choose from loopback"):
        run_bench(links=["x"])


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"exitwave-bench-{os.getpid()}-")]


def needs_a_slow_link() -> None:
    try:
        with open_link("400mbit"):
            pass
    except UsageError as error:
        pytest.skip(str(error))


def test_namespaces_are_joined_and_gone_after_an_error():
    needs_a_slow_link()
    with pytest.raises(RuntimeError, match="on the way"), open_link("400mbit") as link:
        assert len(namespaces()) == 2
        subprocess.run([*link.prefixes[1], "ping", "-c1", "-W2", link.address], check=False, capture_output=True)
        shown = subprocess.run([*link.prefixes[0], "tc", "qdisc", "show"], capture_output=True, text=True).stdout
        assert "tbf" in shown and "rate 400Mbit" in shown
        raise RuntimeError("on the way")
    assert namespaces() == []


def test_namespaces_of_a_killed_benchmark_are_removed_by_the_next():
    needs_a_slow_link()
    code = "import os, signal\nfrom exitwave.train.allreduce.bench_links import open_link\n"
    code += "with open_link('1gbit'):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    killed = subprocess.Popen([sys.executable, "-c", code])
    assert killed.wait(60) == -signal.SIGKILL
    listed = ["ip", "netns", "list"]
    assert f"exitwave-bench-{killed.pid}-a" in subprocess.run(listed, capture_output=True, text=True).stdout
    with open_link("1gbit"):
        assert f"exitwave-bench-{killed.pid}-" not in subprocess.run(listed, capture_output=True, text=True).stdout


def test_a_rank_that_fails_ends_both_and_says_why(tmp_path):
    (tmp_path / "odd_rank.py").write_text(
        "import sys, time\nif '1' == sys.argv[2]:\n    sys.exit('rank 1 says no')\ntime.sleep(60)\n"
    )
    begun = time.monotonic()
    with open_link("loopback") as link, pytest.raises(ExitwaveError, match=r"rank 1 failed[\s\S]*rank 1 says no"):
        link = type(link)(prefixes=(("env", f"PYTHONPATH={tmp_path}"),) * 2, address=link.address, device=link.device)
        link.run("odd_rank", [], limit_s=30)
    assert time.monotonic() - begun < 30


def test_a_benchmark_that_is_told_to_stop_leaves_no_rank():
    alarm = threading.Timer(3.0, os.kill, (os.getpid(), signal.SIGTERM))
    alarm.start()
    try:
        with pytest.raises(InterruptedRunError, match="stopped"):
            run_bench(links=["loopback"], models=["small-tensors-1000"], seconds=60)
    finally:
        alarm.cancel()
    mine = [p for p in Path("/proc").glob("[0-9]*/cmdline") if _is_rank(p)]
    assert mine == []


def _is_rank(path: Path) -> bool:
    try:
        words = path.read_bytes().split(b"\0")
    except OSError:
        return False
    return b"exitwave.train.allreduce.bench_rank" in words and str(os.getpid()).encode() in words
