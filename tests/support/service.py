"""A real service as a process, and a client for it that knows its token."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import line
import requests


class Service:
    """Serves `root` on a free port; killed and started again at will, then on the same port."""

    def __init__(self, root: Path) -> None:
        self.root, self.log = root, root.parent / f"{root.name}.service.log"
        root.mkdir(exist_ok=True)
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Service:
        already = self.log.stat().st_size if self.log.exists() else 0
        self.process = line.start("serve", "--root", self.root, "--port", self.port, log=self.log)

        def said() -> re.Match[str] | None:
            return re.search(r"at http://127\.0\.0\.1:(\d+)", self.log.read_text()[already:])

        line.wait_until(lambda: said() is not None, self.process, timeout=60)
        self.port = int(said().group(1))  # type: ignore[union-attr]
        return self

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def token(self) -> str:
        return (self.root / ".exitwave" / "token").read_text().strip()

    def call(self, method: str, path: str, **options: Any) -> requests.Response:
        """With the token."""
        headers = {"authorization": f"Bearer {self.token}", **options.pop("headers", {})}
        return requests.request(method, self.address + path, headers=headers, timeout=30, **options)

    def get(self, path: str) -> Any:
        answer = self.call("GET", path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def submit(self, name: str, text: str) -> requests.Response:
        return self.call("POST", "/api/runs", json={"name": name, "configuration": text})

    def command(self, id: str, command: str) -> requests.Response:
        return self.call("POST", f"/api/runs/{id}/commands", json={"command": command})

    def wait(self, id: str, *states: str, seconds: float = 120) -> dict[str, Any]:
        """Until the run is in one of the states."""
        until = time.monotonic() + seconds
        while True:
            run: dict[str, Any] = self.get(f"/api/runs/{id}")
            if run["state"] in states:
                return run
            assert time.monotonic() < until, json.dumps(run) + self.call("GET", f"/api/runs/{id}/log").text
            time.sleep(0.1)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """The service, and whatever it started."""
        if self.process is not None:
            line.end(self.process)
        for pid in line.processes_naming(self.root):
            import os
            import signal

            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
