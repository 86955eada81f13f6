"""Nodes on one machine: network namespaces joined by a bridge, each with an address of its own. Needs root."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class Cluster:
    """`n` namespaces; node k has the address `address(k)`, and its processes start with `prefix(k)`.

    `host`: they also reach this machine itself, at any of its addresses, and it reaches them.
    """

    def __init__(self, n: int, *, host: bool = False) -> None:
        self.n = n
        self.host = host
        self.name = f"xw{uuid.uuid4().hex[:5]}"
        self.net = f"10.{201 + os.getpid() % 50}.{os.getpid() // 50 % 250}"

    def address(self, node: int) -> str:
        return f"{self.net}.{node + 1}"

    def prefix(self, node: int) -> list[str]:
        return ["ip", "netns", "exec", f"{self.name}n{node}"]

    def make(self) -> None:
        ip("link", "add", f"{self.name}b", "type", "bridge")
        ip("link", "set", f"{self.name}b", "up")
        if self.host:
            ip("addr", "add", f"{self.net}.254/24", "dev", f"{self.name}b")
        for node in range(self.n):
            space, inside, outside = f"{self.name}n{node}", f"{self.name}i{node}", f"{self.name}o{node}"
            ip("netns", "add", space)
            ip("link", "add", outside, "type", "veth", "peer", "name", inside)
            ip("link", "set", inside, "netns", space)
            ip("link", "set", outside, "master", f"{self.name}b")
            ip("link", "set", outside, "up")
            ip("-n", space, "addr", "add", f"{self.address(node)}/24", "dev", inside)
            ip("-n", space, "link", "set", inside, "up")
            ip("-n", space, "link", "set", "lo", "up")
            if self.host:
                ip("-n", space, "route", "add", "default", "via", f"{self.net}.254")

    def slow(self, node: int, rate: str) -> None:
        """What this node sends goes at `rate` only."""
        tbf = ["root", "tbf", "rate", rate, "burst", "16kb", "latency", "200ms"]
        run(["ip", "netns", "exec", f"{self.name}n{node}", "tc", "qdisc", "add", "dev", f"{self.name}i{node}", *tbf])

    def remove(self) -> None:
        for node in range(self.n):
            subprocess.run(["ip", "netns", "del", f"{self.name}n{node}"], capture_output=True)
            subprocess.run(["ip", "link", "del", f"{self.name}o{node}"], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{self.name}b"], capture_output=True)


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def ip(*what: str) -> None:
    run(["ip", *what])


@contextmanager
def cluster(n: int, *, host: bool = False) -> Iterator[Cluster]:
    """`n` nodes, removed at the end; skips, saying why, where they cannot be made."""
    made = Cluster(n, host=host)
    try:
        made.make()
    except (OSError, subprocess.CalledProcessError) as error:
        made.remove()
        pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', None) or error}")
    try:
        yield made
    finally:
        made.remove()
