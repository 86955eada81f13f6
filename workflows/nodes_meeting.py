"""How the nodes of one attempt find each other, see that one is gone, and agree on how it ended: by files and sockets.

1. Each node writes RUN/.slurm/ATTEMPT/node-K.json with its host, its address and the ports that it picked there. The
   folder's name holds the job's number and how often it was queued again, so that nothing of an earlier attempt is
   ever met. Node 0 writes last what is common to all (the run's configuration, a secret for the caches).
2. Each node listens on one of its ports and answers nothing: that a connection can be made says that its process
   lives. A node that leaves says so by node-K.left; one that can no longer be reached and has not said so is lost.
3. The first node that knows how the attempt ended writes `verdict`: the exit code, and on the next lines the message.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from exitwave.ingest.errors import DamagedDataError, ExitwaveError, InterruptedRunError, UsageError
from exitwave.ingest.files import read_plain_text, write_atomic
from exitwave.workflows.nodes_place import NodePlace, free_port, own_address

__all__ = ["Meeting", "Member", "error_of", "read_verdict"]

_MEET_S = 300.0
_LOOK_S = 3.0
_PATIENCE = 3  # looks in a row at a node that did not answer
_ERRORS: dict[int, type[ExitwaveError]] = {2: UsageError, 3: DamagedDataError, 75: InterruptedRunError}


@dataclass(frozen=True, kw_only=True)
class Member:
    """A node as it tells of itself: where its cache serves shards, where ranks meet, and where it shows that it lives.

    All ports are on `address`.
    """

    node: int
    host: str
    address: str
    cache_port: int
    meeting_port: int
    alive_port: int


class Meeting:
    """This node's part in one attempt; use it as a context. `folder` is RUN/.slurm/ATTEMPT."""

    def __init__(self, place: NodePlace, folder: Path, *, meet_s: float = _MEET_S) -> None:
        self.place = place
        self.folder = folder
        self.members: tuple[Member, ...] = ()
        self._meet_s = meet_s
        self._lost: dict[int, str] = {}
        self._done = threading.Event()
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None

    @property
    def secret_file(self) -> Path:
        return self.folder / "secret"

    def __enter__(self) -> Meeting:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.place.node == 0:
            descriptor = os.open(self.secret_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        with contextlib.suppress(OSError):
            write_atomic(self.folder / f"node-{self.place.node}.left", b"")
        if self._thread is not None:
            self._thread.join(2 * _LOOK_S)
        if self._listener is not None:
            self._listener.close()

    def meet(self, stop: Callable[[], bool]) -> tuple[Member, ...]:
        """Tell the others of this node and wait for them.

        Raises InterruptedRunError when told to stop or when nodes do not come, and what the verdict says if there is
        one already.
        """
        place = self.place
        address = own_address(place.interface, place.host)
        alive = free_port(address)
        self._listener = socket.create_server((address, alive), backlog=1024)
        self._listener.setblocking(False)
        me = Member(
            node=place.node, host=place.host, address=address, alive_port=alive,
            cache_port=free_port(address), meeting_port=free_port(address),
        )  # fmt: skip
        write_atomic(self.folder / f"node-{place.node}.json", json.dumps(asdict(me)).encode())
        until = time.monotonic() + self._meet_s
        while len(found := self._found()) < place.nodes:
            if (ended := read_verdict(self.folder)) is not None:
                raise ended
            if left := [n for n in range(place.nodes) if (self.folder / f"node-{n}.left").exists()]:
                names = ", ".join(place.hosts[n] if place.hosts else f"number {n}" for n in left)
                raise self.verdict(1.0) or InterruptedRunError(f"node {names} has ended before the training began.")
            if stop():
                raise InterruptedRunError("Stopped before the training began.")
            if time.monotonic() > until:
                raise InterruptedRunError(self._who_is_missing(found))
            time.sleep(0.1)
        self.members = tuple(found[node] for node in range(place.nodes))
        self._thread = threading.Thread(target=self._watch, name="exitwave-nodes", daemon=True)
        self._thread.start()
        return self.members

    def _found(self) -> dict[int, Member]:
        found = {}
        for node in range(self.place.nodes):
            with contextlib.suppress(OSError, ValueError, TypeError):
                found[node] = Member(**json.loads(read_plain_text(self.folder / f"node-{node}.json")))
        return found

    def _who_is_missing(self, found: dict[int, Member]) -> str:
        place = self.place
        names = [place.hosts[n] if place.hosts else f"number {n}" for n in range(place.nodes) if n not in found]
        return (
            f"{', '.join(names[:8])}: not there {self._meet_s:.0f} s after node {place.host}. Does the job's folder "
            f"{self.folder} lie on storage that all nodes share?"
        )

    # --- who is still there

    def lost(self) -> str:
        """The names of the nodes that are gone without a word, or nothing."""
        return ", ".join(self._lost[node] for node in sorted(self._lost))

    def look(self) -> str:
        """As `lost`, but look now."""
        for _ in range(_PATIENCE):
            silent = [m for m in self._others() if not self._answers(m)]
            if not silent:
                break
            time.sleep(0.3)
        for member in silent:
            self._lost[member.node] = member.host
        return self.lost()

    def _others(self) -> list[Member]:
        return [m for m in self.members if m.node != self.place.node]

    def _watch(self) -> None:
        silent: dict[int, int] = {}
        # Each looks at the next one and at the first: that is enough for a verdict, and n nodes make 2 n looks.
        watched = [m for m in self._others() if m.node in (0, (self.place.node + 1) % self.place.nodes)]
        while not self._done.wait(_LOOK_S):
            self._take_in()
            for member in watched:
                silent[member.node] = 0 if self._answers(member) else silent.get(member.node, 0) + 1
                if silent[member.node] >= _PATIENCE:
                    self._lost[member.node] = member.host

    def _take_in(self) -> None:
        """Connections that were looks at this node: taken, lest they fill the queue."""
        assert self._listener is not None
        with contextlib.suppress(OSError):
            while True:
                self._listener.accept()[0].close()

    def _answers(self, member: Member) -> bool:
        try:
            socket.create_connection((member.address, member.alive_port), timeout=_LOOK_S).close()
            return True
        except OSError:
            return (self.folder / f"node-{member.node}.left").exists()

    # --- how it ended

    def conclude(self, error: ExitwaveError) -> None:
        """Write the verdict, unless another node has."""
        text = f"{error.exit_code}\n{error}\n"
        with contextlib.suppress(OSError):  # a full disk: the error itself matters more than its being told
            part, path = self.folder / f"verdict-{self.place.node}.part", self.folder / "verdict"
            part.write_text(text, errors="surrogateescape")
            try:
                os.link(part, path)  # whole, and only if it is the first
            except FileExistsError:
                pass
            except OSError:  # not every shared file system has links
                if not path.exists():
                    part.rename(path)

    def verdict(self, wait_s: float = 0.0) -> ExitwaveError | None:
        """What another node concluded, waiting that long for one."""
        until = time.monotonic() + wait_s
        while (found := read_verdict(self.folder)) is None and time.monotonic() < until:
            time.sleep(0.1)
        return found


def read_verdict(folder: Path) -> ExitwaveError | None:
    """The error that an attempt ended with, or None."""
    try:
        code, _, message = read_plain_text(folder / "verdict", errors="surrogateescape").partition("\n")
        return error_of(int(code), message.strip())
    except (OSError, ValueError):
        return None


def error_of(code: int, message: str) -> ExitwaveError:
    """The error of an exit code."""
    return _ERRORS.get(code, ExitwaveError)(message)
