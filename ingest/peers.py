"""Shards from node to node, so that shared storage is read once for a cluster: a small server and its client.

Protocol, one request a connection; integers are big-endian, a message is its length (4 bytes) and that many bytes of
JSON.
 (1) The client connects from its own cluster address. The server closes what comes from an address that no node has.
 (2) Server -> client: "EXWP2", then 32 random bytes S.
 (3) Client -> server: 32 random bytes C, then HMAC-SHA256(secret, "client" S C N), where N is the
     server's name in the list of nodes: who sits at one node's address cannot pass the proof on to another node. The
     server closes the connection without a word unless that is right: it speaks to holders of the run's secret only,
     and the secret never travels. The client has 10 s for this, whole.
 (4) Server -> client: HMAC-SHA256(secret, "server" C S N). The client closes unless that is right.
 (5) Client -> server: {"dataset": id, "from": node, "shard": id}; or {…, "done": true} by a node that needs no more.
 (6) Server -> client: {"state": "here", "nbytes": n}, then n bytes; or {"state": "coming"} each half second while the
     shard is under way there, at most ten times; or {"state": "no"}; or {"state": "noted"}.
What arrives is verified by the hash in the manifest, like any copy. The bytes travel in the clear.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import open_to_read
from exitwave.ingest.staging_home import pin

__all__ = ["PeerBusyError", "PeerLacksError", "PeerServer", "ask_peer", "parse_address", "tell_done"]

_MAGIC = b"EXWP2"
_NONCE = 32
_MAX_MESSAGE = 4096
_TIMEOUT_S = 10.0
_KEEPALIVE_S = 0.5
_KEEPALIVES = 10
_MAX_CONNECTIONS = 256

Status = Literal["here", "coming", "no"]


class PeerBusyError(OSError):
    """The peer is still getting the shard itself: ask again."""


def parse_address(text: str) -> tuple[str, int]:
    """`host:port`, one of this cluster's own addresses. UsageError: malformed, or an address that means all."""
    host, _, port = text.rpartition(":")
    if not host.strip() or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise UsageError(f"peer {text!r}: expected HOST:PORT, such as 10.0.0.2:7070")
    host = host.strip("[]")
    if _means_all(host):
        raise UsageError(f"peer {text!r}: shards are served on an address of the cluster or on 127.0.0.1, not on all")
    return host, int(port)


def _means_all(host: str) -> bool:
    """Also in its other spellings, such as `0` or `::ffff:0.0.0.0`."""
    if host == "*":
        return True
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_unspecified
    with contextlib.suppress(OSError):
        return socket.inet_aton(host) == bytes(4)
    return False


def _proof(secret: bytes, who: bytes, first: bytes, second: bytes, server: str) -> bytes:
    return hmac.digest(secret, who + first + second + server.encode(), hashlib.sha256)


def _receive(sock: socket.socket, n: int, *, until: float | None = None) -> bytes:
    """`n` bytes; TimeoutError once `until` (monotonic) is over, however many single bytes have come."""
    data = bytearray()
    while len(data) < n:
        if until is not None:
            sock.settimeout(max(0.001, min(until - time.monotonic(), _TIMEOUT_S)))
            if time.monotonic() > until:
                raise TimeoutError(errno.ETIMEDOUT, "the handshake took too long")
        piece = sock.recv(n - len(data))
        if not piece:
            raise ConnectionResetError(errno.ECONNRESET, "the peer closed the connection")
        data += piece
    return bytes(data)


def _send_message(sock: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    sock.sendall(len(data).to_bytes(4, "big") + data)


def _receive_message(sock: socket.socket, *, until: float | None = None) -> dict[str, Any]:
    n = int.from_bytes(_receive(sock, 4, until=until), "big")
    if n > _MAX_MESSAGE:
        raise OSError(errno.EBADMSG, f"a message of {n} bytes, expected at most {_MAX_MESSAGE}")
    try:
        message = json.loads(_receive(sock, n, until=until))
    except (ValueError, RecursionError) as error:
        raise OSError(errno.EBADMSG, f"no message of ours: {error}") from None
    if not isinstance(message, dict):
        raise OSError(errno.EBADMSG, "no message of ours")
    return message


class PeerLacksError(OSError):
    """The peer is well, but has no such shard and is not getting it."""


class PeerServer:
    """Serves the ready shards of one data set to the other nodes, until closed.

    `status(shard_id)`: whether a shard that is not ready is `coming`. `allowed`: the hosts that may connect.
    `met(node)`: called with each node that asked.
    """

    def __init__(
        self,
        address: str,
        *,
        secret: bytes,
        dataset_id: str,
        ready: Path,
        status: Callable[[str], Status],
        allowed: set[str],
        met: Callable[[str], None] = lambda node: None,
    ) -> None:
        self._secret = secret
        self._address = address
        self._dataset_id = dataset_id
        self._ready = ready
        self._status = status
        self._met = met
        self._allowed = _resolved(allowed)
        self.done: set[str] = set()
        self.bytes_served = 0
        self.refused = 0
        self.last_asked = time.monotonic()
        self._closing = threading.Event()
        self._slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        host, port = parse_address(address)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise UsageError(
                f"peer address {address}: {error.strerror or error}. Give an address of this node."
            ) from None
        self._listener.settimeout(0.2)
        self._thread = threading.Thread(target=self._accept, name="peer server", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, (host, *_) = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # also for want of descriptors, which may be there again soon
                self._closing.wait(0.05)
                continue
            if host not in self._allowed or not self._slots.acquire(blocking=False):
                self.refused += 1
                sock.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(sock,), name=f"peer {host}", daemon=True).start()
            except RuntimeError:  # no more threads now
                self._slots.release()
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock, contextlib.suppress(OSError):
                sock.settimeout(_TIMEOUT_S)
                mine = secrets.token_bytes(_NONCE)
                sock.sendall(_MAGIC + mine)
                until = time.monotonic() + _TIMEOUT_S
                theirs, proof = _receive(sock, _NONCE, until=until), _receive(sock, 32, until=until)
                if not hmac.compare_digest(proof, _proof(self._secret, b"client", mine, theirs, self._address)):
                    self.refused += 1
                    return
                sock.settimeout(_TIMEOUT_S)
                sock.sendall(_proof(self._secret, b"server", theirs, mine, self._address))
                request = _receive_message(sock, until=time.monotonic() + _TIMEOUT_S)
                sock.settimeout(_TIMEOUT_S)
                self._answer(sock, request)
        finally:
            self._slots.release()

    def _answer(self, sock: socket.socket, request: dict[str, Any]) -> None:
        self.last_asked = time.monotonic()
        node = str(request.get("from"))
        self._met(node)
        if request.get("dataset") != self._dataset_id:
            _send_message(sock, {"state": "no"})
        elif "done" in request:
            self.done.add(node)
            _send_message(sock, {"state": "noted"})
        else:
            self._hand_over(sock, str(request.get("shard")))

    def _hand_over(self, sock: socket.socket, shard_id: str) -> None:
        for _ in range(_KEEPALIVES):
            status = self._status(shard_id)  # asked first: what becomes ready after it is found by looking
            if (fd := self._open(shard_id)) is not None:
                break
            _send_message(sock, {"state": "no" if status == "no" else "coming"})
            if status == "no" or self._closing.wait(_KEEPALIVE_S):
                return
        else:
            return
        with os.fdopen(fd, "rb") as file:
            nbytes = os.fstat(fd).st_size
            _send_message(sock, {"state": "here", "nbytes": nbytes})
            offset = 0
            while offset < nbytes and not self._closing.is_set():
                sent = sock.sendfile(file, offset, min(8 << 20, nbytes - offset))
                offset += sent
                self.bytes_served += sent
                self.last_asked = time.monotonic()

    def _open(self, shard_id: str) -> int | None:
        """The ready shard, pinned while it is sent."""
        if not re.fullmatch(r"[0-9A-Za-z_-]{1,128}", shard_id):
            return None
        try:
            fd = open_to_read(self._ready / f"{shard_id}.h5")
        except OSError:
            return None
        if pin(fd):
            return fd
        os.close(fd)
        return None

    def close(self) -> None:
        self._closing.set()
        self._listener.close()
        self._thread.join(5)


def _resolved(hosts: set[str]) -> set[str]:
    found: set[str] = set()
    for host in hosts:
        with contextlib.suppress(OSError):
            found |= {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    return found


@contextlib.contextmanager
def _connected(peer: str, me: str, secret: bytes, timeout_s: float) -> Iterator[socket.socket]:
    sock = _connect(peer, me, secret, timeout_s)
    with sock:
        yield sock


def _connect(peer: str, me: str, secret: bytes, timeout_s: float) -> socket.socket:
    sock = socket.create_connection(parse_address(peer), timeout=timeout_s, source_address=(parse_address(me)[0], 0))
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if _receive(sock, len(_MAGIC)) != _MAGIC:
            raise OSError(errno.EPROTO, f"{peer} is no peer of ours")
        theirs, mine = _receive(sock, _NONCE), secrets.token_bytes(_NONCE)
        sock.sendall(mine + _proof(secret, b"client", theirs, mine, peer))
        if not hmac.compare_digest(_receive(sock, 32), _proof(secret, b"server", mine, theirs, peer)):
            raise OSError(errno.EPROTO, f"{peer} does not know the secret of this run")
        return sock
    except BaseException:
        sock.close()
        raise


def ask_peer(
    peer: str,
    me: str,
    *,
    secret: bytes,
    dataset_id: str,
    shard_id: str,
    nbytes: int,
    timeout_s: float,
    met: Callable[[str], None] = lambda peer: None,
) -> PeerReader:
    """Asks `peer` for a shard. PeerBusyError while it is getting the shard itself, OSError when it cannot give it.

    `met(peer)` is called once the peer has proved that it is one.
    """
    sock = _connect(peer, me, secret, timeout_s)
    try:
        met(peer)
        _send_message(sock, {"dataset": dataset_id, "from": me, "shard": shard_id})
        for _ in range(_KEEPALIVES + 1):
            if (answer := _receive_message(sock)).get("state") != "coming":
                break
        else:
            raise PeerBusyError(errno.EAGAIN, f"{peer} has not got the shard yet")
        if answer.get("state") != "here":
            raise PeerLacksError(errno.ENOENT, f"{peer} has no such shard")
        if answer.get("nbytes") != nbytes:
            raise OSError(errno.EBADMSG, f"{peer} has {answer.get('nbytes')} bytes of it, expected {nbytes}")
        return PeerReader(sock, nbytes)
    except ConnectionResetError:
        sock.close()
        raise PeerBusyError(errno.EAGAIN, f"{peer} has not got the shard yet") from None
    except BaseException:
        sock.close()
        raise


def tell_done(peer: str, me: str, *, secret: bytes, dataset_id: str, timeout_s: float = 2.0) -> None:
    """Tells `peer` that this node needs no more of it. OSError."""
    with _connected(peer, me, secret, timeout_s) as sock:
        _send_message(sock, {"dataset": dataset_id, "from": me, "done": True})
        _receive_message(sock)


class PeerReader:
    """The bytes of a shard as they come; to be read front to back."""

    def __init__(self, sock: socket.socket, nbytes: int) -> None:
        self._sock = sock
        self._nbytes = nbytes
        self._offset = 0

    def readinto(self, view: memoryview, offset: int) -> int:
        if offset != self._offset:
            raise OSError(errno.ESPIPE, f"byte {offset} asked of a peer, expected {self._offset}")
        count = self._sock.recv_into(view[: self._nbytes - offset])
        self._offset += count
        return count

    def close(self) -> None:
        self._sock.close()
