"""Nodes that stage one data set together: shared storage read once, whatever becomes of a peer."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ingest_samples import flip_bit, make_dataset
from namespaces import cluster

from exitwave.ingest import load_manifest, stage
from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import hash_file
from exitwave.ingest.peers import PeerServer, ask_peer, parse_address
from exitwave.ingest.peers_staging import PeerOptions
from exitwave.ingest.placement import owner, ranking
from exitwave.ingest.schema import FieldSpec

NODE = Path(__file__).parents[1] / "support" / "ingest_node.py"
LARGE = (FieldSpec(name="cbed", dtype="float32", shape=(8, 8, 32, 32)),)  # 256 KiB a sample
SECRET = "the run's own secret, 32 letters"
SHARDS = 24


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("shared") / "d", "t" * SHARDS, n=4, fields=LARGE)


def free_ports(n: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def start(prefix: list[str], data: Path, cache: Path, nodes: list[str], me: int, **more: Any) -> subprocess.Popen[str]:
    asked = {"dataset": str(data), "cache": str(cache), "me": nodes[me], "nodes": nodes, "secret": SECRET, **more}
    command = [*prefix, sys.executable, str(NODE), json.dumps(asked)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def report_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=90)
    assert process.returncode == 0
    result: dict[str, Any] = json.loads(out)
    return result


def check_whole(data: Path, cache: Path) -> None:
    for shard in load_manifest(data).shards:
        assert hash_file(cache / "tiny" / "ready" / f"{shard.shard_id}.h5") == shard.xxh3_128
    assert not list((cache / "tiny" / "part").iterdir())


def ratio(data: Path, reports: list[dict[str, Any]]) -> float:
    return sum(r["bytes_from_source"] for r in reports) / load_manifest(data).nbytes


LONG = pytest.mark.long


@pytest.mark.parametrize("n", [pytest.param(2, marks=LONG), pytest.param(3, marks=LONG), 4])
def test_shared_storage_is_read_once_on_one_host(tmp_path: Path, data: Path, n: int) -> None:
    nodes = [f"127.0.0.1:{port}" for port in free_ports(n)]
    processes = [start([], data, tmp_path / f"c{k}", nodes, k) for k in range(n)]
    reports = [report_of(process) for process in processes]
    for k in range(n):
        check_whole(data, tmp_path / f"c{k}")
    assert ratio(data, reports) == 1.0
    assert all(r["bytes_from_peers"] + r["bytes_from_source"] == r["bytes_copied"] for r in reports)
    assert all(r["bytes_from_source"] > 0 for r in reports), "each node reads what it owns"


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=LONG), 4])
def test_shared_storage_is_read_once_over_a_network(tmp_path: Path, data: Path, n: int) -> None:
    with cluster(n) as made:
        nodes = [f"{made.address(k)}:7070" for k in range(n)]
        processes = [start(made.prefix(k), data, tmp_path / f"c{k}", nodes, k) for k in range(n)]
        reports = [report_of(process) for process in processes]
    for k in range(n):
        check_whole(data, tmp_path / f"c{k}")
    assert ratio(data, reports) <= 1.02


def test_a_node_that_comes_late_is_waited_for(tmp_path: Path, data: Path) -> None:
    nodes = [f"127.0.0.1:{port}" for port in free_ports(2)]
    first = start([], data, tmp_path / "c0", nodes, 0)
    time.sleep(1)
    second = start([], data, tmp_path / "c1", nodes, 1)
    assert ratio(data, [report_of(first), report_of(second)]) == 1.0


def test_a_node_that_never_comes_is_not_waited_for_for_ever(tmp_path: Path, data: Path) -> None:
    nodes = [f"127.0.0.1:{port}" for port in free_ports(2)]
    report = report_of(start([], data, tmp_path / "c0", nodes, 0, join_s=1.0))
    check_whole(data, tmp_path / "c0")
    assert report["bytes_from_peers"] == 0


@pytest.mark.parametrize("where", ["loopback", pytest.param("network", marks=LONG)])
def test_a_peer_killed_in_mid_copy(tmp_path: Path, data: Path, where: str) -> None:
    if where == "network":
        with cluster(3) as made:
            lose_one(tmp_path, data, [f"{made.address(k)}:7070" for k in range(3)], [made.prefix(k) for k in range(3)])
    else:
        lose_one(tmp_path, data, [f"127.0.0.1:{port}" for port in free_ports(3)], [[], [], []])


def lose_one(tmp_path: Path, data: Path, nodes: list[str], prefixes: list[list[str]]) -> None:
    doomed = start(prefixes[0], data, tmp_path / "c0", nodes, 0, die_at="sendfile:4:after")
    others = [start(prefixes[k], data, tmp_path / f"c{k}", nodes, k, join_s=6.0) for k in (1, 2)]
    assert doomed.wait(60) == -signal.SIGKILL
    reports = [report_of(process) for process in others]
    for k in (1, 2):
        check_whole(data, tmp_path / f"c{k}")
    # What the dead node owned is read once more, by the next in the ranking, if no living node had it yet.
    assert ratio(data, reports) <= 1.02


def test_one_slow_peer_is_passed_over(tmp_path: Path, data: Path) -> None:
    with cluster(3) as made:
        made.slow(0, "2mbit")
        nodes = [f"{made.address(k)}:7070" for k in range(3)]
        patience = {"limits": {"stall_s": 1.0, "stall_bytes_per_s": 350e3}}
        began = time.monotonic()
        processes = [start(made.prefix(k), data, tmp_path / f"c{k}", nodes, k, **patience) for k in range(3)]
        reports = [report_of(process) for process in processes]
        seconds = time.monotonic() - began
    for k in range(3):
        check_whole(data, tmp_path / f"c{k}")
    owned = sum(s.nbytes for s in load_manifest(data).shards if owner(s.shard_id, nodes) == nodes[0])
    assert seconds < owned / 250e3, "waiting for it would have taken as long as its bytes at its rate"
    # What it owns is read once more by the next in the ranking, from whom the third has it.
    assert ratio(data, reports[1:]) <= 1.02


def test_shares_are_exchanged_between_nodes(tmp_path: Path, data: Path) -> None:
    nodes = [f"127.0.0.1:{port}" for port in free_ports(2)]
    for epoch in range(3):
        share = {"nodes": 2, "epoch": epoch, "exchange": 0.5}
        processes = [
            start([], data, tmp_path / f"c{k}", nodes, k, share={**share, "node": k}, join_s=5.0) for k in range(2)
        ]
        reports = [report_of(process) for process in processes]
        assert all(r["shards"] == SHARDS // 2 for r in reports)
        assert ratio(data, reports) == (1.0 if epoch == 0 else 0.0), "once read, shards go from node to node"
    assert sum(r["bytes_reused"] + r["bytes_from_peers"] for r in reports) == load_manifest(data).nbytes


def test_wrong_bytes_of_a_peer_are_never_kept(tmp_path: Path, data: Path) -> None:
    nodes = [f"127.0.0.1:{port}" for port in free_ports(2)]
    manifest = load_manifest(data)
    stage(data, tmp_path / "c0")
    theirs = [s for s in manifest.shards if owner(s.shard_id, nodes) == nodes[0]]
    for shard in theirs[:3]:
        flip_bit(tmp_path / "c0" / "tiny" / "ready" / f"{shard.shard_id}.h5", shard.nbytes // 2)
    first = start([], data, tmp_path / "c0", nodes, 0)
    report = report_of(start([], data, tmp_path / "c1", nodes, 1, down_s=0.2, join_s=0.0))
    report_of(first)
    check_whole(data, tmp_path / "c1")
    assert report["retries"] >= 1


def test_the_secret_is_asked_for_and_never_sent(tmp_path: Path, data: Path) -> None:
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    stage(data, tmp_path / "c")
    shard = load_manifest(data).shards[0]
    ready = tmp_path / "c" / "tiny" / "ready"
    server = PeerServer(
        address,
        secret=SECRET.encode(),
        dataset_id="tiny",
        ready=ready,
        status=lambda shard_id: "no",
        allowed={"127.0.0.1"},
    )
    try:
        asked = {"dataset_id": "tiny", "shard_id": shard.shard_id, "nbytes": shard.nbytes, "timeout_s": 5.0}
        reader = ask_peer(address, address, secret=SECRET.encode(), **asked)
        received = bytearray(shard.nbytes)
        while (at := reader._offset) < shard.nbytes:
            reader.readinto(memoryview(received)[at:], at)
        reader.close()
        assert bytes(received) == (data / shard.path).read_bytes()
        with pytest.raises(OSError):
            ask_peer(address, address, secret=b"another secret, also 32 letters.", **asked)
        assert server.refused == 1
        for strange in ("../ready/" + shard.shard_id, "unknown"):
            with pytest.raises(OSError, match="no such shard"):
                ask_peer(address, address, secret=SECRET.encode(), **{**asked, "shard_id": strange})
        with pytest.raises(OSError, match="no such shard"):
            ask_peer(address, address, secret=SECRET.encode(), **{**asked, "dataset_id": "other"})
        with socket.create_connection(("127.0.0.1", port)) as stranger:  # says nothing of use, and learns nothing
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 64)
            heard = bytearray()
            with contextlib.suppress(ConnectionResetError):
                while piece := stranger.recv(1024):
                    heard += piece
            assert len(heard) <= 5 + 32
    finally:
        server.close()


def test_what_a_client_sends_does_not_hold_the_secret() -> None:
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def listen() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(b"EXWP2" + bytes(32))
                heard.extend(sock.recv(1024))
                sock.sendall(bytes(32))

        thread = threading.Thread(target=listen)
        thread.start()
        with pytest.raises(OSError, match="does not know the secret"):
            ask_peer(address, address, secret=SECRET.encode(), dataset_id="d", shard_id="s", nbytes=1, timeout_s=5.0)
        thread.join()
    assert len(heard) == 64
    assert SECRET.encode() not in heard


def test_only_nodes_of_the_cluster_are_answered(tmp_path: Path, data: Path) -> None:
    with cluster(2) as made:
        nodes = [f"{made.address(0)}:7070", f"{made.address(0)}:7071"]  # the other namespace is no node
        first = start(made.prefix(0), data, tmp_path / "c0", nodes, 0)
        code = f"import socket; s = socket.create_connection(('{made.address(0)}', 7070), 5); print(len(s.recv(99)))"
        deadline = time.monotonic() + 20
        while True:
            done = subprocess.run([*made.prefix(1), sys.executable, "-c", code], capture_output=True, text=True)
            if "refused" not in done.stderr.lower() or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        second = start(made.prefix(0), data, tmp_path / "c1", nodes, 1)
        report_of(first), report_of(second)
    assert done.stdout.strip() == "0" or "reset" in done.stderr.lower(), done.stderr


@pytest.mark.parametrize("bad", ["0.0.0.0:7070", "*:1", "here", "host:0", "host:99999"])
def test_addresses_that_are_none_or_mean_all_are_refused(bad: str) -> None:
    with pytest.raises(UsageError, match="peer"):
        parse_address(bad)


def test_peer_options_are_checked() -> None:
    with pytest.raises(UsageError, match="this one"):
        PeerOptions(me="a:1", nodes=("b:1", "c:1"), secret=b"x" * 32)
    with pytest.raises(UsageError, match="at least 16"):
        PeerOptions(me="a:1", nodes=("a:1", "c:1"), secret=b"short")


def test_a_lost_node_changes_the_owner_of_its_own_shards_only() -> None:
    nodes, names = [f"n{k}" for k in range(5)], [f"shard{k}" for k in range(2000)]
    before = {i: owner(i, nodes) for i in names}
    after = {i: owner(i, nodes[1:]) for i in names}
    assert all(after[i] == before[i] for i in names if before[i] != "n0")
    assert all(after[i] == ranking(i, nodes)[1] for i in names if before[i] == "n0")
    counts = [list(before.values()).count(node) for node in nodes]
    assert min(counts) > 320 and max(counts) < 480
