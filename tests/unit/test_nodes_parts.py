"""The pure parts of a training on several nodes: its job script, who and where a node is, how nodes meet and part."""

from __future__ import annotations

import errno
import shutil
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from exitwave.ingest.errors import DamagedDataError, ExitwaveError, InterruptedRunError, UsageError
from exitwave.simulate.cluster_spec import SlurmSpec
from exitwave.train.spec import TrainSpec
from exitwave.workflows import nodes_meeting
from exitwave.workflows.nodes_agent import NodeTraining, _is_to_be_forgotten, run_node
from exitwave.workflows.nodes_meeting import Meeting, read_verdict
from exitwave.workflows.nodes_place import NodePlace, free_port, hosts_of, node_place, own_address
from exitwave.workflows.nodes_spec import LaunchSection, ranks_a_node, training_script
from exitwave.workflows.session import open_session

GOLDEN = Path(__file__).resolve().parent.parent / "data" / "slurm"
FULL = LaunchSection(
    nodes=4,
    cpus_per_rank=8,
    gpus_per_node=2,
    warning_s=300,
    slurm=SlurmSpec(
        partition="gpu",
        account="phys",
        walltime="12:00:00",
        memory_per_worker="32GB",
        directives=("--constraint=h100",),
        prologue=("module load python/3.11",),
        interface="ib0",
    ),
)
SCRIPTS = {
    "training.sh": (FULL, 4, 8, "/scratch/my runs/a"),
    "training-default.sh": (LaunchSection(slurm=SlurmSpec(requeue=False)), 1, 1, "/r/100%"),
}


@pytest.mark.parametrize("name", list(SCRIPTS))
def test_job_scripts_are_the_golden_ones(name: str) -> None:
    launch, nodes, ranks, out = SCRIPTS[name]
    words = ["exitwave", "train", "t.yaml", "--data", "d", "--out", out, "--cache", "$TMPDIR/exitwave-$USER"]
    text = training_script(launch, nodes=nodes, ranks=ranks, name="exitwave-a", out=Path(out), command=words)
    assert text == (GOLDEN / name).read_text()
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("code, again", [(0, False), (75, True), (3, False), (137, False)])
def test_the_script_asks_for_the_queue_again_after_75_alone(tmp_path: Path, code: int, again: bool) -> None:
    """bash runs it, with an srun that ends with `code`: that passes through."""
    assert run_script(tmp_path, f"exit {code}") == (code, again)


def test_the_nodes_verdict_counts_and_not_the_largest_code_of_a_task(tmp_path: Path) -> None:
    """srun gives 137 where one node was killed; the others have said that the training can go on."""
    body = 'echo 75 > "$RUN/.slurm/$EXITWAVE_ATTEMPT/verdict"; exit 137'
    assert run_script(tmp_path, body) == (75, True)


def test_a_warning_goes_on_to_srun_and_the_job_is_queued_again(tmp_path: Path) -> None:
    body = "trap 'exit 75' USR1; kill -USR1 $PPID; while :; do sleep 0.05; done"
    assert run_script(tmp_path, body) == (75, True)


def test_a_job_that_is_taken_away_is_not_asked_for_again(tmp_path: Path) -> None:
    """scancel ends it for good, and a preempted job Slurm queues itself; srun does not hear of it from the script."""
    body = "trap 'touch \"$RUN/told\"' TERM USR1; kill -TERM $PPID; sleep 0.3; exit 75"
    assert run_script(tmp_path, body) == (75, False)
    assert not (tmp_path / "run" / "told").exists()


def run_script(folder: Path, srun: str) -> tuple[int, bool]:
    """(exit code, whether `scontrol requeue` was called)."""
    for name, body in (("srun", srun), ("scontrol", 'echo "$@" > "$RUN/asked"')):
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    run = folder / "run"
    text = training_script(LaunchSection(), nodes=2, ranks=2, name="n", out=run, command=["x"])
    env = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "RUN": str(run)}
    code = subprocess.run(["bash", "-c", text], env=env, timeout=20, capture_output=True).returncode
    assert (run / ".slurm" / "7-0" / "ended").read_text() == f"{code}\n"
    asked = (run / "asked").read_text() if (run / "asked").exists() else ""
    assert asked in ("", "requeue 7\n")
    return code, bool(asked)


def test_ranks_are_shared_out_evenly_or_not_at_all() -> None:
    assert ranks_a_node(8, 4) == 2
    for ranks, nodes in ((7, 2), (1, 2)):
        with pytest.raises(ValueError, match=f"{ranks} ranks on {nodes} nodes"):
            ranks_a_node(ranks, nodes)
    with pytest.raises(ValueError, match="expected more than the 120 s"):
        training_script(
            LaunchSection(slurm=SlurmSpec(walltime="00:02:00")), nodes=1, ranks=1, name="n", out=Path("/r"), command=[]
        )
    with pytest.raises(ValueError, match="workers_per_job is for campaigns"):
        LaunchSection(slurm=SlurmSpec(workers_per_job=2))


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("", ()),
        ("n1", ("n1",)),
        ("n[1-3]", ("n1", "n2", "n3")),
        ("gpu[08-10,12],login", ("gpu08", "gpu09", "gpu10", "gpu12", "login")),
        ("r[1-2]n[01-02]", ("r1n01", "r1n02", "r2n01", "r2n02")),
    ],
)
def test_lists_of_nodes(text: str, hosts: tuple[str, ...]) -> None:
    assert hosts_of(text) == hosts


@pytest.mark.parametrize("text", ["n[a]", "n[1-", "n[1-9999999999]"])
def test_a_list_of_nodes_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UsageError, match="list of nodes"):
        hosts_of(text)


STEP = {
    "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "99",
    "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n2",
}  # fmt: skip


def test_the_place_of_a_node() -> None:
    place = node_place(STEP | {"SLURM_RESTART_COUNT": "3"}, 2)
    assert place is not None and (place.node, place.nodes, place.host, place.hosts) == (1, 2, "n2", ("n1", "n2"))
    assert (place.restarts, place.attempt) == (3, "7-3.0")  # a requeued job meets nothing of its earlier run
    assert node_place({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, 2) is None  # a batch script is no step
    assert node_place(STEP | {"RANK": "0"}, 2) is None  # torchrun's ranks inherit all of SLURM_*
    with pytest.raises(UsageError, match=r"--nodes 4: this step has 2 tasks on 2 nodes"):
        node_place(STEP, 4)


def test_an_address_is_one_of_an_interface_here() -> None:
    here = {a.address for found in psutil.net_if_addrs().values() for a in found}
    assert own_address() in here and own_address("lo") == "127.0.0.1" and own_address(host="no-such-host") in here
    with pytest.raises(UsageError, match="interface ib7: this node has none"):
        own_address("ib7")
    with socket.create_server(("127.0.0.1", free_port("127.0.0.1"))) as taken:
        assert free_port("127.0.0.1") != taken.getsockname()[1]


def place(node: int, **more: Any) -> NodePlace:
    return NodePlace(
        node=node, nodes=2, job="7", attempt="7-0", host=f"n{node}", hosts=("n0", "n1"), interface="lo", **more
    )  # fmt: skip


def never() -> bool:
    return False


def test_two_nodes_meet_and_one_that_is_gone_is_told_from_one_that_left(tmp_path: Path) -> None:
    with Meeting(place(0), tmp_path) as first:
        with Meeting(place(1), tmp_path) as second:
            there = threading.Thread(target=lambda: second.meet(never))
            there.start()
            members = first.meet(never)
            there.join()
            assert members == second.members and [m.host for m in members] == ["n0", "n1"]
            assert first.secret_file.read_text() == second.secret_file.read_text()
            assert first.look() == ""
            assert second._listener is not None
            second._listener.close()
            assert first.look() == "n1"
        first._lost.clear()
        assert first.look() == ""  # it has said that it leaves


def test_nodes_that_do_not_come_are_named(tmp_path: Path) -> None:
    told = r"n1: not there .* after node n0. Does the job's folder"
    with Meeting(place(0), tmp_path, meet_s=0.3) as first, pytest.raises(InterruptedRunError, match=told):
        first.meet(never)


def test_the_first_verdict_stands_and_ends_a_meeting(tmp_path: Path) -> None:
    with Meeting(place(0), tmp_path) as first, Meeting(place(1), tmp_path) as second:
        first.conclude(DamagedDataError("shard a is damaged"))
        second.conclude(InterruptedRunError("stopped"))
        found = read_verdict(tmp_path)
        assert isinstance(found, DamagedDataError) and str(found) == "shard a is damaged"
        with pytest.raises(DamagedDataError, match="shard a"):
            second.meet(never)


def test_a_node_that_left_ends_a_meeting_at_once(tmp_path: Path) -> None:
    with Meeting(place(0), tmp_path) as first:
        with Meeting(place(1), tmp_path):
            pass
        with pytest.raises(InterruptedRunError, match="node n1 has ended before"):
            first.meet(never)


def test_a_verdict_without_links_and_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no links here")

    monkeypatch.setattr(nodes_meeting.os, "link", no_links)
    with Meeting(place(0), tmp_path) as first, Meeting(place(1), tmp_path) as second:
        first.conclude(DamagedDataError("shard \udcff is damaged"))
        second.conclude(InterruptedRunError("stopped"))
        assert "shard" in str(read_verdict(tmp_path))
        shutil.rmtree(tmp_path)
        first.conclude(InterruptedRunError("nowhere to say it"))  # what ended it is raised, and not this
        tmp_path.mkdir()


def test_a_fault_of_one_node_is_told_to_the_others(tmp_path: Path) -> None:
    training = NodeTraining(
        spec=TrainSpec(steps=1), data=tmp_path, out=tmp_path / "run", ranks=2, cache=None, cache_capacity=None,
        mesh="auto", fresh=False,
    )  # fmt: skip
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").mkdir()
    with open_session(quiet=True) as session, pytest.raises(OSError):
        run_node(session, place(0), training)
    told = read_verdict(tmp_path / "run" / ".slurm" / "7-0")
    assert type(told) is ExitwaveError and "n0: IsADirectoryError" in str(told)


def test_fresh_is_done_once_in_a_job_however_often_it_is_queued(tmp_path: Path) -> None:
    def fresh(restarts: int) -> bool:
        return _is_to_be_forgotten(tmp_path, place(0, restarts=restarts))

    (tmp_path / "train.json").write_text("of another training")
    assert fresh(0) and fresh(1) and fresh(2)  # its ranks never came to it
    (tmp_path / "train.json").unlink()
    (tmp_path / "train.json").write_text("of this one")
    assert not fresh(3)
