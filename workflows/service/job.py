"""A job's own process: runs one verb to its end, whatever becomes of the service that started it.

    python -m exitwave.workflows.service.job JOB_FOLDER

It holds JOB_FOLDER/lock while it lives: the kernel frees it with the process, so "does it still run?" has one true
answer, on any restart of the service, and a second process for the same job ends at once. At its end it writes
exit.json. JOB_FOLDER/stop (`drain` or `cancel`) is passed on as the signals that a person at a terminal would send.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from exitwave.ingest.files import FileLock, read_plain_text, write_atomic

__all__ = ["EXIT", "JOB", "LOCK", "STOP", "main"]

JOB, LOCK, EXIT, STOP = "job.json", "lock", "exit.json", "stop"
_LOOK_S = 0.3


def main(folder: Path) -> int:
    """Returns the verb's exit code; 0 without doing anything where another process has the job."""
    lock = FileLock(folder / LOCK)
    for _ in range(20):  # the service looks at it for an instant, now and then
        if lock.acquire():
            break
        time.sleep(0.1)
    else:
        return 0
    (folder / EXIT).unlink(missing_ok=True)
    arguments: list[str] = json.loads(read_plain_text(folder / JOB))["arguments"]
    threading.Thread(target=_obey, args=(folder / STOP,), daemon=True).start()

    from exitwave.workflows.cli import run

    code = run(arguments)
    write_atomic(folder / EXIT, json.dumps({"code": code, "t": time.time()}).encode())
    lock.release()
    return code


def _obey(stop: Path) -> None:
    """One SIGTERM drains; a second one stops at once."""
    sent = 0
    while sent < 2:
        try:
            wanted = {"drain": 1, "cancel": 2}.get(read_plain_text(stop).strip(), 0)
        except OSError:
            wanted = 0
        if sent < wanted:
            os.kill(os.getpid(), signal.SIGTERM)
            sent += 1
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
