"""Peers that lie, stall, come in masses, or stand between two honest nodes: bytes go to holders of the secret only."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from ingest_samples import make_dataset

from exitwave.ingest import load_manifest, peers, stage
from exitwave.ingest.errors import UsageError
from exitwave.ingest.peers import PeerBusyError, PeerLacksError, PeerServer, ask_peer, parse_address
from exitwave.ingest.peers_staging import PeerOptions, PeerSources
from exitwave.ingest.placement import ranking
from exitwave.ingest.records import ShardRecord
from exitwave.ingest.staging_home import CacheHome
from exitwave.ingest.staging_sources import StorageSource
from exitwave.ingest.storage import PosixStorage

SECRET = b"the run's own secret, 32 letters"


def free_address(host: str = "127.0.0.1") -> str:
    with socket.create_server((host, 0)) as made:
        return f"{host}:{made.getsockname()[1]}"


class Served:
    """A server of one small data set, and its first shard."""

    def __init__(self, tmp_path: Path, address: str) -> None:
        root = make_dataset(tmp_path / "d", "t")
        stage(root, tmp_path / "c")
        self.shard: ShardRecord = load_manifest(root).shards[0]
        self.bytes = (root / self.shard.path).read_bytes()
        self.address = address
        host = parse_address(address)[0]
        self.server = PeerServer(
            address,
            secret=SECRET,
            dataset_id="tiny",
            ready=tmp_path / "c" / "tiny" / "ready",
            status=lambda shard_id: "no",
            allowed={host},
        )

    def get(self, *, peer: str | None = None, shard_id: str | None = None, timeout_s: float = 5.0) -> bytes:
        reader = ask_peer(
            peer or self.address,
            f"{parse_address(self.address)[0]}:1",
            secret=SECRET,
            dataset_id="tiny",
            shard_id=shard_id or self.shard.shard_id,
            nbytes=self.shard.nbytes,
            timeout_s=timeout_s,
        )
        data, at = bytearray(self.shard.nbytes), 0
        while count := reader.readinto(memoryview(data)[at:], at):
            at += count
        reader.close()
        return bytes(data)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path, free_address())
    assert made.get() == made.bytes
    yield made
    made.server.close()


def test_who_sits_at_one_address_cannot_pass_a_proof_on_to_another(served: Served) -> None:
    """A stranger at a node's address carries the handshake to an honest node; he has no secret, and gets no byte."""
    got = bytearray()

    def relay(listener: socket.socket) -> None:
        client, _ = listener.accept()
        with client, socket.create_connection(parse_address(served.address)) as honest:
            honest.settimeout(5)
            client.sendall(honest.recv(37, socket.MSG_WAITALL))
            honest.sendall(client.recv(64, socket.MSG_WAITALL))
            got.extend(honest.recv(32))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=relay, args=(listener,))
        thread.start()
        with pytest.raises(OSError):
            served.get(peer=f"127.0.0.1:{listener.getsockname()[1]}")
        thread.join(10)
    assert not got and served.server.refused == 1


def test_byte_by_byte_is_no_way_to_hold_a_place(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_TIMEOUT_S", 0.6)
    with socket.create_connection(parse_address(served.address)) as slow:
        began = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - began < 10:
                slow.sendall(b"x")
                time.sleep(0.1)
        assert time.monotonic() - began < 5


def test_a_server_outlives_a_want_of_descriptors(served: Served) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        waiting = [stack.enter_context(socket.socket()) for _ in range(4)]
        low = max(s.fileno() for s in waiting) + 1
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
            for sock in waiting:
                sock.connect(parse_address(served.address))
            time.sleep(0.6)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert served.get() == served.bytes


def test_a_thousand_connections_that_say_nothing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_TIMEOUT_S", 1.0)
    with ExitStack() as stack:
        for _ in range(600):
            stack.enter_context(socket.create_connection(parse_address(served.address)))
        deadline = time.monotonic() + 20
        while True:  # refused while all places are taken, served once their time is over
            try:
                assert served.get() == served.bytes
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.1)


@pytest.mark.parametrize("strange", ["a\0b", "\ud800", "..", "../x", "x" * 3000, "é"])
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_strange_names_are_answered_with_no(served: Served, strange: str) -> None:
    with pytest.raises(PeerLacksError):
        served.get(shard_id=strange)
    assert served.get() == served.bytes


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_deep_json_of_a_holder_of_the_secret(served: Served) -> None:
    with peers._connected(served.address, "127.0.0.1:1", SECRET, 5.0) as sock:
        data = b"[" * 4000
        sock.sendall(len(data).to_bytes(4, "big") + data)
        assert sock.recv(1) == b""
    with peers._connected(served.address, "127.0.0.1:1", SECRET, 5.0) as sock:
        sock.sendall(b"\xff\xff\xff\xff")
        assert sock.recv(1) == b""
    assert served.get() == served.bytes


def test_a_peer_that_says_coming_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def lie(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            mine, name = bytes(32), f"127.0.0.1:{listener.getsockname()[1]}"
            sock.sendall(b"EXWP2" + mine)
            theirs = sock.recv(64, socket.MSG_WAITALL)[:32]
            sock.sendall(peers._proof(SECRET, b"server", theirs, mine, name))
            try:
                while True:
                    peers._send_message(sock, {"state": "coming"})
                    time.sleep(0.01)
            except OSError:
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lie, args=(listener,))
        thread.start()
        peer = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(PeerBusyError):
            ask_peer(peer, "127.0.0.1:1", secret=SECRET, dataset_id="d", shard_id="s", nbytes=1, timeout_s=5.0)
        thread.join(10)
        assert not thread.is_alive()


def test_nodes_may_have_addresses_of_six(tmp_path: Path) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as made:
            address = f"[::1]:{made.getsockname()[1]}"
    except OSError:
        pytest.skip("this machine has no ::1")
    served = Served(tmp_path, address)
    assert served.get() == served.bytes
    served.server.close()


@pytest.mark.parametrize("bad", ["0:7070", "0x0:7070", "[::ffff:0.0.0.0]:1", "[0:0:0:0:0:0:0:0]:1", "a:²", " :1"])
def test_other_spellings_of_all_addresses_are_refused(bad: str) -> None:
    with pytest.raises(UsageError, match="peer"):
        parse_address(bad)


def test_a_peer_that_was_asked_before_it_had_started_is_not_passed_over(tmp_path: Path) -> None:
    """It refused us, started, and asked us, before we had taken in that it refused."""
    root = make_dataset(tmp_path / "d", "t" * 12)
    manifest = load_manifest(root)
    me, other = free_address(), free_address()
    options = PeerOptions(me=me, nodes=(me, other), secret=SECRET)
    home = CacheHome(tmp_path / "c", manifest.header)
    home.make()
    sources = PeerSources(
        options, home, StorageSource(PosixStorage(root)), dataset_id="tiny", status=lambda shard_id: "no"
    )
    try:
        shard = next(s for s in manifest.shards if ranking(s.shard_id, options.nodes)[0] == other)
        source = sources.choose(shard)
        with pytest.raises(ConnectionRefusedError):
            source.open(shard)
        peers.tell_done(me, other, secret=SECRET, dataset_id="tiny")
        sources.failed(source)
        assert sources.choose(shard).name == other
        sources.failed(sources.choose(shard))
        assert sources.choose(shard).shared, "asked while it was known to be up, it has failed"
    finally:
        sources.close()
