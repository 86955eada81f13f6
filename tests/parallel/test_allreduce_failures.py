"""A failing rank fails every rank, soon, and the message names who and what. Plain processes over gloo, real signals.

The file runs itself as rank r of a scenario's world. Ranks that outlive a scenario write what they met to a file.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from exitwave.train import GroupedAllreduce
from exitwave.train.allreduce import StallError, StallWarning, Sum, allreduce
from exitwave.train.transport import TransportError

LIMIT_S = 4.0


class Report:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._said: dict[str, dict[str, object]] = {}

    def expect(self, name: str, kind: type[BaseException], call) -> None:
        begun = time.monotonic()
        try:
            call()
            said = "nothing was raised"
        except kind as error:
            said = str(error)
        self._said[name] = {"said": said, "seconds": time.monotonic() - begun}
        self._path.write_text(json.dumps(self._said))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def step(engine: GroupedAllreduce) -> None:
    engine(torch.ones(2, 4)).sum().backward()


def lost_submissions(rank: int, report: Report) -> None:
    """Rank 1 stays alive and never submits: to a function, to either protocol, to a construction. Then 2 is killed."""
    notes = dist.distributed_c10d._get_default_store()

    def stays_away(name: str, others, absent) -> None:
        if rank == 1:
            notes.wait([f"{name}/0", f"{name}/2"])
            time.sleep(LIMIT_S / 10)  # two beats: the verdict arrives without a call
            report.expect(name, StallError, absent)
        else:
            report.expect(name, StallError, others)
            notes.set(f"{name}/{rank}", "done")

    for protocol in ("static", "bitvector"):
        engine = GroupedAllreduce(net(), protocol=protocol, timeout_s=LIMIT_S, grouping="count:2")
        step(engine)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            stays_away(protocol, lambda e=engine: step(e), lambda e=engine: e(torch.ones(1, 4)))
        if rank != 1:
            assert any(issubclass(w.category, StallWarning) for w in caught), "no warning came first"
        engine.close()

    engine = GroupedAllreduce(net(), timeout_s=LIMIT_S)
    step(engine)
    if rank == 2:
        engine.module[0].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    report.expect("killed", StallError, lambda: step(engine))


def absent_from_calls(rank: int, report: Report) -> None:
    """Rank 1 never makes a call by name, nor a construction; it is not there afterwards to be told."""
    assert allreduce(torch.ones(1), op=Sum, name="warm", timeout_s=LIMIT_S).item() == 2.0
    if rank == 0:
        report.expect("function", StallError, lambda: allreduce(torch.ones(1), name="grads"))
        report.expect("construction", TransportError, lambda: GroupedAllreduce(net(), timeout_s=1))
    else:
        time.sleep(2 * LIMIT_S)


def an_exception(rank: int, report: Report) -> None:
    """Rank 1 fails in its own code and ends."""
    engine = GroupedAllreduce(net(), timeout_s=LIMIT_S)
    step(engine)
    if rank == 1:
        raise SystemExit("my own failure")
    report.expect("exception", StallError, lambda: step(engine))


def the_host_of_the_store_is_killed(rank: int, report: Report) -> None:
    engine = GroupedAllreduce(net(), timeout_s=LIMIT_S)
    step(engine)
    if rank == 0:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    report.expect("host", StallError, lambda: step(engine))


def killed_in_mid_collective(overlap: str, size: int, rank: int, report: Report) -> None:
    """The last rank is killed when its part of a collective of megabytes has begun."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
    engine = GroupedAllreduce(model, overlap=overlap, grouping="count:2", timeout_s=LIMIT_S)
    optimizer = engine.wrap(torch.optim.SGD(model.parameters(), lr=1e-3))

    def train() -> None:
        optimizer.zero_grad()
        engine(torch.ones(2, 1024)).sum().backward()
        optimizer.step()

    train()
    with engine.full_parameters():
        dist.barrier()
    if rank == size - 1:
        at, name = (engine.data, "allreduce") if overlap == "backward" else (engine._ring, "reduce_scatter")
        start = getattr(at, name)

        def start_and_die(*arguments: object) -> None:
            start(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(at, name, start_and_die)
    report.expect("killed", StallError, lambda: (train(), train()))


KILLED = {
    f"killed_{overlap}_{size}": (partial(killed_in_mid_collective, overlap, size), size)
    for overlap in ("backward", "step")
    for size in (2, 4)
}
SCENARIOS = {
    scenario.__name__: (scenario, size)
    for scenario, size in [
        (lost_submissions, 3),
        (absent_from_calls, 2),
        (an_exception, 2),
        (the_host_of_the_store_is_killed, 3),
    ]
}


def main(name: str, rank: int, port: int, folder: Path) -> None:
    scenario, size = {**SCENARIOS, **KILLED}[name]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    scenario(rank, Report(folder / f"{name}.{rank}.json"))


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[tuple[str, int], dict]:
    return run(SCENARIOS, tmp_path_factory.mktemp("failures"))


def run(scenarios: dict, folder: Path) -> dict[tuple[str, int], dict]:
    """All at once: (scenario, rank) -> exit code, stderr and report."""
    processes: dict[tuple[str, int], subprocess.Popen] = {}
    for name, (_, size) in scenarios.items():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(size):
            processes[name, rank] = subprocess.Popen(
                [sys.executable, __file__, name, str(rank), str(port), str(folder)],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stderr=(folder / f"{name}.{rank}.stderr").open("w"),
            )
    until = time.monotonic() + 120
    found = {}
    for key, process in processes.items():
        try:
            process.wait(max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            pytest.fail(f"rank {key[1]} of {key[0]} hangs")
        report = folder / f"{key[0]}.{key[1]}.json"
        found[key] = {
            "code": process.returncode,
            "stderr": (folder / f"{key[0]}.{key[1]}.stderr").read_text()[-3000:],
            **(json.loads(report.read_text()) if report.exists() else {}),
        }
    return found


def said(reports, scenario: str, rank: int, name: str, within_s: float) -> str:
    report = reports[scenario, rank]
    assert name in report, report["stderr"]
    assert report[name]["seconds"] < within_s, report[name]
    return report[name]["said"]


@pytest.mark.parametrize("protocol", ["static", "bitvector"])
def test_a_rank_that_never_submits_is_named_on_every_rank_with_its_tensors(reports, protocol):
    for rank in range(3):
        message = said(reports, "lost_submissions", rank, protocol, within_s=LIMIT_S + 4)
        assert "rank 1" in message
        assert "0.weight" in message and "1.bias" in message
        assert "rank 1 is alive but has not submitted" in message or "rank 1 died" in message  # a starved machine


def test_a_killed_rank_is_named_by_the_others(reports):
    assert reports["lost_submissions", 2]["code"] == -signal.SIGKILL
    for rank in (0, 1):
        message = said(reports, "lost_submissions", rank, "killed", within_s=LIMIT_S + 4)
        assert "rank 2 died: no sign of life" in message
        assert "missing" in message and "0.weight" in message


@pytest.mark.parametrize(
    ("overlap", "size"),
    [
        ("backward", 2),
        ("step", 4),
        pytest.param("backward", 4, marks=pytest.mark.long),
        pytest.param("step", 2, marks=pytest.mark.long),
    ],
)
def test_a_rank_that_is_killed_in_mid_collective_is_named(tmp_path, overlap, size):
    name = f"killed_{overlap}_{size}"
    reports = run({name: KILLED[name]}, tmp_path)
    assert reports[name, size - 1]["code"] == -signal.SIGKILL
    for rank in range(size - 1):
        message = said(reports, name, rank, "killed", within_s=LIMIT_S + 8)
        assert f"rank {size - 1} died: no sign of life" in message
        assert reports[name, rank]["code"] == 0, reports[name, rank]["stderr"]


def test_a_call_that_one_rank_never_makes(reports):
    message = said(reports, "absent_from_calls", 0, "function", within_s=LIMIT_S + 4)
    assert "rank 1 is alive but has not submitted grads" in message or "rank 1 died" in message


def test_a_construction_that_one_rank_never_makes(reports):
    message = said(reports, "absent_from_calls", 0, "construction", within_s=6)
    assert "rank 1 never came" in message


def test_a_rank_that_failed_by_itself_is_named(reports):
    assert "rank 1 has left" in said(reports, "an_exception", 0, "exception", within_s=LIMIT_S + 4)


def test_the_end_of_the_rank_that_holds_the_store_hangs_nobody(reports):
    for rank in (1, 2):
        message = said(reports, "the_host_of_the_store_is_killed", rank, "host", within_s=LIMIT_S + 8)
        assert "rendezvous store does not answer" in message or "rank 0 died" in message


def test_survivors_end_by_themselves_and_in_order(reports):
    """No process aborts or hangs on its way out with a collective still in flight."""
    for (scenario, rank), report in reports.items():
        killed = (scenario, rank) in {("lost_submissions", 2), ("the_host_of_the_store_is_killed", 0)}
        own = (scenario, rank) == ("an_exception", 1)
        expected = -signal.SIGKILL if killed else 1 if own else 0
        assert report["code"] == expected, (scenario, rank, report["stderr"])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
