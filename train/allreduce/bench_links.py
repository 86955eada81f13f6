"""Ranks and the links between them, for benchmarks: loopback, or network namespaces whose links are slowed down.

A slow link is a veth pair between two namespaces with a token bucket (`tc tbf`) at both ends; making it needs root.
More than two ranks hang on a switch (a bridge in a namespace of its own), each by such a link.
Whatever happens, processes and namespaces go: they are removed on the way out, the ranks ask the kernel to die with
their parent, and namespaces that a killed benchmark left behind are removed by the next one (their name carries its
process id).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import ExitwaveError, UsageError

__all__ = ["LINKS", "Link", "open_link", "terminated_as_interrupt"]

# name -> rate for tc
LINKS: dict[str, str | None] = {
    "loopback": None,
    "1gbit": "1gbit",
    "400mbit": "400mbit",
    "250mbit": "250mbit",
    "100mbit": "100mbit",
    "25mbit": "25mbit",
}
_BURST = "256kb"  # a few segments as the kernel hands them over (64 KiB)
_PREFIX = "exitwave-bench"
_DEVICE = "exw0"  # in either namespace


@dataclass(frozen=True, kw_only=True)
class Link:
    """Where the ranks run: the command prefix of each, rank 0's address and the network device."""

    prefixes: tuple[tuple[str, ...], ...]
    address: str
    device: str
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run(self, module: str, arguments: Sequence[str], *, limit_s: float) -> None:
        """Run `module` as all ranks until all have ended. Raises `ExitwaveError` with their words if one fails."""
        settings = ["env", f"GLOO_SOCKET_IFNAME={self.device}", "OMP_NUM_THREADS=1"]
        with contextlib.ExitStack() as stack:
            logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in self.prefixes]
            port = str(_free_port())
            for rank, prefix in enumerate(self.prefixes):
                place = ["--rank", str(rank), "--world", str(len(self.prefixes)), "--parent", str(os.getpid())]
                place += ["--address", self.address, "--port", port]
                self.children.append(
                    subprocess.Popen(
                        [*prefix, *settings, sys.executable, "-m", module, *place, *arguments],
                        stdin=subprocess.DEVNULL,
                        stdout=logs[rank],
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
            try:
                failed = self._wait(time.monotonic() + limit_s)
            finally:
                self.stop()
            if failed is not None:
                logs[failed].seek(0)
                raise ExitwaveError(
                    f"the benchmark's rank {failed} failed or took more than {limit_s:.0f} s:\n"
                    f"{logs[failed].read().decode(errors='replace')[-3000:]}"
                )

    def _wait(self, until: float) -> int | None:
        """None when all ended well, else the rank that did not."""
        while any(child.poll() is None for child in self.children):
            for rank, child in enumerate(self.children):
                if child.poll() not in (None, 0) or time.monotonic() > until:
                    return rank
            time.sleep(0.05)
        return next((rank for rank, child in enumerate(self.children) if child.returncode), None)

    def stop(self) -> None:
        """End what still runs."""
        for child in self.children:
            if child.poll() is None:
                child.kill()
            child.wait()
        self.children.clear()


@contextlib.contextmanager
def open_link(name: str, ranks: int = 2, *, burst: str = _BURST) -> Iterator[Link]:
    """`ranks` ranks with the link `name` of `LINKS`. Raises `UsageError`, with what is missing, where there is none.

    burst: bytes (as tc writes them) that an idle link lets through at once, however slow it is.
    """
    rate = LINKS[name]
    if rate is None:
        yield Link(prefixes=((),) * ranks, address="127.0.0.1", device="lo")
        return
    if os.geteuid() != 0:
        raise UsageError("network namespaces need root")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise UsageError(f"needs the command {' and '.join(missing)} (iproute2)")
    _sweep()
    ends = [f"{_PREFIX}-{os.getpid()}-{side}" for side in "abcdefghijklmnopqrstuvwxy"[:ranks]]
    switch = f"{_PREFIX}-{os.getpid()}-z"
    try:
        _make(ends, switch, rate, burst)
        yield Link(
            prefixes=tuple(("ip", "netns", "exec", end) for end in ends),
            address="10.213.7.1",
            device=_DEVICE,
        )
    finally:
        for end in [*ends, *([switch] if ranks > 2 else [])]:
            subprocess.run(["ip", "netns", "del", end], capture_output=True)


def _make(ends: Sequence[str], switch: str, rate: str, burst: str) -> None:
    """Namespaces, joined; the veth pairs go with them. More than two hang on a switch."""
    for end in ends:
        _ip("netns", "add", end)
    if len(ends) == 2:
        _ip("-n", ends[0], "link", "add", _DEVICE, "type", "veth", "peer", "name", _DEVICE, "netns", ends[1])
    else:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for number, end in enumerate(ends):
            port = f"port{number}"
            _ip("-n", end, "link", "add", _DEVICE, "type", "veth", "peer", "name", port, "netns", switch)
            _ip("-n", switch, "link", "set", port, "master", "bridge")
            _ip("-n", switch, "link", "set", port, "up")
            _slow(switch, port, rate, burst)
    for host, end in enumerate(ends, start=1):
        _ip("-n", end, "addr", "add", f"10.213.7.{host}/24", "dev", _DEVICE)
        _ip("-n", end, "link", "set", "lo", "up")
        _ip("-n", end, "link", "set", _DEVICE, "up")
        _slow(end, _DEVICE, rate, burst)


def _slow(namespace: str, device: str, rate: str, burst: str) -> None:
    """What leaves by `device` leaves at `rate`."""
    # The queue holds 50 ms.
    shape = ["root", "tbf", "rate", rate, "burst", burst, "latency", "50ms"]
    _call(["ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", device, *shape])


def _ip(*arguments: str) -> None:
    _call(["ip", *arguments])


def _call(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UsageError(f"the link cannot be made here: `{' '.join(command)}`: {done.stderr.strip()}")


def _sweep() -> None:
    """Remove namespaces of benchmarks whose process is no more."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for line in listed.splitlines():
        name = line.split()[0] if line.strip() else ""
        parts = name.removeprefix(f"{_PREFIX}-").split("-")
        if name.startswith(f"{_PREFIX}-") and parts[0].isdigit() and not Path(f"/proc/{parts[0]}").exists():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextlib.contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """Within, SIGTERM raises `KeyboardInterrupt`, so that what is open is closed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
