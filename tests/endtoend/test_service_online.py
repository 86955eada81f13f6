"""A pipeline that trains while its campaign runs, from a submission that says so, through a stop, to its report."""

from __future__ import annotations

import time

import pytest
from line import PIPELINE
from service import Service


@pytest.mark.long
def test_from_the_api_through_a_cancel_to_the_report(tmp_path):
    service = Service(tmp_path / "root").start()
    try:
        body = {"name": "live", "configuration": PIPELINE, "online": True, "ranks": 2}
        answer = service.call("POST", "/api/runs", json=body)
        assert answer.status_code == 201, answer.text
        until = time.monotonic() + 120
        while not (tmp_path / "root" / "live" / "train" / "arrivals.jsonl").exists():
            assert time.monotonic() < until
            time.sleep(0.1)
        assert service.command("live", "cancel").status_code == 202
        service.wait("live", "stopped", "finished")
        if service.get("/api/runs/live")["state"] == "stopped":
            assert service.command("live", "resume").status_code == 202
        run = service.wait("live", "finished", seconds=300)
        assert run["mode"] == "online" and run["report"]
        assert (tmp_path / "root" / "live" / "train" / "model.pt").exists()
        wrong = service.call("POST", "/api/runs", json={**body, "name": "other", "ranks": 10_000})
        assert wrong.status_code == 422
        refused = service.call("POST", "/api/runs", json={**body, "name": "other", "ranks": 1000})
        assert refused.status_code == 422 and "ranks" in refused.json()["detail"]
        assert not (tmp_path / "root" / "other.yaml").exists()
    finally:
        service.end()
