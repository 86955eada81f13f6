"""What fifty people who watch a campaign cost it.

    python benchmarks/service_watchers.py [--rounds 4] [--watchers 50] [--samples 40]

A service runs all the time. In turn, again and again, the same campaign is submitted to it (multislice on two Dask
workers) with nobody watching, and with `--watchers` clients, of which each keeps a stream of events open, as a page
does, and half ask for the run's facts every two seconds besides. A campaign's time is that from its first shard in work
to its last one committed, as its own events tell, so that imports and the start of the cluster are in neither.

All clients live in one process that reads and drops; on a real network they are elsewhere, here their time counts too.
Besides the ratio, of which noise on a shared machine is the larger part, the processors' seconds are shown that service
and clients used in each second of a campaign: these are the cost itself, and hardly depend on who else is there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from exitwave.ingest.events import read_events

CAMPAIGN = """\
name: watched
seed: {seed}
structures: [{{library: [Si, Au, GaAs]}}]
samples_per_structure: {samples}
samples_per_shard: 5
cell: {{min_extent_A: 26}}
sampling: {{energy_keV: {{choice: [100, 200]}}, thickness_A: {{uniform: [20, 60]}}}}
grid: {{sampling_A: 0.25, max_gpts: 128}}
detector: {{shape: [32, 32], max_q_per_A: 1.2}}
"""
TARGET = 1.02
_ASK_S = 2.0


class Client:
    """The service as a process, and what a program asks of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        command = [sys.executable, "-m", "exitwave.workflows", "serve", "--root", str(root), "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self.process.stdout is not None
        found = re.search(r"at (http://127\.0\.0\.1:(\d+))", self.process.stdout.readline())
        assert found is not None
        self.address, self.port = found.group(1), int(found.group(2))
        self.token = (root / ".exitwave" / "token").read_text().strip()

    def call(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            self.address + path,
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"authorization": f"Bearer {self.token}", "content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def cpu_s(self) -> float:
        """Processor seconds of the service itself, without what it started."""
        used = psutil.Process(self.process.pid).cpu_times()
        return float(used.user + used.system)

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


# ----------------------------------------------------------------------------------------------- the watchers' process


async def _stream(port: int, token: str, id: str, told: list[int]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"GET /api/runs/{id}/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
    )
    try:
        while piece := await reader.read(1 << 16):
            told[0] += piece.count(b"event: run")
    finally:
        writer.close()


async def _ask(port: int, token: str, id: str, asked: list[int]) -> None:
    request = f"GET /api/runs/{id} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while True:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        size = re.search(rb"content-length: (\d+)", head.lower())
        assert size is not None
        await reader.readexactly(int(size.group(1)))
        asked[0] += 1
        await asyncio.sleep(_ASK_S)


async def _watch(port: int, token: str, id: str, watchers: int) -> None:
    """Until SIGTERM; then says what came, and what it cost."""
    told, asked = [0], [0]
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    tasks = [asyncio.create_task(_stream(port, token, id, told)) for _ in range(watchers)]
    tasks += [asyncio.create_task(_ask(port, token, id, asked)) for _ in range(watchers // 2)]
    await stop.wait()
    for task in tasks:
        task.cancel()
    print(json.dumps({"events": told[0], "answers": asked[0], "cpu_s": time.process_time()}), flush=True)


# ---------------------------------------------------------------------------------------------------------- the rounds


def campaign(client: Client, id: str, *, watchers: int, samples: int) -> dict[str, Any]:
    """One campaign from its submission to its end: its seconds, and processor seconds of those who watched."""
    client.call("POST", "/api/runs", {"name": id, "configuration": CAMPAIGN.format(seed=7, samples=samples)})
    log = client.root / id / "events.jsonl"
    while not any(e["kind"] == "task_submitted" for e in read_events(log)):
        time.sleep(0.2)
    before, began = client.cpu_s(), time.monotonic()
    watching = None
    if watchers:
        command = [sys.executable, __file__, "--as-watchers", str(client.port), client.token, id, str(watchers)]
        watching = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while not any(e["kind"] == "campaign_finished" for e in read_events(log)):
        time.sleep(1.0)
    wall, service = time.monotonic() - began, client.cpu_s() - before
    row: dict[str, Any] = {"watchers": watchers, "service_cpu": service / wall}
    if watching is not None:
        watching.terminate()
        found = json.loads(watching.communicate()[0])
        row |= {"events": found["events"], "answers": found["answers"], "clients_cpu": found["cpu_s"] / wall}
    events = read_events(log)
    first = min(e["t"] for e in events if e["kind"] == "task_submitted")
    last = max(e["t"] for e in events if e["kind"] == "shard_committed")
    while client.call("GET", f"/api/runs/{id}")["state"] != "finished":
        time.sleep(0.2)
    return {**row, "seconds": last - first}


def measure(rounds: int, watchers: int, samples: int) -> dict[str, Any]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="exitwave-bench-") as folder:
        client = Client(Path(folder))
        try:
            campaign(client, "warm", watchers=0, samples=5)
            for i in range(rounds):
                # ABBA: what drifts slowly falls on both alike.
                for many in (0, watchers) if i % 2 == 0 else (watchers, 0):
                    row = campaign(client, f"r{i}-{many}", watchers=many, samples=samples)
                    rows.append({"round": i, **row})
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        finally:
            client.close()
    alone = [row["seconds"] for row in rows if row["watchers"] == 0]
    watched = [row["seconds"] for row in rows if row["watchers"]]
    ratio = min(watched) / min(alone)
    pairs = [w / a for w, a in zip(watched, alone, strict=True)]
    idle = statistics.median(row["service_cpu"] for row in rows if not row["watchers"])
    busy = statistics.median(row["service_cpu"] for row in rows if row["watchers"])
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    return {
        "bench": "service watchers",
        "machine": machine,
        "rows": rows,
        "summary": {
            "seconds_alone": alone,
            "seconds_watched": watched,
            "ratio_of_fastest": round(ratio, 4),
            "ratio_median_of_pairs": round(statistics.median(pairs), 4),
            "service_cpu_alone": round(idle, 4),
            "service_cpu_watched": round(busy, 4),
        },
        "targets": [
            {
                "name": f"campaign's time with {watchers} watchers over without (fastest of {rounds} each)",
                "value": round(ratio, 4),
                "target": TARGET,
                "holds": ratio <= TARGET,
            }
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--watchers", type=int, default=50)
    parser.add_argument("--samples", type=int, default=40, help="of each of three structures")
    parser.add_argument("--as-watchers", nargs=4, metavar=("PORT", "TOKEN", "ID", "N"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_watchers:
        port, token, id, count = arguments.as_watchers
        asyncio.run(_watch(int(port), token, id, int(count)))
        return
    print(json.dumps(measure(arguments.rounds, arguments.watchers, arguments.samples), indent=1))


if __name__ == "__main__":
    main()
