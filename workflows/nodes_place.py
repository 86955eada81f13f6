"""Where a task of Slurm stands among the nodes of its step, and by which address others reach it.

A host's own name is no address to rely on: it may mean 127.0.1.1, be known on that host alone, or belong to a network
that the nodes do not share. So each node finds an address on one of its own interfaces and tells it to the others.
"""

from __future__ import annotations

import ipaddress
import random
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from exitwave.ingest.errors import UsageError

__all__ = ["NETWORK_VARIABLES", "NodePlace", "free_port", "hosts_of", "interface_of", "node_place", "own_address"]

NETWORK_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_PORTS = range(20_000, 32_000)  # below those that the kernel gives to outgoing connections
_MAX_HOSTS = 100_000


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """Task `node` of `nodes` in a step of Slurm, one on each node. `attempt` names this run of the job, and no other.

    `restarts`: how often the job was queued again before.
    """

    node: int
    nodes: int
    job: str
    attempt: str
    host: str
    hosts: tuple[str, ...]
    restarts: int = 0
    interface: str | None = None


def node_place(env: Mapping[str, str], nodes: int) -> NodePlace | None:
    """The place that srun gave, or None outside a step.

    Raises UsageError where the step's tasks are not one for each of `nodes`.
    """
    if "SLURM_STEP_ID" not in env or "SLURM_PROCID" not in env or "RANK" in env:
        return None
    try:
        node, tasks = int(env["SLURM_PROCID"]), int(env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", "1")))
        restarts = int(env.get("SLURM_RESTART_COUNT", "0"))
    except ValueError as error:
        raise UsageError(f"SLURM_* in the environment: expected numbers ({error}).") from None
    hosts = hosts_of(env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", "")))
    if tasks != nodes or (hosts and len(hosts) != nodes):
        raise UsageError(
            f"--nodes {nodes}: this step has {tasks} tasks on {len(hosts) or '?'} nodes. Start one task a node, "
            f"`srun --nodes={nodes} --ntasks-per-node=1 exitwave train … --nodes {nodes}`, or leave --nodes out and "
            "start one task a rank."
        )
    job = env.get("SLURM_JOB_ID", "0")
    return NodePlace(
        node=node,
        nodes=nodes,
        job=job,
        attempt=env.get("EXITWAVE_ATTEMPT") or f"{job}-{restarts}.{env['SLURM_STEP_ID']}",
        host=env.get("SLURMD_NODENAME") or socket.gethostname(),
        hosts=hosts,
        restarts=restarts,
        interface=env.get("EXITWAVE_INTERFACE") or None,
    )


def hosts_of(nodelist: str) -> tuple[str, ...]:
    """`gpu[01-03,7],login` -> gpu01, gpu02, gpu03, gpu7, login: Slurm's way to write many names. UsageError."""
    found: list[str] = []
    items = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", nodelist)
    if ",".join(items) != nodelist:
        raise UsageError(f"a list of nodes that cannot be read: {nodelist[:80]!r}")
    for item in items:
        found += _expanded(item.strip())
        if len(found) > _MAX_HOSTS:
            raise UsageError(f"a list of nodes with more than {_MAX_HOSTS} names: {nodelist[:80]}")
    return tuple(found)


def _expanded(item: str) -> list[str]:
    head, bracket, rest = item.partition("[")
    if not bracket:
        return [item]
    inside, _, tail = rest.partition("]")
    names: list[str] = []
    for part in inside.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None or int(match[2] or match[1]) - int(match[1]) > _MAX_HOSTS:
            raise UsageError(f"a list of nodes that cannot be read: {item!r}")
        numbers = range(int(match[1]), int(match[2] or match[1]) + 1)
        names += [f"{head}{number:0{len(match[1])}d}" for number in numbers]
    return [name + end for name in names for end in _expanded(tail)] if tail else names


def own_address(interface: str | None = None, host: str | None = None) -> str:
    """An IPv4 address of this node that others can reach: of `interface` where that is given, else the one that the
    node's name means, else the one it would send from, else of the first interface that is up.

    Raises UsageError: no such interface, or none with an address.
    """
    addresses = {
        name: [a.address for a in found if a.family == socket.AF_INET] for name, found in psutil.net_if_addrs().items()
    }
    if interface is not None:
        if not addresses.get(interface):
            have = ", ".join(name for name, found in addresses.items() if found)
            raise UsageError(f"interface {interface}: this node has none of that name with an address (it has {have}).")
        return addresses[interface][0]
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    usable = [a for name, found in addresses.items() if name in up for a in found if not _is_local(a)]
    for guess in (_named(host or socket.gethostname()), _sends_from(), *usable):
        if guess in usable:
            assert guess is not None
            return guess
    return "127.0.0.1"


def interface_of(address: str) -> str | None:
    """The interface that has this address."""
    for name, found in psutil.net_if_addrs().items():
        if any(a.address == address for a in found):
            return name
    return None


def _is_local(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _named(host: str) -> str | None:
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def _sends_from() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 9))  # nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return None


def free_port(address: str) -> int:
    """A port of `address` on which nobody listens, and which no outgoing connection takes meanwhile. UsageError."""
    for port in random.SystemRandom().sample(_PORTS, 50):
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    raise UsageError(f"{address}: no free port among fifty of {_PORTS.start} to {_PORTS.stop}.")
