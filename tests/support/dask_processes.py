"""A Dask scheduler and workers as processes of their own, as a site would run them: for tests that kill them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class DaskProcesses:
    """Everything listens on 127.0.0.1. `close` ends all that were started, and their children."""

    def __init__(self, folder: Path, *, protocol: str = "tcp", tls: Sequence[str] = ()) -> None:
        self.folder = folder
        self.port = free_port()
        self.address = f"{protocol}://127.0.0.1:{self.port}"
        self.tls = list(tls)
        self.scheduler: subprocess.Popen[bytes] | None = None
        self.workers: list[subprocess.Popen[bytes]] = []
        folder.mkdir(parents=True, exist_ok=True)

    def _start(self, *command: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        with (self.folder / "log.txt").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *command, *self.tls],
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0",
                    "PYTHONPATH": os.pathsep.join(sys.path),  # functions of a test are imported by name
                    **(environment or {}),
                },
                start_new_session=True,
            )

    def start_scheduler(self, *options: str) -> None:
        protocol = self.address.partition(":")[0]
        self.scheduler = self._start(
            "distributed.cli.dask_scheduler",
            "--protocol", protocol, "--host", "127.0.0.1", "--port", str(self.port),
            "--dashboard-address", "127.0.0.1:0", *options,
        )  # fmt: skip
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.1)
        raise TimeoutError((self.folder / "log.txt").read_text()[-2000:])

    def start_worker(self, *options: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """One worker process of one thread under a nanny; it is not waited for."""
        worker = self._start(
            "distributed.cli.dask_worker",
            self.address, "--nthreads", "1", "--host", "127.0.0.1", "--no-dashboard",
            "--local-directory", str(self.folder), *options,
            environment=environment,
        )  # fmt: skip
        self.workers.append(worker)
        return worker

    def wait_for_workers(self, count: int, seconds: float = 60.0) -> None:
        from distributed import Client

        with Client(self.address, timeout=10, security=self._security(), set_as_default=False) as client:
            client.wait_for_workers(count, timeout=seconds)

    def _security(self) -> object:
        if not self.tls:
            return None
        from distributed.security import Security

        files = dict(zip(self.tls[::2], self.tls[1::2], strict=True))
        return Security(
            require_encryption=True,
            tls_ca_file=files["--tls-ca-file"],
            tls_client_cert=files["--tls-cert"],
            tls_client_key=files["--tls-key"],
        )

    def close(self) -> None:
        for process in [*self.workers, self.scheduler]:
            if process is not None:
                end_tree(process)


def end_tree(process: subprocess.Popen[bytes], how: int = signal.SIGKILL) -> None:
    """End a process that we started, and its children, by their ids."""
    try:
        tree = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        tree = []
    for member in tree:
        try:
            member.send_signal(how)
        except psutil.NoSuchProcess:
            continue
    process.wait(timeout=30)
